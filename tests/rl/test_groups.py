"""The group rule, over every group of up to six rollouts."""

import dataclasses
import itertools

import pytest

from glm_jax.data.trajectory import Status
from glm_jax.rl.groups import fill_group


@dataclasses.dataclass
class Outcome:
    status: Status
    oldest_version: int


VALID = Outcome(Status.COMPLETED, 8)
KINDS = [
    VALID,
    Outcome(Status.TRUNCATED, 10),
    Outcome(Status.ENVIRONMENT_FAILURE, 10),
    Outcome(Status.COMPLETED, 7),  # stale
    Outcome(Status.TRUNCATED, -1),  # nothing sampled
]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_group(size):
    for outcomes in itertools.product(KINDS, repeat=size):
        valid = [i for i, o in enumerate(outcomes) if o in KINDS[:2]]
        filled = fill_group(outcomes, size, current_version=10, max_staleness=2)
        if len(valid) * 2 <= size:
            assert filled == []
            continue
        assert len(filled) == size
        assert [i for i, repeat in filled if not repeat] == valid
        repeats = [i for i, repeat in filled if repeat]
        assert repeats == valid[: len(repeats)], "fewer than the valid ones, so none is repeated twice"


def test_every_status_but_the_policys_own_is_failed():
    for status in Status:
        filled = fill_group([Outcome(status, 10)], 1, 10, 0)
        assert bool(filled) == (status in (Status.COMPLETED, Status.TRUNCATED))


def test_missing_rollouts_count_as_failed():
    assert fill_group([VALID, VALID], 4, 10, 2) == []
    assert fill_group([VALID, VALID, VALID], 4, 10, 2) == [(0, False), (1, False), (2, False), (0, True)]
    with pytest.raises(ValueError, match="3 rollouts in a group of 2"):
        fill_group([VALID] * 3, 2, 10, 2)
