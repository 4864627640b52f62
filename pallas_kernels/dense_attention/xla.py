"""Attention in chunks of queries: memory is that of one chunk's scores, and a query's chunk reads no key behind it."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.chunks import over_queries
from pallas_kernels.dense_attention.reference import chosen
from pallas_kernels.dispatch import varying_alike
from pallas_kernels.lightning_indexer.reference import visible

CHUNK = 512  # queries at most whose scores are alive at once
SPANS = 4  # parts of a row that each read the keys up to their end only: of the causal half, 1 / SPANS is computed in vain


def dense_attention(
    q_BxTxGxQxD, k_BxSxGxD, v_BxSxGxV, *, scale, query_positions, key_positions, query_segments, key_segments, selection_BxTxK=None,
    same_row=False,
):
    length = q_BxTxGxQxD.shape[1]
    q, k, v = varying_alike(q_BxTxGxQxD, k_BxSxGxD, v_BxSxGxV)
    queries = (q, query_positions, query_segments, selection_BxTxK)
    # Heads before keys: every product is then one of whole matrices, none of which is turned for it.
    keys = (jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2), key_positions, key_segments)
    span = -(-length // SPANS) if same_row and length >= 32 * SPANS else length
    out = []
    for start in range(0, length, span):
        end = min(start + span, length)
        seen = [x[:, :, :end] if x.ndim == 4 else x[:, :end] for x in keys] if same_row else keys
        out.append(_chunked([None if x is None else x[:, start:end] for x in queries], seen, scale))
    return jnp.concatenate(out, axis=1)


def _chunked(queries, keys, scale):
    rows, _, heads, group, _ = queries[0].shape
    per_query = 2 * rows * heads * group * keys[0].shape[2]
    return over_queries(lambda queries: _attend(*queries, *keys, scale), queries, per_query, CHUNK)


def _attend(q, query_positions, query_segments, selection, k, v, key_positions, key_segments, scale):
    if selection is None:
        seen_BxTxS = visible(query_positions, key_positions, query_segments, key_segments)
    else:
        seen_BxTxS = chosen(selection, k.shape[2])
    return jnp.moveaxis(_softmax_product(jnp.moveaxis(q, 1, 3), k, v, seen_BxTxS, scale), 3, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _softmax_product(q_BxGxQxTxD, k_BxGxSxD, v_BxGxSxV, seen_BxTxS, scale):
    """softmax(scale q k) v over the seen keys, 0 where there are none. Its gradient by hand: fewer passes over the [T, S] scores."""
    return _forward(q_BxGxQxTxD, k_BxGxSxD, v_BxGxSxV, seen_BxTxS, scale)[0]


def _forward(q, k, v, seen, scale):
    scores = jnp.einsum("bgqtd,bgsd->bgqts", q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    inverse = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
    out = jnp.einsum("bgqts,bgsv->bgqtv", weights.astype(v.dtype), v, preferred_element_type=jnp.float32) * inverse
    out = out.astype(v.dtype)
    return out, (q, k, v, weights, inverse, out)


def _backward(scale, saved, gradient):
    """With p = weights * inverse: dv = p^T do, ds = p * (do v^T - sum(do * out)), dq = scale ds k, dk = scale ds^T q."""
    q, k, v, weights, inverse, out = saved
    delta = jnp.sum(gradient.astype(jnp.float32) * out * inverse, axis=-1, keepdims=True)
    scaled = (gradient * inverse).astype(v.dtype)
    ds = weights * (jnp.einsum("bgqtv,bgsv->bgqts", scaled, v, preferred_element_type=jnp.float32) - delta)
    ds, weights = ds.astype(q.dtype), weights.astype(v.dtype)
    dq = jnp.einsum("bgqts,bgsd->bgqtd", ds, k) * scale
    dk = jnp.einsum("bgqts,bgqtd->bgsd", ds, q) * scale
    return dq, dk, jnp.einsum("bgqts,bgqtv->bgsv", weights, scaled), None


_softmax_product.defvjp(_forward, _backward)
