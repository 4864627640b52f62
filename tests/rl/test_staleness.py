"""Admission keeps the promise it is for, and never stops the run."""

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_jax.rl.staleness import Admission, is_stale

settings_of = {"max_staleness": st.integers(0, 3), "publish_every": st.integers(1, 3), "batch": st.integers(1, 4)}


@given(oldest=st.integers(0, 20), age=st.integers(0, 20), bound=st.integers(0, 20))
def test_is_stale(oldest, age, bound):
    assert is_stale(oldest, oldest + age, bound) == (age > bound)
    assert not is_stale(-1, oldest, bound)


@given(**settings_of, seed=st.integers(0, 1000), drop=st.sampled_from([0.0, 0.3]))
def test_in_order_training_is_never_over_stale_and_always_goes_on(max_staleness, publish_every, batch, seed, drop):
    """Rollouts are started whenever admission lets them, at any point between two updates, and trained in the order of their start."""
    rng = random.Random(seed)
    admission = Admission(max_staleness, publish_every, batch)
    version, queue, worst = 0, [], 0
    for update in range(60):
        for _ in range(rng.choice([0, 1, admission.limit])):
            if admission.try_admit(1):
                queue.append(version)
        dropped = [start for start in queue if rng.random() < drop]
        for start in dropped:
            queue.remove(start)
            admission.dropped(1)
        assert admission.unpublished == len(queue) + admission.trained_unpublished <= admission.limit
        while len(queue) < batch:
            assert admission.try_admit(1), "the learner waits for a batch that may not be started"
            queue.append(version)
        trained, queue = queue[:batch], queue[batch:]
        worst = max(worst, *(version - start for start in trained))
        admission.trained(batch)
        if (update + 1) % publish_every == 0:
            admission.published()
            version += 1
    assert worst <= max_staleness


def test_the_limit_is_reached_and_tight():
    """With one rollout more the bound would break: the last admitted is trained exactly max_staleness versions later."""
    for max_staleness, publish_every, batch in [(0, 1, 4), (1, 2, 3), (2, 1, 1)]:
        admission = Admission(max_staleness, publish_every, batch)
        assert admission.limit == (max_staleness + 1) * publish_every * batch
        assert admission.try_admit(admission.limit) and not admission.try_admit(1)
        last_batch = (admission.limit - 1) // batch
        assert last_batch // publish_every == max_staleness and admission.limit // batch // publish_every == max_staleness + 1


def test_sync_is_the_bound_of_one_batch():
    admission = Admission(max_staleness=0, publish_every=1, batch_rollouts=4)
    assert admission.try_admit(4)
    admission.trained(4)
    assert not admission.try_admit(1), "trained with weights that are not out yet"
    admission.published()
    assert admission.try_admit(4)


def test_the_bound_survives_a_restart():
    before = Admission(1, 2, 2)
    before.try_admit(7)
    before.trained(2)
    after = Admission(1, 2, 2, live=5, trained=before.trained_unpublished)
    assert (after.unpublished, after.limit) == (before.unpublished, before.limit)
    after.published()
    assert after.unpublished == 5


def test_threads_never_pass_the_limit():
    admission = Admission(3, 4, 16)
    admitted = []

    def admit():
        while admission.try_admit(1):
            admitted.append(1)

    threads = [threading.Thread(target=admit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(admitted) == admission.limit == admission.unpublished


def test_refusals():
    with pytest.raises(ValueError, match="never be admitted"):
        Admission(0, 1, 4).try_admit(5)
    for wrong in [(-1, 1, 1), (0, 0, 1), (0, 1, 0)]:
        with pytest.raises(ValueError, match="must hold"):
            Admission(*wrong)
