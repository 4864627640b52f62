"""The lightning indexer, written as its equation: I[t,s] = sum_h w[t,h] relu(q[t,h] . k[s])  (DeepSeek-V3.2, eq. 1)."""

import jax.numpy as jnp


def visible(query_positions, key_positions, query_segments, key_segments):
    """[B, T, S] bool: a query sees keys of its own segment at its own or an earlier position; segment 0 is padding."""
    causal = key_positions[:, None, :] <= query_positions[:, :, None]
    same = (key_segments[:, None, :] == query_segments[:, :, None]) & (query_segments[:, :, None] != 0)
    return causal & same


def index_scores(q_BxTxHxD, k_BxSxD, w_BxTxH, *, query_positions, key_positions, query_segments, key_segments):
    q, k, w = (x.astype(jnp.float32) for x in (q_BxTxHxD, k_BxSxD, w_BxTxH))
    logits_BxTxHxS = jnp.einsum("bthd,bsd->bths", q, k)
    scores_BxTxS = jnp.einsum("bths,bth->bts", jnp.maximum(logits_BxTxHxS, 0), w)
    return jnp.where(visible(query_positions, key_positions, query_segments, key_segments), scores_BxTxS, -jnp.inf)


def index_scores_at(q_BxTxHxD, k_BxSxD, w_BxTxH, places_BxTxK):
    logits_BxTxHxS = jnp.einsum("bthd,bsd->bths", q_BxTxHxD, k_BxSxD, preferred_element_type=jnp.float32)
    scores_BxTxS = jnp.einsum("bths,bth->bts", jnp.maximum(logits_BxTxHxS, 0), w_BxTxH)
    return jnp.take_along_axis(scores_BxTxS, jnp.maximum(places_BxTxK, 0), axis=-1)
