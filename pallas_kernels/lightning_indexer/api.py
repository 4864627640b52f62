"""DSA's lightning indexer: which keys a query should look at (DeepSeek-V3.2, eq. 1; GLM-5, arXiv 2602.15763)."""

from __future__ import annotations

from jax import Array

from pallas_kernels.dispatch import choose
from pallas_kernels.lightning_indexer import reference, xla
from pallas_kernels.topk_select.api import select_topk


def index_scores(
    q_BxTxHxD: Array, k_BxSxD: Array, w_BxTxH: Array, *,
    query_positions: Array, key_positions: Array, query_segments: Array, key_segments: Array, implementation: str = "auto",
) -> Array:
    """I[t,s] = sum_h w[t,h] relu(q[t,h] . k[s]), float32 [B, T, S]; -inf where query t does not see key s.

    Positions and segments are int32 [B, T] and [B, S]. A query sees the keys of its own segment at positions up to its own;
    segment 0 is padding. Differentiable in q, k and w.
    """
    available = {"reference": reference.index_scores, "xla": xla.index_scores}
    return choose("lightning_indexer", implementation, available)(
        q_BxTxHxD, k_BxSxD, w_BxTxH,
        query_positions=query_positions, key_positions=key_positions, query_segments=query_segments, key_segments=key_segments)


def index_topk(
    q_BxTxHxD: Array, k_BxSxD: Array, w_BxTxH: Array, *, k: int,
    query_positions: Array, key_positions: Array, query_segments: Array, key_segments: Array, implementation: str = "auto",
) -> Array:
    """Positions in the row of the k highest visible scores, int32 [B, T, min(k, S)], ascending, -1 last; ties go to the lowest position."""
    scores = index_scores(
        q_BxTxHxD, k_BxSxD, w_BxTxH, query_positions=query_positions, key_positions=key_positions,
        query_segments=query_segments, key_segments=key_segments, implementation=implementation)
    return select_topk(scores, k, implementation=implementation)
