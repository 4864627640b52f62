"""The smallest model with the call signature, the cache and the routing of glm_jax.model: one layer of causal attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

VOCAB, WIDTH, TOPK, EXPERTS = 32, 16, 4, 4


@struct.dataclass
class FakeCache:
    keys: Array  # [1, B, S, D]
    lengths: Array  # int32 [B]


@struct.dataclass
class FakeOutput:
    logits: Array | None
    hidden: Array
    cache: FakeCache | None
    routing: dict
    selections: dict | None


@struct.dataclass
class FakeModel:
    embedding: Array
    places: Array
    head: Array

    def __call__(self, tokens, attention_mask=None, cache=None, replay=None, return_selections=False, compute_logits=True):
        batch, length = tokens.shape
        mask = jnp.ones_like(tokens) if attention_mask is None else attention_mask
        cache_in = cache if cache is not None else self.init_cache(batch, length)
        positions = cache_in.lengths[:, None] + jnp.arange(length)
        x = self.embedding[tokens] + jnp.take(self.places, positions, axis=0, mode="clip")
        x = jnp.where(mask[..., None] == 1, x, jnp.nan)  # padding must never be read
        keys = cache_in.keys.at[0, jnp.arange(batch)[:, None], positions].set(x, mode="drop")
        visible = jnp.arange(keys.shape[2]) <= positions[..., None]
        scores = jnp.where(visible, jnp.einsum("btd,bsd->bts", x, keys[0]), -jnp.inf)
        values = jnp.where(visible[..., None], keys[0][:, None], 0)
        hidden = x + jnp.einsum("bts,btsd->btd", jax.nn.softmax(scores), values)
        experts = jnp.stack([(tokens + positions) % EXPERTS, (tokens + positions + 1) % EXPERTS], axis=-1)
        selection = positions[..., None] - jnp.arange(TOPK)[::-1]
        return FakeOutput(
            logits=self.logits(hidden) if compute_logits else None,
            hidden=hidden,
            cache=None if cache is None else FakeCache(keys, cache.lengths + mask.sum(axis=1, dtype=jnp.int32)),
            routing={1: experts},
            selections={0: selection, 1: selection} if return_selections else None,
        )

    def logits(self, hidden):
        return hidden @ self.head

    def init_cache(self, batch, length):
        return FakeCache(jnp.zeros((1, batch, length, WIDTH)), jnp.zeros(batch, jnp.int32))


def fake_model(seed: int) -> FakeModel:
    shapes = ((VOCAB, WIDTH), (64, WIDTH), (WIDTH, VOCAB))
    keys = jax.random.split(jax.random.key(seed), 3)
    return FakeModel(*(jax.random.normal(key, shape) / 2 for key, shape in zip(keys, shapes, strict=True)))
