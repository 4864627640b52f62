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
    latent_norm_eps: float = 1e-5  # HF builds these two norms with 1e-6, the serving engines and Megatron with rms_norm_eps

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """DSA's lightning indexer; `topk` keys are selected for every query."""

    heads: int
    head_dim: int
    topk: int
    key_norm_eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts with sigmoid scores and a selection-only bias (GLM-4.5, arXiv 2508.06471 §2)."""

    experts: int
    experts_per_token: int
    shared_experts: int
    intermediate_size: int
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A GLM-5-shaped model: `dense_layers` first layers with a dense FFN, the rest with experts; MLA with DSA everywhere."""

    vocab_size: int
    hidden_size: int
    layers: int
    dense_layers: int
    intermediate_size: int
    heads: int
    mla: MLAConfig
    indexer: IndexerConfig
    moe: MoEConfig
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02

    def __post_init__(self):
        def refuse(condition, message):
            if condition:
                raise ValueError(f"ModelConfig: {message}")

        for config in (self, self.mla, self.indexer, self.moe):
            for field in dataclasses.fields(config):
                value = getattr(config, field.name)
                may_be_zero = field.name in ("dense_layers", "shared_experts")
                refuse(isinstance(value, int | float) and not isinstance(value, bool) and (value < 0 or (value == 0 and not may_be_zero)),
                       f"{field.name}={value} must be positive")
        refuse(self.dense_layers > self.layers, f"dense_layers={self.dense_layers} exceeds layers={self.layers}")
        refuse(self.moe.experts_per_token > self.moe.experts,
               f"moe.experts_per_token={self.moe.experts_per_token} exceeds moe.experts={self.moe.experts}")
        refuse(self.mla.qk_rope_head_dim % 2, f"mla.qk_rope_head_dim={self.mla.qk_rope_head_dim} must be even: rotary pairs")
        refuse(self.indexer.head_dim < self.mla.qk_rope_head_dim,
               f"indexer.head_dim={self.indexer.head_dim} is below mla.qk_rope_head_dim={self.mla.qk_rope_head_dim}, its rotated part")

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    def size(self, axis: str) -> int:
        """Length of a logical axis of a weight."""
        return {
            "vocab": self.vocab_size, "embed": self.hidden_size, "heads": self.heads, "ff": self.intermediate_size,
            "q_rank": self.mla.q_lora_rank, "kv_rank": self.mla.kv_lora_rank,
            "kv_latent": self.mla.kv_lora_rank + self.mla.qk_rope_head_dim,
            "qk": self.mla.qk_head_dim, "nope": self.mla.qk_nope_head_dim, "v": self.mla.v_head_dim,
            "index_heads": self.indexer.heads, "index_dim": self.indexer.head_dim,
            "experts": self.moe.experts, "expert_ff": self.moe.intermediate_size, "expert_ff2": 2 * self.moe.intermediate_size,
            "shared_ff": self.moe.intermediate_size * self.moe.shared_experts,
            "dense_layers": self.dense_layers, "moe_layers": self.moe_layers,
        }[axis]

    def parameter_count(self, include_router_bias: bool = False) -> int:
        """Number of weights, from shapes alone."""
        from glm_jax.model.transformer import Transformer
        declared = Transformer.declare(self)
        return sum(math.prod(d.shape) for d in declared if include_router_bias or not d.path.endswith("router_bias"))
