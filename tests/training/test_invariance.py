"""What must not change an update: how sequences lie in rows, rows in microbatches, microbatches on devices. All losses on, latent attention
with shared indexers, experts, a further token; without a mesh and on one over rows, experts and heads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from packed_run import KEEP_GRADIENTS, arguments, sequence, unoptimised
from small_model import random_model, small_config

from glm_jax.model import MTPConfig
from glm_jax.model.transformer import Transformer
from glm_jax.parallel import make_mesh, sharding_of
from glm_jax.training.mtp_loss import mtp_tokens
from glm_jax.training.objectives import supervised_loss
from glm_jax.training.optimizers import adamw, path_name
from glm_jax.training.step import build_update, init_state

LENGTH = 12
SMALL = small_config(topk=3)
CONFIG = dataclasses.replace(
    SMALL, layers=2, dense_layers=0, heads=4, indexer=dataclasses.replace(SMALL.indexer, pattern="FS"), mtp=MTPConfig(),
    moe=dataclasses.replace(SMALL.moe, experts=6, intermediate_size=8))
OPTIONS = {
    "dense_attention": False, "indexer_coefficient": 0.5, "balance_coefficient": 0.2, "mtp_coefficient": 0.3, "mtp_steps": 1,
    "count_experts": True}

SEQUENCES = A, B, C, D, E, F, G, H = [sequence(number, length) for number, length in enumerate((6, 5, 12, 4, 7, 3, 9, 5))]
ONE_A_ROW = [[[s] for s in SEQUENCES]]
LAYOUTS = {  # microbatches of rows of sequences
    "rows permuted": [[[G], [B], [H], [A], [C], [F], [E], [D]]],
    "packed": [[[A, B], [C], [D, E], [F, G], [H], [], [], []]],
    "packed in another order, padding between": [[[H, F, D], [], [G], [E, B], [], [C], [], [A]]],
    "two microbatches": [[[A], [B], [C], [D]], [[E], [F], [G], [H]]],
    "two microbatches, rows permuted": [[[G], [A], [F], [D]], [[C], [H], [B], [E]]],
    "two microbatches, packed unevenly": [[[B, E], [C], [F, A], [H, D]], [[], [], [G], []]],
}


def compiled_updates(model, **options):
    """run(microbatches) -> metrics and gradients; compiled once for every number of microbatches."""
    update = build_update(functools.partial(supervised_loss, **OPTIONS, **options), KEEP_GRADIENTS)
    programs = {}

    def run(microbatches):
        batch, shared, count = arguments(*microbatches, shape=(len(microbatches), len(microbatches[0]), LENGTH))
        shared["mtp_tokens"] = mtp_tokens(batch["segment_ids"], batch["loss_mask"], OPTIONS["mtp_steps"])
        given = init_state(model, KEEP_GRADIENTS), batch, shared, count
        if len(microbatches) not in programs:
            programs[len(microbatches)] = unoptimised(update, *given)
        state, metrics = programs[len(microbatches)](*given)
        return jax.tree.map(np.asarray, metrics), state.optimizer

    return run


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


@pytest.fixture(scope="module")
def alone(model):
    return compiled_updates(model)


@pytest.fixture(scope="module")
def wanted(alone):
    """One sequence a row, one microbatch, one device. But for the routers' biases, which have none, no weight's gradient is rounding
    alone: AdamW's first step, which is nearly a gradient's signs, says something about each."""
    metrics, gradients = alone(ONE_A_ROW)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        if gradient.size and "router_bias" not in path_name(path):
            assert np.abs(gradient).max() > 1e-3, path_name(path)
    return metrics, gradients


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=2, expert=2, model=2)


@pytest.fixture(scope="module")
def placed(mesh):
    """The model on the mesh."""
    with jax.set_mesh(mesh):
        return jax.tree.map(
            lambda declared, w: jax.device_put(w, sharding_of(declared, mesh)), Transformer.declare_tree(CONFIG), random_model(CONFIG))


@pytest.fixture(scope="module")
def on_mesh(placed):
    return compiled_updates(placed)


@functools.partial(jax.jit, static_argnums=0)
def first_change(optimizer, gradients, weights):
    return optimizer.update(gradients, optimizer.init(weights), weights)[0]


SGD, ADAMW = optax.sgd(0.1), adamw(1e-2, weight_decay=0.1)


def change(optimizer, gradients, model):
    """What the optimizer's first step adds to each weight, all of them laid out as one vector: there is less to compile."""
    sizes = [leaf.size for leaf in jax.tree.leaves(model)]
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    return np.split(np.asarray(first_change(optimizer, flat(gradients), flat(model))), np.cumsum(sizes)[:-1])


def assert_same(model, found, wanted):
    """Loss, metrics, gradients, the weights after an SGD step, and the change that AdamW makes."""
    assert found[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=1e-6)
    for name, value in wanted[0].items():
        np.testing.assert_allclose(found[0][name], value, rtol=0 if name.endswith("load") else 3e-6, err_msg=name)
    given = [(path_name(path), np.ravel(w)) for path, w in jax.tree_util.tree_leaves_with_path(model)]
    gradients = [[np.ravel(g) for g in jax.tree.leaves(each[1])] for each in (found, wanted)]
    steps = {optimizer: [change(optimizer, g, model) for g in gradients] for optimizer in (SGD, ADAMW)}
    for (name, weight), *both in zip(given, *gradients, *steps[SGD], *steps[ADAMW], strict=True):
        (a, b), sgd, adam = both[:2], both[2:4], both[4:]
        assert np.abs(a - b).max(initial=0) <= 1e-5 * np.abs(b).max(initial=0), name
        assert np.linalg.norm(sgd[0] - sgd[1]) <= 1e-6 * np.linalg.norm(weight + sgd[1]), name
        assert np.linalg.norm(adam[0] - adam[1]) <= 1e-3 * np.linalg.norm(adam[1]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_changes_nothing(model, alone, wanted, layout):
    assert_same(model, alone(LAYOUTS[layout]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_changes_nothing_on_a_mesh(model, placed, on_mesh, mesh, wanted, layout):
    with jax.set_mesh(mesh):
        found = on_mesh(LAYOUTS[layout])
    for gradient, weight in zip(jax.tree.leaves(found[1]), jax.tree.leaves(placed), strict=True):
        assert gradient.sharding.is_equivalent_to(weight.sharding, weight.ndim)
    assert_same(model, found, wanted)


@pytest.mark.slow
def test_computing_in_bfloat16_and_again_gives_gradients_of_the_weights_type(model, wanted):
    """Selections and experts may differ where scores are near each other, so that the whole gradient is compared."""
    metrics, gradients = compiled_updates(model, remat="layer", dtype=jnp.bfloat16)(ONE_A_ROW)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {np.dtype(np.float32)}
    assert metrics["loss"].dtype == np.float32 and metrics["loss"] == pytest.approx(wanted[0]["loss"], rel=0.05)
    flat = lambda tree: np.concatenate([np.ravel(g) for g in jax.tree.leaves(tree)])
    a, b = flat(gradients), flat(wanted[1])
    assert a @ b > 0.95 * np.linalg.norm(a) * np.linalg.norm(b)
