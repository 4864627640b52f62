"""The sampler against the softmax, and what its randomness depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.rollout.sampling import sample

LOGITS = jnp.array([2.0, 0.5, -1.0, 0.0, 2.0])


def draw(temperature, seeds, positions):
    """One row a (seed, position)."""
    seeds, positions = np.broadcast_arrays(np.asarray(seeds, np.uint64), positions)
    words = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)
    rows = len(positions)
    return jax.jit(sample)(jnp.tile(LOGITS, (rows, 1)), words, positions.astype(np.int32), np.full(rows, temperature, np.float32))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_frequencies_and_logprobs_are_the_tempered_softmax(temperature, over):
    count = 20_000
    seeds, positions = (np.arange(count), 3) if over == "seeds" else (3, np.arange(count))
    token, logp = draw(temperature, seeds, positions)
    expected = jax.nn.log_softmax(LOGITS / temperature)
    np.testing.assert_allclose(logp, expected[token], atol=1e-6)
    # Five standard deviations of a frequency, at most.
    np.testing.assert_allclose(np.bincount(token, minlength=5) / count, np.exp(expected), atol=5 * 0.5 / count**0.5)


def test_greedy_takes_the_lowest_of_equal_logits_and_reports_raw_logprobs():
    token, logp = draw(0.0, np.arange(9), 0)
    assert token.tolist() == [0] * 9
    np.testing.assert_allclose(logp, jax.nn.log_softmax(LOGITS)[0], atol=1e-6)


def test_both_words_of_the_seed_count_and_the_row_does_not():
    low, _ = draw(1.0, 5, np.arange(200))
    high, _ = draw(1.0, 5 + 2**40, np.arange(200))
    again, _ = draw(1.0, 5, np.arange(200)[::-1].copy())
    assert low.tolist() != high.tolist()
    assert low.tolist() == again.tolist()[::-1]
    assert low[7] == jnp.argmax(LOGITS + jax.random.gumbel(jax.random.fold_in(jax.random.key(5), 7), LOGITS.shape))
