"""Multi-head latent attention (DeepSeek-V2 §2.1; GLM-5 §2): over the keys that an indexer selects (DSA), or over all.

Two forms with one result. Absorbed: queries are carried into the latent space by `k_up`, all heads read one latent key a token; expanded:
every head has its own keys and values. Absorbed is what a cache and a selection need; expanded takes fewer FLOPs over whole rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from glm_jax.model.cache import Context, Selection
from glm_jax.model.config import ModelConfig
from glm_jax.model.gqa import attend_in_island
from glm_jax.model.indexer import DENSE_UP_TO, indexer_kl
from glm_jax.model.layers import rms_norm, rotate
from glm_jax.model.parameters import weight
from glm_jax.parallel.axes import einsum, island, mesh_axes, shard
from pallas_kernels.dense_attention.api import dense_attention
from pallas_kernels.sparse_mla.api import dense_mla_with_attention, sparse_mla, sparse_mla_with_attention

# (x, query latent, context) -> the keys to attend to, and the context with the indexer's keys stored
Select = Callable[[Array, Array, Context], tuple[Selection, Context]]


@struct.dataclass
class MLA:
    """Low-rank queries, one latent and one rotary key a token; heads read them through `k_up` and `v_up`."""

    q_down: Array = weight("embed", "q_rank", fan_in=("embed",))
    q_norm: Array = weight("q_rank", init="ones")
    q_up: Array = weight("q_rank", "heads", "qk", fan_in=("q_rank",))
    kv_down: Array = weight("embed", "kv_latent", fan_in=("embed",))
    kv_norm: Array = weight("kv_rank", init="ones")
    k_up: Array = weight("heads", "nope", "kv_rank", fan_in=("kv_rank",))
    v_up: Array = weight("heads", "kv_rank", "v", fan_in=("kv_rank",))
    out: Array = weight("heads", "v", "embed", fan_in=("heads", "v"))

    def __call__(
        self, config: ModelConfig, x_BxTxD: Array, context: Context, select: Select | None,
    ) -> tuple[Array, Context, dict[str, Array]]:
        """Returns the output [B, T, D], the context with this layer's keys stored, and "selections" and "indexer_loss" where asked for.

        `select` says where the selection comes from; None without an indexer.
        """
        nope, rank, eps = config.mla.qk_nope_head_dim, config.mla.kv_lora_rank, config.mla.latent_norm_eps
        turn = functools.partial(rotate, interleaved=config.mla.rope_interleaved)
        q_latent = rms_norm(x_BxTxD @ self.q_down, self.q_norm, eps)
        q = jnp.einsum("btl,lhd->bthd", q_latent, self.q_up)
        q_nope, q_rope = q[..., :nope], turn(q[..., nope:], context.cos[:, :, None], context.sin[:, :, None])
        kv = x_BxTxD @ self.kv_down
        latent, rope = rms_norm(kv[..., :rank], self.kv_norm, eps), turn(kv[..., rank:], context.cos, context.sin)
        if context.shared_keys is None:
            context, (latent, rope) = context.store(("latent", "rope"), (latent, rope), (None,))
            if context.keep_keys:
                context = context.replace(shared_keys=(latent, rope))
        else:
            latent, rope = context.shared_keys

        found, parts = {}, (q_nope, q_rope, latent, rope)
        if config.indexer is None:
            form = self.absorbed if context.cache is not None else self.expanded
            values = form(config, *parts, context)
        else:
            selection, context = select(x_BxTxD, q_latent, context)
            if context.return_selections and not context.dense_attention:
                found["selections"] = selection.places
            sparse = context.dense_attention or context.indexer_loss or context.cache is not None
            if not sparse and latent.shape[1] <= DENSE_UP_TO * config.indexer.topk:
                values = self.expanded(config, *parts, context, selection.places)
            else:
                values, attention = self.selected(config, *parts, context, selection)
            if context.indexer_loss:
                valid = selection.scores > -jnp.inf if context.dense_attention else selection.places >= 0
                found["indexer_loss"] = context.share * indexer_kl(selection.scores, attention, valid)
        return einsum("bthv,hvd->btd", values, self.out, "batch", "queries", None), context, found

    def absorbed(self, config: ModelConfig, q_nope: Array, q_rope: Array, latent: Array, rope: Array, context: Context) -> Array:
        """Values [B, T, H, V]: one key (latent | rope) and value (latent) a token for all heads."""
        q = jnp.concatenate([jnp.einsum("bthn,hnc->bthc", q_nope, self.k_up), q_rope], axis=-1)
        names, masks = zip(*context.causal().items(), strict=True)

        def attend(q, latent, rope, *masks):
            keys = jnp.concatenate([latent, rope], axis=-1)[:, :, None]
            return dense_attention(q[:, :, None], keys, latent[:, :, None], scale=config.mla.qk_head_dim**-0.5,
                                   **dict(zip(names, masks, strict=True)))[:, :, 0]

        heads, keys = ("batch", "queries", "heads", None), ("batch", None, None)
        where = [("batch", "queries" if name.startswith("query") else None) for name in names]
        out = island(attend, (heads, keys, keys, *where), heads)(q, latent, rope, *masks)
        return jnp.einsum("bthc,hcv->bthv", out, self.v_up)

    def expanded(
        self, config: ModelConfig, q_nope: Array, q_rope: Array, latent: Array, rope: Array, context: Context, places: Array | None = None,
    ) -> Array:
        """Values [B, T, H, V]: a key (nope | rope) and a value for every head; over the keys at `places` alone, if given."""
        latent, rope = shard(latent, "batch", None, None), shard(rope, "batch", None, None)  # small; their keys and values are not
        k_nope, v = jnp.einsum("bsc,hnc->bshn", latent, self.k_up), jnp.einsum("bsc,hcv->bshv", latent, self.v_up)
        k_rope = shard(jnp.broadcast_to(rope[:, :, None], (*k_nope.shape[:3], rope.shape[-1])), "batch", None, "heads", None)
        q, k = jnp.concatenate([q_nope, q_rope], axis=-1), jnp.concatenate([k_nope, k_rope], axis=-1)
        attend = functools.partial(dense_attention, scale=config.mla.qk_head_dim**-0.5)
        return attend_in_island(attend, q[:, :, :, None], k, v, context, places)[:, :, :, 0]

    def selected(
        self, config: ModelConfig, q_nope: Array, q_rope: Array, latent: Array, rope: Array, context: Context, selection: Selection,
    ) -> tuple[Array, Array | None]:
        """Values [B, T, H, V] over the selected keys, or all visible ones under dense attention, absorbed; and, if the indexer's loss is
        asked for, the heads' mean attention on them, float32 [B, T, K or S]."""
        q_absorbed = jnp.einsum("bthn,hnc->bthc", q_nope, self.k_up)
        scale, heads = config.mla.qk_head_dim**-0.5, mesh_axes("heads", config.heads)

        def attend(q_absorbed, q_rope, latent, rope, chosen):
            if context.dense_attention:
                out, _, attention = dense_mla_with_attention(q_absorbed, q_rope, latent, rope, chosen > -jnp.inf, scale=scale)
            elif context.indexer_loss:
                out, _, attention = sparse_mla_with_attention(q_absorbed, q_rope, latent, rope, chosen, scale=scale)
            else:
                return (sparse_mla(q_absorbed, q_rope, latent, rope, chosen, scale=scale)[0],)
            if not context.indexer_loss:
                return (out,)
            return out, jax.lax.pmean(attention, heads) if heads else attention

        per_head, keys, per_query = ("batch", "queries", "heads", None), ("batch", None, None), ("batch", "queries", None)
        chosen = jax.lax.stop_gradient(selection.scores) if context.dense_attention else selection.places
        outputs = (per_head, per_query) if context.indexer_loss else (per_head,)
        out, *attention = island(attend, (per_head, per_head, keys, keys, per_query), outputs)(q_absorbed, q_rope, latent, rope, chosen)
        return jnp.einsum("bthc,hcv->bthv", out, self.v_up), attention[0] if attention else None
