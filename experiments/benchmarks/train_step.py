"""python -m experiments.benchmarks.train_step --json: tokens/s of a whole AdamW update, beside transformers + torch on the same weights.

Both sides start from one checkpoint and train on one batch, with the same optimizer, in float32, on all cores. They take turns, round by
round, so that what else the machine does hits both; `ratio` is the median over rounds of ours to theirs. transformers is given each of the
implementations it offers that runs on a CPU, and the fastest counts. `loss` and `torch.loss` are those of the same weights: they agree.

tokens_per_second, torch_tokens_per_second, ratio   higher is better; `ratios` are those of the rounds
cpu_seconds                                         of a step, all threads together: what a busy machine disturbs least
compilations                                        programs compiled by the first step, and by all later ones (must be 0)
expert_flops                                        FLOPs of the experts' products, forward and backward, over what the routed tokens need
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
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
from glm_jax.training.objectives import supervised_loss
from glm_jax.training.optimizers import adamw
from glm_jax.training.step import TrainState, build_update, init_state

ADAMW = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "clip": 1.0}
SETTINGS = [f"{attention}/{experts}" for attention, experts in itertools.product(("eager", "sdpa"), ("eager", "grouped_mm"))]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1, with the reason on standard error, when a comparison that was asked for could not be made."""
    parse = measure.parser("train_step", __doc__)
    parse.add_argument("--batch", type=int, default=8, help="rows (default: %(default)s)")
    parse.add_argument("--length", type=int, default=512, help="tokens of a row (default: %(default)s)")
    parse.add_argument("--rounds", type=int, default=5, help="turns of each side (default: %(default)s)")
    parse.add_argument("--steps", type=int, default=2, help="steps of a turn (default: %(default)s)")
    parse.add_argument("--torch-setting", choices=["best", *SETTINGS], default="best",
                       help="transformers' implementations of attention/experts (default: try all, keep the fastest)")
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
    tokens = np.random.default_rng(arguments.seed).integers(0, config.vocab_size, (arguments.batch, arguments.length), np.int32)
    with measure.count_compilations() as compiled:
        ours = Ours(config, tokens, arguments.seed)
        first_loss, _ = ours.step()
        ours.step()  # the first call also pages its memory in
        warm_up = len(compiled)
        rounds, other = compare(arguments, ours, tokens)
        later = len(compiled) - warm_up
    seconds = [wall for one in rounds for wall, _ in one["ours"]]
    result = {
        "benchmark": "train_step",
        "setting": {
            "preset": arguments.preset, "batch": arguments.batch, "length": arguments.length, "dtype": "float32", "optimizer": ADAMW,
            "rounds": arguments.rounds, "steps": arguments.steps, "seed": arguments.seed, "parameters": config.parameter_count(),
            **measure.machine()},
        "tokens_per_second": tokens.size / statistics.median(seconds),
        "seconds": statistics.median(seconds),
        "cpu_seconds": statistics.median(cpu for one in rounds for _, cpu in one["ours"]),
        "loss": first_loss,
        "compilations": {"warm_up": warm_up, "timed": later},
        "expert_flops": expert_flops(config, arguments.batch, arguments.length),
        "temporary_bytes": ours.temporary_bytes,
        "peak_rss_bytes": measure.peak_rss_bytes(),
        "torch": other,
    }
    if rounds[0]["torch"]:
        theirs = [wall for one in rounds for wall, _ in one["torch"]]
        ratios = [median_wall(one["torch"]) / median_wall(one["ours"]) for one in rounds]
        result |= {"torch_tokens_per_second": tokens.size / statistics.median(theirs), "ratio": statistics.median(ratios), "ratios": ratios}
        other["cpu_seconds"] = statistics.median(cpu for one in rounds for _, cpu in one["torch"])
    return result


class Ours:
    """The project's own update on one batch, from weights drawn from a seed."""

    def __init__(self, config: ModelConfig, tokens: np.ndarray, seed: int) -> None:
        self.model = jax.jit(init_model, static_argnums=0)(config, jax.random.key(seed))
        optimizer = adamw(**ADAMW)
        self._update = build_update(functools.partial(supervised_loss, dense_attention=False, indexer_coefficient=0.0), optimizer)
        mask = np.ones(tokens.shape, np.float32)
        mask[:, 0] = 0  # nothing predicts a row's first token
        batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "loss_mask": mask}
        shared = {"loss_tokens": np.float32(mask.sum()), "real_tokens": np.float32(tokens.size)}
        self._inputs = jax.device_put(({name: value[None] for name, value in batch.items()}, shared, np.int32(1)))
        self._state: TrainState = init_state(self.model, optimizer)
        self.temporary_bytes = self._update.lower(self._state, *self._inputs).compile().memory_analysis().temp_size_in_bytes

    def step(self) -> tuple[float, tuple[float, float]]:
        """The loss before the step, and its wall and processor seconds."""
        wall, cpu, (self._state, metrics) = measure.time_call(self._update, self._state, *self._inputs)
        return float(metrics["loss"]), (wall, cpu)


def compare(arguments: argparse.Namespace, ours: Ours, tokens: np.ndarray) -> tuple[list[dict[str, list]], dict[str, Any]]:
    """For every round the (wall, processor) seconds of both sides' steps, and what the other side is, or why there is none."""

    def rounds(theirs: Callable[[int], list]) -> list[dict[str, list]]:
        found = []
        for index in range(arguments.rounds):
            measure.progress(f"round {index + 1} of {arguments.rounds}")
            found.append({"ours": [ours.step()[1] for _ in range(arguments.steps)], "torch": theirs(arguments.steps)})
        return found

    try:
        if arguments.torch == "no":
            raise measure.BenchmarkError("not asked for")
        if jax.default_backend() != "cpu":
            raise measure.BenchmarkError(f"the comparison is one of CPUs; JAX runs on {jax.default_backend()}")
        with tempfile.TemporaryDirectory() as folder, torch_worker() as worker:
            setting, loss = start_torch(worker, arguments, pathlib.Path(folder), ours.model, tokens)
            step = lambda steps: pairs(worker("step", steps=steps))
            found = rounds(step)
            return found, {"attention": setting.split("/")[0], "experts": setting.split("/")[1], "loss": loss, **worker("versions")}
    except measure.BenchmarkError as error:
        if arguments.torch == "yes":
            raise
        return rounds(lambda steps: []), {"unavailable": str(error)}


def start_torch(
    worker: TorchWorker, arguments: argparse.Namespace, folder: pathlib.Path, model: Transformer, tokens: np.ndarray,
) -> tuple[str, float]:
    """The worker with the fastest setting, warmed up, and its loss on the model's own weights."""
    save_pretrained(model, folder / "model", fused_experts=True)
    np.save(folder / "tokens.npy", tokens)

    def prepare(setting: str) -> float:
        attention, experts = setting.split("/")
        worker("load", path=str(folder / "model"), attention=attention, experts=experts, threads=measure.machine()["cores"])
        worker("train", tokens=str(folder / "tokens.npy"), eps=1e-8, **ADAMW)
        return worker("step", steps=1)["losses"][0]

    setting = arguments.torch_setting
    if setting == "best":
        trial = {}
        for candidate in SETTINGS:
            prepare(candidate)
            trial[candidate] = min(worker("step", steps=2)["seconds"])
            measure.progress(f"torch with {candidate}: {trial[candidate]:.2f} s a step")
        setting = min(trial, key=trial.get)
    return setting, prepare(setting)


def pairs(answer: dict[str, Any]) -> list[tuple[float, float]]:
    return list(zip(answer["seconds"], answer["cpu_seconds"], strict=True))


def median_wall(steps: Sequence[tuple[float, float]]) -> float:
    return statistics.median(wall for wall, _ in steps)


def expert_flops(config: ModelConfig, batch: int, length: int) -> dict[str, float] | None:
    """FLOPs of one mixture layer's routed part, forward and backward: what is multiplied, what the routed tokens need, and the ratio.

    Counted from the shapes of the program that runs; the shared expert is left out, the router is on both sides. None without experts.
    """
    if config.moe is None:
        return None
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, shared_experts=0), mtp=None)
    layer = jax.tree.map(lambda d: jax.ShapeDtypeStruct(d.shape[1:], jnp.float32), Transformer.declare_tree(config).moe_layers.moe)
    x = jax.ShapeDtypeStruct((batch, length, config.hidden_size), jnp.float32)
    gradients = jax.grad(lambda layer, x: layer(config, x, None)[0].sum(), argnums=(0, 1))
    done = measure.dot_flops(jax.make_jaxpr(gradients)(layer, x).jaxpr)
    moe = config.moe
    a_token = moe.experts_per_token * 3 * config.hidden_size * moe.intermediate_size + config.hidden_size * moe.experts
    needed = 3 * 2 * batch * length * a_token
    return {"done": done, "needed": needed, "ratio": done / needed}


if __name__ == "__main__":
    sys.exit(main())
