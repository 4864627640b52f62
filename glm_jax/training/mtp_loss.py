"""Cross entropy of the tokens further on: L_MTP = lambda / n sum_k CE_k over n steps with the same weights (DeepSeek-V3 eq. 24-25)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from glm_jax.model import Transformer
from glm_jax.model.mtp import MTPOutput, followed, shift_left
from glm_jax.training.scoring import score


def mtp_tokens(segment_ids: np.ndarray, loss_mask: np.ndarray, steps: int) -> np.ndarray:
    """float32 [n]: the trained tokens of each step k over the rows [..., T], those with k + 2 tokens before them in their sequence."""
    ahead = range(2, steps + 2)
    same = lambda by: (segment_ids[..., by:] == segment_ids[..., :-by]) & (segment_ids[..., by:] != 0)
    return np.array([np.sum(loss_mask[..., by:] * same(by)) for by in ahead], np.float32)


def mtp_metrics(model: Transformer, mtp: MTPOutput, tokens: Array, segments: Array, loss_mask: Array) -> dict[str, Array]:
    """Sums float32 [n] over the trained tokens of each step: `mtp_nll`, `mtp_tokens`, and `mtp_correct`, those predicted greedily.

    tokens, segments int32 [B, T] and loss_mask float32 [B, T]: entry t of step k scores token t + k + 2, if it is in the same sequence
    and trained.
    """

    def step(hidden, targets, mask):
        logp, hit = score(hidden, model.mtp_unembedding, targets)
        return -jnp.sum(logp * mask), jnp.sum(mask), jnp.sum(hit * mask)

    ahead = range(2, len(mtp.hidden) + 2)
    masks = [shift_left(loss_mask, by) * (followed(segments, by) != 0) for by in ahead]
    steps = [step(mtp.hidden[k], shift_left(tokens, by), masks[k]) for k, by in enumerate(ahead)]
    return dict(zip(("mtp_nll", "mtp_tokens", "mtp_correct"), map(jnp.stack, zip(*steps, strict=True)), strict=True))


def mtp_loss(metrics: dict[str, Array], tokens: Array, coefficient: float) -> Array:
    """coefficient / n sum_k CE_k, each CE_k the mean over the step's own trained tokens (the paper divides by a sequence's length).

    `tokens` float32 [n] are the counts of the whole update, so that microbatches add up to its mean; a step without any adds nothing.
    """
    return coefficient * jnp.mean(metrics["mtp_nll"] / jnp.maximum(tokens, 1))
