"""Generation: sessions over a slot cache, continuous batching, log-probabilities and weight versions per token."""

from glm_jax.rollout.engine import Engine, EngineError
from glm_jax.rollout.sampling import SamplingParams
from glm_jax.rollout.scheduler import Completion, EngineConfig, PrefixError, Routing

__all__ = ["Completion", "Engine", "EngineConfig", "EngineError", "PrefixError", "Routing", "SamplingParams"]
