"""Absorbed MLA over selected keys, as dense attention under a mask that holds the selection: O(T S), the oracle."""

import jax
import jax.numpy as jnp


def masked_softmax(scores, valid):
    """Probabilities over the last axis and the log normaliser [...], float32; where nothing is valid they are 0 and -inf."""
    scores = jnp.where(valid, scores, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), jnp.finfo(jnp.float32).min))
    weights = jnp.where(valid, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    safe_total = jnp.where(total > 0, total, 1)
    return weights / safe_total, jnp.where(total > 0, jnp.log(safe_total) + top, -jnp.inf)[..., 0]


def head_mean(probabilities_BxTxHxK):
    """The heads' summed attention, L1-normalised, as a constant: every head's sums to 1, or all to 0."""
    return jax.lax.stop_gradient(probabilities_BxTxHxK.mean(axis=2))


def dense_mla(q_latent_BxTxHxC, q_rope_BxTxHxR, latent_BxSxC, rope_BxSxR, visible_BxTxS, *, scale):
    scores = jnp.einsum("bthc,bsc->bths", q_latent_BxTxHxC, latent_BxSxC, preferred_element_type=jnp.float32)
    scores += jnp.einsum("bthr,bsr->bths", q_rope_BxTxHxR, rope_BxSxR, preferred_element_type=jnp.float32)
    probabilities, lse = masked_softmax(scores * scale, visible_BxTxS[:, :, None, :])
    out = jnp.einsum("bths,bsc->bthc", probabilities.astype(latent_BxSxC.dtype), latent_BxSxC)
    return out, lse, head_mean(probabilities)


def sparse_mla(q_latent_BxTxHxC, q_rope_BxTxHxR, latent_BxSxC, rope_BxSxR, selection_BxTxK, *, scale):
    selected = jax.nn.one_hot(selection_BxTxK, latent_BxSxC.shape[1], dtype=jnp.bool_)  # -1 gives a row of False
    out, lse, attention_BxTxS = dense_mla(
        q_latent_BxTxHxC, q_rope_BxTxHxR, latent_BxSxC, rope_BxSxR, selected.any(axis=2), scale=scale)
    on_selection = jnp.take_along_axis(attention_BxTxS, jnp.maximum(selection_BxTxK, 0), axis=-1)
    return out, lse, jnp.where(selection_BxTxK >= 0, on_selection, 0)
