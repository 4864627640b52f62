"""What attention sees besides the layer's input: positions, segments, the keys of earlier tokens, a selection to share or to replay."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import struct
from jax import Array

from glm_jax.parallel.axes import island


@struct.dataclass
class Cache:
    """Keys of earlier tokens. Every leaf but `lengths` is [layers, B, S, ...]: one row a sequence, entry s is the token at position s.

    MLA: latent [layers, B, S, kv_rank], rope [layers, B, S, rope]; DSA: index_key [full layers, B, S, index_dim];
    GQA: key, value [layers, B, S, kv_heads, head_dim]; those that a model has not are None. lengths int32 [B]: tokens stored.
    """

    lengths: Array
    latent: Array | None = None
    rope: Array | None = None
    index_key: Array | None = None
    key: Array | None = None
    value: Array | None = None

    @property
    def slots(self) -> int:
        """S, the tokens a sequence may have."""
        return (self.latent if self.latent is not None else self.key).shape[2]


@struct.dataclass
class Selection:
    """A full layer's choice, for itself and the layers that share it.

    places int32 [B, T, K], ascending, -1 last; None under dense attention. scores float32, of the places [B, T, K] or of all keys
    [B, T, S] under dense attention; None unless the indexer's loss is asked for.
    """

    places: Array | None
    scores: Array | None


@struct.dataclass
class Context:
    """One layer's view of the sequence. Queries are the T tokens at hand, keys the same tokens or, with a cache, all S stored ones."""

    cos: Array  # [B, T, rotary/2]
    sin: Array
    query_positions: Array  # int32 [B, T]
    query_segments: Array  # int32 [B, T], 0 = padding
    key_positions: Array  # int32 [B, S]
    key_segments: Array
    cache: Cache | None
    selection: Selection | None = None  # of the nearest earlier full layer, where layers share
    shared_keys: tuple[Array, Array] | None = None  # (latent, rope) to attend to in place of the layer's own
    layer: Array | int = 0
    full: Array | int = 0  # index of the layer's indexer among all; their number in a shared layer
    share: Array | float = 1.0  # of the source's loss that this layer's attention is: 1 / layers that use its selection
    dense_attention: bool = struct.field(pytree_node=False, default=False)  # attend to every visible key: DSA's dense warm-up
    indexer_loss: bool = struct.field(pytree_node=False, default=False)
    return_selections: bool = struct.field(pytree_node=False, default=False)
    balance_loss: bool = struct.field(pytree_node=False, default=False)
    keep_selection: bool = struct.field(pytree_node=False, default=False)  # leave it for the layers that share
    keep_keys: bool = struct.field(pytree_node=False, default=False)  # leave this layer's keys as shared_keys

    def store(self, names: Sequence[str], new: Sequence[Array], axes: Sequence[str | None]) -> tuple[Context, tuple[Array, ...]]:
        """The keys to attend to, [B, S, ...]: the new ones [B, T, ...], or the cached ones with the new written at the query positions.

        `axes`: the logical axes behind [B, T]. Nothing is stored past the cache's end, nor by a shared layer its (absent) index key.
        """
        if self.cache is None:
            return self, tuple(new)
        at = {name: self.full if name == "index_key" else self.layer for name in names}
        changed = {name: _put(getattr(self.cache, name), at[name], self.query_positions, value, axes)
                   for name, value in zip(names, new, strict=True)}
        return self.replace(cache=self.cache.replace(**changed)), tuple(changed[name][at[name]] for name in names)

    def index_keys(self, new_BxTxD: Array) -> Array:
        """The indexer's keys [B, S, D] with the new ones among them, as `store` gives them; but nothing is stored."""
        if self.cache is None:
            return new_BxTxD
        return _put(self.cache.index_key[self.full][None], 0, self.query_positions, new_BxTxD, (None,))[0]

    def causal(self) -> dict[str, Array]:
        """Who sees whom, as the kernels' keyword arguments."""
        return {"query_positions": self.query_positions, "key_positions": self.key_positions,
                "query_segments": self.query_segments, "key_segments": self.key_segments}


def _put(store: Array, layer: Array | int, positions_BxT: Array, new: Array, axes: Sequence[str | None]) -> Array:
    """`store` [layers, B, S, ...] with new [B, T, ...] at [layer, b, positions[b]]; out-of-range ones are dropped."""

    def put(store, layer, positions, new):
        return store.at[layer, jnp.arange(new.shape[0])[:, None], positions].set(new, mode="drop")

    stored = (None, "batch", None, *axes)
    return island(put, (stored, (), ("batch", None), ("batch", None, *axes)), stored)(
        store, jnp.asarray(layer, jnp.int32), positions_BxT, new.astype(store.dtype))
