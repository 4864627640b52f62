"""From the logical axes of weights and activations to shardings on the mesh that is set. Without one, every function here does nothing.

A logical axis takes the mesh axes that the rules give it, as long as they divide its length and no other axis of the same array has them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh, reshard

Rules = Mapping[str, tuple[str, ...]]

# Axes of weights that a device stores a piece of and computes with whole (see parameters.gather): they take what the others leave.
STORED = ("embed", "q_rank", "kv_rank")

RULES: Rules = {
    # activations
    "batch": ("data", "fsdp", "expert"),
    "queries": ("context",),
    # weights
    **dict.fromkeys(STORED, ("fsdp", "expert", "context", "model")),
    "experts": ("expert",),
    "vocab": ("model",),
    "heads": ("model",),
    "kv_heads": ("model",),
    "ff": ("model",),
    "shared_ff": ("model",),
    "expert_ff": ("model",),
}

# For generation weights stay where they are, and the few rows are not split over experts: each device adds its experts' part of all.
DECODE_RULES: Rules = {**RULES, "batch": ("data", "fsdp"), **dict.fromkeys(STORED, ())}

_rules: contextvars.ContextVar[Rules] = contextvars.ContextVar("rules", default=RULES)


@contextlib.contextmanager
def use_rules(rules: Rules) -> Iterator[None]:
    """These rules in place of RULES while a program is traced, in this thread. A jitted function keeps those of its first trace."""
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


def mesh_axes(
    axis: str | None, size: int, mesh: Mesh | AbstractMesh | None = None, taken: Sequence[str] | set[str] = (),
) -> tuple[str, ...]:
    """The mesh axes larger than 1 that `axis` of length `size` is split over: of its rule without those `taken`, the longest leading part
    that divides it."""
    mesh = get_abstract_mesh() if mesh is None else mesh
    names, parts = [], 1
    for name in _rules.get().get(axis, ()):
        if name in taken or (width := mesh.shape.get(name, 1)) == 1:
            continue
        if size % (parts * width):
            break
        names.append(name)
        parts *= width
    return tuple(names)


def spec(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh | None = None) -> PartitionSpec:
    """The partition of an array with these logical axes and this shape; axes that are only stored split choose last."""
    if len(axes) != len(shape):
        raise ValueError(f"logical axes {tuple(axes)} for an array of shape {tuple(shape)}")
    used: set[str] = set()
    entries: list[tuple[str, ...] | None] = [None] * len(shape)
    for i in sorted(range(len(shape)), key=lambda i: axes[i] in STORED):
        names = mesh_axes(axes[i], shape[i], mesh, used)
        used.update(names)
        entries[i] = names or None
    return PartitionSpec(*entries)


def shared_storage(axes: Sequence[str | None], shape: Sequence[int], tokens: tuple[int, int]) -> tuple[str, ...]:
    """Of the mesh axes that a weight with these logical axes is only stored split over, those that tokens [B, T] are split over too.

    Gathered over them inside an island, a weight has its gradient scattered, not summed whole on every device.
    """
    if get_abstract_mesh().empty:
        return ()
    split = {*mesh_axes("batch", tokens[0]), *mesh_axes("queries", tokens[1])}
    entries = [entry for axis, entry in zip(axes, spec(axes, shape), strict=True) if axis in STORED and entry is not None]
    return tuple(name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry) if name in split)


def sharding_of(declared: Any, mesh: Mesh) -> NamedSharding:
    """Where a declared weight lives on `mesh`."""
    return NamedSharding(mesh, spec(declared.axes, declared.shape, mesh))


def shard(x: Array, *axes: str | None) -> Array:
    """x laid out by its logical axes."""
    return x if get_abstract_mesh().empty else reshard(x, spec(axes, x.shape))


def einsum(subscripts: str, x: Array, w: Array, *axes: str | None, **keywords: Any) -> Array:
    """jnp.einsum whose result has these logical axes; for products that sum over a sharded axis."""
    if get_abstract_mesh().empty:
        return jnp.einsum(subscripts, x, w, **keywords)
    operands, out = subscripts.split("->")
    sizes = dict(zip(operands.replace(",", ""), (*x.shape, *w.shape), strict=True))
    return jnp.einsum(subscripts, x, w, out_sharding=spec(axes, [sizes[letter] for letter in out]), **keywords)


def island(function: Callable, inputs: Sequence[Sequence[str | None] | PartitionSpec | None], outputs: Any) -> Callable:
    """`function` over each device's own piece of its arguments (shard_map).

    `inputs` gives the logical axes of every argument, or its partition (None for an argument that is None), `outputs` those of the
    results, a tuple of tuples for several. A logical axis must have one length in all of them. Without a mesh it is `function` itself.
    """
    mesh = get_abstract_mesh()
    if mesh.empty:
        return function

    def call(*arguments):
        split: dict[str, tuple[str, ...]] = {}
        in_specs = []
        for axes, argument in zip(inputs, arguments, strict=True):
            if argument is None:
                in_specs.append(None)
                continue
            if isinstance(axes, PartitionSpec):
                in_specs.append(axes)
                continue
            in_specs.append(spec(axes, argument.shape))
            split |= {axis: entry for axis, entry in zip(axes, in_specs[-1], strict=True) if axis is not None}
        arguments = [a if s is None else reshard(a, s) for a, s in zip(arguments, in_specs, strict=True)]
        to_spec = lambda axes: PartitionSpec(*(split.get(axis) for axis in axes))
        several = bool(outputs) and isinstance(outputs[0], tuple)
        out_specs = tuple(to_spec(axes) for axes in outputs) if several else to_spec(outputs)
        return jax.shard_map(function, in_specs=tuple(in_specs), out_specs=out_specs)(*arguments)

    return call


def sum_over(x: Array, axis: str, size: int) -> Array:
    """Inside an island: the sum of the pieces' partial results, where `axis` of this length is split."""
    names = mesh_axes(axis, size)
    return jax.lax.psum(x, names) if names else x
