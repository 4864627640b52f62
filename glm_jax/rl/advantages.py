"""Advantages of rollouts within their group."""

from __future__ import annotations

import numpy as np

KINDS = ("mean", "mean_std", "leave_one_out")


def group_advantages(rewards_N, group_ids_N, valid_N, kind: str) -> np.ndarray:
    """How much better each rollout did than the others of its group. N rollouts, one reward each, groups of any size, in any order.

    kind
      "mean"           r − mean(r)             GLM-5's agentic RL, arXiv 2602.15763 §4.1
      "mean_std"       (r − mean(r)) / std(r)  GRPO, arXiv 2402.03300; GLM-5's reasoning RL §3.2; population standard deviation and no
                                               epsilon: the result is at most sqrt(group − 1), so none is needed
      "leave_one_out"  r − mean(the others)    RLOO, arXiv 2402.14740
    rewards_N: any real dtype; what it holds where valid_N is false is ignored, and such rollouts get 0 and enter no mean.
    Equal rewards, and the only valid rollout of a group, get exactly 0. Returns float32 [N]; computed in float64.
    Raises ValueError for arrays that are not all [N], a reward that is not finite, or an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown advantage kind {kind!r}; known: {', '.join(KINDS)}")
    rewards_N, group_ids_N, valid_N = np.asarray(rewards_N, np.float64), np.asarray(group_ids_N), np.asarray(valid_N, bool)
    if rewards_N.ndim != 1 or not rewards_N.shape == group_ids_N.shape == valid_N.shape:
        raise ValueError(f"rewards {rewards_N.shape}, group ids {group_ids_N.shape} and valid {valid_N.shape} must all be [N]")
    if bad := np.flatnonzero(valid_N & ~np.isfinite(rewards_N)).tolist():
        raise ValueError(f"rewards at {bad} are valid but not finite")

    advantages_N = np.zeros(len(rewards_N))
    for group in np.unique(group_ids_N[valid_N]):
        members = np.flatnonzero(valid_N & (group_ids_N == group))
        # Measured from the lowest and in units of the spread: equal rewards are exactly 0, and no standard deviation underflows.
        above = rewards_N[members] - rewards_N[members].min()
        spread = above.max()
        if spread == 0:
            continue
        centred = above / spread - np.mean(above / spread)
        if kind == "mean":
            advantages_N[members] = centred * spread
        elif kind == "mean_std":
            advantages_N[members] = centred / np.sqrt(np.mean(centred**2))
        else:
            advantages_N[members] = centred * spread * len(members) / (len(members) - 1)
    return advantages_N.astype(np.float32)
