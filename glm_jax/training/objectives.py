"""The supervised objective."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from glm_jax.model import Transformer
from glm_jax.model.mtp import shift_left
from glm_jax.model.transformer import Output
from glm_jax.parallel.axes import shard
from glm_jax.training.balancing import expert_loads
from glm_jax.training.mtp_loss import mtp_loss, mtp_metrics
from glm_jax.training.scoring import score, shift_right


def supervised_loss(
    model: Transformer, batch: dict[str, Array], *, dense_attention: bool, indexer_coefficient: float, balance_coefficient: float = 0.0,
    mtp_coefficient: float = 0.0, mtp_steps: int = 0, count_experts: bool = False, remat: str = "none",
    dtype: Any = None,
) -> tuple[Array, dict[str, Array]]:
    """Cross entropy of the masked tokens, and what else has a coefficient, each divided by its global count.

    Reads tokens, segment_ids int32 [B, T] (numbered from 1 in every row), loss_mask float32 [B, T] and counts of the whole update, so that
    the sum over microbatches is the mean over the update: loss_tokens, real_tokens, sequences, and with mtp_steps mtp_tokens [n].

    - The indexers' KL, over real tokens. `dense_attention` is DSA's dense warm-up. Indexers learn from their KL only, everything else from
      the rest only (DeepSeek-V3.2 §2.1.1).
    - The sequence-wise balance loss, over sequences, summed over the layers (DeepSeek-V3 eq. 17-20; GLM-4.5 §2.4: 1e-4).
    - The cross entropy of `mtp_steps` further tokens, see mtp_loss. The MTP layer then counts as one more layer in both of the above.

    Metrics are sums; `count_experts` adds those that the biases of the routers move by, see expert_loads. `remat` is the model's. `dtype`
    is the type to compute in, by default that of the weights; gradients have the weights' type, and losses are summed in float32.
    """
    if dtype is not None:
        model = model.astype(dtype)
    tokens, segments, mask = (shard(batch[name], "batch", None) for name in ("tokens", "segment_ids", "loss_mask"))
    out = model(
        tokens, segment_ids=segments, dense_attention=dense_attention, indexer_loss=indexer_coefficient > 0,
        balance_loss=balance_coefficient > 0, mtp_steps=mtp_steps, compute_logits=False, remat=remat)
    logp, hit = map(shift_right, score(out.hidden, model.unembedding, shift_left(tokens, 1)))
    nll = -jnp.sum(logp * mask)
    loss = nll / batch["loss_tokens"]
    metrics = {"nll": nll, "loss_tokens": mask.sum(), "correct_tokens": jnp.sum(hit * mask)}
    if indexer_coefficient > 0:
        kl = jnp.sum(jnp.where(segments != 0, _with_mtp(out, "indexer_loss"), 0))
        loss += indexer_coefficient * kl / batch["real_tokens"]
        metrics |= {"indexer_kl": kl, "real_tokens": jnp.sum(segments != 0)}
    if balance_coefficient > 0:
        balance = jnp.sum(_with_mtp(out, "balance_loss"))
        loss += balance_coefficient * balance / batch["sequences"]
        metrics |= {"balance": balance, "sequences": jnp.sum(segments.max(axis=1))}
    if mtp_steps:
        further = mtp_metrics(model, out.mtp, tokens, segments, mask)
        loss += mtp_loss(further, batch["mtp_tokens"], mtp_coefficient)
        metrics |= further
    if count_experts:
        metrics |= expert_loads(model, out, segments)
    return loss, metrics


def _with_mtp(out: Output, name: str) -> Array:
    """The sum over layers, the MTP layer among them where it ran."""
    more = None if out.mtp is None else getattr(out.mtp, name)
    return getattr(out, name) if more is None else getattr(out, name) + more
