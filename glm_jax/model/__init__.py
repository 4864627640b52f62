"""The network: configurations, weights, forward pass, cache."""

from glm_jax.model.cache import Cache
from glm_jax.model.config import IndexerConfig, MLAConfig, ModelConfig, MoEConfig
from glm_jax.model.presets import get_preset
from glm_jax.model.transformer import Output, Replay, Transformer, init_model

__all__ = ["Cache", "IndexerConfig", "MLAConfig", "ModelConfig", "MoEConfig", "Output", "Replay", "Transformer", "get_preset", "init_model"]
