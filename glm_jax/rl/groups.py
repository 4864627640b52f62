"""What remains of a group when some of its rollouts failed or went stale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from glm_jax.data.trajectory import Status
from glm_jax.rl.staleness import is_stale


class Outcome(Protocol):
    """A Trajectory, or a ring's Ticket."""

    status: Status
    oldest_version: int


def is_valid(outcome: Outcome, current_version: int, max_staleness: int) -> bool:
    """Trainable and not over-stale. A rollout that sampled nothing teaches nothing and is not valid either."""
    return outcome.status.trainable and outcome.oldest_version >= 0 and not is_stale(outcome.oldest_version, current_version, max_staleness)


def fill_group(outcomes: Sequence[Outcome], group_size: int, current_version: int, max_staleness: int) -> list[tuple[int, bool]]:
    """GLM-5's group rule (arXiv 2602.15763, §4.1.2): more than half of the group valid: pad it by repeating valid rollouts; else drop it.

    outcomes: at most `group_size`; those that are missing count as failed. A stale rollout counts as failed. Returns `group_size` pairs
    (index into outcomes, is_repeat), the valid ones in order and then, round robin from the first, their repeats; or [] when the group is
    to be dropped. A repeat is trained like its original and enters the group's mean as often as it appears.
    """
    if len(outcomes) > group_size:
        raise ValueError(f"{len(outcomes)} rollouts in a group of {group_size}")
    valid = [i for i, outcome in enumerate(outcomes) if is_valid(outcome, current_version, max_staleness)]
    if 2 * len(valid) <= group_size:
        return []
    repeats = group_size - len(valid)
    return [(i, False) for i in valid] + [(valid[r], True) for r in range(repeats)]
