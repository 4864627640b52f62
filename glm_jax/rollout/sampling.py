"""Drawing tokens so that a request's randomness depends on its own seed and positions and on nothing else in the batch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

MAX_STOP_IDS = 8  # width of the device table of stop ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request.

    temperature  0 is greedy
    max_tokens   at most this many sampled tokens, the stop id included
    stop_ids     the request ends with, and includes, the first of these that is sampled; at most MAX_STOP_IDS
    seed         64 bits; the same seed and prompt give the same tokens in any batch
    """

    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    temperature: float = 1.0

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"at most {MAX_STOP_IDS} stop ids, got {len(self.stop_ids)}")
        if min(self.stop_ids, default=0) < 0:
            raise ValueError(f"stop ids must not be negative, got {self.stop_ids}")


def sample(logits_BxV: jax.Array, seed_Bx2: jax.Array, position_B: jax.Array, temperature_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Samples one token a row by the Gumbel-max trick; the key is fold_in(key(seed), position).

    logits float32 [B, V]; seed uint32 [B, 2] (high word, low word); position int32 [B] of the token to sample; temperature float32 [B].
    Returns token int32 [B] and logp float32 [B] = log_softmax(logits / temperature)[token]; at temperature 0 the argmax, ties going
    to the lowest id, and log_softmax(logits).
    """
    greedy_Bx1 = temperature_B[:, None] == 0
    logits_BxV = logits_BxV.astype(jnp.float32) / jnp.where(greedy_Bx1, 1.0, temperature_B[:, None])
    # The implementation is named, so that a process-wide default does not change what a seed means.
    keys_B = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seed_Bx2, impl="threefry2x32"), position_B)
    noise_BxV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BxV.shape[-1:]))(keys_B)
    token_B = jnp.argmax(logits_BxV + jnp.where(greedy_Bx1, 0.0, noise_BxV), axis=-1).astype(jnp.int32)
    logp_BxV = jax.nn.log_softmax(logits_BxV)
    return token_B, jnp.take_along_axis(logp_BxV, token_B[:, None], axis=-1)[:, 0]
