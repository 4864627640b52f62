"""Who learns from what: the indexers from their KL alone, the router through replayed choices too; and replay itself."""

import glm_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import random_model, small_config

from glm_jax.model import Replay, mla
from glm_jax.model.indexer import indexer_kl

SEGMENTS = np.array([[1] * 7 + [2] * 5, [0] * 2 + [1] * 8 + [0] * 2])


def objective(dense_attention):
    """(model, tokens, replay, weights [2]) -> gradients and Output of weights . (sum of cosines of real logits, indexer loss)."""

    def loss(model, tokens, replay, weights):
        out = model(tokens, segment_ids=SEGMENTS, replay=replay, dense_attention=dense_attention, indexer_loss=True, return_selections=True)
        real = SEGMENTS > 0
        return weights[0] * jnp.sum(jnp.cos(out.logits) * real[..., None]) + weights[1] * jnp.sum(out.indexer_loss * real), out

    # Compiled without optimisation: each program runs a few times only.
    return jax.jit(jax.grad(loss, has_aux=True), compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(scope="module")
def sparse():
    return objective(dense_attention=False)


@pytest.fixture(scope="module")
def recorded(model, tokens, forward):
    """A pass over the packed and padded rows, and its choices as a trajectory stores them."""
    out = forward(model, tokens, SEGMENTS)
    experts = np.stack([out.routing[layer] for layer in sorted(out.routing)]).astype(np.int8)
    return out, experts, np.stack([out.selections[layer] for layer in sorted(out.selections)]).astype(np.int16)


def norms(gradients):
    """{path of a weight: largest absolute gradient}."""
    return {jax.tree_util.keystr(path): float(jnp.abs(leaf).max()) for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)}


def assert_choices(out, experts, selections):
    """The choices for real tokens."""
    real = SEGMENTS > 0
    for i, layer in enumerate(sorted(out.routing)):
        np.testing.assert_array_equal(out.routing[layer][real], experts[i][real])
    for layer, selection in out.selections.items():
        np.testing.assert_array_equal(selection[real], selections[layer][real])


@pytest.mark.parametrize("dense_attention", [False, True])
def test_indexers_learn_from_their_kl_only(model, tokens, sparse, recorded, dense_attention):
    gradient = objective(True) if dense_attention else sparse
    nothing = None if dense_attention else Replay(np.full_like(recorded[1], -1), np.full_like(recorded[2], -1))
    from_logits, out = gradient(model, tokens, nothing, np.array([1.0, 0.0], np.float32))
    from_kl, _ = gradient(model, tokens, nothing, np.array([0.0, 1.0], np.float32))
    for path, size in norms(from_logits).items():
        assert np.isfinite(size)
        assert (size == 0) == ("indexer" in path or "router_bias" in path), path
    for path, size in norms(from_kl).items():
        assert np.isfinite(size)
        assert (size == 0) == ("indexer" not in path), path

    config = small_config(topk=tokens.shape[1]) if dense_attention else model.config
    for row in range(2):
        wanted = glm_oracle.forward(model, tokens[row], SEGMENTS[row], config)
        np.testing.assert_allclose(out.indexer_loss[row], wanted.indexer_kl, rtol=0, atol=1e-5 * wanted.indexer_kl.max())
        np.testing.assert_allclose(out.logits[row], wanted.logits, rtol=0, atol=2e-5 * np.abs(wanted.logits).max())
    assert (out.selections is None) == dense_attention


def test_replay_of_nothing_is_a_no_op(model, tokens, sparse, recorded):
    wanted, experts, selections = recorded
    _, out = sparse(model, tokens, Replay(np.full_like(experts, -1), np.full_like(selections, -1)), np.ones(2, np.float32))
    np.testing.assert_allclose(out.logits, wanted.logits, rtol=0, atol=1e-5)
    assert_choices(out, experts, selections)


def test_replay_reproduces_logits(model, tokens, sparse, recorded):
    wanted, experts, selections = recorded
    _, out = sparse(model, tokens, Replay(experts, selections), np.ones(2, np.float32))
    np.testing.assert_allclose(out.logits[SEGMENTS > 0], wanted.logits[SEGMENTS > 0], rtol=0, atol=1e-5)
    assert_choices(out, experts, selections)


def test_replay_under_other_weights_keeps_choices_and_router_gradients(tokens, sparse, recorded):
    """Gates come from the scores of the recorded experts, not from a top-k in which those scores may be missing."""
    _, experts, selections = recorded
    other = random_model(small_config(), seed=5)
    gradients, out = sparse(other, tokens, Replay(experts, selections), np.array([1.0, 0.0], np.float32))
    assert_choices(out, experts, selections)
    router = np.abs(gradients.moe_layers.moe.router).max(axis=1)
    used = np.stack([np.bincount(e[SEGMENTS > 0].reshape(-1), minlength=5) > 0 for e in experts])
    assert ((router > 0) == used).all()


def test_replay_of_some_tokens_chooses_the_others_anew(model, tokens, sparse, recorded):
    """Every second token replays fixed choices; the first of the others, which no changed token precedes, chooses as before."""
    _, experts, selections = recorded
    given = np.arange(tokens.shape[1]) % 2 == 1
    experts = np.where(given[:, None], np.int8([3, 1]), np.int8(-1)) + np.zeros_like(experts)
    oldest = np.where(SEGMENTS == 2, 7, np.where(SEGMENTS[:, :1] == 0, 2, 0)).astype(np.int16)[..., None]
    selections = np.where(given[:, None], np.concatenate([oldest, *[np.full_like(oldest, -1)] * 3], axis=-1), -1) + 0 * selections
    _, out = sparse(model, tokens, Replay(experts, selections.astype(np.int16)), np.ones(2, np.float32))
    real = (SEGMENTS > 0) & given
    for layer, chosen in out.routing.items():
        assert (chosen[real] == np.array([3, 1])).all()
        np.testing.assert_array_equal(chosen[0, 0], recorded[0].routing[layer][0, 0])
    for selection in out.selections.values():
        np.testing.assert_array_equal(selection[real][:, 0], oldest[..., 0][real])
        assert (selection[real][:, 1:] == -1).all()
        np.testing.assert_array_equal(selection[0, 6], sorted(selection[0, 6]))
        assert (selection[0, 6] >= 0).all()


@pytest.mark.parametrize("width", [1, 3, 9])
def test_replayed_selections_of_any_width_are_read(model, tokens, width):
    selections = np.full((3, *tokens.shape, width), -1, np.int16)
    out = jax.eval_shape(lambda model: model(tokens, replay=Replay(selections=selections), return_selections=True), model)
    assert out.selections[0].shape == (*tokens.shape, 4)


def test_indexer_kl_gradient_is_softmax_minus_target():
    rng = np.random.default_rng(0)
    scores, attention = rng.normal(size=(1, 2, 4)).astype(np.float32), rng.uniform(size=(1, 2, 4)).astype(np.float32)
    valid = np.array([[[1, 1, 0, 1], [0, 0, 0, 0]]], bool)
    attention = np.where(valid, attention / np.sum(attention * valid, axis=-1, keepdims=True, where=valid, initial=1e-30), 0)
    value, gradient = jax.value_and_grad(lambda s: indexer_kl(s, attention, valid).sum())(scores)
    p = attention[0, 0]
    q = np.where(valid[0, 0], np.exp(scores[0, 0]), 0)
    q /= q.sum()
    np.testing.assert_allclose(value, np.sum(p[valid[0, 0]] * np.log(p[valid[0, 0]] / q[valid[0, 0]])), rtol=1e-5)
    np.testing.assert_allclose(gradient, [[q - p, np.zeros(4)]], atol=1e-6)


def test_short_rows_under_a_mask_and_gathered_keys_agree(model, tokens, monkeypatch):
    """Rows up to DENSE_UP_TO times index_topk attend in expanded form under a mask, longer ones in absorbed form to gathered keys."""

    def logits_and_gradients(up_to):
        monkeypatch.setattr(mla, "DENSE_UP_TO", up_to)
        loss = lambda model: (lambda logits: (jnp.sum(jnp.cos(logits) * (SEGMENTS > 0)[..., None]), logits))(
            model(tokens, segment_ids=SEGMENTS).logits)
        gradients, logits = jax.jit(jax.grad(loss, has_aux=True), compiler_options={"xla_backend_optimization_level": 0})(model)
        return jax.tree.leaves((logits * (SEGMENTS > 0)[..., None], gradients))

    for under_a_mask, gathered in zip(logits_and_gradients(4), logits_and_gradients(0), strict=True):
        np.testing.assert_allclose(under_a_mask, gathered, rtol=0, atol=2e-5 * max(np.abs(gathered).max(), 1e-30))
