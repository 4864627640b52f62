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
    return choose("sparse_mla", implementation, {"reference": reference.sparse_mla, "xla": xla.sparse_mla})(
        q_latent_BxTxHxC, q_rope_BxTxHxR, latent_BxSxC, rope_BxSxR, selection_BxTxK, scale=scale)
