"""Multi-head latent attention in its absorbed form, over the keys that the indexer selects (GLM-5 §2; DeepSeek-V3.2 §2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from glm_jax.model.cache import Context
from glm_jax.model.config import ModelConfig
from glm_jax.model.indexer import Indexer, indexer_kl
from glm_jax.model.layers import rms_norm, rotate_interleaved
from glm_jax.model.parameters import part, weight
from pallas_kernels.lightning_indexer.api import index_scores
from pallas_kernels.sparse_mla.api import dense_mla_with_attention, sparse_mla_with_attention
from pallas_kernels.topk_select.api import select_topk


@struct.dataclass
class MLA:
    """Low-rank queries, one latent and one rotary key a token; heads read them through `k_up` and `v_up`."""

    q_down: Array = weight("embed", "q_rank", fan_in=("embed",))
    q_norm: Array = weight("q_rank", init="ones")
    q_up: Array = weight("q_rank", "heads", "qk", fan_in=("q_rank",))
    kv_down: Array = weight("embed", "kv_latent", fan_in=("embed",))
    kv_norm: Array = weight("kv_rank", init="ones")
    k_up: Array = weight("heads", "nope", "kv_rank", fan_in=("kv_rank",))
    v_up: Array = weight("heads", "kv_rank", "v", fan_in=("kv_rank",))
    out: Array = weight("heads", "v", "embed", fan_in=("heads", "v"))
    indexer: Indexer = part(Indexer)

    def __call__(self, config: ModelConfig, x_BxTxD: Array, context: Context) -> tuple[Array, Context, dict[str, Array]]:
        """Returns the output [B, T, D], the context with this layer's keys stored, and "selections" and "indexer_loss" where asked for."""
        nope, rank = config.mla.qk_nope_head_dim, config.mla.kv_lora_rank
        q_latent = rms_norm(x_BxTxD @ self.q_down, self.q_norm, config.mla.latent_norm_eps)
        q = jnp.einsum("btl,lhd->bthd", q_latent, self.q_up)
        q_rope = rotate_interleaved(q[..., nope:], context.cos[:, :, None], context.sin[:, :, None])
        q_absorbed = jnp.einsum("bthn,hnc->bthc", q[..., :nope], self.k_up)
        kv = x_BxTxD @ self.kv_down
        latent = rms_norm(kv[..., :rank], self.kv_norm, config.mla.latent_norm_eps)
        rope = rotate_interleaved(kv[..., rank:], context.cos, context.sin)

        # The indexer learns from its own objective alone: nothing flows back into the layer (DeepSeek-V3.2 §2.1.1).
        detached = jax.lax.stop_gradient((x_BxTxD, q_latent))
        q_index, k_index, w_index = self.indexer.project(config, *detached, context.cos, context.sin)
        context, latent, rope, k_index = context.store(latent, rope, k_index)
        scores = index_scores(
            q_index, k_index, w_index, query_positions=context.query_positions, key_positions=context.key_positions,
            query_segments=context.query_segments, key_segments=context.key_segments)

        found = {}
        scale = config.mla.qk_head_dim ** -0.5
        if context.dense_attention:
            visible = scores > -jnp.inf
            out, _, attention = dense_mla_with_attention(q_absorbed, q_rope, latent, rope, visible, scale=scale)
            if context.indexer_loss:
                found["indexer_loss"] = indexer_kl(scores, attention, visible)
        else:
            selection = select_topk(jax.lax.stop_gradient(scores), config.indexer.topk)
            selection = context.replayed_selection(selection)
            out, _, attention = sparse_mla_with_attention(q_absorbed, q_rope, latent, rope, selection, scale=scale)
            found["selections"] = selection
            if context.indexer_loss:
                on_selection = jnp.take_along_axis(scores, jnp.maximum(selection, 0), axis=-1)
                found["indexer_loss"] = indexer_kl(on_selection, attention, selection >= 0)
        values = jnp.einsum("bthc,hcv->bthv", out, self.v_up)
        return jnp.einsum("bthv,hvd->btd", values, self.out), context, found
