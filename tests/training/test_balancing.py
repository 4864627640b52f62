"""Expert loads, the biases that follow them, and the sequence-wise balance loss, against counts and equations written out."""

import dataclasses

import glm_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_run import A, B, C, assert_same, compiled_run, unoptimised
from small_model import random_model, small_config

from glm_jax.model import MTPConfig
from glm_jax.model.moe import route, sequence_balance
from glm_jax.training.balancing import balanced, expert_load, load_violation, moved_bias
from glm_jax.training.optimizers import adamw, path_name
from glm_jax.training.step import build_update, init_state

CONFIG = small_config()
BALANCE, RATE = 0.4, 1e-3


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


@pytest.fixture(scope="module")
def run(model):
    return compiled_run(model, bias_rate=RATE, indexer_coefficient=0.0, balance_coefficient=BALANCE, count_experts=True)


def test_load_counts_the_real_tokens():
    rng = np.random.default_rng(0)
    experts, real = rng.integers(0, 5, (3, 2, 4, 2)), rng.random((2, 4)) < 0.6
    wanted = np.zeros((3, 5), int)
    for layer, row, t, k in np.ndindex(experts.shape):
        wanted[layer, experts[layer, row, t, k]] += real[row, t]
    found = expert_load(jnp.asarray(experts), jnp.asarray(real), 5)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, wanted)


def test_biases_move_by_the_rate_and_only_where_the_load_is_not_the_mean():
    # Means: 4, 2.25 (no integer), 0, and one too large for float32, as its product with the number of experts is for int32.
    load = jnp.array([[4, 3, 5, 4], [2, 3, 4, 0], [0, 0, 0, 0], [2**28, 2**28 + 1, 2**28 - 1, 2**28]], jnp.int32)
    bias = jnp.asarray(np.random.default_rng(0).normal(size=load.shape) + 7, jnp.float32)
    direction = np.array([[0, 1, -1, 0], [1, -1, -1, 1], [0, 0, 0, 0], [0, -1, 1, 0]], np.float32)
    found = moved_bias(bias, load, RATE)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.asarray(bias) + np.float32(RATE) * direction)


def test_an_update_moves_every_bias_against_the_load_of_all_its_microbatches(model, run):
    metrics, gradients, after = run([[A], [B]], [[C]])
    load = np.zeros((CONFIG.moe_layers, CONFIG.moe.experts), int)
    for tokens, _ in (A, B, C):
        for layer, experts in glm_oracle.forward(model, tokens).routing.items():
            np.add.at(load[layer - CONFIG.dense_layers], experts, 1)
    np.testing.assert_array_equal(metrics["expert_load"], load)
    before = np.asarray(model.moe_layers.moe.router_bias)
    wanted = before + np.float32(RATE) * np.sign(load.mean(axis=1, keepdims=True) - load).astype(np.float32)
    np.testing.assert_array_equal(after.moe_layers.moe.router_bias, wanted)
    assert (wanted != before).any()
    assert not np.asarray(gradients.moe_layers.moe.router_bias).any()
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(model), jax.tree.leaves(after), strict=True):
        if not path_name(path).endswith("router_bias"):
            np.testing.assert_array_equal(new, old)


def counted(model, batch):
    """A cheap objective with a gradient for every weight; the batch says what the loads are."""
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(model)), {name: value for name, value in batch.items() if name.endswith("load")}


def test_the_optimizer_leaves_the_biases_to_the_loads():
    model = random_model(dataclasses.replace(CONFIG, mtp=MTPConfig()))
    optimizer = adamw(1e-2, weight_decay=0.1)
    loads = {"expert_load": [[1, 0, 0, 0, 0], [0, 1, 1, 1, 2]], "mtp_expert_load": [[3, 0, 1, 1, 0]]}
    batch = {name: np.array([load, load], np.int32) for name, load in loads.items()}
    state = init_state(model, optimizer)
    update = unoptimised(build_update(counted, optimizer, RATE), state, batch, {}, np.int32(2))
    for _ in range(2):
        state, _ = update(state, batch, {}, np.int32(2))
    for bias, old, direction in (
        (state.model.moe_layers.moe.router_bias, model.moe_layers.moe.router_bias, [[-1, 1, 1, 1, 1], [1, 0, 0, 0, -1]]),
        (state.model.mtp.layer.moe.router_bias, model.mtp.layer.moe.router_bias, [[-1, 1, 0, 0, 1]])):
        once = np.float32(RATE) * np.array(direction, np.float32)
        np.testing.assert_array_equal(bias, (np.asarray(old) + once) + once)
    assert (np.asarray(state.model.moe_layers.moe.router) != np.asarray(model.moe_layers.moe.router)).all()


def test_a_rate_without_counts_is_refused(model):
    with pytest.raises(ValueError, match="count_experts=True"):
        balanced(model, {"loss": jnp.zeros(())}, RATE)


def test_biases_even_out_a_router_that_prefers_some_experts(model):
    """arXiv 2408.15664: the violation falls, while gates stay the router's own."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(256, CONFIG.hidden_size)), jnp.float32)
    router = model.moe_layers.moe.router[0] + 0.1 * x.mean(axis=0)[:, None]
    bias = jnp.array([1.0, 0.5, 0, -0.5, -1], jnp.float32)

    @jax.jit
    def step(bias):
        experts, _, _ = route(CONFIG, x, router, bias, None)
        load = expert_load(experts[None], jnp.ones((1, len(x)), bool), CONFIG.moe.experts)
        return moved_bias(bias, load, 2e-2), load

    violations = []
    for _ in range(100):
        bias, load = step(bias)
        violations.append(load_violation(np.asarray(load)[None]))
    assert violations[0] > 1 and max(violations[-10:]) < 0.2


def test_violation_is_the_fullest_experts_share_above_the_mean():
    assert load_violation(np.array([[4, 0, 2, 2], [1, 1, 1, 1]])) == 0.5
    assert load_violation(np.zeros((1, 4), np.int32)) == -1  # no token, no expert at its mean


ROWS = np.array([
    [1, 1, 1, 2, 2, 2, 2, 2, 0, 0],  # packed, padding at the end
    [0, 0, 1, 1, 0, 1, 0, 2, 3, 3],  # padding first, in the middle of a sequence, and between two
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
], np.int32)


def test_balance_of_each_sequence_is_that_of_the_equations():
    rng = np.random.default_rng(0)
    scores = glm_oracle.sigmoid(2 * rng.normal(size=(*ROWS.shape, CONFIG.moe.experts)))
    balance = jax.jit(lambda scores: sequence_balance(CONFIG, scores, jnp.asarray(ROWS)))
    found = np.asarray(balance(jnp.asarray(scores, jnp.float32)))
    assert found.dtype == np.float32 and not found[ROWS == 0].any()
    for row, segments in enumerate(ROWS):
        for number in set(segments[segments != 0]):
            wanted = glm_oracle.sequence_balance(CONFIG, scores[row][segments == number])
            assert found[row][segments == number].sum() == pytest.approx(wanted, rel=1e-6)

    total = lambda scores: sum(
        glm_oracle.sequence_balance(CONFIG, scores[row][ROWS[row] == number]) for row in range(2) for number in set(ROWS[row]) - {0})
    gradient = jax.jit(jax.grad(lambda scores: balance(scores).sum()))(jnp.asarray(scores, jnp.float32))
    direction = rng.normal(size=scores.shape)
    slope = (total(scores + 1e-6 * direction) - total(scores - 1e-6 * direction)) / 2e-6
    assert float(np.sum(np.asarray(gradient, np.float64) * direction)) == pytest.approx(slope, rel=1e-5)


def test_equal_loads_and_scores_give_one():
    """K of E experts used alike: f_i = 1 and sum_i P_i = 1."""
    scores = np.full((1, 10, CONFIG.moe.experts), 0.4, np.float32)
    for t in range(10):
        scores[0, t, (np.arange(2) + 2 * t) % 5] += 1e-6
    balance = jax.jit(lambda scores: sequence_balance(CONFIG, scores, jnp.ones((1, 10), jnp.int32)).sum())
    assert float(balance(scores)) == pytest.approx(1, abs=1e-5)


def test_the_balance_loss_of_an_update_is_the_mean_over_its_sequences(model, run):
    metrics, _, _ = run([[A, B], [C]])
    nll = loss_tokens = balance = 0.0
    for tokens, mask in (A, B, C):
        out = glm_oracle.forward(model, tokens)
        nll -= sum(mask[t] * np.log(glm_oracle.softmax(out.logits[t - 1])[tokens[t]]) for t in range(1, len(tokens)))
        loss_tokens += mask.sum()
        balance += sum(glm_oracle.sequence_balance(CONFIG, scores) for scores in out.scores.values())
    assert metrics["balance"] == pytest.approx(balance, rel=1e-5) and metrics["sequences"] == 3
    assert metrics["loss"] == pytest.approx(nll / loss_tokens + BALANCE * balance / 3, rel=1e-5)


def test_packing_and_microbatches_change_neither_the_loss_nor_the_loads(run):
    together = run([[A], [B]])
    for rows in ([[[A, B]]], [[[], [B, A]]], [[[A]], [[B]]], [[[], [B]], [[A]]]):
        found = run(*rows)
        assert_same(found, together)
        np.testing.assert_array_equal(found[2].moe_layers.moe.router_bias, together[2].moe_layers.moe.router_bias)
