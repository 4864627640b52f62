"""Causal attention over all visible keys, with grouped queries: GQA, and MLA in either form."""

from __future__ import annotations

from jax import Array

from pallas_kernels.dense_attention import reference, xla
from pallas_kernels.dispatch import choose


def dense_attention(
    q_BxTxGxQxD: Array, k_BxSxGxD: Array, v_BxSxGxV: Array, *, scale: float,
    query_positions: Array, key_positions: Array, query_segments: Array, key_segments: Array, selection_BxTxK: Array | None = None,
    same_row: bool = False, implementation: str = "auto",
) -> Array:
    """softmax(scale q . k) v, [B, T, G, Q, V] in v's type; each of the G keys is read by Q queries (heads = G Q).

    Positions and segments are int32 [B, T] and [B, S]: a query sees the keys of its own segment at positions up to its own; segment 0 is
    padding. A query that sees no key gives 0. Differentiable in q, k and v.

    With a `selection`, int32 [B, T, K], -1 where there is none, a query attends to those keys alone: what sparse_mla computes, in O(T S).
    `same_row` is the caller's promise that key s is of the token of query s, so that no query reads a key behind it.
    """
    return choose("dense_attention", implementation, {"reference": reference.dense_attention, "xla": xla.dense_attention})(
        q_BxTxGxQxD, k_BxSxGxD, v_BxSxGxV, scale=scale, query_positions=query_positions, key_positions=key_positions,
        query_segments=query_segments, key_segments=key_segments, selection_BxTxK=selection_BxTxK, same_row=same_row)
