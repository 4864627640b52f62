"""Queries in chunks, so that what lies between queries and keys is alive for one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ELEMENTS = 2**27  # numbers that one chunk may have in memory at once, in its largest arrays
SMALLEST = 16  # queries


def over_queries(function: Callable, queries: Any, per_query: int, most: int | None = None) -> Any:
    """function(queries) for a tree of arrays [B, T, ...] and results [B, T, ...], in chunks of at most `most` queries.

    `per_query`: the numbers that function holds for one query place, all rows together. A chunk is computed again in the backward pass.
    """
    rows, length = jax.tree.leaves(queries)[0].shape[:2]
    size = max(SMALLEST, ELEMENTS // per_query)
    size = min(size, most) if most is not None else size
    if length <= size:
        return function(queries)
    count = -(-length // size)
    size = -(-length // count)  # as even as can be: padding is computed in vain

    def split(x):
        padded = jnp.pad(x, ((0, 0), (0, count * size - length), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(rows, count, size, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(rows, count * size, *x.shape[3:])[:, :length]

    return jax.tree.map(join, jax.lax.map(jax.checkpoint(function, prevent_cse=False), jax.tree.map(split, queries)))
