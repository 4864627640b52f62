"""Policy losses. Arrays are [B, T] over tokens, and entry t of each scores token t: nothing here shifts.

Every loss is a sum over tokens divided by a normaliser that the caller counts over the whole batch, so that it does not depend on how the
batch is cut into microbatches. Metrics are sums and counts over the tokens in `mask`; of those ending in `_max` take the maximum, add the
others.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

# exp of it is finite in float32 with room for products; no band reaches that far.
_MAX_LOG_RATIO = 20.0


def glm5_agentic(logp, old_logp, advantages, *, eps_low: float = 0.2, eps_high: float = 0.28):
    """Direct double-sided importance sampling, Equations 3–5 of GLM-5 (arXiv 2602.15763, §4.1.2).

        r_t = exp(log π_θ − log π_rollout)
        f(r) = r if 1 − ε_low < r < 1 + ε_high else 0
        maximise E_t[ f(r_t) · A_t · log π_θ ]

    The ratio is to the behaviour policy itself, for a trajectory sampled by several weight versions has no other old policy. Both bounds
    are strict and hold for either sign of A. f(r) is a detached coefficient: then the gradient is r · A · ∇log π, the importance-weighted
    score function, while differentiating through f would add r · log π · A · ∇log π. The report gives no ε for this loss; the defaults
    are those of its reasoning RL (§3.2).
    """
    ratio = jnp.exp(_log_ratio(logp, old_logp))
    below, above = ratio <= 1 - eps_low, ratio >= 1 + eps_high
    coefficient = jax.lax.stop_gradient(jnp.where(below | above, 0, ratio))
    return -coefficient * advantages * logp, below, above


def grpo(logp, old_logp, advantages, *, eps_low: float = 0.2, eps_high: float = 0.2):
    """The clipped surrogate of PPO (arXiv 1707.06347, Equation 7) as GRPO uses it (arXiv 2402.03300, Equation 3), without the KL term.

        r_t = exp(log π_θ − log π_old),   maximise min(r_t · A_t, clip(r_t, 1 − ε_low, 1 + ε_high) · A_t)

    π_old is the proximal policy when its log-probs are given, else the behaviour policy. Averaged over tokens, not over rollouts first.
    """
    ratio = jnp.exp(_log_ratio(logp, old_logp))
    clipped = jnp.clip(ratio, 1 - eps_low, 1 + eps_high)
    return -jnp.minimum(ratio * advantages, clipped * advantages), ratio < 1 - eps_low, ratio > 1 + eps_high


# name: (loss, whether its old policy is the proximal one when given)
_LOSSES: dict[str, tuple[Callable, bool]] = {"glm5_agentic": (glm5_agentic, False), "grpo": (grpo, True)}


def policy_loss(
    name: str, *, logp, behaviour_logp, proximal_logp=None, advantages, mask, rollout_ids, group_ids, normaliser, **hyper
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss `name` over the tokens in `mask`, to be minimised, and its metrics.

    logp            [B, T] float  log π_θ of each token, differentiated
    behaviour_logp  [B, T] float  log-probability the token was sampled with; a token for which it is not finite is left out and counted
    proximal_logp   [B, T] float or None
    advantages      [B, T] float
    mask            [B, T]        not 0 where the policy sampled the token; elsewhere the other arrays may hold anything, NaN included
    rollout_ids, group_ids  [B, T] int  what a token belongs to, for losses that need it
    normaliser      scalar        number of masked tokens in the whole batch, over all microbatches and hosts
    hyper           the loss's own numbers: see its function
    Returns a float32 scalar and a dict of float32 scalars. Raises ValueError for an unknown loss or hyper-parameter and for arrays not
    all [B, T].
    """
    if name not in _LOSSES:
        raise ValueError(f"unknown policy loss {name!r}; known: {', '.join(sorted(_LOSSES))}")
    loss, prefers_proximal = _LOSSES[name]
    if unknown := sorted(hyper.keys() - loss.__kwdefaults__.keys()):
        raise ValueError(f"policy loss {name!r} has no {', '.join(unknown)}; it has {', '.join(loss.__kwdefaults__)}")
    arrays = {
        "logp": logp, "behaviour_logp": behaviour_logp, "proximal_logp": proximal_logp, "advantages": advantages, "mask": mask,
        "rollout_ids": rollout_ids, "group_ids": group_ids,
    }  # fmt: skip
    shapes = {key: jnp.shape(value) for key, value in arrays.items() if value is not None}
    if len(set(shapes.values())) > 1 or len(jnp.shape(logp)) != 2:
        raise ValueError(f"token arrays must all be [B, T]: {shapes}")

    sampled = mask != 0
    trained = sampled & jnp.isfinite(behaviour_logp)

    def clean(x):
        # Before any arithmetic: where() on a result still multiplies 0 by NaN in the backward pass.
        return jnp.where(trained, x, 0).astype(jnp.float32)

    def total(x):
        return jnp.sum(jnp.where(trained, x, 0), dtype=jnp.float32)

    logp, behaviour_logp, advantages = clean(logp), clean(behaviour_logp), clean(advantages)
    old_logp = clean(proximal_logp) if prefers_proximal and proximal_logp is not None else behaviour_logp

    loss_BxT, below, above = loss(logp, old_logp, advantages, **hyper)
    loss_sum = total(loss_BxT)

    difference = jax.lax.stop_gradient(logp - behaviour_logp)
    log_ratio = jax.lax.stop_gradient(_log_ratio(logp, behaviour_logp))
    ratio = jnp.exp(log_ratio)
    metrics = {
        "tokens": total(1.0),
        "tokens_without_behaviour_logp": jnp.sum(sampled & ~trained, dtype=jnp.float32),
        "tokens_below_band": total(below),
        "tokens_above_band": total(above),
        "loss_sum": jax.lax.stop_gradient(loss_sum),
        "advantage_sum": total(advantages),
        "logp_sum": total(jax.lax.stop_gradient(logp)),
        "ratio_sum": total(ratio),
        "ratio_max": jnp.max(jnp.where(trained, ratio, 0)),
        "logp_difference_sum": total(jnp.abs(difference)),
        "logp_difference_max": jnp.max(jnp.abs(difference)),
        # Estimators of KL(behaviour ‖ current) from the behaviour's samples: http://joschu.net/blog/kl-approx.html
        "kl_k1_sum": total(-difference),
        "kl_k3_sum": total(jnp.expm1(log_ratio) - log_ratio),
    }
    return loss_sum / normaliser, metrics


def _log_ratio(logp, old_logp):
    return jnp.clip(logp - old_logp, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
