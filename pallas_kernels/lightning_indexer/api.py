"""DSA's lightning indexer: which keys a query should look at (DeepSeek-V3.2, eq. 1; GLM-5, arXiv 2602.15763)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.chunks import over_queries
from pallas_kernels.dispatch import choose
from pallas_kernels.lightning_indexer import reference, xla
from pallas_kernels.topk_select.api import select_topk

SPANS, MIN_SPAN = 4, 128  # a long row's queries are taken in parts that each score the keys up to their end


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


def index_scores_at(q_BxTxHxD: Array, k_BxSxD: Array, w_BxTxH: Array, places_BxTxK: Array, *, implementation: str = "auto") -> Array:
    """I[t, places[t, k]], float32 [B, T, K], in O(T K); places of -1 give some finite score. Differentiable in q, k and w."""
    available = {"reference": reference.index_scores_at, "xla": xla.index_scores_at}
    return choose("lightning_indexer", implementation, available)(q_BxTxHxD, k_BxSxD, w_BxTxH, places_BxTxK)


def index_topk(
    q_BxTxHxD: Array, k_BxSxD: Array, w_BxTxH: Array, *, k: int,
    query_positions: Array, key_positions: Array, query_segments: Array, key_segments: Array, same_row: bool = False,
    implementation: str = "auto",
) -> Array:
    """Positions in the row of the k highest visible scores, int32 [B, T, min(k, S)], ascending, -1 last; ties go to the lowest position.

    `same_row` is the caller's promise that key s is of the token of query s: the keys behind a query are then not even scored, nearly.
    """
    length, size = q_BxTxHxD.shape[1], k_BxSxD.shape[1]
    spans = SPANS if same_row and length >= MIN_SPAN * SPANS and implementation != "reference" else 1
    span = -(-length // spans)
    found = []
    for start in range(0, length, span):
        end = min(start + span, length)
        keys = end if spans > 1 else size
        seen = {"key_positions": key_positions[:, :keys], "key_segments": key_segments[:, :keys]}

        def best(queries, keys=keys, seen=seen):
            q, w, positions, segments = queries
            scores = index_scores(
                q, k_BxSxD[:, :keys], w, query_positions=positions, query_segments=segments, **seen, implementation=implementation)
            return select_topk(scores, k, implementation=implementation)

        queries = [a[:, start:end] for a in (q_BxTxHxD, w_BxTxH, query_positions, query_segments)]
        places = over_queries(best, queries, 2 * q_BxTxHxD.shape[0] * keys)
        found.append(jnp.pad(places, ((0, 0), (0, 0), (0, min(k, size) - places.shape[-1])), constant_values=-1))
    return jnp.concatenate(found, axis=1)
