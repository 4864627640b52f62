"""Random numbers of demonstrations and prompts."""

from __future__ import annotations

import zlib

import numpy as np


def generator(seed: int, purpose: str, index: int) -> np.random.Generator:
    """A generator of its own for every index, so that streams resume anywhere and purposes never share numbers."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), index])


def draw_seed(rng: np.random.Generator) -> int:
    """A seed for an environment's `reset`."""
    return int(rng.integers(2**31))
