"""From the logical axes of weights and activations to shardings on the mesh that is set. Without one, every function here does nothing.

A logical axis takes the mesh axes that RULES gives it, as long as they divide its length and no earlier axis of the same array has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh, reshard

RULES: dict[str, tuple[str, ...]] = {
    # activations
    "batch": ("data", "fsdp", "expert"),
    "queries": ("context",),
    # weights; see parameters.gather for what a device computes with
    "embed": ("fsdp", "expert"),
    "experts": ("expert",),
    "vocab": ("model",),
    "heads": ("model",),
    "kv_heads": ("model",),
    "ff": ("model",),
    "shared_ff": ("model",),
    "expert_ff": ("model",),
}


def mesh_axes(axis: str | None, size: int, mesh: Mesh | AbstractMesh | None = None) -> tuple[str, ...]:
    """The mesh axes larger than 1 that `axis` of length `size` is split over: the longest leading part of its rule that divides it."""
    mesh = get_abstract_mesh() if mesh is None else mesh
    taken, parts = [], 1
    for name in RULES.get(axis, ()):
        if (width := mesh.shape.get(name, 1)) == 1:
            continue
        if size % (parts * width):
            break
        taken.append(name)
        parts *= width
    return tuple(taken)


def spec(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh | None = None) -> PartitionSpec:
    """The partition of an array with these logical axes and this shape."""
    used: set[str] = set()
    entries = []
    for axis, size in zip(axes, shape, strict=True):
        names = tuple(name for name in mesh_axes(axis, size, mesh) if name not in used)
        used.update(names)
        entries.append(names or None)
    return PartitionSpec(*entries)


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


def island(function: Callable, inputs: Sequence[Sequence[str | None] | None], outputs: Any) -> Callable:
    """`function` over each device's own piece of its arguments (shard_map).

    `inputs` gives the logical axes of every argument (None for an argument that is None), `outputs` those of the results, a tuple of
    tuples for several. A logical axis must have one length in all of them. Without a mesh it is `function` itself.
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
