"""Exact top-k through lax.top_k, whose ties go to the lowest index."""

import jax
import jax.numpy as jnp


def select_topk(scores_BxTxS, k):
    size = scores_BxTxS.shape[-1]
    if size <= k:  # all that are seen: nothing to compare
        kept, order = scores_BxTxS > -jnp.inf, jnp.arange(size, dtype=jnp.int32)
    else:
        # lax.top_k orders -0.0 (a negative weight times relu's 0) below 0.0, though the two are a tie.
        values, order = jax.lax.top_k(jnp.where(scores_BxTxS == 0, 0.0, scores_BxTxS), k)
        kept = values > -jnp.inf
    ascending = jnp.sort(jnp.where(kept, order, size), axis=-1)
    return jnp.where(ascending == size, -1, ascending).astype(jnp.int32)
