"""The whole network, top to bottom: embedding, dense layers, mixture layers, head. An immutable pytree with pure methods."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from glm_jax.model.cache import Cache, Context, Selection
from glm_jax.model.config import ModelConfig
from glm_jax.model.indexer import Indexer
from glm_jax.model.layer import REMAT, DenseLayer, MoELayer, run_stack
from glm_jax.model.layers import rms_norm, rotary_angles
from glm_jax.model.moe import last_real_segment
from glm_jax.model.mtp import MTP, MTPOutput, shift_left
from glm_jax.model.parameters import declare, weight
from glm_jax.parallel.axes import island, shard, sum_over


@struct.dataclass
class Output:
    """What a forward pass gives; None where it was not asked for.

    logits float32 [B, T, V]; hidden [B, T, D] after the final norm; cache as given, extended by the real tokens;
    routing {layer: int32 [B, T, K]} of the MoE layers; selections {full layer: int32 [B, T, min(index_topk, S)]}, positions in the row
    (with a cache: in the sequence), ascending, -1 last, None under dense attention; indexer_loss float32 [B, T], the KL summed over the
    full layers, each against the mean over the layers that use its selection; balance_loss float32 [B, T], see `sequence_balance`, summed
    over layers; mtp, see MTPOutput.
    """

    logits: Array | None
    hidden: Array
    cache: Cache | None
    routing: dict[int, Array]
    selections: dict[int, Array] | None
    indexer_loss: Array | None
    balance_loss: Array | None
    mtp: MTPOutput | None


@struct.dataclass
class Replay:
    """Recorded choices to use again: experts [moe_layers, B, T, K] and selections [full layers, B, T, k], any signed integer type.

    An expert of -1, or a selection whose first entry is -1, is chosen anew. Selections of any width are read: what is missing counts as -1.
    """

    experts: Array | None = None
    selections: Array | None = None


@struct.dataclass
class Transformer:
    """A model of the GLM line. Layers of a kind are stacked and scanned; the indexers of all full layers are a stack of their own."""

    embedding: Array
    dense_layers: DenseLayer
    moe_layers: MoELayer | None
    indexer: Indexer | None
    final_norm: Array
    head: Array | None
    mtp: MTP | None
    config: ModelConfig = struct.field(pytree_node=False)

    @staticmethod
    def declare_tree(config: ModelConfig) -> Transformer:
        """The model with a Declared in place of every weight."""
        stacked = lambda kind, cls, stack: declare(cls, config, stack=stack, path=kind)
        return Transformer(
            **vars(declare(_Ends, config)), config=config,
            dense_layers=stacked("dense_layers", DenseLayer, "dense_layers"),
            moe_layers=None if config.moe is None else stacked("moe_layers", MoELayer, "moe_layers"),
            indexer=None if config.indexer is None else stacked("indexer", Indexer, "full_layers"),
            mtp=None if config.mtp is None else stacked("mtp", MTP, "mtp_layers"))

    @staticmethod
    def declare(config: ModelConfig) -> list[Any]:
        """Every weight's declaration."""
        return jax.tree.leaves(Transformer.declare_tree(config))

    def __call__(
        self, tokens: Array, positions: Array | None = None, segment_ids: Array | None = None, attention_mask: Array | None = None,
        cache: Cache | None = None, replay: Replay | None = None, return_selections: bool = False, compute_logits: bool = True,
        dense_attention: bool = False, indexer_loss: bool = False, balance_loss: bool = False, mtp_steps: int = 0, remat: str = "none",
    ) -> Output:
        """The network's outputs for tokens int32 [B, T].

        `attention_mask` [B, T] 1 = real or `segment_ids` [B, T] 0 = padding: at most one of the two, and with a cache only the mask, real
        tokens first. Positions [B, T] turn the rotary embedding; they default to the count of earlier real tokens in the segment, and with
        a cache they follow those stored, always. `dense_attention` attends to all visible keys (DSA's dense warm-up); `indexer_loss` asks
        for the indexers' objective, `balance_loss` for the router's, `mtp_steps` for that many further tokens. `remat`: "layer" keeps of
        each layer its input, its selection and its experts and computes the rest again in the backward pass; "ffn" keeps the attention's
        output too; "none" keeps everything.
        Outputs of padding are finite and otherwise unspecified.

        Raises ValueError for arguments that exclude each other or whose shapes do not fit.
        """
        config, replay = self.config, replay or Replay()
        self._check(tokens, positions, segment_ids, attention_mask, cache, replay, dense_attention, indexer_loss, mtp_steps, remat)
        segments = segment_ids if segment_ids is not None else attention_mask if attention_mask is not None else jnp.ones_like(tokens)
        tokens, segments = (shard(a, "batch", "queries") for a in (tokens, segments.astype(jnp.int32)))
        if cache is not None:
            positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        elif positions is None:
            positions = island(default_positions, (("batch", None),), ("batch", None))(segments)
        flags = {
            "dense_attention": dense_attention, "indexer_loss": indexer_loss, "return_selections": return_selections,
            "balance_loss": balance_loss, "keep_selection": "S" in (config.indexer.pattern if config.indexer is not None else "")}
        context = self._context(positions, segments, cache, flags)

        x = self.embed(tokens)
        found = []
        for kind, first, count in (("dense_layers", 0, config.dense_layers), ("moe_layers", config.dense_layers, config.moe_layers)):
            if count:
                x, context, out = run_stack(
                    config, getattr(self, kind), first, count, self.indexer, x, context,
                    replay.experts if kind == "moe_layers" else None, replay.selections, remat)
                found.append((first, out))

        hidden = rms_norm(x, gather_one(self.final_norm), config.rms_norm_eps)
        each = {name: {first + i: value for first, out in found for i, value in enumerate(out.get(name, ()))}
                for name in ("experts", "selections", "indexer_loss", "balance_loss")}
        total = lambda name: sum(each[name].values()) if each[name] else jnp.zeros(tokens.shape, jnp.float32)
        mtp = None
        if mtp_steps:
            ahead = [shift_left(tokens, k + 1) for k in range(mtp_steps)]
            own = self.embedding if self.mtp.embedding is None else self.mtp.embedding[0]
            mtp = self.mtp(config, [lookup(own, t) for t in ahead], hidden, context.replace(cache=None), remat)
        return Output(
            logits=self.logits(hidden) if compute_logits else None,
            hidden=hidden,
            cache=None if cache is None else context.cache.replace(
                lengths=cache.lengths + segments.astype(bool).sum(axis=1, dtype=jnp.int32)),
            routing=each["experts"],
            selections={i: each["selections"][i] for i in config.full_layers} if return_selections and not dense_attention else None,
            indexer_loss=total("indexer_loss") if indexer_loss else None,
            balance_loss=total("balance_loss") if balance_loss else None,
            mtp=mtp,
        )

    def _context(self, positions: Array, segments: Array, cache: Cache | None, flags: dict[str, bool]) -> Context:
        config = self.config
        cos, sin = rotary_angles(positions, config.rotary_dim, config.rope_theta)
        rows, length = segments.shape
        if cache is None:
            # Causality inside a packed row is that of places in the row: that of positions, whatever the caller gives.
            places = shard(jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), segments.shape), "batch", "queries")
            context = Context(cos, sin, places, segments, places, segments, None, **flags)
        else:
            places = shard(jnp.broadcast_to(jnp.arange(cache.slots, dtype=jnp.int32), (rows, cache.slots)), "batch", None)
            context = Context(cos, sin, positions, segments, places, jnp.ones_like(places), cache, **flags)
        if not flags["keep_selection"]:
            return context
        keys = context.key_positions.shape[1]
        width = keys if flags["dense_attention"] else min(config.indexer.topk, keys)
        empty = lambda dtype: shard(jnp.zeros((rows, length, width), dtype), "batch", "queries", None)
        return context.replace(selection=Selection(
            None if flags["dense_attention"] else empty(jnp.int32),
            empty(jnp.float32) if flags["dense_attention"] or flags["indexer_loss"] else None))

    def _check(self, tokens, positions, segment_ids, attention_mask, cache, replay, dense_attention, indexer_loss, mtp_steps, remat):
        config = self.config
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
        if config.indexer is None and (dense_attention or indexer_loss or replay.selections is not None):
            raise ValueError("dense_attention, indexer_loss and replay.selections need a model with an indexer")
        if mtp_steps and (self.mtp is None or cache is not None):
            raise ValueError(f"mtp_steps={mtp_steps} needs a model with an MTP module, and no cache")
        if remat not in REMAT:
            raise ValueError(f"remat={remat!r}; there are: {', '.join(REMAT)}")
        if replay.experts is not None:
            experts = (config.moe_layers, *tokens.shape, config.moe.experts_per_token if config.moe is not None else 0)
            if replay.experts.shape != experts:
                raise ValueError(f"replay.experts has shape {replay.experts.shape}, must be [moe_layers, B, T, K] = {experts}")
        if replay.selections is not None and replay.selections.shape[:-1] != (len(config.full_layers), *tokens.shape):
            raise ValueError(f"replay.selections has shape {replay.selections.shape}, must be [full layers, B, T, k] = "
                             f"{(len(config.full_layers), *tokens.shape, config.indexer.topk)}")

    def embed(self, tokens: Array) -> Array:
        """[B, T, D] for tokens int32 [B, T]."""
        return lookup(self.embedding, tokens)

    def logits(self, hidden: Array) -> Array:
        """float32 [..., V] for hidden [..., D]."""
        return jnp.einsum("...d,dv->...v", hidden, gather_one(self.unembedding, None, "vocab"), preferred_element_type=jnp.float32)

    @property
    def unembedding(self) -> Array:
        """[D, V]: the head, or the embedding where they are tied."""
        return self.embedding.T if self.head is None else self.head

    @property
    def mtp_unembedding(self) -> Array:
        """[D, V], for the hidden states of `Output.mtp`."""
        return self.unembedding if self.mtp.head is None else self.mtp.head[0]

    def astype(self, dtype: Any) -> Transformer:
        """The model in another type, but for the router biases: rounded, their order would be lost (see MoE)."""
        keep = lambda d, w: w if d.path.endswith("router_bias") else w.astype(dtype)
        return jax.tree.map(keep, Transformer.declare_tree(self.config), self)

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty cache for `batch` sequences of up to `length` tokens."""
        c, dtype = self.config, self.embedding.dtype
        zeros = lambda layers, *rest, axes=(None,): shard(
            jnp.zeros((layers, batch, length, *rest), dtype), None, "batch", None, *axes)
        stored = {}
        if c.mla is not None:
            stored |= {"latent": zeros(c.layers, c.mla.kv_lora_rank), "rope": zeros(c.layers, c.mla.qk_rope_head_dim)}
        else:
            shape, axes = (c.gqa.kv_heads, c.gqa.head_dim), ("kv_heads", None)
            stored |= {"key": zeros(c.layers, *shape, axes=axes), "value": zeros(c.layers, *shape, axes=axes)}
        if c.indexer is not None:
            stored["index_key"] = zeros(len(c.full_layers), c.indexer.head_dim)
        return Cache(lengths=shard(jnp.zeros(batch, jnp.int32), "batch"), **stored)


def gather_one(w: Array, *axes: str | None) -> Array:
    """A weight outside the layers, ready to compute with; `axes` are those that stay split."""
    return shard(w, *(axes or (None,) * w.ndim))


def lookup(table_VxD: Array, tokens_BxT: Array) -> Array:
    """Rows of an embedding [B, T, D]; each device looks up the part of the vocabulary that it holds."""
    size = table_VxD.shape[0]

    def pick(table, tokens):
        if table.shape[0] == size:
            return table[tokens]
        local = tokens - jax.lax.axis_index("model") * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        return sum_over(jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0), "vocab", size)

    return island(pick, (("vocab", None), ("batch", "queries")), ("batch", "queries", None))(table_VxD, tokens_BxT)


@struct.dataclass
class _Ends:
    """The weights that are not in a layer."""

    embedding: Array = weight("vocab", "embed")
    final_norm: Array = weight("embed", init="ones")
    head: Array | None = weight("embed", "vocab", fan_in=("embed",), present=lambda config: not config.tied_embeddings)


def default_positions(segments: Array) -> Array:
    """int32 [B, T]: the number of earlier real tokens in a token's own segment. Padding may stand anywhere; segments do not interleave."""
    real = segments != 0
    count = jnp.cumsum(real, axis=1, dtype=jnp.int32) - real
    previous = jnp.pad(last_real_segment(segments)[:, :-1], ((0, 0), (1, 0)))
    base = jax.lax.cummax(jnp.where(real & (segments != previous), count, 0), axis=1)
    return count - base


def init_model(config: ModelConfig, key: Array, dtype: Any = jnp.float32) -> Transformer:
    """A freshly initialised model of type `dtype`, its router biases float32 whatever the type.

    Weights are normal with deviation 1/sqrt(fan-in) (embedding: initializer_range), cut at three of them; gains are 1, biases 0.
    """
    make = lambda d: d.make(key, jnp.float32 if d.path.endswith("router_bias") else dtype)
    return jax.tree.map(make, Transformer.declare_tree(config))
