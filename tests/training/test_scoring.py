"""Log-probabilities of tokens and greedy hits: against brute force, in one chunk and in many, on a mesh, and what memory they take."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from glm_jax.parallel import make_mesh, shard
from glm_jax.training import scoring
from glm_jax.training.scoring import score, token_logp

ROWS, LENGTH, WIDTH, VOCAB = 2, 6, 5, 8
RNG = np.random.default_rng(0)
HIDDEN = (2 * RNG.normal(size=(ROWS, LENGTH, WIDTH))).astype(np.float32)
WEIGHTS = RNG.normal(size=(WIDTH, VOCAB)).astype(np.float32)
TARGETS = RNG.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
COEFFICIENTS = RNG.normal(size=(ROWS, LENGTH)).astype(np.float32)


def plain_score(hidden, weights, targets, temperature=1.0):
    """The same from all logits at once."""
    logits = jnp.einsum("btd,dv->btv", hidden, weights, preferred_element_type=jnp.float32) / temperature
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return logp, logits.argmax(axis=-1) == targets


def value_and_gradients(function, temperature=1.0, hidden=HIDDEN, weights=WEIGHTS):
    """(logp, hit) and the gradients of a random mixture of the log-probabilities."""

    def loss(hidden, weights):
        logp, hit = function(hidden, weights, jnp.asarray(TARGETS), temperature)
        return jnp.sum(logp * COEFFICIENTS), (logp, hit)

    (_, found), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(jnp.asarray(hidden), jnp.asarray(weights))
    return found, gradients


def assert_same(found, wanted, tolerance=1e-6):
    np.testing.assert_allclose(found[0][0], wanted[0][0], rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(found[0][1], wanted[0][1])
    for a, b in zip(found[1], wanted[1], strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0, atol=tolerance * np.abs(b).max())


@pytest.fixture(params=[1, 2, 3, VOCAB], ids=lambda columns: f"chunks of {columns}")
def chunks(request, monkeypatch):
    """Chunks that divide the 8 columns (and those of a device) or not, and one of all."""
    monkeypatch.setattr(scoring, "NARROWEST", request.param)
    monkeypatch.setattr(scoring, "LOGITS", 1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entry_t_scores_token_t(temperature):
    found = token_logp(jnp.asarray(HIDDEN), jnp.asarray(WEIGHTS), jnp.asarray(TARGETS), temperature)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found[:, 0], 0)
    for row in range(ROWS):
        for t in range(1, LENGTH):
            scaled = HIDDEN[row, t - 1].astype(np.float64) @ WEIGHTS / temperature
            wanted = scaled[TARGETS[row, t]] - np.log(np.exp(scaled).sum())
            assert float(found[row, t]) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_change_nothing(chunks, temperature):
    assert_same(value_and_gradients(score, temperature), value_and_gradients(plain_score, temperature))


def test_one_chunk_where_all_logits_are_few():
    """A small vocabulary's logits are computed once, and kept for the backward pass."""
    program = str(jax.make_jaxpr(jax.grad(lambda hidden: score(hidden, WEIGHTS, TARGETS)[0].sum()))(HIDDEN))
    assert "scan" not in program and program.count("dot_general") == 2


@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"context": 2, "model": 4}, {"fsdp": 2, "context": 2}], ids=str)
def test_a_mesh_changes_nothing(chunks, axes):
    wanted = value_and_gradients(plain_score)
    with jax.set_mesh(make_mesh(**axes)):
        split = shard(jnp.asarray(HIDDEN), "batch", "queries", None), shard(jnp.asarray(WEIGHTS), "embed", "vocab")
        found = value_and_gradients(score, 1.0, *split)
        for gradient, given in zip(found[1], split, strict=True):
            assert gradient.sharding == given.sharding
    assert_same(found, wanted)


def test_the_vocabulary_stays_split():
    """No device gathers it, nor logits: the largest thing that passes between devices is the weights' own part."""
    hidden, weights = jnp.zeros((2, 16, 4)), jnp.zeros((4, 4096))
    with jax.set_mesh(make_mesh(model=8)):
        compiled = jax.jit(jax.grad(lambda h, w: score(h, w, jnp.zeros((2, 16), jnp.int32))[0].sum(), argnums=(0, 1))).lower(
            hidden, shard(weights, "embed", "vocab")).compile()
    text = compiled.as_text()
    assert "all-reduce" in text and "all-gather" not in text and "all-to-all" not in text


@pytest.mark.parametrize("mesh", [None, {"model": 2}, {"model": 4, "data": 2}], ids=str)
def test_a_hit_is_the_first_of_equals(chunks, mesh):
    weights = np.ones((WIDTH, VOCAB), np.float32)
    weights[:, 2] = weights[:, 5] = 2
    targets, hidden = np.broadcast_to([2, 5, 2, 0, 5, 2], (ROWS, LENGTH)), np.ones_like(HIDDEN)
    context = jax.set_mesh(make_mesh(**mesh)) if mesh else contextlib.nullcontext()
    with context:
        hit = jax.jit(lambda *a: score(*a)[1])(hidden, weights, targets)
    assert hit.dtype == bool
    np.testing.assert_array_equal(hit, targets == 2)


def test_large_logits_stay_finite():
    found = token_logp(jnp.asarray([[[1.0], [0.0]]]), jnp.asarray([[3e4, -3e4]]), jnp.asarray([[0, 1]]))
    np.testing.assert_array_equal(found, [[0.0, -6e4]])


def test_weights_in_bfloat16_have_their_gradients_summed_in_float32(monkeypatch):
    """Of 512 tokens with the same gradient, a sum in bfloat16 would stop growing at 256 times one of them."""
    monkeypatch.setattr(scoring, "NARROWEST", 1)
    monkeypatch.setattr(scoring, "LOGITS", 1)
    hidden, weights = jnp.ones((1, 512, 1), jnp.bfloat16), jnp.zeros((1, 2), jnp.bfloat16)
    gradient = jax.grad(lambda weights: score(hidden, weights, jnp.zeros((1, 512), jnp.int32))[0].sum())(weights)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), [[256, -256]])


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    """Of loss and backward pass: what four times the tokens and four times the vocabulary add is what each adds alone."""

    @functools.cache
    def temporary(tokens, vocabulary):
        shape = jax.ShapeDtypeStruct
        loss = lambda *given: score(*given)[0].sum()
        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(
            shape((2, tokens // 2, 64), jnp.float32), shape((64, vocabulary), jnp.float32), shape((2, tokens // 2), jnp.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    tokens, vocabulary = 8192, 16384
    logits = 4 * tokens * vocabulary
    both = temporary(4 * tokens, 4 * vocabulary) - temporary(tokens, vocabulary)
    alone = temporary(4 * tokens, vocabulary) + temporary(tokens, 4 * vocabulary) - 2 * temporary(tokens, vocabulary)
    assert both - alone < logits / 100
    assert temporary(4 * tokens, 4 * vocabulary) < 16 * logits / 10


def test_the_weights_may_be_a_view_of_a_split_embedding():
    with jax.set_mesh(make_mesh(fsdp=2, model=2)):
        embedding = shard(jnp.asarray(WEIGHTS.T), "vocab", None)
        gradient = jax.jit(jax.grad(lambda e: jnp.sum(score(jnp.asarray(HIDDEN), e.T, jnp.asarray(TARGETS))[0] * COEFFICIENTS)))(embedding)
        assert gradient.sharding.spec == PartitionSpec(("model",), None)
    wanted = value_and_gradients(plain_score)[1][1]
    np.testing.assert_allclose(gradient, wanted.T, rtol=0, atol=1e-6 * np.abs(wanted).max())
