"""What is written about an update and its rollouts: sums and counts, which add up over processes, and the ratios that are printed."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping

import numpy as np

from glm_jax.data.trajectory import Trajectory
from glm_jax.metrics import ratio
from glm_jax.rl.learner import Batch


def update_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """An update's sums and counts as the ratios that are printed; per token unless said otherwise."""
    tokens = sums["tokens"]
    metrics = {
        "loss": sums["loss"], "gradient_norm": sums["gradient_norm"], "tokens": tokens,
        "ratio/mean": ratio(sums["ratio_sum"], tokens), "ratio/max": sums["ratio_max"],
        "band/below": ratio(sums["tokens_below_band"], tokens), "band/above": ratio(sums["tokens_above_band"], tokens),
        "kl/k1": ratio(sums["kl_k1_sum"], tokens), "kl/k3": ratio(sums["kl_k3_sum"], tokens),
        "mismatch/logp_mean": ratio(sums["logp_difference_sum"], tokens), "mismatch/logp_max": sums["logp_difference_max"],
        "logp_mean": ratio(sums["logp_sum"], tokens),
    }
    for name in ("experts", "selections"):
        if f"{name}_recorded" in sums:
            metrics[f"mismatch/{name}"] = ratio(sums[f"{name}_flipped"], sums[f"{name}_recorded"])
    return metrics


def batch_sums(batch: Batch) -> dict[str, float]:
    """Of a batch: rewards and rollouts by environment, tokens, counts by staleness and of advantages that are 0."""
    sums = collections.Counter(tokens=0, zero_advantages=int(np.sum(batch.advantages == 0)))
    for trajectory, staleness in zip(batch.trajectories, batch.staleness.tolist(), strict=True):
        sums.update({
            f"reward/{trajectory.environment}": float(trajectory.reward), f"rollouts/{trajectory.environment}": 1,
            "tokens": trajectory.token_count, f"staleness/{staleness}": 1})
    return dict(sums)


def batch_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """What is printed of batch_sums: mean rewards, staleness counts, mean length."""
    count = {name.removeprefix("rollouts/"): value for name, value in sorted(sums.items()) if name.startswith("rollouts/")}
    rewards = {name: sums[f"reward/{name}"] for name in count}
    rollouts = sum(count.values())
    return {f"reward/{name}": ratio(total, count[name]) for name, total in rewards.items()} | {
        "reward": ratio(sum(rewards.values()), rollouts),
        **{name: value for name, value in sorted(sums.items()) if name.startswith("staleness/")},
        "length_mean": ratio(sums["tokens"], rollouts), "zero_advantage_share": ratio(sums["zero_advantages"], rollouts)}


def sample_record(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> dict:
    """A trajectory as a line of trajectories/*.jsonl: text pieces beside mask, log-probs and versions, for the report."""
    segment = trajectory.segments[0]
    return {
        "rollout_id": trajectory.rollout_id, "environment": trajectory.environment, "reward": trajectory.reward,
        "status": trajectory.status.value, "version": trajectory.oldest_version, "tokens": [decode([int(t)]) for t in segment.tokens],
        "mask": segment.loss_mask.tolist(), "logp": [round(float(x), 4) for x in segment.logp], "versions": segment.versions.tolist(),
    }
