"""What the benchmarks share: timing, counting compilations and products, fitting exponents, printing."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax import monitoring

COMPILED = "/jax/core/compile/backend_compile_duration"


class BenchmarkError(RuntimeError):
    """The benchmark could not be run; the message says why and what to do."""


@contextlib.contextmanager
def count_compilations() -> Iterator[list[float]]:
    """A list that grows by the seconds of every program that XLA compiles, or reads from the persistent cache, meanwhile."""
    seconds: list[float] = []

    def note(event: str, duration: float, **_: Any) -> None:
        if event == COMPILED:
            seconds.append(duration)

    monitoring.register_event_duration_secs_listener(note)
    try:
        yield seconds
    finally:
        monitoring.unregister_event_duration_listener(note)


def keep_freed_memory() -> bool:
    """Has glibc keep what the process frees, to be called before JAX starts its threads; False, and nothing done, where there is no glibc.

    By default a step's gigabytes of temporaries go back to the system and come anew at the next, page by page: of a bench-20m step
    580,000 page faults, a quarter of its time. `torch_side.py` gives its process the same.
    """
    arena_max, mmap_max, trim_threshold = -8, -4, -1  # malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # One arena: others map and unmap large blocks whatever the limits are.
    return all([mallopt(arena_max, 1), mallopt(mmap_max, 0), mallopt(trim_threshold, -1)])


def time_call(function: Callable, *arguments: Any) -> tuple[float, float, Any]:
    """Wall seconds, seconds of all this process's threads on a core, and the result, once it is there."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(function(*arguments))
    return time.perf_counter() - wall, time.process_time() - cpu, result


def time_repeatedly(function: Callable, *arguments: Any, repeats: int, seconds: float) -> list[float]:
    """Wall seconds of up to `repeats` calls after one to warm up; of that one alone where it has taken more than `seconds`."""
    first, _, _ = time_call(function, *arguments)
    if first > seconds:
        return [first]
    times: list[float] = []
    while len(times) < repeats and sum(times) <= seconds:
        times.append(time_call(function, *arguments)[0])
    return times


def exponent(values: Mapping[int, float], smallest: int = 0) -> float | None:
    """The slope of log value over log length by least squares, from `smallest` on; None for fewer than two lengths."""
    lengths = [length for length in sorted(values) if length >= smallest]
    if len(lengths) < 2:
        return None
    return float(np.polyfit(np.log(lengths), np.log([values[length] for length in lengths]), 1)[0])


def dot_flops(jaxpr: Any) -> int:
    """FLOPs of the matrix products of a jaxpr: two for each multiply-add, loops by their length, branches by the largest.

    Counted from shapes, so whatever is padded, masked or multiplied for nothing counts. A while loop counts as long as its scope says,
    `expected_trips_N` (see grouped_matmul); BenchmarkError for one with products in it that does not say.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        elif equation.primitive.name.startswith("ragged_dot"):
            # XLA multiplies every row with every group's matrix under a mask where it has no kernel of its own.
            raise BenchmarkError("a ragged product's FLOPs depend on the backend: they are not counted")
        elif equation.primitive.name == "cond":
            total += max(dot_flops(branch.jaxpr) for branch in equation.params["branches"])
        else:
            inner = sum(dot_flops(getattr(sub, "jaxpr", sub)) for sub in _inner(equation.params))
            if inner and equation.primitive.name == "while":
                expected = re.findall(r"expected_trips_(\d+)", str(equation.source_info.name_stack))
                if not expected:
                    raise BenchmarkError("the products of a while loop cannot be counted: its length is not known")
                inner *= int(expected[-1])
            total += inner * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total


def _inner(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for entry in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(entry, "jaxpr", entry), "eqns"):
                yield entry


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def machine() -> dict[str, Any]:
    """Where a figure was measured."""
    return {
        "platform": jax.default_backend(), "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2), "python": platform.python_version(), "jax": jax.__version__}


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """The options that every benchmark of a model has."""
    parse = argparse.ArgumentParser(
        prog=f"python -m experiments.benchmarks.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--json", action="store_true", help="print only the JSON object, on one line, the last")
    parse.add_argument("--preset", default="bench-20m", help="a model preset (default: %(default)s)")
    parse.add_argument("--torch", choices=["auto", "yes", "no"], default="auto",
                       help="compare with transformers + torch: auto (default) goes without where they cannot be installed")
    parse.add_argument("--seed", type=int, default=0)
    return parse


def show(result: dict[str, Any], as_json: bool) -> None:
    """The result as text, or as one line of JSON."""
    print(json.dumps(result) if as_json else json.dumps(result, indent=2), flush=True)


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
