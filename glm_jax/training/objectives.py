"""Log-probabilities of tokens and the supervised objective."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from glm_jax.model import Transformer


def token_logp(logits_BxTxV: Array, tokens_BxT: Array, temperature: float = 1.0) -> Array:
    """log pi(token t | tokens before t), float32 [B, T]; entry t scores token t, entry 0 (which nothing predicts) is 0.

    In a packed row the first token of each later segment gets the score of an unrelated prediction: the loss mask is 0 there.
    """
    log_probs = jax.nn.log_softmax(logits_BxTxV[:, :-1] / temperature, axis=-1)
    scored = jnp.take_along_axis(log_probs, tokens_BxT[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(scored, ((0, 0), (1, 0)))


def supervised_loss(
    model: Transformer, batch: dict[str, Array], *, dense_attention: bool, indexer_coefficient: float,
) -> tuple[Array, dict[str, Array]]:
    """Cross entropy of the masked tokens plus the indexers' KL over all real tokens, each divided by its global count.

    Reads tokens, segment_ids int32 [B, T], loss_mask float32 [B, T] and the scalars loss_tokens, real_tokens of the whole update, so that
    the sum over microbatches is the mean over the update. `dense_attention` is DSA's dense warm-up; an `indexer_coefficient` of 0 leaves
    the KL out. Indexers learn from their KL only, everything else from the cross entropy only (DeepSeek-V3.2 §2.1.1). Metrics are sums.
    """
    out = model(batch["tokens"], segment_ids=batch["segment_ids"], dense_attention=dense_attention, indexer_loss=indexer_coefficient > 0)
    logp, mask = token_logp(out.logits, batch["tokens"]), batch["loss_mask"]
    nll = -jnp.sum(logp * mask)
    loss = nll / batch["loss_tokens"]
    greedy = out.logits[:, :-1].argmax(axis=-1) == batch["tokens"][:, 1:]
    metrics = {"nll": nll, "loss_tokens": mask.sum(), "correct_tokens": jnp.sum(greedy * mask[:, 1:])}
    if indexer_coefficient > 0:
        kl = jnp.sum(jnp.where(batch["segment_ids"] != 0, out.indexer_loss, 0))
        loss += indexer_coefficient * kl / batch["real_tokens"]
        metrics |= {"indexer_kl": kl, "real_tokens": jnp.sum(batch["segment_ids"] != 0)}
    return loss, metrics
