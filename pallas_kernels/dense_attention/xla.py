"""Attention in chunks of queries: memory is that of one chunk's scores, and a query's chunk reads no key behind it."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dense_attention.reference import chosen
from pallas_kernels.dispatch import varying_alike
from pallas_kernels.lightning_indexer.reference import visible

CHUNK = 512  # queries whose scores are alive at once
SPANS = 4  # parts of a row that each read the keys up to their end only: of the causal half, 1 / SPANS is computed in vain


def dense_attention(
    q_BxTxGxQxD, k_BxSxGxD, v_BxSxGxV, *, scale, query_positions, key_positions, query_segments, key_segments, selection_BxTxK=None,
    same_row=False,
):
    length = q_BxTxGxQxD.shape[1]
    q, k, v = varying_alike(q_BxTxGxQxD, k_BxSxGxD, v_BxSxGxV)
    queries = (q, query_positions, query_segments, selection_BxTxK)
    keys = (k, v, key_positions, key_segments)
    span = -(-length // SPANS) if same_row and length >= 32 * SPANS else length
    out = []
    for start in range(0, length, span):
        end = min(start + span, length)
        seen = [x[:, :end] for x in keys] if same_row else keys
        out.append(_chunked([None if x is None else x[:, start:end] for x in queries], seen, scale))
    return jnp.concatenate(out, axis=1)


def _chunked(queries, keys, scale):
    attend = lambda queries: _attend(*queries, *keys, scale)
    rows, length = queries[1].shape
    if length <= CHUNK:
        return attend(queries)

    def chunks(x):  # [B, T, ...] to [chunks, B, CHUNK, ...]; padded queries are of segment 0
        padded = jnp.pad(x, ((0, 0), (0, -length % CHUNK), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(rows, -1, CHUNK, *x.shape[2:]), 1, 0)

    out = jax.lax.map(jax.checkpoint(attend), jax.tree.map(chunks, queries))
    return jnp.moveaxis(out, 0, 1).reshape(rows, -1, *out.shape[3:])[:, :length]


def _attend(q, query_positions, query_segments, selection, k, v, key_positions, key_segments, scale):
    if selection is None:
        seen_BxTxS = visible(query_positions, key_positions, query_segments, key_segments)
    else:
        seen_BxTxS = chosen(selection, k.shape[1])
    return _softmax_product(q, k, v, seen_BxTxS, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _softmax_product(q_BxTxGxQxD, k_BxSxGxD, v_BxSxGxV, seen_BxTxS, scale):
    """softmax(scale q k) v over the seen keys, 0 where there are none. Its gradient by hand: fewer passes over the [T, S] scores."""
    return _forward(q_BxTxGxQxD, k_BxSxGxD, v_BxSxGxV, seen_BxTxS, scale)[0]


def _forward(q, k, v, seen, scale):
    scores = jnp.einsum("btgqd,bsgd->bgqts", q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - top)
    total_BxGxQxT = weights.sum(axis=-1)
    inverse = jnp.where(total_BxGxQxT > 0, 1 / jnp.where(total_BxGxQxT > 0, total_BxGxQxT, 1), 0)
    inverse_BxTxGxQx1 = jnp.moveaxis(inverse, 3, 1)[..., None]
    out = jnp.einsum("bgqts,bsgv->btgqv", weights.astype(v.dtype), v, preferred_element_type=jnp.float32) * inverse_BxTxGxQx1
    out = out.astype(v.dtype)
    return out, (q, k, v, weights, inverse_BxTxGxQx1, out)


def _backward(scale, saved, gradient):
    """With p = weights * inverse: dv = p^T do, ds = p * (do v^T - sum(do * out)), dq = scale ds k, dk = scale ds^T q."""
    q, k, v, weights, inverse_BxTxGxQx1, out = saved
    delta = jnp.moveaxis(jnp.sum(gradient.astype(jnp.float32) * out * inverse_BxTxGxQx1, axis=-1), 1, 3)[..., None]
    scaled = (gradient * inverse_BxTxGxQx1).astype(v.dtype)
    ds = weights * (jnp.einsum("btgqv,bsgv->bgqts", scaled, v, preferred_element_type=jnp.float32) - delta)
    ds, weights = ds.astype(q.dtype), weights.astype(v.dtype)
    dq = jnp.einsum("bgqts,bsgd->btgqd", ds, k) * scale
    dk = jnp.einsum("bgqts,btgqd->bsgd", ds, q) * scale
    return dq, dk, jnp.einsum("bgqts,btgqv->bsgv", weights, scaled), None


_softmax_product.defvjp(_forward, _backward)
