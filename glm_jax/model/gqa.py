"""Grouped-query attention with partial rotary embedding (GLM-4.5, arXiv 2508.06471 §2; Qwen3 and Llama are special cases)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import struct
from jax import Array

from glm_jax.model.cache import Context
from glm_jax.model.config import ModelConfig
from glm_jax.model.layers import rms_norm, rotate
from glm_jax.model.parameters import weight
from glm_jax.parallel.axes import einsum, island, mesh_axes
from pallas_kernels.dense_attention.api import dense_attention

HEADS = ("batch", "queries", "kv_heads", None, None)
KEYS = ("batch", None, "kv_heads", None)


@struct.dataclass
class GQA:
    """`kv_heads` keys and values; query head h = g * query_group + q reads key g."""

    q: Array = weight("embed", "kv_heads", "query_group", "head_dim", fan_in=("embed",))
    k: Array = weight("embed", "kv_heads", "head_dim", fan_in=("embed",))
    v: Array = weight("embed", "kv_heads", "head_dim", fan_in=("embed",))
    q_bias: Array | None = weight("kv_heads", "query_group", "head_dim", init="zeros", present=lambda config: config.gqa.bias)
    k_bias: Array | None = weight("kv_heads", "head_dim", init="zeros", present=lambda config: config.gqa.bias)
    v_bias: Array | None = weight("kv_heads", "head_dim", init="zeros", present=lambda config: config.gqa.bias)
    q_norm: Array | None = weight("head_dim", init="ones", present=lambda config: config.gqa.qk_norm)
    k_norm: Array | None = weight("head_dim", init="ones", present=lambda config: config.gqa.qk_norm)
    out: Array = weight("kv_heads", "query_group", "head_dim", "embed", fan_in=("kv_heads", "query_group", "head_dim"))

    def __call__(self, config: ModelConfig, x_BxTxD: Array, context: Context) -> tuple[Array, Context, dict[str, Array]]:
        """Returns the output [B, T, D], the context with this layer's keys stored, and nothing found."""
        q = jnp.einsum("btd,dgqh->btgqh", x_BxTxD, self.q)
        k, v = jnp.einsum("btd,dgh->btgh", x_BxTxD, self.k), jnp.einsum("btd,dgh->btgh", x_BxTxD, self.v)
        if config.gqa.bias:
            q, k, v = q + self.q_bias, k + self.k_bias, v + self.v_bias
        if config.gqa.qk_norm:
            q, k = rms_norm(q, self.q_norm, config.rms_norm_eps), rms_norm(k, self.k_norm, config.rms_norm_eps)
        q = self._turned(config, q, context.cos[:, :, None, None], context.sin[:, :, None, None])
        k = self._turned(config, k, context.cos[:, :, None], context.sin[:, :, None])
        context, (k, v) = context.store(("key", "value"), (k, v), ("kv_heads", None))
        attend = functools.partial(dense_attention, scale=config.gqa.head_dim**-0.5)
        out = attend_in_island(attend, q, k, v, context)
        return einsum("btgqh,gqhd->btd", out, self.out, "batch", "queries", None), context, {}

    @staticmethod
    def _turned(config: ModelConfig, x: Array, cos: Array, sin: Array) -> Array:
        dim = config.gqa.rotary_dim
        turned = rotate(x[..., :dim], cos, sin, interleaved=False)
        return turned if dim == config.gqa.head_dim else jnp.concatenate([turned, x[..., dim:]], axis=-1)


def attend_in_island(
    attend: Callable, q_BxTxGxQxD: Array, k_BxSxGxD: Array, v_BxSxGxV: Array, context: Context, places: Array | None = None,
) -> Array:
    """Dense attention on each device's own rows, queries and key heads; over the keys at `places` alone, if given."""
    names, masks = zip(*context.causal().items(), strict=True)
    where = [("batch", "queries" if name.startswith("query") else None) for name in names]
    same_row = context.cache is None and not mesh_axes("queries", q_BxTxGxQxD.shape[1])

    def call(q, k, v, places, *masks):
        return attend(q, k, v, selection_BxTxK=places, same_row=same_row, **dict(zip(names, masks, strict=True)))

    return island(call, (HEADS, KEYS, KEYS, ("batch", "queries", None), *where), HEADS)(
        q_BxTxGxQxD, k_BxSxGxD, v_BxSxGxV, places, *masks)
