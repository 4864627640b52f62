"""One update: its loss and metrics against the equations, and what must not change them (microbatches, packing)."""

import dataclasses
import functools

import glm_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_run import KEEP_GRADIENTS, LENGTH, A, B, C, assert_same, compiled_run, unoptimised
from small_model import random_model, small_config

from glm_jax.config import RLConfig
from glm_jax.data.packing import pack_segments
from glm_jax.data.trajectory import Segment
from glm_jax.model import GQAConfig, MTPConfig
from glm_jax.model.transformer import Transformer
from glm_jax.parallel import make_mesh, sharding_of
from glm_jax.rl.learner import rl_objective
from glm_jax.training.objectives import supervised_loss
from glm_jax.training.optimizers import adamw, path_name
from glm_jax.training.step import build_update, init_state, supervised_inputs

COEFFICIENT = 0.5


@pytest.fixture(scope="module")
def model():
    return random_model(small_config())


@pytest.fixture(scope="module")
def run(model):
    return compiled_run(model, indexer_coefficient=COEFFICIENT)


@pytest.fixture(scope="module")
def together(run):
    """A and B in a row of their own, one microbatch."""
    return run([[A], [B]])


def test_loss_and_metrics_are_those_of_the_equations(model, run):
    metrics, gradients, _ = run([[A, B], [C]])
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
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(wanted, rel=2e-5)


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


def inputs(microbatches):
    return {"weight": np.ones((microbatches, 2), np.float32)}, {}, np.int32(microbatches)


def bytes_of(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_one_microbatch_takes_no_loop(model, microbatches):
    """And so no sums of gradients."""
    update = build_update(squares, KEEP_GRADIENTS).lower(init_state(model, KEEP_GRADIENTS), *inputs(microbatches))
    assert ("stablehlo.while" in update.as_text()) == (microbatches > 1)


def test_gradients_of_bfloat16_weights_are_summed_in_float32():
    """Of 512 microbatches with the same gradient, a sum in bfloat16 would stop growing at 256 times one of them."""
    weight = jnp.ones(2, jnp.bfloat16)
    update = build_update(lambda w, batch: (jnp.sum(w * batch["weight"].mean().astype(w.dtype)), {}), KEEP_GRADIENTS)
    state, _ = update(init_state(weight, KEEP_GRADIENTS), *inputs(512))
    assert state.model.dtype == state.optimizer.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(state.optimizer, np.float32), 512)


@pytest.mark.parametrize("microbatches, axes", [(1, {}), (2, {"fsdp": 2, "model": 2})], ids=["", "mesh"])
def test_the_state_is_donated_whole_and_keeps_its_shardings(microbatches, axes):
    optimizer, mesh = adamw(1e-2, moments_dtype=jnp.bfloat16), make_mesh(**axes)
    with jax.set_mesh(mesh):
        split = jax.tree.map(
            lambda declared, w: jax.device_put(w, sharding_of(declared, mesh)), Transformer.declare_tree(PLAIN), random_model(PLAIN))
        state = init_state(split, optimizer)
        given = jax.tree.map(lambda leaf: leaf.sharding, state)
        compiled = unoptimised(build_update(squares, optimizer), state, *inputs(microbatches))
        assert compiled.memory_analysis().alias_size_in_bytes == bytes_of(state)
        after, _ = compiled(state, *inputs(microbatches))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    for (path, leaf), before in zip(jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(given), strict=True):
        assert leaf.sharding.is_equivalent_to(before, leaf.ndim), path_name(path)
    moments = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(after.optimizer)}
    for kind in ("mu", "nu"):
        (embedding,) = (leaf for name, leaf in moments.items() if name.endswith(f"{kind}/embedding"))
        assert embedding.dtype == jnp.bfloat16 and embedding.sharding.is_equivalent_to(after.model.embedding.sharding, 2)


def shapes(rows, length):
    """What every objective reads of rows [B, T]."""
    shape = jax.ShapeDtypeStruct
    batch = dict.fromkeys(("tokens", "segment_ids", "rollout_ids", "group_ids"), shape((rows, length), jnp.int32))
    batch |= dict.fromkeys(("loss_mask", "behaviour_logp", "advantages"), shape((rows, length), jnp.float32))
    batch |= dict.fromkeys(("loss_tokens", "real_tokens", "sequences"), shape((), jnp.float32))
    return batch | {"mtp_tokens": shape((1,), jnp.float32)}


PLAIN = dataclasses.replace(
    small_config(), mla=None, indexer=None, moe=None, layers=1, dense_layers=1, mtp=MTPConfig(), heads=2, intermediate_size=8,
    gqa=GQAConfig(kv_heads=1, head_dim=8, rotary_dim=4))
FURTHER = functools.partial(supervised_loss, dense_attention=False, indexer_coefficient=0.0, mtp_coefficient=0.3, mtp_steps=1)
OBJECTIVES = {
    "supervised": lambda **options: functools.partial(FURTHER, **options),
    "rl": lambda **options: rl_objective(dataclasses.replace(RLConfig(), replay="none"), **options)}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_have_the_weights_type_and_logits_are_never_computed_at_once(name):
    """Four times the tokens and four times the vocabulary take four times the memory, in bfloat16 with rematerialisation."""
    objective = OBJECTIVES[name](remat="layer", dtype=jnp.bfloat16)

    def temporary(rows, vocabulary):
        model = jax.tree.map(
            lambda declared: jax.ShapeDtypeStruct(declared.shape, jnp.float32),
            Transformer.declare_tree(dataclasses.replace(PLAIN, vocab_size=vocabulary)))
        lowered = jax.jit(jax.value_and_grad(objective, has_aux=True)).lower(model, shapes(rows, 16))
        (loss, _), gradients = lowered.out_info
        assert {leaf.dtype for leaf in jax.tree.leaves((loss, gradients))} == {jnp.dtype(jnp.float32)}
        return lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).memory_analysis().temp_size_in_bytes

    rows, vocabulary = 512, 16384
    small, large = temporary(rows, vocabulary), temporary(4 * rows, 4 * vocabulary)
    assert large < 4.2 * small
    assert large < 4 * rows * 16 * 4 * vocabulary * 4 / 10  # of what the logits would take


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


def test_moments_in_bfloat16_are_computed_with_in_float32():
    """One update from no moments is that of AdamW with float32 moments exactly; the moments kept are its rounded ones."""
    gradients, weights = jnp.float32([0.3, -1e-3, 7.0]), jnp.ones(3)
    rules = adamw(1e-2, moments_dtype=jnp.bfloat16), adamw(1e-2)
    found, wanted = (rule.update(gradients, rule.init(weights), weights) for rule in rules)
    np.testing.assert_array_equal(found[0], wanted[0])
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_array_equal(a, b.astype(a.dtype))
    kinds = {leaf.dtype for leaf in jax.tree.leaves(found[1]) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert kinds == {jnp.dtype(jnp.bfloat16)}
