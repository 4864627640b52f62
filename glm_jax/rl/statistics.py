"""Means with confidence intervals by the bootstrap, stratified by environment. numpy only.

The overall mean is the mean of the environments' means, whatever number of tasks each has. Tasks are resampled within their environment,
since the environments are chosen and only the tasks are drawn. The intervals are percentile intervals (Efron and Tibshirani, 1993, ch. 13).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_DRAWN = 1_000_000  # indices drawn at once: bounds the memory


def paired_interval(
    a: Sequence[float],
    b: Sequence[float],
    level: float = 0.95,
    seed: int = 0,
    draws: int = 10_000,
    groups: Sequence[str] | None = None,
) -> tuple[float, float, float]:
    """(mean, low, high) of the differences a − b; a[i] and b[i] are of the same task. Otherwise as `mean_interval`.

    What a task contributes to both alike cancels, so that the interval is narrower than one from two separate columns.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"pairs are of the same tasks in the same order: got {a.shape} and {b.shape}")
    return mean_interval(a - b, level, seed, draws, groups)


def mean_interval(
    values: Sequence[float],
    level: float = 0.95,
    seed: int = 0,
    draws: int = 10_000,
    groups: Sequence[str] | None = None,
) -> tuple[float, float, float]:
    """(mean, low, high): mean of `values` [N], one a task, and its interval of confidence `level`.

    groups: [N], the environment of each task; None: all of one. Deterministic in `seed`. The interval of a single task, or of equal values,
    has no width: it says nothing then. ValueError for no values, values that are not finite, or a `level` outside (0, 1).
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise ValueError(f"needs one finite number a task, and at least one: got {values}")
    if not 0 < level < 1 or draws < 1:
        raise ValueError(f"level={level} must lie between 0 and 1, and draws={draws} be at least 1")
    of = np.zeros(len(values)) if groups is None else np.asarray(groups)
    if of.shape != values.shape:
        raise ValueError(f"groups name the environment of each of the {len(values)} tasks: got {of.shape}")
    rng = np.random.default_rng(seed)
    strata = [values[of == group] for group in np.unique(of)]
    mean = np.mean([stratum.mean() for stratum in strata])
    resampled = np.mean([_resampled_means(stratum, draws, rng) for stratum in strata], axis=0)
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return float(mean), float(low), float(high)


def _resampled_means(values: np.ndarray, draws: int, rng: np.random.Generator) -> np.ndarray:
    """float64 [draws]: means of samples of values, with replacement, as many as there are."""
    at_once = max(1, _DRAWN // len(values))
    sizes = [min(at_once, draws - start) for start in range(0, draws, at_once)]
    return np.concatenate([values[rng.integers(len(values), size=(size, len(values)))].mean(axis=1) for size in sizes])
