"""Absorbed MLA over selected keys in O(T k): gather the selected rows, attend to them, scatter-add their gradients."""

import jax
import jax.numpy as jnp


def gather_rows(x_BxSxD, selection_BxTxK):
    """x[b, selection[b, t, k]] as [B, T, K, D]; -1 reads row 0, which the caller masks. A flat gather has a flat scatter as gradient."""
    batch, size, width = x_BxSxD.shape
    flat = jnp.maximum(selection_BxTxK, 0) + size * jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    return jnp.take(x_BxSxD.reshape(batch * size, width), flat, axis=0, mode="clip")


def sparse_mla_with_probabilities(q_latent_BxTxHxC, q_rope_BxTxHxR, latent_BxSxC, rope_BxSxR, selection_BxTxK, *, scale):
    """As sparse_mla, and the attention probabilities on the selection, float32 [B, T, H, K]."""
    width = latent_BxSxC.shape[-1]
    q = jnp.concatenate([q_latent_BxTxHxC, q_rope_BxTxHxR], axis=-1)
    keys_BxTxKxD = gather_rows(jnp.concatenate([latent_BxSxC, rope_BxSxR], axis=-1), selection_BxTxK)
    valid = (selection_BxTxK >= 0)[:, :, None, :]
    scores = jnp.einsum("bthd,btkd->bthk", q, keys_BxTxKxD, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(valid, scores, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), jnp.finfo(jnp.float32).min))
    weights = jnp.where(valid, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    any_key = total > 0
    probabilities = weights / jnp.where(any_key, total, 1)
    out = jnp.einsum("bthk,btkc->bthc", probabilities.astype(latent_BxSxC.dtype), keys_BxTxKxD[..., :width])
    lse = jnp.where(any_key, jnp.log(jnp.where(any_key, total, 1)) + top, -jnp.inf)[..., 0]
    return out, lse, probabilities


def sparse_mla(q_latent_BxTxHxC, q_rope_BxTxHxR, latent_BxSxC, rope_BxSxR, selection_BxTxK, *, scale):
    return sparse_mla_with_probabilities(q_latent_BxTxHxC, q_rope_BxTxHxR, latent_BxSxC, rope_BxSxR, selection_BxTxK, scale=scale)[:2]
