"""The network: configurations, weights, forward pass, cache."""

from glm_jax.model.cache import Cache
from glm_jax.model.config import GQAConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig
from glm_jax.model.huggingface import CheckpointError, load_pretrained, save_pretrained
from glm_jax.model.presets import get_preset
from glm_jax.model.transformer import Output, Replay, Transformer, init_model

__all__ = [
    "Cache", "CheckpointError", "GQAConfig", "IndexerConfig", "MLAConfig", "MTPConfig", "MoEConfig", "ModelConfig", "Output", "Replay",
    "Transformer", "get_preset", "init_model", "load_pretrained", "save_pretrained",
]
