"""The TPUs that plans are made for, and slices of them that JAX describes without one being there (libtpu's compile-only topologies)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

GIB = 2**30


class PlanError(ValueError):
    """What was asked for cannot be planned; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX sees it: of a v5p both cores, of a tpu7x one of the two chiplets.

    flops            bfloat16 FLOP/s
    hbm_bytes        what a program may use, as the compiler says when one does not fit
    hbm_bandwidth    B/s
    torus_bandwidth  B/s that the device sends along one dimension of the torus, both ways together
    """

    flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    torus_bandwidth: float


# FLOP/s and HBM bandwidth: jax.experimental.pallas.tpu.get_tpu_info_for_chip, times the cores of a device. Links: "How to Scale Your
# Model" (jax-ml.github.io/scaling-book, TPU networking): 4.5e10 (v5e) or 9e10 B/s each one way, two a dimension; the two devices of a
# tpu7x chip share them.
CHIPS = {
    "v5e": Chip(197e12, 15.75 * GIB, 0.82e12, 9e10),
    "v5p": Chip(459e12, 95.74 * GIB, 2.46e12, 1.8e11),
    "v6e": Chip(920e12, 31.25 * GIB, 1.64e12, 1.8e11),
    "tpu7x": Chip(1155e12, 94.75 * GIB, 3.7e12, 9e10),
}

_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice: its name, its kind of chip and JAX's devices for it, which can be compiled for but hold nothing."""

    name: str
    chip: Chip
    devices: Sequence[Any]


def describe(name: str) -> Topology:
    """The slice called `name`, a kind of CHIPS and its shape: v5p:8x16x16, v6e:4x4.

    Raises PlanError for a name that is none, for a shape that the chip has not, and where libtpu is missing.
    """
    kind, _, shape = name.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        raise PlanError(f"no topology {name!r}: it is one of {', '.join(CHIPS)}, a colon and the slice's shape, as in v5p:4x4x4 or v6e:4x4")
    from jax.experimental import topologies

    try:
        with _without_a_tpu():
            found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except Exception as error:  # libtpu missing, or what it refuses, comes as several types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise PlanError(f"topology {name!r} cannot be described: {reason} (plans need libtpu: pip install -e '.[plan]')") from error
    return Topology(name, CHIPS[kind], found.devices)


@contextlib.contextmanager
def _without_a_tpu() -> Iterator[None]:
    """libtpu is loaded to compile only: it asks no metadata server for its machine, and several processes may do it at once."""
    before = dict(os.environ)
    os.environ.update({name: os.environ.get(name, value) for name, value in _QUIET.items()})
    try:
        yield
    finally:
        for name in _QUIET.keys() - before.keys():
            del os.environ[name]
