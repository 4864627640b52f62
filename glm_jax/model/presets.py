"""Named model shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

from glm_jax.model.config import IndexerConfig, MLAConfig, ModelConfig, MoEConfig

PRESETS = {
    # GLM-5 with nothing left out, only made small: trains in minutes on two CPU cores.
    "tiny": ModelConfig(
        vocab_size=288, hidden_size=64, layers=3, dense_layers=1, intermediate_size=128, heads=4,
        mla=MLAConfig(q_lora_rank=32, kv_lora_rank=40, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16),
        indexer=IndexerConfig(heads=2, head_dim=24, topk=12),
        moe=MoEConfig(experts=8, experts_per_token=2, shared_experts=1, intermediate_size=32, routed_scaling_factor=1.0),
        rope_theta=1e3,
    ),
}


def get_preset(name: str, **overrides: Any) -> ModelConfig:
    """The named configuration; overrides replace fields, `part__field=value` a part's. Raises ValueError naming the presets there are."""
    if name not in PRESETS:
        raise ValueError(f"no model preset {name!r}; there are: {', '.join(PRESETS)}")
    config = PRESETS[name]
    for key, value in overrides.items():
        part, _, field = key.rpartition("__")
        try:
            if part:
                config = dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **{field: value})})
            else:
                config = dataclasses.replace(config, **{field: value})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"model preset {name!r} has no field {key!r}") from error
    return config
