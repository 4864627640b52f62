"""Log-probabilities of tokens from hidden states, a bounded number of logits at a time; on a mesh vocabulary and queries may be split."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import PartitionSpec

from glm_jax.model.mtp import shift_left
from glm_jax.parallel.axes import island, mesh_axes, shared_storage
from pallas_kernels.dispatch import varying_alike

LOGITS = 2**23  # how many a device has in memory at once, unless NARROWEST columns have more
NARROWEST = 512  # columns of a chunk: narrower ones multiply too slowly
LANES = 128  # columns of wider chunks are a multiple


def score(hidden_BxTxD: Array, unembedding_DxV: Array, targets_BxT: Array, temperature: float = 1.0) -> tuple[Array, Array]:
    """log softmax(hidden unembedding / temperature)[target] float32 [B, T], and whether the target's logit is the highest (of equals the
    first), bool [B, T].

    Each device takes its vocabulary in chunks of columns, for all its tokens. If there are several, the backward pass computes their logits
    again; a column's gradient is summed over the tokens in one product, in float32.
    """
    tokens = ("batch", "queries")
    stored = shared_storage(("embed", "vocab"), unembedding_DxV.shape, targets_BxT.shape)
    split = mesh_axes("vocab", unembedding_DxV.shape[1])
    own = functools.partial(_own_tokens, split, stored, temperature)
    return island(own, ((*tokens, None), PartitionSpec(stored or None, split or None), tokens), (tokens, tokens))(
        hidden_BxTxD, unembedding_DxV, targets_BxT)


def token_logp(hidden_BxTxD: Array, unembedding_DxV: Array, tokens_BxT: Array, temperature: float = 1.0) -> Array:
    """log pi(token t | tokens before t), float32 [B, T]; entry t scores token t, entry 0 (which nothing predicts) is 0.

    In a packed row the first token of each later segment gets the score of an unrelated prediction: the loss mask is 0 there.
    """
    return shift_right(score(hidden_BxTxD, unembedding_DxV, shift_left(tokens_BxT, 1), temperature)[0])


def shift_right(values_BxT: Array) -> Array:
    """The value of the place before; 0 (False) at the row's beginning."""
    return island(lambda own: jnp.pad(own[:, :-1], ((0, 0), (1, 0))), (("batch", None),), ("batch", None))(values_BxT)


@struct.dataclass
class _Seen:
    """What is known of each token's logits after some columns: the highest, sum of exp(logit - highest), the target's logit (0 if it was
    not among them) and the first column with the highest. float32, but for the column; all [N]."""

    highest: Array
    total: Array
    chosen: Array
    best: Array

    @staticmethod
    def of(logits_NxC: Array, targets_N: Array, first: Array | int, new_C: Array | bool = True) -> _Seen:
        """Of columns first .. first + C - 1, without those that are not new."""
        logits = jnp.where(new_C, logits_NxC, -jnp.inf)
        fixed = jax.lax.stop_gradient(logits)
        highest = fixed.max(axis=-1)
        # A sum with one term other than 0 in place of a lookup: it needs no vocabulary in one piece.
        mine = (first + jnp.arange(logits.shape[1]) == targets_N[:, None]) & new_C
        return _Seen(
            highest, jnp.exp(logits - highest[:, None]).sum(axis=-1), jnp.where(mine, logits, 0).sum(axis=-1),
            first + fixed.argmax(axis=-1).astype(jnp.int32))

    def before(self, later: _Seen) -> _Seen:
        """Of these columns and later ones."""
        highest = jnp.maximum(self.highest, later.highest)
        rescaled = lambda seen: seen.total * jnp.exp(seen.highest - highest)
        return _Seen(highest, rescaled(self) + rescaled(later), self.chosen + later.chosen,
                     jnp.where(later.highest > self.highest, later.best, self.best))

    def everywhere(self, split: tuple[str, ...]) -> _Seen:
        """Of the columns of all devices along `split`."""
        if not split:
            return self
        highest = jax.lax.pmax(self.highest, split)
        total = jax.lax.psum(self.total * jnp.exp(self.highest - highest), split)
        best = jnp.where(self.highest == highest, self.best, jnp.iinfo(jnp.int32).max)
        return _Seen(highest, total, jax.lax.psum(self.chosen, split), jax.lax.pmin(best, split))


def _own_tokens(
    split: tuple[str, ...], stored: tuple[str, ...], temperature: float, hidden: Array, weights: Array, targets: Array,
) -> tuple[Array, Array]:
    """`score` of a device's own tokens [B, T]. `split` are the mesh axes that the vocabulary is split over, `stored` those that the rows of
    the weights are."""
    shape, tokens = targets.shape, targets.size
    hidden, targets = hidden.reshape(tokens, -1), targets.reshape(tokens)
    width = max(NARROWEST, LOGITS // tokens // LANES * LANES)
    if width < weights.shape[1]:
        logp, hit = _by_columns((split, stored, temperature, width), *varying_alike(hidden, weights), targets)
    else:
        first = _first(split, weights.shape[1])
        seen = _Seen.of(_logits(temperature, hidden, _gathered(weights, stored)), targets, first).everywhere(split)
        logp, hit = _logp(seen), seen.best == targets
    return logp.reshape(shape), hit.reshape(shape)


def _first(split: tuple[str, ...], size: int) -> Array | int:
    """This device's first column."""
    return jax.lax.axis_index(split) * size if split else 0


def _gathered(weights: Array, stored: tuple[str, ...]) -> Array:
    return jax.lax.all_gather(weights, stored, axis=0, tiled=True) if stored else weights


def _logits(temperature: float, hidden_NxD: Array, weights_DxC: Array) -> Array:
    return jnp.einsum("nd,dc->nc", hidden_NxD, weights_DxC, preferred_element_type=jnp.float32) / temperature


def _logp(seen: _Seen) -> Array:
    return seen.chosen - seen.highest - jnp.log(seen.total)


def _chunks(width: int, columns: int) -> Array:
    """int32 [chunks, 2]: where each starts, and its first column that no earlier one had; the last one ends with the last column."""
    new = jnp.arange(0, columns, width, dtype=jnp.int32)
    return jnp.stack([jnp.minimum(new, columns - width), new], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_columns(how: tuple, hidden: Array, weights: Array, targets: Array) -> tuple[Array, Array]:
    """(logp, hit) [N] one chunk of columns after the other, of hidden [N, D], and of the weights this device's part."""
    logp, hit, _ = _forward(how, hidden, weights, targets)
    return logp, hit


def _forward(how, hidden, weights, targets):
    split, stored, temperature, width = how
    first = _first(split, weights.shape[1])

    def one(seen, chunk):
        start, new = chunk
        part = _gathered(jax.lax.dynamic_slice_in_dim(weights, start, width, axis=1), stored)
        more = _Seen.of(_logits(temperature, hidden, part), targets, first + start, start + jnp.arange(width) >= new)
        return seen.before(more), None

    zeros = jnp.zeros(targets.shape, jnp.float32)
    nothing = _Seen(zeros - jnp.inf, zeros, zeros, jnp.zeros(targets.shape, jnp.int32))
    nothing = jax.tree.map(lambda a: varying_alike(a, hidden, weights)[0], nothing)
    seen = jax.lax.scan(one, nothing, _chunks(width, weights.shape[1]))[0].everywhere(split)
    return _logp(seen), seen.best == targets, seen.highest + jnp.log(seen.total)


def _by_columns_forward(how, hidden, weights, targets):
    logp, hit, normaliser = _forward(how, hidden, weights, targets)
    return (logp, hit), (hidden, weights, targets, normaliser)


def _by_columns_backward(how, saved, gradients):
    split, stored, temperature, width = how
    hidden, weights, targets, normaliser = saved
    first, gradient = _first(split, weights.shape[1]), gradients[0] / temperature

    def one(sums, chunk):
        start, new = chunk
        columns = start + jnp.arange(width)
        part = _gathered(jax.lax.dynamic_slice_in_dim(weights, start, width, axis=1), stored)
        p = jnp.exp(_logits(temperature, hidden, part) - normaliser[:, None])
        of_logits = (gradient[:, None] * ((first + columns == targets[:, None]) - p)).astype(weights.dtype)
        of_part = jnp.einsum("nd,nc->dc", hidden, of_logits, preferred_element_type=jnp.float32).astype(weights.dtype)
        if stored:
            of_part = jax.lax.psum_scatter(of_part, stored, scatter_dimension=0, tiled=True)
        once = jnp.where(columns >= new, of_logits, 0)
        of_hidden = sums[0] + jnp.einsum("nc,dc->nd", once, part, preferred_element_type=jnp.float32)
        return (of_hidden, jax.lax.dynamic_update_slice_in_dim(sums[1], of_part, start, axis=1)), None

    zeros = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(weights)
    zeros = tuple(varying_alike(a, hidden, weights)[0] for a in zeros)
    (of_hidden, of_weights), _ = jax.lax.scan(one, zeros, _chunks(width, weights.shape[1]))
    return of_hidden.astype(hidden.dtype), of_weights, None


_by_columns.defvjp(_by_columns_forward, _by_columns_backward)
