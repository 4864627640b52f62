"""Attention written as its equation, every score alive at once: the oracle."""

import jax.numpy as jnp

from pallas_kernels.lightning_indexer.reference import visible
from pallas_kernels.sparse_mla.reference import masked_softmax


def chosen(selection_BxTxK, size):
    """bool [B, T, S]: the keys of each query's selection."""
    batch, length, _ = selection_BxTxK.shape
    rows = jnp.arange(batch)[:, None, None], jnp.arange(length)[None, :, None]
    places = jnp.where(selection_BxTxK < 0, size, selection_BxTxK)
    return jnp.zeros((batch, length, size), bool).at[(*rows, places)].set(True, mode="drop")


def dense_attention(
    q_BxTxGxQxD, k_BxSxGxD, v_BxSxGxV, *, scale, query_positions, key_positions, query_segments, key_segments, selection_BxTxK=None,
    same_row=False,
):
    del same_row
    if selection_BxTxK is None:
        seen_BxTxS = visible(query_positions, key_positions, query_segments, key_segments)
    else:
        seen_BxTxS = chosen(selection_BxTxK, k_BxSxGxD.shape[1])
    scores = jnp.einsum("btgqd,bsgd->bgqts", q_BxTxGxQxD, k_BxSxGxD, preferred_element_type=jnp.float32) * scale
    probabilities, _ = masked_softmax(scores, seen_BxTxS[:, None, None])
    return jnp.einsum("bgqts,bsgv->btgqv", probabilities.astype(v_BxSxGxV.dtype), v_BxSxGxV)
