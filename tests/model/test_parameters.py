"""Declared weights: how they are drawn, and models as pytrees. Counts and contradictions: test_presets."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import random_model, small_config

from glm_jax.model.transformer import Transformer


def test_initial_scale_and_independence():
    """Deviation 1/sqrt(fan-in) cut at three; the draw of a weight depends on the key and its path alone."""
    declared = {d.path: d for d in Transformer.declare(small_config())}
    up = declared["moe_layers/attention/q_up"]
    assert up.shape == (2, 12, 3, 10) and up.scale == pytest.approx(12**-0.5)
    assert declared["moe_layers/attention/out"].scale == pytest.approx((3 * 5) ** -0.5)
    assert declared["embedding"].scale == 0.02
    key = jax.random.key(3)
    first = np.asarray(up.make(key, jnp.float32))
    np.testing.assert_array_equal(first, up.make(key, jnp.float32))
    assert np.abs(first).max() <= 3 * up.scale and first.std() == pytest.approx(up.scale, rel=0.15)
    other = dataclasses.replace(up, path="moe_layers/attention/elsewhere")
    assert (first != np.asarray(other.make(key, jnp.float32))).any()


def test_gains_are_one_and_biases_zero():
    for d in Transformer.declare(small_config()):
        if d.init != "normal":
            assert (d.init == "zeros") == d.path.endswith("bias")
            assert d.init == "zeros" or "norm" in d.path


def test_models_are_pytrees_with_their_configuration_static():
    """Two models of one configuration share a compiled program; another configuration is another."""
    structure = jax.tree.structure
    assert structure(random_model(small_config())) == structure(random_model(small_config(), seed=1))
    assert structure(random_model(small_config())) != structure(random_model(small_config(topk=5)))
