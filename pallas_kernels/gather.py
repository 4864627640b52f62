"""Rows of keys by their positions."""

import jax.numpy as jnp


def gather_rows(x_BxSxD, selection_BxTxK):
    """x[b, selection[b, t, k]] as [B, T, K, D]; -1 reads row 0, which the caller masks. A flat gather has a flat scatter as gradient."""
    batch, size, width = x_BxSxD.shape
    flat = jnp.maximum(selection_BxTxK, 0) + size * jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    return jnp.take(x_BxSxD.reshape(batch * size, width), flat, axis=0, mode="clip")
