"""One declaration per weight: its logical axes give its shape (and, on a mesh, its sharding); its initialiser stands beside them."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from glm_jax.parallel.axes import STORED, shard, spec


@dataclasses.dataclass(frozen=True)
class Weight:
    """Logical axes of one weight; `init` is "normal" (see `weight` for its scale), "ones" or "zeros"."""

    axes: tuple[str, ...]
    init: str
    fan_in: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Declared:
    """A weight of one particular model: everything that is known before memory is allocated."""

    path: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    init: str
    scale: float

    def make(self, key: jax.Array, dtype: Any) -> jax.Array:
        """The key is folded with the path, so that a weight does not depend on which others exist."""
        mesh = jax.sharding.get_abstract_mesh()
        where = None if mesh.empty else spec(self.axes, self.shape, mesh)
        if self.init in ("ones", "zeros"):
            return jnp.full(self.shape, float(self.init == "ones"), dtype, out_sharding=where)
        key = jax.random.fold_in(key, zlib.crc32(self.path.encode()))
        return (self.scale * jax.random.truncated_normal(key, -3, 3, self.shape, jnp.float32, out_sharding=where)).astype(dtype)


def weight(*axes: str, init: str = "normal", fan_in: tuple[str, ...] = (), present: Callable[[Any], Any] | None = None) -> Any:
    """A weight field of a flax.struct dataclass. `fan_in` names the axes that a product with it contracts; none means initializer_range.

    `present(config)` says whether a model has it; where not, the field is None.
    """
    return struct.field(metadata={"weight": Weight(axes, init, fan_in), "present": present})


def part(choose: Callable[[Any], type | None]) -> Any:
    """A field that is itself a dataclass of weights: the class that `choose(config)` names, or None."""
    return struct.field(metadata={"part": choose})


def declare(cls: type, config: Any, *, stack: str | None = None, path: str = "") -> Any:
    """The tree of Declared for `cls`; `stack` names the leading layer axis of its weights, if they are stacked."""
    fields = {}
    for field in dataclasses.fields(cls):
        here = f"{path}/{field.name}".lstrip("/")
        if "part" in field.metadata:
            chosen = field.metadata["part"](config)
            fields[field.name] = chosen and declare(chosen, config, stack=stack, path=here)
        elif "weight" in field.metadata:
            declared, present = field.metadata["weight"], field.metadata["present"]
            if present is not None and not present(config):
                fields[field.name] = None
                continue
            axes = ((stack,) if stack else ()) + declared.axes
            scale = config.initializer_range
            if declared.fan_in:
                # An axis may be empty (no shared expert): such a weight has no entries to scale.
                scale = 1 / math.sqrt(max(math.prod(config.size(a) for a in declared.fan_in), 1))
            fields[field.name] = Declared(here, axes, tuple(config.size(a) for a in axes), declared.init, scale)
    return cls(**fields)


def map_weights(function: Callable[[tuple[str, ...], jax.Array], jax.Array], tree: Any) -> Any:
    """`tree` with function(axes, w) in place of every weight w, unstacked; what is not a weight stays."""
    changed = {}
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if value is not None and "part" in field.metadata:
            changed[field.name] = map_weights(function, value)
        elif value is not None and "weight" in field.metadata:
            changed[field.name] = function(field.metadata["weight"].axes, value)
    return dataclasses.replace(tree, **changed)


def gather(part: Any) -> Any:
    """A dataclass of weights ready to compute with: whole but for experts, heads and widths. Its transpose scatters the gradients again.

    The experts' matrices stay as they are stored: the mixture gathers its own inside its island.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return part
    ready = lambda axes, w: w if axes[0] == "experts" else shard(w, *(None if axis in STORED else axis for axis in axes))
    return map_weights(ready, part)
