"""Exact top-k through lax.top_k, whose ties go to the lowest index."""

import jax
import jax.numpy as jnp


def select_topk(scores_BxTxS, k):
    size = scores_BxTxS.shape[-1]
    # lax.top_k orders -0.0 (a negative weight times relu's 0) below 0.0, though the two are a tie.
    scores_BxTxS = jnp.where(scores_BxTxS == 0, 0.0, scores_BxTxS)
    values, order = jax.lax.top_k(scores_BxTxS, min(k, size))
    ascending = jnp.sort(jnp.where(values > -jnp.inf, order, size), axis=-1)
    return jnp.where(ascending == size, -1, ascending).astype(jnp.int32)
