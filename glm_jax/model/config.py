"""What a model is: hyper-parameters as frozen dataclasses, contradictions refused when one is built."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2; GLM-5 §2). Sizes per token (ranks) or per head (dims)."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float = 1e-6  # of the two norms of latents: Hugging Face builds them with 1e-6, serving engines with rms_norm_eps
    rope_interleaved: bool = True  # rotary pairs are (2i, 2i+1); False: (i, i + dim/2)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclasses.dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention (GLM-4.5 §2): `kv_heads` keys and values, each read by heads / kv_heads queries."""

    kv_heads: int
    head_dim: int
    rotary_dim: int  # the first dims of a head are turned, pairs (i, i + rotary_dim/2)
    qk_norm: bool = False  # RMSNorm of every query and key head, before the rotation
    bias: bool = False  # of the query, key and value projections


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """DSA's lightning indexer; `topk` keys are selected for every query.

    `pattern`: one letter a layer, F for a full layer (its own indexer), S for one that shares the nearest earlier full layer's selection
    (GLM-5.2, IndexCache arXiv 2603.12201); empty: all full.
    """

    heads: int
    head_dim: int
    topk: int
    key_norm_eps: float = 1e-6
    rope_interleaved: bool = True  # GLM; DeepSeek-V3.2 turns the pairs (i, i + dim/2)
    pattern: str = ""


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts with sigmoid scores and a selection-only bias (GLM-4.5, arXiv 2508.06471 §2).

    With `groups` > 1 only the `topk_groups` groups with the highest sum of their two best biased scores may be chosen (DeepSeek-V3 §2.1.2).
    """

    experts: int
    experts_per_token: int
    shared_experts: int
    intermediate_size: int
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    groups: int = 1
    topk_groups: int = 1


@dataclasses.dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction (DeepSeek-V3 §2.2; GLM-5 §2.1): one stored layer, applied once per further token with the same weights.

    recycle         the hidden state that a step hands to the next: "post_norm" is after the module's final norm, what the DeepSeek and GLM
                    checkpoints were fitted to (vLLM pull requests 45895 and 47448, ATOM 1764: pre-norm costs acceptance); "pre_norm" the
                    block's raw output. The first step always reads the main model's hidden state after its final norm.
    share_selection later steps attend with the first step's selection, to the first step's keys (GLM-5.2: index_share_for_mtp_iteration)
    own_embeddings  the module has an embedding and a head of its own, as GLM-4.5's checkpoints store them
    """

    layers: int = 1
    recycle: str = "post_norm"
    share_selection: bool = False
    own_embeddings: bool = False


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of the GLM line.

    Attention is MLA (with an indexer: DSA) or GQA; the first `dense_layers` have a dense FFN, the rest experts.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    dense_layers: int
    intermediate_size: int
    heads: int
    mla: MLAConfig | None = None
    gqa: GQAConfig | None = None
    indexer: IndexerConfig | None = None
    moe: MoEConfig | None = None
    mtp: MTPConfig | None = None
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tied_embeddings: bool = False
    max_positions: int = 131072

    def __post_init__(self):
        def refuse(condition, message):
            if condition:
                raise ValueError(f"ModelConfig: {message}")

        refuse((self.mla is None) == (self.gqa is None), "exactly one of mla and gqa must be given")
        refuse(self.indexer is not None and self.mla is None, "an indexer reads MLA's query latent: it needs mla")
        for name, part in (("", self), *((f"{part}.", getattr(self, part)) for part in ("mla", "gqa", "indexer", "moe", "mtp"))):
            for field in dataclasses.fields(part) if part is not None else ():
                value = getattr(part, field.name)
                may_be_zero = field.name in ("dense_layers", "shared_experts")
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                refuse(is_number and not (value > 0 or (may_be_zero and value == 0)), f"{name}{field.name}={value} must be positive")
        refuse(self.dense_layers > self.layers, f"dense_layers={self.dense_layers} exceeds layers={self.layers}")
        refuse(self.moe is None and self.moe_layers > 0, f"dense_layers={self.dense_layers} of layers={self.layers}: the rest needs moe")
        if (moe := self.moe) is not None:
            refuse(moe.experts_per_token > moe.experts, f"moe.experts_per_token={moe.experts_per_token} exceeds moe.experts={moe.experts}")
            refuse(moe.experts % moe.groups, f"moe.experts={moe.experts} is not a multiple of moe.groups={moe.groups}")
            refuse(moe.topk_groups > moe.groups, f"moe.topk_groups={moe.topk_groups} exceeds moe.groups={moe.groups}")
            refuse(moe.topk_groups * (moe.experts // moe.groups) < moe.experts_per_token,
                   f"moe.topk_groups={moe.topk_groups} groups hold fewer than moe.experts_per_token={moe.experts_per_token} experts")
        if self.mla is not None:
            refuse(self.mla.qk_rope_head_dim % 2, f"mla.qk_rope_head_dim={self.mla.qk_rope_head_dim} must be even: rotary pairs")
        if (gqa := self.gqa) is not None:
            refuse(self.heads % gqa.kv_heads, f"heads={self.heads} is not a multiple of gqa.kv_heads={gqa.kv_heads}")
            refuse(gqa.rotary_dim % 2 or gqa.rotary_dim > gqa.head_dim,
                   f"gqa.rotary_dim={gqa.rotary_dim} must be even and at most gqa.head_dim={gqa.head_dim}")
        if (indexer := self.indexer) is not None:
            refuse(indexer.head_dim < self.mla.qk_rope_head_dim,
                   f"indexer.head_dim={indexer.head_dim} is below mla.qk_rope_head_dim={self.mla.qk_rope_head_dim}, its rotated part")
            refuse(indexer.pattern.strip("FS"), f"indexer.pattern={indexer.pattern!r} may hold F (full) and S (shared) only")
            refuse(indexer.pattern and len(indexer.pattern) != self.layers,
                   f"indexer.pattern={indexer.pattern!r} has {len(indexer.pattern)} letters for layers={self.layers}")
            refuse(indexer.pattern.startswith("S"), "indexer.pattern begins with S: the first layer has no earlier one to share with")
        if self.mtp is not None:
            refuse(self.mtp.recycle not in ("post_norm", "pre_norm"), f"mtp.recycle={self.mtp.recycle!r} must be post_norm or pre_norm")
            refuse(self.mtp.share_selection and self.indexer is None, "mtp.share_selection needs an indexer")
            refuse(self.mtp.layers != 1, f"mtp.layers={self.mtp.layers}: one layer is stored and applied at every step")

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers with an indexer of their own, ascending; none without DSA."""
        if self.indexer is None:
            return ()
        pattern = self.indexer.pattern or "F" * self.layers
        return tuple(layer for layer, letter in enumerate(pattern) if letter == "F")

    def source_layer(self, layer: int) -> int:
        """The full layer whose selection `layer` uses."""
        return max(full for full in self.full_layers if full <= layer)

    @property
    def rotary_dim(self) -> int:
        return self.mla.qk_rope_head_dim if self.mla is not None else self.gqa.rotary_dim

    @property
    def cache_width(self) -> int:
        """Numbers that a cache stores for one token, all layers together."""
        if self.gqa is not None:
            return self.layers * 2 * self.gqa.kv_heads * self.gqa.head_dim
        index = self.indexer.head_dim if self.indexer is not None else 0
        return self.layers * (self.mla.kv_lora_rank + self.mla.qk_rope_head_dim) + len(self.full_layers) * index

    def size(self, axis: str) -> int:
        """Length of a logical axis of a weight."""
        mla, gqa, indexer, moe = self.mla, self.gqa, self.indexer, self.moe
        sizes = {
            "vocab": self.vocab_size, "embed": self.hidden_size, "embed_out": self.hidden_size, "two": 2,
            "heads": self.heads, "ff": self.intermediate_size,
            "dense_layers": self.dense_layers, "moe_layers": self.moe_layers, "full_layers": len(self.full_layers)}
        if mla is not None:
            sizes |= {
                "q_rank": mla.q_lora_rank, "kv_rank": mla.kv_lora_rank, "kv_latent": mla.kv_lora_rank + mla.qk_rope_head_dim,
                "qk": mla.qk_head_dim, "nope": mla.qk_nope_head_dim, "v": mla.v_head_dim}
        if gqa is not None:
            sizes |= {"kv_heads": gqa.kv_heads, "query_group": self.heads // gqa.kv_heads, "head_dim": gqa.head_dim}
        if indexer is not None:
            sizes |= {"index_heads": indexer.heads, "index_dim": indexer.head_dim}
        if moe is not None:
            sizes |= {"experts": moe.experts, "expert_ff": moe.intermediate_size, "shared_ff": moe.intermediate_size * moe.shared_experts}
        if self.mtp is not None:
            sizes["mtp_layers"] = self.mtp.layers
        return sizes[axis]

    def parameter_count(self, include_mtp: bool = True, include_router_bias: bool = False) -> int:
        """Number of weights, from shapes alone."""
        from glm_jax.model.transformer import Transformer
        return sum(
            math.prod(d.shape) for d in Transformer.declare(self)
            if (include_mtp or not d.path.startswith("mtp/")) and (include_router_bias or not d.path.endswith("router_bias")))


def shared_pattern(layers: int, every: int, offset: int) -> str:
    """GLM-5.2's regular pattern: layer i is full where max(i - offset + 1, 0) is a multiple of `every`."""
    return "".join("S" if max(layer - offset + 1, 0) % every else "F" for layer in range(layers))
