"""One declaration per weight: its logical axes give its shape (and, on a mesh, its sharding); its initialiser stands beside them."""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


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
        if self.init in ("ones", "zeros"):
            return jnp.full(self.shape, float(self.init == "ones"), dtype)
        key = jax.random.fold_in(key, zlib.crc32(self.path.encode()))
        return (self.scale * jax.random.truncated_normal(key, -3, 3, self.shape, jnp.float32)).astype(dtype)


def weight(*axes: str, init: str = "normal", fan_in: tuple[str, ...] = ()) -> Any:
    """A weight field of a flax.struct dataclass. `fan_in` names the axes that a product with it contracts; none means initializer_range."""
    return struct.field(metadata={"weight": Weight(axes, init, fan_in)})


def part(cls: type) -> Any:
    """A field that is itself a dataclass of weights."""
    return struct.field(metadata={"part": cls})


def declare(cls: type, config: Any, *, stack: str | None = None, path: str = "") -> Any:
    """The tree of Declared for `cls`; `stack` names the leading layer axis of its weights, if they are stacked."""
    fields = {}
    for field in dataclasses.fields(cls):
        here = f"{path}/{field.name}".lstrip("/")
        if "part" in field.metadata:
            fields[field.name] = declare(field.metadata["part"], config, stack=stack, path=here)
        elif "weight" in field.metadata:
            spec = field.metadata["weight"]
            axes = ((stack,) if stack else ()) + spec.axes
            scale = config.initializer_range
            if spec.fan_in:
                # An axis may be empty (no shared expert): such a weight has no entries to scale.
                scale = 1 / math.sqrt(max(math.prod(config.size(a) for a in spec.fan_in), 1))
            fields[field.name] = Declared(here, axes, tuple(config.size(a) for a in axes), spec.init, scale)
    return cls(**fields)
