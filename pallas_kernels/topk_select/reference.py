"""Exact top-k by a stable sort of everything."""

import jax.numpy as jnp


def select_topk(scores_BxTxS, k):
    size = scores_BxTxS.shape[-1]
    order = jnp.argsort(-scores_BxTxS, axis=-1, stable=True)[..., : min(k, size)]
    kept = jnp.take_along_axis(scores_BxTxS, order, axis=-1) > -jnp.inf
    ascending = jnp.sort(jnp.where(kept, order, size), axis=-1)
    return jnp.where(ascending == size, -1, ascending).astype(jnp.int32)
