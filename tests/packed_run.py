"""Rows of sequences through one compiled update that keeps the gradients, for tests of what packing and microbatches must not change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_model import VOCAB

from glm_jax.training.mtp_loss import mtp_tokens
from glm_jax.training.objectives import supervised_loss
from glm_jax.training.step import build_update, init_state

LENGTH = 10

# An optimizer that changes nothing and keeps the gradients it is given, for the test to read.
KEEP_GRADIENTS = optax.GradientTransformation(
    init=lambda model: jax.tree.map(jnp.zeros_like, model),
    update=lambda gradients, state, model: (jax.tree.map(jnp.zeros_like, gradients), gradients))


def sequence(seed, length):
    """(tokens, loss mask) of a sequence; its first token is not trained."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, length, np.int32), np.concatenate([[0], rng.random(length - 1) < 0.6]).astype(np.float32)


A, B, C = sequence(0, 6), sequence(1, 4), sequence(2, 9)


def arguments(*microbatches, shape=(2, 2, LENGTH)):
    """(batch, shared, microbatches) for lists of rows that are lists of sequences; `shape` has room for more, [M, rows, T]."""
    batch = {"tokens": np.zeros(shape, np.int32), "segment_ids": np.zeros(shape, np.int32), "loss_mask": np.zeros(shape, np.float32)}
    for m, rows in enumerate(microbatches):
        for r, sequences in enumerate(rows):
            start = 0
            for number, (tokens, mask) in enumerate(sequences, 1):
                place = m, r, slice(start, start := start + len(tokens))
                batch["tokens"][place], batch["loss_mask"][place], batch["segment_ids"][place] = tokens, mask, number
    shared = {
        "loss_tokens": batch["loss_mask"].sum(), "real_tokens": np.float32((batch["segment_ids"] > 0).sum()),
        "sequences": np.float32(sum(len(row) for rows in microbatches for row in rows))}
    return batch, shared, np.int32(len(microbatches))


def unoptimised(jitted, *given):
    """The function compiled for these arguments in the shortest time."""
    return jitted.lower(*given).compile(compiler_options={"xla_backend_optimization_level": 0})


def compiled_run(model, bias_rate=0.0, **objective):
    """run(microbatch, ...) -> metrics, gradients, the model after; compiled once, without optimisation."""
    update = build_update(functools.partial(supervised_loss, dense_attention=False, **objective), KEEP_GRADIENTS, bias_rate)
    program = None

    def run(*microbatches):
        nonlocal program
        batch, shared, count = arguments(*microbatches)
        if steps := objective.get("mtp_steps", 0):
            shared["mtp_tokens"] = mtp_tokens(batch["segment_ids"], batch["loss_mask"], steps)
        given = init_state(model, KEEP_GRADIENTS), batch, shared, count
        if program is None:
            program = unoptimised(update, *given)
        state, metrics = program(*given)
        return jax.tree.map(np.asarray, metrics), state.optimizer, state.model

    return run


def assert_same(found, wanted):
    """Metrics, and gradients within 1e-6 of the largest one."""
    for name, value in wanted[0].items():
        assert found[0][name] == pytest.approx(value, rel=3e-6), name
    largest = max(np.abs(g).max(initial=0) for g in map(np.asarray, jax.tree.leaves(wanted[1])))
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * largest)
