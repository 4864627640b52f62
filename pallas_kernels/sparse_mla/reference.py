"""Absorbed MLA over selected keys, as dense attention under a mask that holds the selection: O(T S), the oracle."""

import jax
import jax.numpy as jnp


def masked_mla(q_latent_BxTxHxC, q_rope_BxTxHxR, latent_BxSxC, rope_BxSxR, mask_BxTxS, *, scale):
    """out [B, T, H, C], lse [B, T, H], probabilities [B, T, H, S]; rows that see no key give 0 and lse -inf."""
    scores = jnp.einsum("bthc,bsc->bths", q_latent_BxTxHxC, latent_BxSxC, preferred_element_type=jnp.float32)
    scores += jnp.einsum("bthr,bsr->bths", q_rope_BxTxHxR, rope_BxSxR, preferred_element_type=jnp.float32)
    mask = mask_BxTxS[:, :, None, :]
    scores = jnp.where(mask, scores * scale, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), jnp.finfo(jnp.float32).min))
    weights = jnp.where(mask, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probabilities = weights / jnp.where(total > 0, total, 1)
    out = jnp.einsum("bths,bsc->bthc", probabilities.astype(latent_BxSxC.dtype), latent_BxSxC)
    lse = jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)) + top, -jnp.inf)[..., 0]
    return out, lse, probabilities


def sparse_mla(q_latent_BxTxHxC, q_rope_BxTxHxR, latent_BxSxC, rope_BxSxR, selection_BxTxK, *, scale):
    selected = jax.nn.one_hot(selection_BxTxK, latent_BxSxC.shape[1], dtype=jnp.bool_)  # -1 gives a row of False
    out, lse, _ = masked_mla(q_latent_BxTxHxC, q_rope_BxTxHxR, latent_BxSxC, rope_BxSxR, selected.any(axis=2), scale=scale)
    return out, lse
