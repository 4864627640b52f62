"""Log-probabilities of tokens against brute force."""

import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.training.scoring import token_logp


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entry_t_scores_token_t(temperature):
    rng = np.random.default_rng(0)
    logits, tokens = 3 * rng.normal(size=(2, 5, 7)).astype(np.float32), rng.integers(0, 7, (2, 5))
    found = token_logp(jnp.asarray(logits), jnp.asarray(tokens), temperature)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found[:, 0], 0)
    for row in range(2):
        for t in range(1, 5):
            scaled = logits[row, t - 1].astype(np.float64) / temperature
            wanted = scaled[tokens[row, t]] - np.log(np.exp(scaled).sum())
            assert float(found[row, t]) == pytest.approx(wanted, rel=1e-5)


def test_large_logits_stay_finite():
    found = token_logp(jnp.asarray([[[3e4, -3e4], [0.0, 0.0]]]), jnp.asarray([[0, 1]]))
    np.testing.assert_array_equal(found, [[0.0, -6e4]])
