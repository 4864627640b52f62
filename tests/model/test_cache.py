"""Prefill in any chunks and decode one by one give what the whole row gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

CHUNK = 4


@pytest.fixture(scope="module")
def step():
    """(model, cache, tokens [2, n], mask [2, n]) -> Output; compiled for n = CHUNK and n = 1."""
    return jax.jit(lambda model, cache, tokens, mask: model(tokens, cache=cache, attention_mask=mask, return_selections=True))


def feed(step, model, cache, tokens, counts, width):
    """Feeds the next counts[row] tokens of each row, padded to `width` by rubbish; gives cache, [(row, token, logits, selections)]."""
    starts = np.asarray(cache.lengths)
    chunk, mask = np.full((2, width), 3, np.int32), np.zeros((2, width), np.int32)
    for row in range(2):
        chunk[row, : counts[row]] = tokens[row, starts[row] : starts[row] + counts[row]]
        mask[row, : counts[row]] = 1
    out = step(model, cache, chunk, mask)
    np.testing.assert_array_equal(out.cache.lengths, starts + counts)
    assert np.isfinite(out.logits).all()
    return out.cache, [
        (row, int(starts[row]) + i, out.logits[row, i], [s[row, i] for s in out.selections.values()])
        for row in range(2) for i in range(counts[row])]


def assert_plain(plain, fed):
    for row, t, logits, selections in fed:
        np.testing.assert_allclose(logits, plain.logits[row, t], rtol=0, atol=2e-5 * np.abs(plain.logits).max())
        for layer, selection in enumerate(selections):
            np.testing.assert_array_equal(selection, plain.selections[layer][row, t])


@pytest.mark.parametrize("seed", range(4))
def test_chunks_of_any_size_give_the_whole_row(model, tokens, plain, step, seed):
    """Rows advance by different counts, 0 among them, each from a cache filled with rubbish."""
    rng = np.random.default_rng(seed)
    cache = jax.tree.map(lambda leaf: jnp.full_like(leaf, 5), model.init_cache(2, 14)).replace(lengths=jnp.zeros(2, jnp.int32))
    fed = []
    while (left := tokens.shape[1] - np.asarray(cache.lengths)).any():
        counts = np.minimum(left, rng.integers(0, CHUNK + 1, 2))
        cache, new = feed(step, model, cache, tokens, counts, CHUNK)
        fed += new
    assert len(fed) == tokens.size
    assert_plain(plain, fed)


def test_decoding_one_by_one_gives_the_whole_row(model, tokens, plain, step):
    """Row 1 pauses for the first steps; both rows end at the last slot of the cache."""
    cache, fed = model.init_cache(2, tokens.shape[1]), []
    for i in range(tokens.shape[1] + 3):
        cache, new = feed(step, model, cache, tokens, [int(i < tokens.shape[1]), int(i >= 3)], 1)
        fed += new
    assert len(fed) == tokens.size
    assert_plain(plain, fed)


def test_cache_leaves(model):
    """Every leaf but the lengths is [layers, batch, length, ...], of the weights' type."""
    cache = jax.eval_shape(lambda: model.init_cache(5, 9))
    assert cache.lengths.shape == (5,) and cache.lengths.dtype == jnp.int32
    for leaf, width in ((cache.latent, 10), (cache.rope, 4), (cache.index_key, 8)):
        assert leaf.shape == (3, 5, 9, width) and leaf.dtype == model.embedding.dtype
