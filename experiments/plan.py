"""python -m experiments.plan PRESET --topology v5p:8x16x16: one step, compiled for hardware that is not there, and what it takes.

The project's own train step (or RL update, or decode step) is compiled ahead of time from abstract arrays; nothing is allocated. Figures
are per chip (per device, for tpu7x) and step. Time is a roofline: the longest of the products at the peak bfloat16 rate, of HBM traffic at
its bandwidth, and of collectives over the dimensions of the torus that they span, as if each overlapped with the others completely.
What is counted, and what is not: glm_jax/parallel/planning/accounting.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported: the TPU that is compiled for is not there

import jax
import numpy as np

from experiments.plan_programs import STAGES, ModelFlops, Program, build, bytes_per_chip, model_flops, total_bytes
from experiments.plan_table import table
from glm_jax.model import ModelConfig, get_preset
from glm_jax.model.layer import REMAT
from glm_jax.parallel.planning import (
    GIB,
    Choice,
    PlanError,
    Topology,
    Work,
    account,
    check_mesh,
    choose_mesh,
    describe,
    parse_mesh,
    plan_mesh,
)

SEQUENCE = 8192  # tokens of a row, or slots of a cache, unless told; one row a device
STATE_SHARE = 0.6  # of HBM that weights, moments and gradients may take before the moments are stored in bfloat16
DOES_NOT_FIT = 1


class DoesNotFit(PlanError):
    """The step was compiled and needs more HBM than there is."""


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m experiments.plan", description=__doc__.splitlines()[0].partition(": ")[2])
    parse.add_argument("preset", help="a model preset; an override is appended as in glm-4.7-flash,layers=3")
    parse.add_argument("--topology", required=True, help="kind and shape of the slice: v5p:8x16x16, v6e:4x4, v5e:4x4, tpu7x:2x2x1")
    parse.add_argument("--mesh", help="axes and sizes, e.g. fsdp=64,expert=32; without, one is chosen and the reasons are printed")
    parse.add_argument("--global-batch", type=int, metavar="N", help="rows of a step, or sessions that decode (default: one a device)")
    parse.add_argument("--sequence", type=int, metavar="N", help=f"tokens of a row, or slots of a cache (default: {SEQUENCE})")
    parse.add_argument("--stage", choices=STAGES, default="pretrain", help="default: %(default)s")
    parse.add_argument("--remat", choices=tuple(REMAT), default="layer", help="the model's, for the backward pass (default: %(default)s)")
    parse.add_argument(
        "--moments", choices=("float32", "bfloat16"), help="type of AdamW's two (default: float32 where the state leaves room)")
    parse.add_argument("--json", action="store_true", help="one JSON object, in bytes and seconds")
    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for a mistake of the user, 1 where the step does not fit, each told in one line."""
    arguments = parser().parse_args(argv)
    jax.config.update("jax_enable_compilation_cache", False)  # how long it takes to compile is part of the plan
    try:
        found = plan(
            arguments.preset, arguments.topology, mesh=arguments.mesh, rows=arguments.global_batch, sequence=arguments.sequence,
            stage=arguments.stage, remat=arguments.remat, moments=arguments.moments)
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return DOES_NOT_FIT if isinstance(error, DoesNotFit) else 2
    print(json.dumps(found) if arguments.json else table(found))
    return 0


def plan(
    preset: str, topology: str, *, mesh: str | None = None, rows: int | None = None, sequence: int | None = None, stage: str = "pretrain",
    remat: str = "layer", moments: str | None = None,
) -> dict[str, Any]:
    """The plan as a JSON-able dict, in bytes, seconds and FLOPs. Raises PlanError, of it DoesNotFit with the largest class."""
    config, slice_ = configured(preset), describe(topology)
    devices, sequence = len(slice_.devices), SEQUENCE if sequence is None else sequence
    rows = devices if rows is None else rows
    if rows < 1 or sequence < 1:
        raise PlanError(f"--global-batch {rows} and --sequence {sequence} must be at least 1")
    if mesh is not None:
        axes = parse_mesh(mesh)
        choice = Choice(axes, ("as asked for",))
    else:
        choice = choose_mesh(config, slice_, rows, sequence, stage)
    check_mesh(choice.axes, devices, config, rows, sequence, stage)
    moments = moments or _moments(config, slice_, devices // choice.axes.get("data", 1))

    start = time.perf_counter()
    program = build(
        config, stage, plan_mesh(slice_, choice.axes), rows, sequence, remat=remat, moments=moments)
    traced = time.perf_counter()
    compiled = _compile(program, slice_)
    seconds = time.perf_counter() - traced
    found = {
        "preset": preset, "topology": topology, "devices": devices, "mesh": {name: n for name, n in choice.axes.items() if n > 1},
        "why": list(choice.why), "stage": stage, "global_batch": rows, "sequence": sequence, "trace_seconds": traced - start,
        "compile_seconds": seconds, "memory": _memory(program, compiled.memory_analysis(), slice_),
        "shardings": _shardings(program, devices),
    }
    if stage != "decode":
        found |= {"remat": remat, "moments": moments, "compute": "bfloat16", "master_weights": "float32"}
    return found | _roofline(account(compiled.as_text(), devices), slice_, choice, model_flops(config, stage, rows, sequence))


def configured(preset: str) -> ModelConfig:
    """The preset `NAME` or `NAME,field=value,part__field=value`."""
    name, *changes = preset.split(",")
    pairs = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not (key and equals and text):
            raise PlanError(f"preset {preset!r}: {change!r} is not FIELD=VALUE")
        try:
            pairs[key] = json.loads(text)
        except ValueError:
            pairs[key] = text
    try:
        return get_preset(name, **pairs)
    except (TypeError, ValueError) as error:
        raise PlanError(f"preset {preset!r}: {error}") from error


def _moments(config: ModelConfig, slice_: Topology, holders: int) -> str:
    """float32, unless weights, two moments and gradients of it, split over `holders` devices, would fill STATE_SHARE of HBM."""
    return "float32" if 16 * config.parameter_count() / holders <= STATE_SHARE * slice_.chip.hbm_bytes else "bfloat16"


def _compile(program: Program, slice_: Topology) -> Any:
    try:
        return program.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        held = {name: bytes_per_chip(tree) for name, tree in program.held.items()}
        needed = re.search(r"Used ([\d.]+)([KMGT]) of|\(([\d.]+)([KMGT])\) exceeds", str(error))
        hbm = slice_.chip.hbm_bytes
        if needed is None:
            raise DoesNotFit(f"the step does not fit {hbm / GIB:.2f} GiB of HBM: {str(error).splitlines()[0]}") from error
        number, unit = (part for part in needed.groups() if part is not None)
        total = float(number) * {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}[unit]
        held["temporaries"] = total - sum(held.values()) if needed[1] else total
        total = max(total, sum(held.values()))
        largest = max(held, key=held.get)
        raise DoesNotFit(
            f"the step needs {total / GIB:.2f} GiB of {hbm / GIB:.2f} GiB of HBM a chip, {(total - hbm) / GIB:.2f} GiB too much; "
            f"the largest class is {largest.replace('_', ' ')} with {held[largest] / GIB:.2f} GiB") from error


def _memory(program: Program, stats: Any, slice_: Topology) -> dict[str, float]:
    """Bytes a chip. `padding` is that of the arguments' tiles; gradients are among the temporaries."""
    memory = {name: bytes_per_chip(tree) for name, tree in program.held.items()}
    memory["padding"] = max(stats.argument_size_in_bytes - sum(memory.values()), 0)
    memory |= {
        "temporaries": stats.temp_size_in_bytes, "output_not_aliased": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "program": stats.generated_code_size_in_bytes}
    used = sum(memory.values())
    if program.gradients is not None:
        memory["gradients_in_temporaries"] = bytes_per_chip(program.gradients)
    return memory | {"used": used, "available": slice_.chip.hbm_bytes}


def _shardings(program: Program, devices: int) -> dict[str, dict[str, float]]:
    """By class its bytes altogether, a chip's, and `spread`: 1 where it is split over all chips, 1 / chips where each has all of it."""
    trees = {name: tree for name, tree in program.held.items() if name != "batch"}
    trees |= {"gradients": program.gradients} if program.gradients is not None else {}
    found = {}
    for name, tree in trees.items():
        whole, chip = total_bytes(tree), bytes_per_chip(tree)
        found[name] = {"bytes": whole, "bytes_per_chip": chip, "spread": whole / (chip * devices)}
    return found


def _roofline(work: Work, slice_: Topology, choice: Choice, model: ModelFlops) -> dict[str, Any]:
    chip, devices = slice_.chip, len(slice_.devices)
    coordinates = np.array([device.coords for device in plan_mesh(slice_, choice.axes).devices.flat])
    sent_seconds = 0.0
    for (_, group), size in work.collectives.items():
        dimensions = (coordinates[list(group)] != coordinates[group[0]]).any(axis=0).sum()
        sent_seconds += size / (max(int(dimensions), 1) * chip.torus_bandwidth)
    seconds = {"compute": work.flops / chip.flops, "hbm": work.hbm_bytes / chip.hbm_bandwidth, "ici": sent_seconds}
    step = max(seconds.values())
    return {
        "flops": work.flops, "hbm_bytes": work.hbm_bytes, "collective_bytes": work.sent(), "uncounted": dict(work.unknown),
        "roofline_seconds": seconds, "step_seconds": step, "bound": max(seconds, key=seconds.get),
        "model_flops": model.total, "model_flops_formula": model.formula,
        "utilisation": model.total / (devices * chip.flops * step),
        "utilisation_formula": f"model FLOPs / ({devices} devices x {chip.flops:.4g} FLOP/s x step time)",
    }


if __name__ == "__main__":
    sys.exit(main())
