"""Multi-token prediction: one layer, applied n times with the same weights, predicts n further tokens (DeepSeek-V3 §2.2; GLM-5 §2.1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from glm_jax.model.cache import Context
from glm_jax.model.config import ModelConfig
from glm_jax.model.indexer import Indexer
from glm_jax.model.layer import DenseLayer, MoELayer, apply_layer, own_selection, rematerialised, shared_selection
from glm_jax.model.layers import rms_norm
from glm_jax.model.parameters import gather, part, weight
from glm_jax.parallel.axes import island


@struct.dataclass
class MTPOutput:
    """What the steps k = 0 .. n-1 give, n leading: hidden [n, B, T, D] after the module's norm, whose entry t predicts token t + k + 2.

    real bool [n, B, T]: entry t of step k has its token t + k + 1, in the same sequence; the others are as padding, and no entry that is
    real sees them. experts int32 [n, B, T, K] or None; indexer_loss and balance_loss float32 [B, T], means over the steps, or None.
    """

    hidden: Array
    real: Array
    experts: Array | None
    indexer_loss: Array | None
    balance_loss: Array | None


@struct.dataclass
class MTP:
    """The stored module. All weights have a leading axis of length 1."""

    embedding_norm: Array = weight("embed", init="ones")
    hidden_norm: Array = weight("embed", init="ones")
    project: Array = weight("two", "embed", "embed_out", fan_in=("two", "embed"))  # [0] reads the token's embedding, [1] the hidden state
    layer: DenseLayer | MoELayer = part(lambda config: DenseLayer if config.moe is None else MoELayer)
    indexer: Indexer | None = part(lambda config: Indexer if config.indexer is not None else None)
    final_norm: Array = weight("embed", init="ones")
    embedding: Array | None = weight("vocab", "embed", present=lambda config: config.mtp.own_embeddings)
    head: Array | None = weight("embed", "vocab", fan_in=("embed",), present=lambda config: config.mtp.own_embeddings)

    def __call__(self, config: ModelConfig, embeddings: list[Array], hidden: Array, context: Context, remat: str = "none") -> MTPOutput:
        """`embeddings[k]` [B, T, D] is that of token t + k + 1 at entry t, `hidden` [B, T, D] the main model's after its final norm."""
        own, eps = gather(jax.tree.map(lambda w: w[0], self)), config.rms_norm_eps
        share = config.mtp.share_selection and len(embeddings) > 1
        context = context.replace(selection=None, shared_keys=None, share=1 / len(embeddings), keep_selection=share, keep_keys=share)
        steps, segments = [], context.query_segments
        for k, embedding in enumerate(embeddings):
            # h'_k = M [RMSNorm(Emb(t_{i+k})); RMSNorm(h_{k-1})] (DeepSeek-V3 eq. 21), h_k = TRM(h'_k) (eq. 22)
            x = rms_norm(embedding, own.embedding_norm, eps) @ own.project[0] + rms_norm(hidden, own.hidden_norm, eps) @ own.project[1]
            select = None
            if config.indexer is not None:
                select = shared_selection if share and k else own_selection(config, own.indexer, None)
            inside = followed(segments, k + 1)
            step = rematerialised(lambda layer, x, context, select=select: apply_layer(config, layer, x, context, select, None), remat)
            x, context, found = step(own.layer, x, context.replace(query_segments=inside, key_segments=inside))
            found["real"] = inside != 0
            if "indexer_loss" in found:  # a selection that was made for an earlier step has keys where this one has no token
                found["indexer_loss"] = jnp.where(found["real"], found["indexer_loss"], 0)
            found["hidden"] = rms_norm(x, own.final_norm, eps)
            hidden = found["hidden"] if config.mtp.recycle == "post_norm" else x
            steps.append(found)
        every = lambda name: [found[name] for found in steps if name in found]
        return MTPOutput(
            hidden=jnp.stack(every("hidden")),
            real=jnp.stack(every("real")),
            experts=jnp.stack(every("experts")) if every("experts") else None,
            indexer_loss=sum(every("indexer_loss")) if every("indexer_loss") else None,
            balance_loss=sum(every("balance_loss")) / len(steps) if every("balance_loss") else None)


def followed(segments_BxT: Array, by: int) -> Array:
    """The segments, with 0 at the tokens whose sequence ends before the token `by` places further on."""
    return island(lambda own: jnp.where(own == _later(own, by), own, 0), (("batch", None),), ("batch", None))(segments_BxT)


def shift_left(values_BxT: Array, by: int) -> Array:
    """The value `by` places further on; past the row's end 0."""
    return island(lambda own: _later(own, by), (("batch", None),), ("batch", None))(values_BxT)


def _later(values: Array, by: int) -> Array:
    return jnp.pad(values[:, by:], ((0, 0), (0, min(by, values.shape[1]))))
