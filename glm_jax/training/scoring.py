"""Log-probabilities of tokens from hidden states, a bounded number of logits at a time; on a mesh vocabulary and queries may be split."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from glm_jax.model.mtp import shift_left
from glm_jax.parallel.axes import island, mesh_axes
from pallas_kernels.dispatch import varying_alike

LOGITS = 2**23  # how many a device has in memory at once, unless SMALLEST tokens have more
SMALLEST = 512  # tokens of a chunk: with fewer, reading the weights and their gradient's sums takes longer than multiplying


def score(hidden_BxTxD: Array, unembedding_DxV: Array, targets_BxT: Array, temperature: float = 1.0) -> tuple[Array, Array]:
    """log softmax(hidden unembedding / temperature)[target] float32 [B, T], and whether the target's logit is the highest (of equals the
    first), bool [B, T].

    Each device takes its tokens in even chunks. If there are several, the backward pass computes their logits again and adds up the
    gradient of the weights in float32.
    """
    split = mesh_axes("vocab", unembedding_DxV.shape[1])
    own = functools.partial(_own_tokens, split, temperature)
    tokens = ("batch", "queries")
    return island(own, ((*tokens, None), (None, "vocab"), tokens), (tokens, tokens))(hidden_BxTxD, unembedding_DxV, targets_BxT)


def token_logp(hidden_BxTxD: Array, unembedding_DxV: Array, tokens_BxT: Array, temperature: float = 1.0) -> Array:
    """log pi(token t | tokens before t), float32 [B, T]; entry t scores token t, entry 0 (which nothing predicts) is 0.

    In a packed row the first token of each later segment gets the score of an unrelated prediction: the loss mask is 0 there.
    """
    return shift_right(score(hidden_BxTxD, unembedding_DxV, shift_left(tokens_BxT, 1), temperature)[0])


def shift_right(values_BxT: Array) -> Array:
    """The value of the place before; 0 (False) at the row's beginning."""
    return island(lambda own: jnp.pad(own[:, :-1], ((0, 0), (1, 0))), (("batch", None),), ("batch", None))(values_BxT)


def _own_tokens(split: tuple[str, ...], temperature: float, hidden: Array, weights: Array, targets: Array) -> tuple[Array, Array]:
    """`score` of a device's own tokens [B, T]; `split` are the mesh axes that the vocabulary is split over."""
    shape, tokens = targets.shape, targets.size
    count = -(-tokens // max(SMALLEST, LOGITS // weights.shape[1]))
    if count <= 1:
        return _chunk(split, temperature, hidden, weights, targets)
    size = -(-tokens // count)

    def chunks(x):
        flat = x.reshape(tokens, *x.shape[2:])
        return jnp.pad(flat, ((0, count * size - tokens), *((0, 0),) * (flat.ndim - 1))).reshape(count, size, *flat.shape[1:])

    found = _chunks(split, temperature, *varying_alike(chunks(hidden), weights), chunks(targets))
    return tuple(x.reshape(-1)[:tokens].reshape(shape) for x in found)


def _chunk(split: tuple[str, ...], temperature: float, hidden: Array, weights: Array, targets: Array) -> tuple[Array, Array]:
    """(logp, hit) [...] of tokens with hidden states [..., D], with this device's part of the vocabulary [D, V]."""
    logits = jnp.einsum("...d,dv->...v", hidden, weights, preferred_element_type=jnp.float32) / temperature
    over = lambda reduce, x: reduce(x, split) if split else x
    size = weights.shape[1]
    first = jax.lax.axis_index(split) * size if split else 0
    fixed = jax.lax.stop_gradient(logits)
    own_highest = fixed.max(axis=-1)
    highest = over(jax.lax.pmax, own_highest)
    shifted = logits - highest[..., None]
    total = over(jax.lax.psum, jnp.exp(shifted).sum(axis=-1))
    # A sum with one term other than 0 in place of a lookup: it needs no vocabulary in one piece.
    mine = jnp.arange(size) == (targets - first)[..., None]
    logp = over(jax.lax.psum, jnp.where(mine, shifted - jnp.log(total)[..., None], 0).sum(axis=-1))
    best = jnp.where(own_highest == highest, first + fixed.argmax(axis=-1), jnp.iinfo(jnp.int32).max)
    return logp, over(jax.lax.pmin, best) == targets


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunks(split: tuple[str, ...], temperature: float, hidden: Array, weights: Array, targets: Array) -> tuple[Array, Array]:
    """`_chunk` of one chunk after the other: hidden [C, N, D], targets [C, N]."""
    return jax.lax.map(lambda chunk: _chunk(split, temperature, chunk[0], weights, chunk[1]), (hidden, targets))


def _chunks_forward(split, temperature, hidden, weights, targets):
    return _chunks(split, temperature, hidden, weights, targets), (hidden, weights, targets)


def _chunks_backward(split, temperature, saved, gradients):
    hidden, weights, targets = saved

    def one(total, chunk):
        hidden, targets, gradient = chunk
        _, pull = jax.vjp(lambda hidden, weights: _chunk(split, temperature, hidden, weights, targets)[0], hidden, weights)
        hidden, more = pull(gradient)
        return total + more, hidden

    zero, _ = varying_alike(jnp.zeros(weights.shape, jnp.float32), weights)
    total, hidden = jax.lax.scan(one, zero, (hidden, targets, gradients[0]))
    return hidden, total.astype(weights.dtype), None


_chunks.defvjp(_chunks_forward, _chunks_backward)
