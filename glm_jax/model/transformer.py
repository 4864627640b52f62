"""The whole network, top to bottom: embedding, dense layers, mixture layers, head. An immutable pytree with pure methods."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from glm_jax.model.cache import Cache, Context
from glm_jax.model.config import ModelConfig
from glm_jax.model.layers import DenseFFN, rms_norm, rotary_angles
from glm_jax.model.mla import MLA
from glm_jax.model.moe import MoE
from glm_jax.model.parameters import declare, part, weight


@struct.dataclass
class Output:
    """What a forward pass gives; None where it was not asked for.

    logits float32 [B, T, V]; hidden [B, T, D] after the final norm; cache as given, extended by the real tokens;
    routing {layer: int32 [B, T, K]} of the MoE layers; selections {layer: int32 [B, T, min(index_topk, S)]}, positions in the row (with a
    cache: in the sequence), ascending, -1 last, None under dense attention; indexer_loss float32 [B, T], the KL summed over layers.
    """

    logits: Array | None
    hidden: Array
    cache: Cache | None
    routing: dict[int, Array]
    selections: dict[int, Array] | None
    indexer_loss: Array | None


@struct.dataclass
class Replay:
    """Recorded choices to use again: experts [moe_layers, B, T, K] and selections [layers, B, T, k], any signed integer type.

    An expert of -1, or a selection whose first entry is -1, is chosen anew. Selections of any width are read: what is missing counts as -1.
    """

    experts: Array | None = None
    selections: Array | None = None


@struct.dataclass
class DenseLayer:
    attention_norm: Array = weight("embed", init="ones")
    attention: MLA = part(MLA)
    ffn_norm: Array = weight("embed", init="ones")
    ffn: DenseFFN = part(DenseFFN)


@struct.dataclass
class MoELayer:
    attention_norm: Array = weight("embed", init="ones")
    attention: MLA = part(MLA)
    ffn_norm: Array = weight("embed", init="ones")
    moe: MoE = part(MoE)


@struct.dataclass
class Transformer:
    """A GLM-5 model. Layers of a kind are stacked and scanned, so that compile time is that of one layer of each kind."""

    embedding: Array
    dense_layers: DenseLayer
    moe_layers: MoELayer
    final_norm: Array
    head: Array
    config: ModelConfig = struct.field(pytree_node=False)

    @staticmethod
    def declare_tree(config: ModelConfig) -> Transformer:
        """The model with a Declared in place of every weight."""
        return Transformer(
            **vars(declare(_Ends, config)), config=config,
            dense_layers=declare(DenseLayer, config, stack="dense_layers", path="dense_layers"),
            moe_layers=declare(MoELayer, config, stack="moe_layers", path="moe_layers"))

    @staticmethod
    def declare(config: ModelConfig) -> list[Any]:
        """Every weight's declaration."""
        return jax.tree.leaves(Transformer.declare_tree(config))

    def __call__(
        self, tokens: Array, positions: Array | None = None, segment_ids: Array | None = None, attention_mask: Array | None = None,
        cache: Cache | None = None, replay: Replay | None = None, return_selections: bool = False, compute_logits: bool = True,
        dense_attention: bool = False, indexer_loss: bool = False,
    ) -> Output:
        """The network's outputs for tokens int32 [B, T].

        `attention_mask` [B, T] 1 = real or `segment_ids` [B, T] 0 = padding: at most one of the two, and with a cache only the mask, real
        tokens first. Positions [B, T] turn the rotary embedding; they default to the count of earlier real tokens in the segment, and with
        a cache they follow those stored, always. `dense_attention` attends to all visible keys (DSA's dense warm-up); `indexer_loss` asks
        for the indexers' objective. Outputs of padding are finite and otherwise unspecified.

        Raises ValueError for arguments that exclude each other or whose shapes do not fit.
        """
        config = self.config
        self._check(tokens, positions, segment_ids, attention_mask, cache, replay, dense_attention)
        segments = segment_ids if segment_ids is not None else attention_mask if attention_mask is not None else jnp.ones_like(tokens)
        segments = segments.astype(jnp.int32)
        if cache is not None:
            positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        elif positions is None:
            positions = default_positions(segments)
        cos, sin = rotary_angles(positions, config.mla.qk_rope_head_dim, config.rope_theta)
        flags = {"dense_attention": dense_attention, "indexer_loss": indexer_loss}
        if cache is None:
            # Causality inside a packed row is that of places in the row: that of positions, whatever the caller gives.
            places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            context = Context(cos, sin, places, segments, places, segments, None, **flags)
        else:
            slots = cache.latent.shape[2]
            places = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (tokens.shape[0], slots))
            context = Context(cos, sin, positions, segments, places, jnp.ones_like(places), cache, **flags)
        replay = replay or Replay()

        x = self.embedding[tokens]
        found = []
        for kind, first, count in (("dense_layers", 0, config.dense_layers), ("moe_layers", config.dense_layers, config.moe_layers)):
            if count:
                experts = replay.experts if kind == "moe_layers" else None
                selections = None if replay.selections is None else replay.selections[first : first + count]
                layers = first + jnp.arange(count, dtype=jnp.int32)
                # One layer is compiled, however many there are; of two, a loop costs more than it saves.
                (x, context), out = jax.lax.scan(
                    self._layer, (x, context), (getattr(self, kind), layers, experts, selections), unroll=count if count <= 2 else 1)
                found.append(out)

        real_count = segments.astype(bool).sum(axis=1, dtype=jnp.int32)
        hidden = rms_norm(x, self.final_norm, config.rms_norm_eps)
        return Output(
            logits=self.logits(hidden) if compute_logits else None,
            hidden=hidden,
            cache=None if cache is None else context.cache.replace(lengths=cache.lengths + real_count),
            routing={config.dense_layers + i: experts for f in found for i, experts in enumerate(f.get("experts", ()))},
            selections=dict(enumerate(s for f in found for s in f["selections"])) if return_selections and not dense_attention else None,
            indexer_loss=sum(f["indexer_loss"].sum(axis=0) for f in found) if indexer_loss else None,
        )

    def _check(self, tokens, positions, segment_ids, attention_mask, cache, replay, dense_attention):
        config, replay = self.config, replay or Replay()
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [batch, length], not of shape {tokens.shape}")
        if segment_ids is not None and (cache is not None or attention_mask is not None):
            raise ValueError("segment_ids go with neither a cache nor an attention_mask")
        if positions is not None and cache is not None:
            raise ValueError("positions go without a cache: tokens follow those that the cache stores")
        if replay.selections is not None and dense_attention:
            raise ValueError("dense_attention selects nothing, so there is no selection to replay")
        for name, value in (("positions", positions), ("segment_ids", segment_ids), ("attention_mask", attention_mask)):
            if value is not None and value.shape != tokens.shape:
                raise ValueError(f"{name} has shape {value.shape}, tokens {tokens.shape}")
        if cache is not None and cache.lengths.shape != tokens.shape[:1]:
            raise ValueError(f"the cache is for {cache.lengths.shape[0]} sequences, tokens {tokens.shape} hold {tokens.shape[0]}")
        experts = (config.moe_layers, *tokens.shape, config.moe.experts_per_token)
        if replay.experts is not None and replay.experts.shape != experts:
            raise ValueError(f"replay.experts has shape {replay.experts.shape}, must be [moe_layers, B, T, K] = {experts}")
        if replay.selections is not None and replay.selections.shape[:-1] != (config.layers, *tokens.shape):
            raise ValueError(f"replay.selections has shape {replay.selections.shape}, must be [layers, B, T, k] = "
                             f"{(config.layers, *tokens.shape, config.indexer.topk)}")

    def _layer(self, carry, xs):
        """One pre-norm layer of either kind, as the body of a scan over stacked layers."""
        config = self.config
        x, context = carry
        layer, index, experts, selection = xs
        context = context.replace(layer=index, replay=selection)
        attended, context, found = layer.attention(config, rms_norm(x, layer.attention_norm, config.rms_norm_eps), context)
        x = x + attended
        h = rms_norm(x, layer.ffn_norm, config.rms_norm_eps)
        if isinstance(layer, DenseLayer):
            x = x + layer.ffn(h)
        else:
            y, found["experts"] = layer.moe(config, h, experts)
            x = x + y
        return (x, context.replace(layer=0, replay=None)), found

    def logits(self, hidden: Array) -> Array:
        """float32 [..., V] for hidden [..., D]."""
        return jnp.einsum("...d,dv->...v", hidden, self.head, preferred_element_type=jnp.float32)

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty cache for `batch` sequences of up to `length` tokens."""
        c, dtype = self.config, self.embedding.dtype
        shape = (c.layers, batch, length)
        return Cache(
            latent=jnp.zeros((*shape, c.mla.kv_lora_rank), dtype), rope=jnp.zeros((*shape, c.mla.qk_rope_head_dim), dtype),
            index_key=jnp.zeros((*shape, c.indexer.head_dim), dtype), lengths=jnp.zeros(batch, jnp.int32))


@struct.dataclass
class _Ends:
    """The weights that are not in a layer."""

    embedding: Array = weight("vocab", "embed")
    final_norm: Array = weight("embed", init="ones")
    head: Array = weight("embed", "vocab", fan_in=("embed",))


def default_positions(segments: Array) -> Array:
    """int32 [B, T]: the number of earlier real tokens in a token's own segment. Padding may stand anywhere; segments do not interleave."""
    real = segments != 0
    count = jnp.cumsum(real, axis=1, dtype=jnp.int32) - real
    places = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    last_real = jax.lax.cummax(jnp.where(real, places, 0), axis=1)
    previous = jnp.pad(jnp.take_along_axis(segments, last_real, axis=1)[:, :-1], ((0, 0), (1, 0)))  # segment of the last real token before
    base = jax.lax.cummax(jnp.where(real & (segments != previous), count, 0), axis=1)
    return count - base


def init_model(config: ModelConfig, key: Array, dtype: Any = jnp.float32) -> Transformer:
    """A freshly initialised model of type `dtype`, its router biases float32 whatever the type.

    Weights are normal with deviation 1/sqrt(fan-in) (embedding: initializer_range), cut at three of them; gains are 1, biases 0.
    """
    make = lambda d: d.make(key, jnp.float32 if d.path.endswith("router_bias") else dtype)
    return jax.tree.map(make, Transformer.declare_tree(config))
