"""The lightning indexer for XLA: heads are a loop, so that no [B, T, H, S] array is alive."""

import jax
import jax.numpy as jnp

from pallas_kernels.chunks import over_queries
from pallas_kernels.dispatch import varying_alike
from pallas_kernels.gather import gather_rows
from pallas_kernels.lightning_indexer.reference import visible

UNROLLED = 8  # heads, at most, of which the program has a copy each: XLA then fuses their sum


def index_scores(q_BxTxHxD, k_BxSxD, w_BxTxH, *, query_positions, key_positions, query_segments, key_segments):
    q, k, w = (x.astype(jnp.float32) for x in (q_BxTxHxD, k_BxSxD, w_BxTxH))
    q, k, w = varying_alike(q, k, w)

    def add(scores_BxTxS, head):
        q_BxTxD, w_BxT = head
        return scores_BxTxS + w_BxT[..., None] * jnp.maximum(jnp.einsum("btd,bsd->bts", q_BxTxD, k), 0), None

    start = varying_alike(jnp.zeros((*q.shape[:2], k.shape[1]), jnp.float32), q)[0]
    heads = jnp.moveaxis(q, 2, 0), jnp.moveaxis(w, 2, 0)
    scores_BxTxS, _ = jax.lax.scan(add, start, heads, unroll=len(heads[0]) if len(heads[0]) <= UNROLLED else 1)
    return jnp.where(visible(query_positions, key_positions, query_segments, key_segments), scores_BxTxS, -jnp.inf)


def index_scores_at(q_BxTxHxD, k_BxSxD, w_BxTxH, places_BxTxK):
    q_BxTxHxD, k_BxSxD, w_BxTxH = varying_alike(q_BxTxHxD, k_BxSxD, w_BxTxH)  # their gradients are summed once, not by chunk
    rows, _, heads, dim = q_BxTxHxD.shape

    def score(queries):
        q, w, places = queries
        products = jnp.einsum("bthd,btkd->bthk", q, gather_rows(k_BxSxD, places), preferred_element_type=jnp.float32)
        return jnp.einsum("bth,bthk->btk", w, jnp.maximum(products, 0))

    return over_queries(score, (q_BxTxHxD, w_BxTxH, places_BxTxK), rows * places_BxTxK.shape[-1] * (dim + 2 * heads))
