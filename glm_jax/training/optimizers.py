"""AdamW with warm-up, clipping, decay of matrices only, and freezing by path."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

UNDECAYED = ("norm", "norm_gain", "_bias", "embedding")  # how their names end


def path_name(path: tuple) -> str:
    return "/".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)


def adamw(
    learning_rate: float, *, warmup_steps: int = 0, weight_decay: float = 0.0, b1: float = 0.9, b2: float = 0.95, clip: float = 1.0,
    frozen: tuple[str, ...] = ("router_bias",), moments_dtype: Any = None,
) -> optax.GradientTransformation:
    """AdamW at a constant rate after a linear warm-up from 0. `frozen`: weights whose path contains one of these names never change.

    `moments_dtype`: what both moments are stored as, by default the weights' type (DeepSeek-V3 §3.3.3: bfloat16).
    """
    schedule = optax.join_schedules(
        [optax.linear_schedule(0.0, learning_rate, max(warmup_steps, 1)), optax.constant_schedule(learning_rate)], [warmup_steps])

    def decayed(tree):
        return jax.tree_util.tree_map_with_path(lambda path, _: not path_name(path).endswith(UNDECAYED), tree)

    def label(tree):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "frozen" if any(name in path_name(path).split("/") for name in frozen) else "trained", tree)

    rule = optax.adamw(schedule, b1=b1, b2=b2, eps=1e-8, weight_decay=weight_decay, mask=decayed)
    if moments_dtype is not None:
        rule = stored_as(rule, moments_dtype)
    trained = optax.chain(optax.clip_by_global_norm(clip), rule)
    return optax.partition({"trained": trained, "frozen": optax.set_to_zero()}, label)


def stored_as(optimizer: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformation:
    """The same, whose state's floating-point arrays are stored as `dtype` between updates, which compute with them in float32."""

    def cast(state, dtype):
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    def update(gradients, state, weights=None):
        changes, state = optimizer.update(gradients, cast(state, jnp.float32), weights)
        return changes, cast(state, dtype)

    return optax.GradientTransformation(lambda weights: cast(optimizer.init(weights), dtype), update)
