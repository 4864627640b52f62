"""The lightning indexer of DSA and its training objective (DeepSeek-V3.2 eq. 1, 3 and 4; GLM-5 §2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from glm_jax.model.config import ModelConfig
from glm_jax.model.layers import layer_norm, rotate_interleaved
from glm_jax.model.parameters import weight


@struct.dataclass
class Indexer:
    """Projects to a few small heads; a query scores a key by sum_h w_h relu(q_h . k). Rotary on the first dims (main MLA: on the last)."""

    q_up: Array = weight("q_rank", "index_heads", "index_dim", fan_in=("q_rank",))
    k: Array = weight("embed", "index_dim", fan_in=("embed",))
    k_norm_gain: Array = weight("index_dim", init="ones")
    k_norm_bias: Array = weight("index_dim", init="zeros")
    head_weights: Array = weight("embed", "index_heads", fan_in=("embed",))

    def project(self, config: ModelConfig, x_BxTxD: Array, q_latent_BxTxL: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        """q [B, T, H, D], k [B, T, D] and float32 weights [B, T, H] that carry both scales (relu is positively homogeneous)."""
        rope, heads, dim = config.mla.qk_rope_head_dim, config.indexer.heads, config.indexer.head_dim
        q = jnp.einsum("btl,lhd->bthd", q_latent_BxTxL, self.q_up)
        k = layer_norm(x_BxTxD @ self.k, self.k_norm_gain, self.k_norm_bias, config.indexer.key_norm_eps)
        q = jnp.concatenate([rotate_interleaved(q[..., :rope], cos[:, :, None], sin[:, :, None]), q[..., rope:]], axis=-1)
        k = jnp.concatenate([rotate_interleaved(k[..., :rope], cos, sin), k[..., rope:]], axis=-1)
        w = x_BxTxD.astype(jnp.float32) @ self.head_weights.astype(jnp.float32)  # float32: bf16 flips near ties
        return q, k, w * (heads * dim) ** -0.5


def indexer_kl(scores: Array, attention_BxTxK: Array, valid: Array) -> Array:
    """KL(p || softmax(I)) per query, float32 [B, T]: p is the heads' summed attention, L1-normalised, a constant.

    `scores` [B, T, K] and `valid` [B, T, K] on the same keys as p: all visible ones (dense warm-up, DeepSeek-V3.2 eq. 3) or the
    selection (sparse stage, eq. 4).
    """
    log_q = jax.nn.log_softmax(jnp.where(valid, scores, -1e30), axis=-1)
    log_p = jnp.log(jnp.maximum(attention_BxTxK, 1e-10))
    return jnp.sum(jnp.where(valid, attention_BxTxK * (log_p - log_q), 0), axis=-1)
