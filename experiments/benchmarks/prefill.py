"""python -m experiments.benchmarks.prefill --json: a whole prefill by length, one row in float32, and sparse_mla alone on its selections.

seconds, peak_bytes     by length (a string): the forward pass with the last token's logits, and what its program needs beyond the weights
                        (temporaries and outputs, as XLA laid them out)
sparse_mla_seconds      by length, on the selection that the model's middle full layer makes of that row
exponent                of sparse_mla's time in the length: the slope of their logarithms from 4k on, or if fewer than two are, of all
total_exponent          of the whole prefill's time, likewise; `memory_exponent` of peak_bytes
torch                   `seconds` of transformers by attention and length, in turn with ours; `ratio` by length: the faster one over ours.
                        Both its forms of attention are dense: T x T scores a head, under a mask that holds the selection
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import measure
from experiments.benchmarks.torch_side import TorchWorker, torch_worker
from glm_jax.model import ModelConfig, Transformer, get_preset, init_model, save_pretrained
from pallas_kernels.sparse_mla.api import sparse_mla

LONG = 4096  # the exponents are those from here on: below, fixed costs and caches tell more than the length


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1, with the reason on standard error, when a comparison that was asked for could not be made."""
    parse = measure.parser("prefill", __doc__)
    parse.add_argument("--lengths", type=_lengths, default="1024,2048,4096,8192,16384,32768", help="default: %(default)s")
    parse.add_argument("--torch-lengths", type=_lengths, default="1024,2048,4096,8192", help="of them, to compare (default: %(default)s)")
    parse.add_argument("--torch-attention", type=lambda text: text.split(","), default="eager,sdpa", help="default: %(default)s")
    parse.add_argument("--repeats", type=int, default=3, help="timed calls a length (default: %(default)s)")
    parse.add_argument("--seconds", type=float, default=30, help="no further call of a length after this long (default: %(default)s)")
    arguments = parse.parse_args(argv)
    measure.keep_freed_memory()
    try:
        result = run(arguments)
    except measure.BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    measure.show(result, arguments.json)
    return 0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = get_preset(arguments.preset)
    if config.indexer is None:
        raise measure.BenchmarkError(f"{arguments.preset} has no indexer, so there is no sparse_mla to time")
    model = jax.jit(init_model, static_argnums=0)(config, jax.random.key(arguments.seed))
    row = np.random.default_rng(arguments.seed).integers(0, config.vocab_size, (1, max(arguments.lengths)), np.int32)
    seconds, alone, peak = {}, {}, {}
    with measure.count_compilations() as compiled:
        later = 0
        for length in arguments.lengths:
            program, peak[length] = compile_prefill(model, row[:, :length])
            before = len(compiled)
            seconds[length] = statistics.median(measure.time_repeatedly(
                program, model, row[:, :length], repeats=arguments.repeats, seconds=arguments.seconds))
            later += len(compiled) - before
            alone[length] = statistics.median(time_sparse_mla(arguments, model, row[:, :length]))
            measure.progress(f"{length}: prefill {seconds[length]:.3f} s, {peak[length] / 2**20:.0f} MiB; sparse_mla {alone[length]:.4f} s")
    fit = lambda values: measure.exponent(values, LONG if sum(length >= LONG for length in values) > 1 else 0)
    by_name = lambda values: {str(length): value for length, value in values.items()}
    return {
        "benchmark": "prefill",
        "setting": {
            "preset": arguments.preset, "batch": 1, "lengths": arguments.lengths, "dtype": "float32", "repeats": arguments.repeats,
            "index_topk": config.indexer.topk, "seed": arguments.seed, "parameters": config.parameter_count(), **measure.machine()},
        "seconds": by_name(seconds), "peak_bytes": by_name(peak), "sparse_mla_seconds": by_name(alone),
        "exponent": fit(alone), "total_exponent": fit(seconds), "memory_exponent": fit(peak),
        "compilations": {"timed": later}, "peak_rss_bytes": measure.peak_rss_bytes(),
        "torch": compare(arguments, model, row),
    }


def compile_prefill(model: Transformer, row: np.ndarray) -> tuple[Callable, int]:
    """(model, row) -> the last token's logits, compiled for the row's length, and the bytes it needs beyond its arguments."""

    def prefill(model: Transformer, row: jax.Array) -> jax.Array:
        return model.logits(model(row, compute_logits=False).hidden[:, -1])

    program = jax.jit(prefill).lower(model, row).compile()
    memory = program.memory_analysis()
    return program, memory.temp_size_in_bytes + memory.output_size_in_bytes


def time_sparse_mla(arguments: argparse.Namespace, model: Transformer, row: np.ndarray) -> list[float]:
    """Seconds of sparse_mla at the model's sizes on the selection that its middle full layer makes for this row."""
    config: ModelConfig = model.config
    layer = config.full_layers[len(config.full_layers) // 2]
    choose = jax.jit(lambda model, row: model(row, return_selections=True, compute_logits=False).selections[layer])
    selection = choose(model, row)
    rank, rope = config.mla.kv_lora_rank, config.mla.qk_rope_head_dim
    keys = jax.random.split(jax.random.key(arguments.seed), 4)
    shapes = [(config.heads, rank), (config.heads, rope), (rank,), (rope,)]
    operands = [jax.random.normal(key, (*row.shape, *shape), jnp.float32) for key, shape in zip(keys, shapes, strict=True)]
    attend = jax.jit(lambda *operands: sparse_mla(*operands, scale=config.mla.qk_head_dim**-0.5))
    return measure.time_repeatedly(attend, *operands, selection, repeats=max(arguments.repeats, 5), seconds=arguments.seconds)


def compare(arguments: argparse.Namespace, model: Transformer, row: np.ndarray) -> dict[str, Any]:
    """The other side's seconds by length and attention, ours again in the same turns, and their ratio."""
    try:
        if arguments.torch == "no":
            raise measure.BenchmarkError("not asked for")
        if jax.default_backend() != "cpu":
            raise measure.BenchmarkError(f"the comparison is one of CPUs; JAX runs on {jax.default_backend()}")
        with tempfile.TemporaryDirectory() as name, torch_worker() as worker:
            folder = pathlib.Path(name)
            save_pretrained(model, folder / "model", fused_experts=True)
            np.save(folder / "tokens.npy", row)
            return measure_both(arguments, worker, folder, model, row) | worker("versions")
    except measure.BenchmarkError as error:
        if arguments.torch == "yes":
            raise
        return {"unavailable": str(error)}


def measure_both(
    arguments: argparse.Namespace, worker: TorchWorker, folder: pathlib.Path, model: Transformer, row: np.ndarray,
) -> dict[str, Any]:
    programs = {length: compile_prefill(model, row[:, :length])[0] for length in arguments.torch_lengths if length in arguments.lengths}
    seconds: dict[str, dict[str, float]] = {}
    ratios: dict[str, list[float]] = {}
    for attention in arguments.torch_attention:
        worker("load", path=str(folder / "model"), attention=attention, experts="eager", threads=measure.machine()["cores"])
        seconds[attention] = {}
        for length, program in programs.items():
            turns: list[tuple[float, float]] = []
            # The first turn warms up. Two at least, then as many as were asked for and time allows.
            while len(turns) < 2 or (len(turns) <= arguments.repeats and sum(map(sum, turns)) < arguments.seconds):
                mine, _, _ = measure.time_call(program, model, row[:, :length])
                turns.append((mine, worker("prefill", tokens=str(folder / "tokens.npy"), length=length)["seconds"]))
            ours, theirs = map(statistics.median, zip(*turns[1:], strict=True))
            seconds[attention][str(length)] = theirs
            ratios.setdefault(str(length), []).append(theirs / ours)
            measure.progress(f"{length}: {attention} {theirs:.3f} s, ours {ours:.3f} s")
    return {"seconds": seconds, "ratio": {length: min(found) for length, found in ratios.items()}}


def _lengths(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


if __name__ == "__main__":
    sys.exit(main())
