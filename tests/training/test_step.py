"""One update: its loss and metrics against the equations, and what must not change them (microbatches, packing)."""

import functools

import glm_oracle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_model import VOCAB, random_model, small_config

from glm_jax.data.packing import pack_segments
from glm_jax.data.trajectory import Segment
from glm_jax.training.objectives import supervised_loss
from glm_jax.training.optimizers import adamw, path_name
from glm_jax.training.step import build_update, init_state, supervised_inputs

LENGTH, COEFFICIENT = 10, 0.5

# An optimizer that changes nothing and keeps the gradients it is given, for the test to read.
KEEP_GRADIENTS = optax.GradientTransformation(
    init=lambda model: jax.tree.map(jnp.zeros_like, model),
    update=lambda gradients, state, model: (jax.tree.map(jnp.zeros_like, gradients), gradients))


@pytest.fixture(scope="module")
def model():
    return random_model(small_config())


@pytest.fixture(scope="module")
def run(model):
    """run(microbatch, ...) -> metrics, gradients, for lists of rows that are lists of (tokens, mask). One shape, so one compilation."""
    update = build_update(functools.partial(supervised_loss, dense_attention=False, indexer_coefficient=COEFFICIENT), KEEP_GRADIENTS)

    def run(*microbatches):
        batch = {"tokens": np.zeros((2, 2, LENGTH), np.int32), "segment_ids": np.zeros((2, 2, LENGTH), np.int32),
                 "loss_mask": np.zeros((2, 2, LENGTH), np.float32)}
        for m, rows in enumerate(microbatches):
            for r, segments in enumerate(rows):
                start = 0
                for number, (tokens, mask) in enumerate(segments, 1):
                    place = m, r, slice(start, start := start + len(tokens))
                    batch["tokens"][place], batch["loss_mask"][place], batch["segment_ids"][place] = tokens, mask, number
        shared = {"loss_tokens": batch["loss_mask"].sum(), "real_tokens": np.float32((batch["segment_ids"] > 0).sum())}
        state, metrics = update(init_state(model, KEEP_GRADIENTS), batch, shared, np.int32(len(microbatches)))
        assert int(state.step) == 1
        return {name: float(value) for name, value in metrics.items()}, state.optimizer

    return run


def segment(seed, length):
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, length, np.int32), np.concatenate([[0], rng.random(length - 1) < 0.6]).astype(np.float32)


A, B, C = segment(0, 6), segment(1, 4), segment(2, 9)


def assert_same(found, wanted):
    """Metrics, and gradients within 1e-6 of the largest one."""
    for name, value in wanted[0].items():
        assert found[0][name] == pytest.approx(value, rel=2e-6), name
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(wanted[1]))
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * largest)


@pytest.fixture(scope="module")
def together(run):
    """A and B in a row of their own, one microbatch."""
    return run([[A], [B]])


def test_loss_and_metrics_are_those_of_the_equations(model, run):
    metrics, gradients = run([[A, B], [C]])
    nll = correct = kl = 0.0
    for tokens, mask in (A, B, C):
        oracle = glm_oracle.forward(model, tokens)
        for t in range(1, len(tokens)):
            p = np.exp(oracle.logits[t - 1] - oracle.logits[t - 1].max())
            nll -= mask[t] * np.log(p[tokens[t]] / p.sum())
            correct += mask[t] * (p.argmax() == tokens[t])
        kl += oracle.indexer_kl.sum()
    loss_tokens, real_tokens = sum(mask.sum() for _, mask in (A, B, C)), 19
    wanted = {
        "nll": nll, "loss_tokens": loss_tokens, "correct_tokens": correct, "indexer_kl": kl, "real_tokens": real_tokens,
        "loss": nll / loss_tokens + COEFFICIENT * kl / real_tokens,
        "gradient_norm": np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in map(np.asarray, jax.tree.leaves(gradients))))}
    assert metrics == pytest.approx(wanted, rel=2e-5)


def test_microbatches_change_nothing(run, together):
    assert_same(run([[A]], [[B]]), together)
    assert_same(run([[], [B]], [[A]]), together)


def test_packing_changes_nothing(run, together):
    assert_same(run([[A, B]]), together)
    assert_same(run([[], [B, A]]), together)


def squares(model, batch):
    """A cheap objective with a gradient for every weight, the router's bias too."""
    rows = batch["weight"].sum()
    return rows * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(model)), {"rows": rows}


def test_updates_leave_the_given_model_and_the_frozen_weights_alone(model):
    optimizer = adamw(1e-2, weight_decay=0.1, frozen=("router_bias", "indexer"))
    update = build_update(squares, optimizer)
    before = jax.tree.map(np.array, model)
    state = first = init_state(model, optimizer)
    for _ in range(3):
        state, metrics = update(state, {"weight": np.ones((4, 2), np.float32)}, {}, np.int32(3))
    assert int(state.step) == 3 and float(metrics["rows"]) == 6  # three microbatches of four
    assert first.model.embedding.is_deleted()
    for (path, old), given, new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(model), jax.tree.leaves(state.model), strict=True):
        np.testing.assert_array_equal(given, old)
        names = path_name(path).split("/")
        assert (np.asarray(new) == old).all() == ("router_bias" in names or "indexer" in names), names


def packed(*segments, rows):
    nothing = lambda tokens, dtype: np.zeros(len(tokens), dtype)
    records = [Segment(tokens, mask.astype(np.uint8), nothing(tokens, np.float32), nothing(tokens, np.int32)) for tokens, mask in segments]
    return pack_segments(records, LENGTH, rows)


def test_supervised_inputs_are_one_microbatch():
    arrays, shared, microbatches = supervised_inputs(packed(A, C, rows=3))
    assert {name: value.shape for name, value in arrays.items()} == dict.fromkeys(("tokens", "segment_ids", "loss_mask"), (1, 3, LENGTH))
    assert shared == {"loss_tokens": A[1].sum() + C[1].sum(), "real_tokens": 15, "sequences": 2} and microbatches == 1


def test_a_batch_that_trains_nothing_is_refused():
    with pytest.raises(ValueError, match=r"no token of the batch \(1, 10\) has loss mask 1"):
        supervised_inputs(packed((A[0], 0 * A[1]), rows=1))
