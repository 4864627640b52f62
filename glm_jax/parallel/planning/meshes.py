"""Which mesh: the one that was asked for, checked, or one chosen by the arithmetic of what has to be split and what has to be sent."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from glm_jax.parallel.mesh import AXES
from glm_jax.parallel.planning.hardware import GIB, PlanError, Topology

if TYPE_CHECKING:
    from glm_jax.model import ModelConfig

BF16 = 2
GATHERED_SHARE = 1 / 16  # of HBM that one layer's experts may take when they are gathered: there are two layers at a time, and gradients
WIDEST_MODEL = 8  # heads and widths over more devices are too thin to multiply


@dataclasses.dataclass(frozen=True)
class Choice:
    """Sizes of the mesh axes, and the reasons, a line each."""

    axes: dict[str, int]
    why: tuple[str, ...]

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes.items() if size > 1) or "one device"


def parse_mesh(text: str) -> dict[str, int]:
    """{"fsdp": 64, "expert": 32} for "fsdp=64,expert=32". Raises PlanError."""
    axes = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\w+)=([1-9]\d*)\s*", part)
        if found is None or found[1] not in AXES or found[1] in axes:
            raise PlanError(f"--mesh {text}: {part.strip()!r} is not an axis and its size; axes, each once: {', '.join(AXES)}")
        axes[found[1]] = int(found[2])
    return axes


def check_mesh(axes: Mapping[str, int], devices: int, config: ModelConfig, rows: int, sequence: int, stage: str) -> None:
    """Raises PlanError where the mesh does not have as many devices as the slice, or something to be split does not divide."""
    size = lambda *names: math.prod(axes.get(name, 1) for name in names)
    text = ",".join(f"{name}={n}" for name, n in axes.items())
    if size(*AXES) != devices:
        raise PlanError(f"mesh {text} is of {size(*AXES)} devices, the topology of {devices}")
    over = ("data", "fsdp") if stage == "decode" else ("data", "fsdp", "expert")
    parts = size(*over)
    if rows % parts:
        raise PlanError(f"mesh {text} splits rows over {' x '.join(over)} = {parts}, which does not divide the global batch of {rows}")
    if stage == "decode" and size("context") > 1:
        raise PlanError(f"mesh {text}: a decode step has one query a row, nothing to split over context")
    if sequence % size("context"):
        raise PlanError(f"mesh {text}: context={size('context')} does not divide the sequence of {sequence}")
    experts = config.moe.experts if config.moe is not None else 1
    if experts % size("expert"):
        raise PlanError(f"mesh {text}: expert={size('expert')} does not divide the model's {experts} experts")
    heads = config.heads if config.gqa is None else config.gqa.kv_heads
    if heads % size("model"):
        raise PlanError(f"mesh {text}: model={size('model')} does not divide the model's {heads} {'key ' if config.gqa else ''}heads")


def plan_mesh(topology: Topology, axes: Mapping[str, int]) -> Mesh:
    """The five explicit axes over the slice's devices, laid along its torus where the sizes allow."""
    sizes = tuple(axes.get(name, 1) for name in AXES)
    try:
        devices = mesh_utils.create_device_mesh(sizes, topology.devices, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError):  # sizes that no assignment of the torus's dimensions gives
        devices = np.array(topology.devices).reshape(sizes)
    return Mesh(devices, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def choose_mesh(config: ModelConfig, topology: Topology, rows: int, sequence: int, stage: str) -> Choice:
    """A mesh for the stage, by rule. Raises PlanError when rows and devices have too little in common."""
    return (_for_decoding if stage == "decode" else _for_training)(config, topology, rows, sequence)


def _for_training(config: ModelConfig, topology: Topology, rows: int, sequence: int) -> Choice:
    devices = len(topology.devices)
    split = math.gcd(rows, devices)
    context = math.gcd(devices // split, sequence)
    model = devices // split // context
    why = [f"rows: {rows} over {split} of {devices} devices"]
    if context > 1:
        why.append(f"context={context}: fewer rows than devices, so {context} devices share a row's queries")
    if model > 1:
        why.append(f"model={model}: what neither rows nor queries can use")
    expert = 1
    if config.moe is not None:
        layer = layer_experts(config) * BF16 // model
        tokens = rows * sequence // (split * context) * config.hidden_size * BF16
        widths = [e for e in range(1, split + 1) if math.gcd(config.moe.experts, split) % e == 0]
        fitting = [e for e in widths if layer / e <= topology.chip.hbm_bytes * GATHERED_SHARE]
        limit = f"at most 1/{1 / GATHERED_SHARE:.0f} of HBM" + (f": {fitting[0]} or more" if fitting else " would do, which none gives")
        fitting = fitting or widths[-1:]
        # Sent a layer and step: its experts' weights gathered twice and their gradients scattered; tokens gathered and their sums
        # scattered, forward, again in the backward pass, and their gradients.
        sent = lambda e: 3 * layer / e + 6 * (e - 1) * tokens
        expert = min(fitting, key=sent)
        why.append(
            f"expert={expert}: a device gathers {layer / expert / GIB:.2f} GiB of experts a layer ({limit}), and sends least, "
            f"{sent(expert) / 1e9:.1f} GB of weights and tokens a layer")
    why.append(f"fsdp={split // expert}: weights, gradients and moments are stored split over all of fsdp, expert and context")
    return Choice(dict(zip(AXES, (1, split // expert, expert, context, model), strict=True)), tuple(why))


def _for_decoding(config: ModelConfig, topology: Topology, rows: int, slots: int) -> Choice:
    devices, experts = len(topology.devices), config.moe.experts if config.moe is not None else 1
    heads = math.gcd(config.heads, config.gqa.kv_heads if config.gqa is not None else config.heads)
    routed = config.moe_layers * layer_experts(config) * BF16
    other = config.parameter_count(include_mtp=True) * BF16 - routed
    cache = rows * slots * config.cache_width * BF16

    def held(axes):
        split, expert, model = axes
        return other / model + routed / (expert * model) + cache / split / (model if config.gqa is not None else 1)

    candidates = [
        (split, expert, model) for split in _divisors(math.gcd(rows, devices)) for expert in _divisors(experts)
        for model in _divisors(heads) if split * expert * model == devices and model <= WIDEST_MODEL]
    if not candidates:
        raise PlanError(f"no decode mesh of {devices} devices: rows ({rows}), experts ({experts}) and heads ({heads}) have too few common "
                        "divisors with it; choose a smaller topology or another --global-batch")
    best = min(candidates, key=held)
    split, expert, model = best
    why = (
        f"weights stay where they are, {(routed + other) / GIB:.0f} GiB over expert x model = {expert * model}",
        f"rows: {rows} over fsdp={split}, a device holding {rows // split} with {cache / split / GIB:.1f} GiB of cache",
        f"of {len(candidates)} meshes the one whose devices hold, and read a step, least: {held(best) / GIB:.1f} GiB",
    )
    return Choice(dict(zip(AXES, (1, split, expert, 1, model), strict=True)), why)


def layer_experts(config: ModelConfig) -> int:
    """Weights of one layer's routed experts."""
    return 0 if config.moe is None else config.moe.experts * 3 * config.hidden_size * config.moe.intermediate_size


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
