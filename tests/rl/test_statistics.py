"""Intervals against what is known in closed form."""

import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_jax.rl.statistics import mean_interval, paired_interval

columns = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30)


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
def test_large_samples_agree_with_the_normal_approximation(level):
    values = np.random.default_rng(0).normal(0.3, 2, 400)
    mean, low, high = mean_interval(values, level)
    half = statistics.NormalDist().inv_cdf((1 + level) / 2) * values.std() / np.sqrt(len(values))
    assert mean == pytest.approx(values.mean())
    assert (low, high) == (pytest.approx(mean - half, abs=0.06 * half), pytest.approx(mean + half, abs=0.06 * half))


def test_strata_weigh_the_same_and_their_variances_add():
    rng = np.random.default_rng(1)
    strata = {"a": rng.normal(1, 2, 900), "b": rng.normal(-1, 1, 100), "c": rng.normal(9, 3, 300)}
    values, groups = np.concatenate(list(strata.values())), np.repeat(list(strata), [len(v) for v in strata.values()])
    order = rng.permutation(len(values))
    mean, low, high = mean_interval(values[order], groups=groups[order])
    error = np.sqrt(sum(v.var() / len(v) for v in strata.values())) / 3  # differences between the strata do not enter
    assert mean == pytest.approx(np.mean([v.mean() for v in strata.values()]))
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.05)
    assert (high + low) / 2 == pytest.approx(mean, abs=0.1 * error)


def test_pairs_cancel_what_tasks_share():
    rng = np.random.default_rng(2)
    difficulty, noise = rng.normal(0, 10, 300), rng.normal(0, 0.1, 300)
    mean, low, high = paired_interval(difficulty + 0.5 + noise, difficulty)
    assert mean == pytest.approx(0.5 + noise.mean())
    assert (high - low) / 2 == pytest.approx(1.96 * noise.std() / np.sqrt(300), rel=0.06)


def test_coverage():
    rng = np.random.default_rng(3)
    inside = 0
    for trial in range(300):
        _, low, high = mean_interval(rng.normal(4, 1, 60), level=0.9, seed=trial, draws=500)
        inside += low <= 4 <= high
    assert inside / 300 == pytest.approx(0.9, abs=0.05)


@settings(deadline=None, max_examples=50)
@given(columns, st.integers(0, 5), st.data())
def test_invariants(values, seed, data):
    groups = data.draw(st.lists(st.sampled_from("abc"), min_size=len(values), max_size=len(values)))
    mean, low, high = mean_interval(values, seed=seed, draws=200, groups=groups)
    assert (mean, low, high) == mean_interval(values, seed=seed, draws=200, groups=groups)
    slack = 1e-9 * (1 + max(map(abs, values)))
    assert min(values) - slack <= low <= high <= max(values) + slack
    wide = mean_interval(values, level=0.99, seed=seed, draws=200, groups=groups)
    assert wide[1] <= low and high <= wide[2]
    shifted = paired_interval(np.add(values, 3), np.full(len(values), 3.0), seed=seed, draws=200, groups=groups)
    np.testing.assert_allclose(shifted, (mean, low, high), atol=1e-9 * 1e3)


def test_degenerate_columns_have_no_width():
    assert mean_interval([0.25]) == (0.25, 0.25, 0.25)
    assert mean_interval([1.0] * 50) == (1.0, 1.0, 1.0)
    assert paired_interval([1, 0, 1], [1, 0, 1], groups=["x", "y", "y"]) == (0.0, 0.0, 0.0)
    assert mean_interval([1, 0, 0, 0], groups=["one", "many", "many", "many"])[0] == 0.5


def test_memory_bound_changes_nothing(monkeypatch):
    values = np.random.default_rng(4).random(50)
    expected = mean_interval(values, draws=300)
    monkeypatch.setattr("glm_jax.rl.statistics._DRAWN", 120)
    np.testing.assert_allclose(mean_interval(values, draws=300), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: mean_interval([]), "at least one"),
        (lambda: mean_interval([1, float("nan")]), "finite"),
        (lambda: mean_interval([[1, 2]]), "one finite number a task"),
        (lambda: mean_interval([1], level=1.0), "level=1.0"),
        (lambda: mean_interval([1], draws=0), "draws=0"),
        (lambda: mean_interval([1, 2], groups=["a"]), "each of the 2 tasks"),
        (lambda: paired_interval([1, 2], [1]), "same tasks"),
    ],
)
def test_errors(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_imports_no_jax():
    program = "import sys, glm_jax.rl.statistics; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
