"""What attention sees besides the layer's input: positions, segments, the keys of earlier tokens, a replayed selection."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jax import Array


@struct.dataclass
class Cache:
    """Keys of earlier tokens. Every leaf but `lengths` is [layers, B, S, ...]: one row a sequence, entry s is the token at position s.

    latent [layers, B, S, kv_rank], rope [layers, B, S, rope], index_key [layers, B, S, index_dim]; lengths int32 [B]: tokens stored.
    """

    latent: Array
    rope: Array
    index_key: Array
    lengths: Array


@struct.dataclass
class Context:
    """One layer's view of the sequence. Queries are the T tokens at hand, keys the same tokens or, with a cache, all S stored ones."""

    cos: Array  # [B, T, rope/2]
    sin: Array
    query_positions: Array  # int32 [B, T]
    query_segments: Array  # int32 [B, T], 0 = padding
    key_positions: Array  # int32 [B, S]
    key_segments: Array
    cache: Cache | None
    layer: Array | int = 0
    replay: Array | None = None  # int32 [B, T, k]: selection to use where its first entry is not -1
    dense_attention: bool = struct.field(pytree_node=False, default=False)  # attend to every visible key: DSA's dense warm-up
    indexer_loss: bool = struct.field(pytree_node=False, default=False)

    def store(self, latent: Array, rope: Array, index_key: Array) -> tuple[Context, Array, Array, Array]:
        """The keys to attend to: those given, or the cached ones with those given written at the query positions (past its end: none)."""
        if self.cache is None:
            return self, latent, rope, index_key
        rows = jnp.arange(latent.shape[0])[:, None]
        put = lambda store, new: store.at[self.layer, rows, self.query_positions].set(new.astype(store.dtype), mode="drop")
        cache = self.cache.replace(
            latent=put(self.cache.latent, latent), rope=put(self.cache.rope, rope), index_key=put(self.cache.index_key, index_key))
        return self.replace(cache=cache), cache.latent[self.layer], cache.rope[self.layer], cache.index_key[self.layer]

    def replayed_selection(self, selection: Array) -> Array:
        """The recorded selection where one was recorded, else the one given."""
        if self.replay is None:
            return selection
        # Both are ascending with -1 last, and neither holds more real entries than the row has keys: cutting and padding lose nothing.
        width = selection.shape[-1]
        recorded = self.replay[..., :width].astype(selection.dtype)
        recorded = jnp.pad(recorded, ((0, 0), (0, 0), (0, width - recorded.shape[-1])), constant_values=-1)
        return jnp.where(recorded[..., :1] >= 0, recorded, selection)
