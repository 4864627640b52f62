"""The lightning indexer for XLA: heads are a loop, so that no [B, T, H, S] array is alive."""

import jax.numpy as jnp

from pallas_kernels.chunks import over_queries
from pallas_kernels.dispatch import varying_alike
from pallas_kernels.lightning_indexer.reference import visible


def index_scores(q_BxTxHxD, k_BxSxD, w_BxTxH, *, query_positions, key_positions, query_segments, key_segments):
    q, k, w = (x.astype(jnp.float32) for x in (q_BxTxHxD, k_BxSxD, w_BxTxH))
    scores_BxTxS = 0.0
    for h in range(q.shape[2]):
        scores_BxTxS += w[:, :, h, None] * jnp.maximum(jnp.einsum("btd,bsd->bts", q[:, :, h], k), 0)
    return jnp.where(visible(query_positions, key_positions, query_segments, key_segments), scores_BxTxS, -jnp.inf)


def index_scores_at(q_BxTxHxD, k_BxSxD, w_BxTxH, places_BxTxK):
    q_BxTxHxD, k_BxSxD, w_BxTxH = varying_alike(q_BxTxHxD, k_BxSxD, w_BxTxH)  # their gradients are summed once, not by chunk
    rows, _, heads, dim = q_BxTxHxD.shape
    row = jnp.arange(rows)[:, None, None]

    def score(queries):
        q, w, places = queries
        keys_BxTxKxD = k_BxSxD[row, jnp.maximum(places, 0)]
        products = jnp.einsum("bthd,btkd->bthk", q, keys_BxTxKxD, preferred_element_type=jnp.float32)
        return jnp.einsum("bth,bthk->btk", w, jnp.maximum(products, 0))

    return over_queries(score, (q_BxTxHxD, w_BxTxH, places_BxTxK), rows * places_BxTxK.shape[-1] * (dim + 2 * heads))
