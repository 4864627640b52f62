"""The lightning indexer of DSA and its training objective (DeepSeek-V3.2 eq. 1, 3 and 4; GLM-5 §2)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from glm_jax.model.cache import Context, Selection
from glm_jax.model.config import ModelConfig
from glm_jax.model.layers import layer_norm, rotate
from glm_jax.model.parameters import weight
from glm_jax.parallel.axes import island, mesh_axes
from pallas_kernels.lightning_indexer.api import index_scores, index_scores_at, index_topk
from pallas_kernels.topk_select.api import select_topk

# Rows up to this many times index_topk are scored and attended to whole: gathering the selected keys costs more.
DENSE_UP_TO = 4


@struct.dataclass
class Indexer:
    """Projects to a few small heads; a query scores a key by sum_h w_h relu(q_h . k). Rotary on the first dims (main MLA: on the last)."""

    q_up: Array = weight("q_rank", "index_heads", "index_dim", fan_in=("q_rank",))
    k: Array = weight("embed", "index_dim", fan_in=("embed",))
    k_norm_gain: Array = weight("index_dim", init="ones")
    k_norm_bias: Array = weight("index_dim", init="zeros")
    head_weights: Array = weight("embed", "index_heads", fan_in=("embed",))

    def project(self, config: ModelConfig, x_BxTxD: Array, q_latent_BxTxL: Array, context: Context) -> tuple[Array, Array, Array]:
        """q [B, T, H, D], k [B, T, D] and float32 weights [B, T, H] that carry both scales (relu is positively homogeneous).

        The indexer learns from its own objective alone: nothing flows back into the layer (DeepSeek-V3.2 §2.1.1).
        """
        x, q_latent = jax.lax.stop_gradient((x_BxTxD, q_latent_BxTxL))
        rope, heads, dim = config.mla.qk_rope_head_dim, config.indexer.heads, config.indexer.head_dim
        turn = functools.partial(rotate, interleaved=config.indexer.rope_interleaved)
        q = jnp.einsum("btl,lhd->bthd", q_latent, self.q_up)
        k = layer_norm(x @ self.k, self.k_norm_gain, self.k_norm_bias, config.indexer.key_norm_eps)
        q = jnp.concatenate([turn(q[..., :rope], context.cos[:, :, None], context.sin[:, :, None]), q[..., rope:]], axis=-1)
        k = jnp.concatenate([turn(k[..., :rope], context.cos, context.sin), k[..., rope:]], axis=-1)
        # Float32, products too: bfloat16 flips near ties.
        w = jnp.matmul(x.astype(jnp.float32), self.head_weights.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        return q, k, w * (heads * dim) ** -0.5


def choose(config: ModelConfig, q: Array, k_BxSxD: Array, w: Array, context: Context, replay_BxTxK: Array | None) -> Selection:
    """The keys with the highest scores; recorded selections rule where their first entry is not -1."""
    masks = context.causal()
    same_row = context.cache is None and not mesh_axes("queries", q.shape[1])

    def best(q, k, w, replay, *values):
        seen = dict(zip(masks, values, strict=True))
        if not context.dense_attention and (not context.indexer_loss or k.shape[1] > DENSE_UP_TO * config.indexer.topk):
            places = index_topk(q, k, w, k=config.indexer.topk, same_row=same_row, **seen)
            places = places if replay is None else replayed(replay, places)
            return (places, index_scores_at(q, k, w, places)) if context.indexer_loss else (places,)
        scores = index_scores(q, k, w, **seen)
        if context.dense_attention:
            return (scores,)
        places = select_topk(jax.lax.stop_gradient(scores), config.indexer.topk)
        if replay is not None:
            places = replayed(replay, places)
        return places, jnp.take_along_axis(scores, jnp.maximum(places, 0), axis=-1)

    per_query = ("batch", "queries", None)
    where = [("batch", "queries" if name.startswith("query") else None) for name in masks]
    count = 2 if context.indexer_loss and not context.dense_attention else 1
    found = island(best, (("batch", "queries", None, None), ("batch", None, None), per_query, per_query, *where), (per_query,) * count)(
        q, k_BxSxD, w, replay_BxTxK, *masks.values())
    if context.dense_attention:
        return Selection(None, found[0])
    return Selection(found[0], found[1] if context.indexer_loss else None)


def replayed(recorded_BxTxK: Array, places_BxTxK: Array) -> Array:
    """The recorded selection where one was recorded, else the one given."""
    # Both are ascending with -1 last, and neither holds more real entries than the row has keys: cutting and padding lose nothing.
    width = places_BxTxK.shape[-1]
    recorded = recorded_BxTxK[..., :width].astype(places_BxTxK.dtype)
    recorded = jnp.pad(recorded, ((0, 0), (0, 0), (0, width - recorded.shape[-1])), constant_values=-1)
    return jnp.where(recorded[..., :1] >= 0, recorded, places_BxTxK)


def indexer_kl(scores: Array, attention_BxTxK: Array, valid: Array) -> Array:
    """KL(p || softmax(I)) per query, float32 [B, T]: p is the heads' summed attention, L1-normalised, a constant.

    `scores` [B, T, K] and `valid` [B, T, K] on the same keys as p: all visible ones (dense warm-up, DeepSeek-V3.2 eq. 3) or the
    selection (sparse stage, eq. 4).
    """
    log_q = jax.nn.log_softmax(jnp.where(valid, scores, -1e30), axis=-1)
    log_p = jnp.log(jnp.maximum(attention_BxTxK, 1e-10))
    return jnp.sum(jnp.where(valid, attention_BxTxK * (log_p - log_q), 0), axis=-1)
