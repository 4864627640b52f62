"""AdamW with warm-up, clipping, decay of matrices only, and freezing by path."""

from __future__ import annotations

from typing import Any

import jax
import optax

UNDECAYED = ("norm", "norm_gain", "_bias", "embedding")  # how their names end


def path_name(path: tuple) -> str:
    return "/".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)


def adamw(
    learning_rate: float, *, warmup_steps: int = 0, weight_decay: float = 0.0, b1: float = 0.9, b2: float = 0.95, clip: float = 1.0,
    frozen: tuple[str, ...] = ("router_bias",), first_moment_dtype: Any = None,
) -> optax.GradientTransformation:
    """AdamW at a constant rate after a linear warm-up from 0. `frozen`: weights whose path contains one of these names never change.

    `first_moment_dtype`: what the mean of the gradients is stored as, by default the weights' type.
    """
    schedule = optax.join_schedules(
        [optax.linear_schedule(0.0, learning_rate, max(warmup_steps, 1)), optax.constant_schedule(learning_rate)], [warmup_steps])

    def decayed(tree):
        return jax.tree_util.tree_map_with_path(lambda path, _: not path_name(path).endswith(UNDECAYED), tree)

    def label(tree):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "frozen" if any(name in path_name(path).split("/") for name in frozen) else "trained", tree)

    trained = optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(schedule, b1=b1, b2=b2, eps=1e-8, weight_decay=weight_decay, mask=decayed, mu_dtype=first_moment_dtype))
    return optax.partition({"trained": trained, "frozen": optax.set_to_zero()}, label)
