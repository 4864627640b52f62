"""Tasks with a text interface: gymnasium environments for reasoning, coding and agentic rollouts. Imports no JAX."""

from glm_jax.environments import calculator, code_steps, digit_chain  # noqa: F401  (each registers its environment)
from glm_jax.environments.base import (
    SPLITS,
    Demonstration,
    EnvironmentFailure,
    TextEnvironment,
    VerifierError,
    make,
    registered,
    split_of,
)
from glm_jax.environments.sandbox import default_sandbox, start_default_sandbox

__all__ = [
    "SPLITS",
    "Demonstration",
    "EnvironmentFailure",
    "TextEnvironment",
    "VerifierError",
    "default_sandbox",
    "make",
    "registered",
    "split_of",
    "start_default_sandbox",
]
