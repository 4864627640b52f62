"""Exact, deterministic top-k selection of key positions."""

from __future__ import annotations

from jax import Array

from pallas_kernels.dispatch import choose
from pallas_kernels.topk_select import reference, xla


def select_topk(scores_BxTxS: Array, k: int, *, implementation: str = "auto") -> Array:
    """Positions of the k highest scores of each query, int32 [B, T, min(k, S)], ascending, -1 last.

    Ties, 0.0 with -0.0 among them, go to the lowest position; a score of -inf is never selected. No gradient flows.
    """
    return choose("topk_select", implementation, {"reference": reference.select_topk, "xla": xla.select_topk})(scores_BxTxS, k)
