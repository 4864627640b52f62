"""Absorbed multi-head latent attention over the keys that the indexer selected (DeepSeek-V3.2 §2.1; GLM-5, arXiv 2602.15763)."""

from __future__ import annotations

from jax import Array

from pallas_kernels.dispatch import choose
from pallas_kernels.sparse_mla import reference, xla


def sparse_mla(
    q_latent_BxTxHxC: Array, q_rope_BxTxHxR: Array, latent_BxSxC: Array, rope_BxSxR: Array, selection_BxTxK: Array, *,
    scale: float, implementation: str = "auto",
) -> tuple[Array, Array]:
    """softmax(scale (q_latent . latent + q_rope . rope)) latent over the selected keys.

    selection int32 [B, T, K]: positions in the row, each once, -1 where there is none. Returns out [B, T, H, C] in the latents' type and
    the natural-log normaliser lse float32 [B, T, H]; a query without keys gives out 0 and lse -inf. Differentiable in all but selection.
    """
    return sparse_mla_with_attention(
        q_latent_BxTxHxC, q_rope_BxTxHxR, latent_BxSxC, rope_BxSxR, selection_BxTxK, scale=scale, implementation=implementation)[:2]


def sparse_mla_with_attention(
    q_latent_BxTxHxC: Array, q_rope_BxTxHxR: Array, latent_BxSxC: Array, rope_BxSxR: Array, selection_BxTxK: Array, *,
    scale: float, implementation: str = "auto",
) -> tuple[Array, Array, Array]:
    """As `sparse_mla`, and the attention summed over heads and L1-normalised, float32 [B, T, K]: the indexer's target, without gradient."""
    return choose("sparse_mla", implementation, {"reference": reference.sparse_mla, "xla": xla.sparse_mla})(
        q_latent_BxTxHxC, q_rope_BxTxHxR, latent_BxSxC, rope_BxSxR, selection_BxTxK, scale=scale)


def dense_mla_with_attention(
    q_latent_BxTxHxC: Array, q_rope_BxTxHxR: Array, latent_BxSxC: Array, rope_BxSxR: Array, visible_BxTxS: Array, *,
    scale: float, implementation: str = "auto",
) -> tuple[Array, Array, Array]:
    """The same over every key in `visible`, bool [B, T, S], in O(T S): DSA's dense warm-up. The attention is float32 [B, T, S]."""
    return choose("dense_mla", implementation, {"reference": reference.dense_mla, "xla": reference.dense_mla})(
        q_latent_BxTxHxC, q_rope_BxTxHxR, latent_BxSxC, rope_BxSxR, visible_BxTxS, scale=scale)
