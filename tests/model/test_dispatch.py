"""From tokens to experts in passes, and what is expected of their blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.model import dispatch


def test_passes_change_nothing_whatever_the_count_of_tokens(monkeypatch):
    """A prime number of tokens takes as many passes as its rows ask for, not one a token; values and gradients stay."""
    rng = np.random.default_rng(0)
    tokens, chosen, experts, width, inner = 53, 2, 5, 6, 4
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    choice = jnp.asarray([rng.permutation(experts)[:chosen] for _ in range(tokens)], jnp.int32)
    arguments = normal(tokens, width), normal(tokens, chosen), normal(experts, width, 2, inner), normal(experts, inner, width)

    def run(x, gates, gate_up, down):
        return dispatch.to_experts(x, choice, gates, gate_up, down, over=(), ring=False)

    pull = lambda: jax.vjp(run, *arguments)
    wanted, pullback = pull()
    monkeypatch.setattr(dispatch, "PASS_ROWS", 30)
    found, pullback_in_passes = pull()
    (loop,) = [e for e in jax.make_jaxpr(run)(*arguments).eqns if e.primitive.name == "scan"]
    assert loop.params["length"] == 4  # 106 rows, 30 a pass
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    cotangent = normal(tokens, width)
    for a, b in zip(pullback_in_passes(cotangent), pullback(cotangent), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows, experts, block", [(4096, 32, 32), (2, 32, 8), (64, 2, 8), (300, 40, 8), (32768, 8, 256)])
def test_expected_blocks_are_those_of_an_even_choice(rows, experts, block):
    rng = np.random.default_rng(0)
    blocks = [(-(-np.bincount(rng.integers(experts, size=rows), minlength=experts) // block)).sum() for _ in range(200)]
    assert dispatch.expected_blocks(rows, experts, block) == pytest.approx(np.mean(blocks), rel=0.08)
