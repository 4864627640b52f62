"""Log-probabilities of tokens, on a mesh too: vocabulary and queries may be split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from glm_jax.model.mtp import shift_left
from glm_jax.parallel.axes import island


def score(logits_BxTxV: Array, targets_BxT: Array) -> tuple[Array, Array]:
    """log softmax(logits)[target] float32 [B, T], and whether the target has the highest logit (the first of equals), bool [B, T]."""
    vocabulary = jnp.arange(logits_BxTxV.shape[-1])
    # A sum with one term other than 0 in place of a lookup: it needs no vocabulary in one piece.
    logp = jnp.where(vocabulary == targets_BxT[..., None], jax.nn.log_softmax(logits_BxTxV, axis=-1), 0).sum(axis=-1)
    return logp, logits_BxTxV.argmax(axis=-1) == targets_BxT


def token_logp(logits_BxTxV: Array, tokens_BxT: Array, temperature: float = 1.0) -> Array:
    """log pi(token t | tokens before t), float32 [B, T]; entry t scores token t, entry 0 (which nothing predicts) is 0.

    In a packed row the first token of each later segment gets the score of an unrelated prediction: the loss mask is 0 there.
    """
    return shift_right(score(logits_BxTxV / temperature, shift_left(tokens_BxT, 1))[0])


def shift_right(values_BxT: Array) -> Array:
    """The value of the place before; 0 (False) at the row's beginning."""
    return island(lambda own: jnp.pad(own[:, :-1], ((0, 0), (1, 0))), (("batch", None),), ("batch", None))(values_BxT)
