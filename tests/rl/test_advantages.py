"""Advantages against their definitions, rollout by rollout."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_jax.rl.advantages import KINDS, group_advantages

rewards = st.one_of(st.sampled_from([0.0, 1.0, 0.1]), st.floats(-100, 100, width=32))
rollouts = st.lists(st.tuples(rewards, st.integers(0, 3), st.booleans()), min_size=1, max_size=12)


def brute_force(rewards, groups, valid, kind):
    out = []
    for i, reward in enumerate(rewards):
        members = [float(r) for r, g, v in zip(rewards, groups, valid, strict=True) if v and g == groups[i]]
        if not valid[i] or len(set(members)) == 1:
            out.append(0.0)
        elif kind == "leave_one_out":
            out.append(reward - (sum(members) - reward) / (len(members) - 1))
        else:
            out.append((reward - np.mean(members)) / (np.std(members) if kind == "mean_std" else 1))
    return out


@pytest.mark.parametrize("kind", KINDS)
@given(rollouts=rollouts)
def test_equals_the_definition(kind, rollouts):
    rewards, groups, valid = zip(*rollouts, strict=True)
    got = group_advantages(rewards, groups, valid, kind)
    assert got.dtype == np.float32 and got.shape == (len(rewards),)
    np.testing.assert_allclose(got, brute_force(rewards, groups, valid, kind), rtol=1e-4, atol=1e-5)
    assert not got[~np.array(valid)].any()


@pytest.mark.parametrize("kind", KINDS)
@given(reward=st.floats(-1e6, 1e6), size=st.integers(1, 9))
def test_equal_rewards_are_exactly_zero(kind, reward, size):
    assert not group_advantages([reward] * size, [5] * size, [True] * size, kind).any()


@pytest.mark.parametrize("kind", KINDS)
@given(rollouts=rollouts, seed=st.integers(0, 100))
def test_order_does_not_matter_and_other_groups_do_not_either(kind, rollouts, seed):
    rewards, groups, valid = (np.array(x) for x in zip(*rollouts, strict=True))
    whole = group_advantages(rewards, groups, valid, kind)
    order = np.random.default_rng(seed).permutation(len(rewards))
    np.testing.assert_allclose(group_advantages(rewards[order], groups[order], valid[order], kind), whole[order], rtol=1e-6, atol=1e-7)
    alone = groups == groups[0]
    np.testing.assert_array_equal(group_advantages(rewards[alone], groups[alone], valid[alone], kind), whole[alone])


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_rewards_move_nothing(kind):
    valid = [True, True, True, False]
    expected = group_advantages([1, 0, 0, 0], [0] * 4, valid, kind)
    for poison in (np.nan, np.inf, 1e30):
        np.testing.assert_array_equal(group_advantages([1, 0, 0, poison], [0] * 4, valid, kind), expected)


def test_tiny_differences_stay_bounded():
    got = group_advantages([1e-310, 0, 0, 0], [0] * 4, [True] * 4, "mean_std")
    np.testing.assert_allclose(got, [3**0.5, *[-(3**-0.5)] * 3], rtol=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match="known: mean, mean_std, leave_one_out"):
        group_advantages([1.0], [0], [True], "median")
    with pytest.raises(ValueError, match="must all be"):
        group_advantages([1.0, 2.0], [[0], [0]], [True, True], "mean")
    with pytest.raises(ValueError, match=r"\[1\] are valid but not finite"):
        group_advantages([1.0, np.nan], [0, 0], [True, True], "mean")
