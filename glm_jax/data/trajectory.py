"""The record of one rollout: token ids from end to end, text is derived from them and never tokenised again.

JAX-free, so that environments, gateways and learners speak it without loading an accelerator runtime.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np


class Status(enum.Enum):
    """How a rollout ended. Only what the policy caused is trained; an environment's failure is never a reward of 0."""

    COMPLETED = "completed"  # the environment ended the episode
    TRUNCATED = "truncated"  # the policy ran out of turns or of context: its own doing
    ENVIRONMENT_FAILURE = "environment_failure"  # a tool, sandbox or worker broke
    VERIFIER_ERROR = "verifier_error"  # the reward could not be computed
    CANCELLED = "cancelled"  # the run stopped it

    @property
    def trainable(self) -> bool:
        return self in (Status.COMPLETED, Status.TRUNCATED)


@dataclasses.dataclass(frozen=True)
class Segment:
    """A contiguous token sequence of a rollout, one row for the model. L tokens; entry t describes token t.

    tokens      int32 [L]
    loss_mask   uint8 [L]    1 where the policy sampled the token
    logp        float32 [L]  behaviour log-probability of the token, 0 where it was not sampled
    versions    int32 [L]    weight version that sampled the token, -1 where it was not sampled
    experts     int16 [L, MoE layers, experts per token] or None   experts used when the token was fed, -1: not recorded
    selections  int16 [L, full layers, index_topk] or None        key positions selected when the token was fed, ascending, -1 last
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    logp: np.ndarray
    versions: np.ndarray
    experts: np.ndarray | None = None
    selections: np.ndarray | None = None

    def __post_init__(self):
        length = len(self.tokens)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and len(value) != length:
                raise ValueError(f"segment of {length} tokens has {field.name} of length {len(value)}")

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One attempt at a prompt. `reward` means something only where `status.trainable`."""

    rollout_id: int
    prompt_id: int
    environment: str
    segments: tuple[Segment, ...]
    reward: float
    status: Status
    attempt: int = 0  # how often this rollout had been issued before
    task_seed: int = 0
    started: float = 0.0  # seconds since the epoch
    finished: float = 0.0

    @property
    def oldest_version(self) -> int:
        """Oldest weight version in the trajectory; -1 when nothing was sampled."""
        sampled = [s.versions[s.versions >= 0] for s in self.segments]
        sampled = [v.min() for v in sampled if v.size]
        return int(min(sampled)) if sampled else -1

    @property
    def token_count(self) -> int:
        return sum(len(s) for s in self.segments)

    @property
    def sampled_count(self) -> int:
        return int(sum(s.loss_mask.sum() for s in self.segments))
