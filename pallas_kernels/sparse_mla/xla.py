"""Absorbed MLA over selected keys in O(T k): gather the selected rows, attend to them, scatter-add their gradients."""

import jax.numpy as jnp

from pallas_kernels.chunks import over_queries
from pallas_kernels.dispatch import varying_alike
from pallas_kernels.gather import gather_rows
from pallas_kernels.sparse_mla.reference import head_mean, masked_softmax


def sparse_mla(q_latent_BxTxHxC, q_rope_BxTxHxR, latent_BxSxC, rope_BxSxR, selection_BxTxK, *, scale):
    width = latent_BxSxC.shape[-1]
    q = jnp.concatenate([q_latent_BxTxHxC, q_rope_BxTxHxR], axis=-1)
    q, latent_rope = varying_alike(q, jnp.concatenate([latent_BxSxC, rope_BxSxR], axis=-1))  # their gradients are summed once, not by chunk

    def attend(queries):
        q, selection = queries
        keys_BxTxKxD = gather_rows(latent_rope, selection)
        scores = jnp.einsum("bthd,btkd->bthk", q, keys_BxTxKxD, preferred_element_type=jnp.float32)
        probabilities, lse = masked_softmax(scores * scale, (selection >= 0)[:, :, None, :])
        out = jnp.einsum("bthk,btkc->bthc", probabilities.astype(latent_BxSxC.dtype), keys_BxTxKxD[..., :width])
        return out, lse, head_mean(probabilities)

    rows, _, heads, dim = q.shape
    return over_queries(attend, (q, selection_BxTxK), rows * selection_BxTxK.shape[-1] * (dim + 2 * heads))
