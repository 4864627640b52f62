"""The device mesh: always five explicit axes, size 1 where unused."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "expert", "context", "model")


def make_mesh(
    *, data: int = 1, fsdp: int = 1, expert: int = 1, context: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of the first data*fsdp*expert*context*model devices; enter it with jax.set_mesh, in every thread that computes.

    Rows of a batch are split over data, fsdp and expert, a row's queries over context, heads and FFN widths over model; weights are stored
    split over all axes but data (glm_jax.parallel.axes.RULES). Raises ValueError when there are too few devices.
    """
    sizes = (data, fsdp, expert, context, model)
    devices = jax.devices() if devices is None else devices
    if math.prod(sizes) > len(devices):
        wanted = ", ".join(f"{name}={size}" for name, size in zip(AXES, sizes, strict=True) if size > 1)
        raise ValueError(f"a mesh of {wanted} needs {math.prod(sizes)} devices; there are {len(devices)}")
    return jax.make_mesh(sizes, AXES, (AxisType.Explicit,) * len(AXES), devices=devices[: math.prod(sizes)])
