"""One jitted update: gradients accumulated over microbatches, then one optimizer step. Every phase of training goes through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import Array

from glm_jax.data.packing import PackedBatch
from glm_jax.model import Transformer
from glm_jax.training.balancing import balanced
from glm_jax.training.mtp_loss import mtp_tokens

Objective = Callable[[Transformer, dict[str, Array]], tuple[Array, dict[str, Array]]]
PER_TOKEN = ("tokens", "segment_ids", "loss_mask")


@struct.dataclass
class TrainState:
    """What an update reads and replaces; `step` counts updates, int32."""

    step: Array
    model: Transformer
    optimizer: Any


def init_state(model: Transformer, optimizer: optax.GradientTransformation) -> TrainState:
    """A state at step 0 that owns copies of the model's arrays, since an update donates them."""
    model = jax.tree.map(jnp.copy, model)
    return TrainState(step=jnp.zeros((), jnp.int32), model=model, optimizer=optimizer.init(model))


def build_update(objective: Objective, optimizer: optax.GradientTransformation, bias_rate: float = 0.0) -> Callable:
    """update(state, batch, shared, microbatches) -> (state, metrics); the state is donated.

    `batch` holds arrays [M, rows, T], of which the first `microbatches` (1 .. M; traced, so no recompilation) are used, one after another;
    where M is 1 there is no loop, and no memory for sums of gradients, which are float32 whatever the weights are. `shared` holds scalars
    that every microbatch sees. The objective returns a loss whose sum over microbatches is the update's loss, and metrics as sums, which
    are added (of names that end in `_max` the largest is kept, if above 0); the update's `loss` and `gradient_norm` (before clipping, over
    all weights) join them. A `bias_rate` moves the routers' biases after the optimizer's step, against the loads that the objective counts
    among its metrics, see `balanced`; the optimizer itself should leave them alone.
    """

    def update(state: TrainState, batch: dict[str, Array], shared: dict[str, Array], microbatches: Array) -> tuple[TrainState, dict]:
        def one(index):
            rows = {name: value[index] for name, value in batch.items()}
            return jax.value_and_grad(objective, has_aux=True)(state.model, rows | shared)

        def add(index, total):
            (loss, metrics), gradients = total
            (more_loss, more), more_gradients = one(index)
            merged = {name: (jnp.maximum if name.endswith("_max") else jnp.add)(metrics[name], more[name]) for name in metrics}
            return (loss + more_loss, merged), jax.tree.map(jnp.add, gradients, more_gradients)

        if jax.tree.leaves(batch)[0].shape[0] == 1:
            (loss, metrics), gradients = one(0)
        else:
            where = lambda s: None if jax.sharding.get_abstract_mesh().empty else s.sharding
            zero = lambda s, dtype=None: jnp.zeros(s.shape, dtype or s.dtype, out_sharding=where(s))
            sums, like = jax.eval_shape(one, 0)
            zeros = jax.tree.map(zero, sums), jax.tree.map(lambda s: zero(s, jnp.float32), like)
            (loss, metrics), gradients = jax.lax.fori_loop(0, microbatches, add, zeros)
            gradients = jax.tree.map(lambda g, s: g.astype(s.dtype), gradients, like)
        changes, optimizer_state = optimizer.update(gradients, state.optimizer, state.model)
        metrics |= {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        model = optax.apply_updates(state.model, changes)
        if bias_rate:
            model = balanced(model, metrics, bias_rate)
        return TrainState(state.step + 1, model, optimizer_state), metrics

    return jax.jit(update, donate_argnums=0)


def supervised_inputs(batch: PackedBatch, mtp_steps: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """The arguments (batch, shared, microbatches) of an update with `supervised_loss` for one packed batch as a single microbatch.

    Raises ValueError when no token of it is trained: the mean over none would make every weight NaN.
    """
    if not batch.loss_mask.any():
        raise ValueError(f"no token of the batch {batch.tokens.shape} has loss mask 1: there is nothing to train on")
    arrays = {name: getattr(batch, name)[None] for name in PER_TOKEN}
    shared = {
        "loss_tokens": np.float32(batch.loss_mask.sum()), "real_tokens": np.float32((batch.segment_ids != 0).sum()),
        "sequences": np.float32(batch.segment_ids.max(axis=1).sum())}
    if mtp_steps:
        shared["mtp_tokens"] = mtp_tokens(batch.segment_ids, batch.loss_mask, mtp_steps)
    return arrays, shared, np.int32(1)
