"""Named model shapes: the published members of the family, a small real model, and two for this machine."""

from __future__ import annotations

import dataclasses
from typing import Any

from glm_jax.model.config import GQAConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig, shared_pattern

# arXiv 2602.15763 and the published config.json; GLM-5.1 has the same shape.
_GLM_5 = ModelConfig(
    vocab_size=154880, hidden_size=6144, layers=78, dense_layers=3, intermediate_size=12288, heads=64,
    mla=MLAConfig(q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256),
    indexer=IndexerConfig(heads=32, head_dim=128, topk=2048),
    moe=MoEConfig(experts=256, experts_per_token=8, shared_experts=1, intermediate_size=2048, routed_scaling_factor=2.5),
    mtp=MTPConfig(), rope_theta=1e6, max_positions=202752)

# arXiv 2508.06471; GLM-4.6 and GLM-4.7 differ in max_positions (202,752) and the stored copies of embedding and head alone.
_GLM_4_5 = ModelConfig(
    vocab_size=151552, hidden_size=5120, layers=92, dense_layers=3, intermediate_size=12288, heads=96,
    gqa=GQAConfig(kv_heads=8, head_dim=128, rotary_dim=64, qk_norm=True, bias=True),
    moe=MoEConfig(experts=160, experts_per_token=8, shared_experts=1, intermediate_size=1536, routed_scaling_factor=2.5),
    mtp=MTPConfig(), rope_theta=1e6, max_positions=131072)

PRESETS = {
    # GLM-5 with nothing left out, only made small: trains in minutes on two CPU cores.
    "tiny": ModelConfig(
        vocab_size=288, hidden_size=64, layers=3, dense_layers=1, intermediate_size=128, heads=4,
        mla=MLAConfig(q_lora_rank=32, kv_lora_rank=40, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, latent_norm_eps=1e-5),
        indexer=IndexerConfig(heads=2, head_dim=24, topk=12),
        moe=MoEConfig(experts=8, experts_per_token=2, shared_experts=1, intermediate_size=32, routed_scaling_factor=1.0),
        rope_theta=1e3,
    ),
    # For benchmarks on a CPU: GLM-5's proportions at 20 million active weights.
    "bench-20m": ModelConfig(
        vocab_size=1024, hidden_size=256, layers=6, dense_layers=1, intermediate_size=1024, heads=8,
        mla=MLAConfig(q_lora_rank=192, kv_lora_rank=128, qk_nope_head_dim=48, qk_rope_head_dim=16, v_head_dim=64),
        indexer=IndexerConfig(heads=8, head_dim=32, topk=128),
        moe=MoEConfig(experts=16, experts_per_token=4, shared_experts=1, intermediate_size=256, routed_scaling_factor=2.5),
    ),
    "glm-5": _GLM_5,
    "glm-5.2": dataclasses.replace(
        _GLM_5, indexer=dataclasses.replace(_GLM_5.indexer, pattern=shared_pattern(78, every=4, offset=3)),
        mtp=MTPConfig(share_selection=True), rope_theta=8e6, max_positions=1048576),
    "glm-4.5": _GLM_4_5,
    "glm-4.5-air": dataclasses.replace(
        _GLM_4_5, hidden_size=4096, layers=46, dense_layers=1, intermediate_size=10944,
        gqa=dataclasses.replace(_GLM_4_5.gqa, qk_norm=False),
        moe=MoEConfig(experts=128, experts_per_token=8, shared_experts=1, intermediate_size=1408, routed_scaling_factor=1.0)),
    "glm-4.7-flash": ModelConfig(
        vocab_size=154880, hidden_size=2048, layers=47, dense_layers=1, intermediate_size=10240, heads=20,
        mla=MLAConfig(q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256),
        moe=MoEConfig(experts=64, experts_per_token=4, shared_experts=1, intermediate_size=1536, routed_scaling_factor=1.8),
        mtp=MTPConfig(), rope_theta=1e6, max_positions=202752),
    # DeepSeek-V3.2 (its released config.json). Its long-context rotary scaling (YaRN) is not built: positions are plain.
    "deepseek-v3.2": ModelConfig(
        vocab_size=129280, hidden_size=7168, layers=61, dense_layers=3, intermediate_size=18432, heads=128,
        mla=MLAConfig(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        indexer=IndexerConfig(heads=64, head_dim=128, topk=2048, rope_interleaved=False),
        moe=MoEConfig(experts=256, experts_per_token=8, shared_experts=1, intermediate_size=2048, routed_scaling_factor=2.5,
                      groups=8, topk_groups=4),
        mtp=MTPConfig(own_embeddings=True), rope_theta=1e4, rms_norm_eps=1e-6, max_positions=163840),
    # Dense models small enough to train on one GPU.
    "qwen3-0.6b": ModelConfig(
        vocab_size=151936, hidden_size=1024, layers=28, dense_layers=28, intermediate_size=3072, heads=16,
        gqa=GQAConfig(kv_heads=8, head_dim=128, rotary_dim=128, qk_norm=True),
        rope_theta=1e6, rms_norm_eps=1e-6, tied_embeddings=True, max_positions=40960),
    "smollm2-135m": ModelConfig(
        vocab_size=49152, hidden_size=576, layers=30, dense_layers=30, intermediate_size=1536, heads=9,
        gqa=GQAConfig(kv_heads=3, head_dim=64, rotary_dim=64),
        rope_theta=1e5, rms_norm_eps=1e-5, tied_embeddings=True, max_positions=8192),
}


def get_preset(name: str, **overrides: Any) -> ModelConfig:
    """The named configuration; overrides replace fields, `part__field=value` a part's. An override of mtp adds it where a preset has none.

    Raises ValueError naming the presets there are.
    """
    if name not in PRESETS:
        raise ValueError(f"no model preset {name!r}; there are: {', '.join(PRESETS)}")
    config, changes = PRESETS[name], {}
    for key, value in overrides.items():
        part, _, field = key.rpartition("__")
        try:
            if part:
                old = changes.get(part, getattr(config, part))
                old = MTPConfig() if part == "mtp" and old is None else old
                changes[part] = dataclasses.replace(old, **{field: value})
            elif hasattr(config, field):
                changes[field] = value
            else:
                raise AttributeError(field)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"model preset {name!r} has no field {key!r}") from error
    return dataclasses.replace(config, **changes)  # at once: some overrides make sense together only
