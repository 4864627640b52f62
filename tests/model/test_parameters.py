"""Declared weights: their number, without any memory; configurations that contradict themselves."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import random_model, small_config

from glm_jax.model import IndexerConfig, MLAConfig, ModelConfig, MoEConfig, get_preset, init_model
from glm_jax.model.transformer import Transformer

# GLM-5's published sizes (the DSA model of arXiv 2602.15763), and its weights without the multi-token-prediction layer.
GLM_5 = ModelConfig(
    vocab_size=154880, hidden_size=6144, layers=78, dense_layers=3, intermediate_size=12288, heads=64,
    mla=MLAConfig(q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256),
    indexer=IndexerConfig(heads=32, head_dim=128, topk=2048),
    moe=MoEConfig(experts=256, experts_per_token=8, shared_experts=1, intermediate_size=2048, routed_scaling_factor=2.5))
WITH_MTP = 753_864_119_552
MTP_ATTENTION, MTP_INDEXER, MTP_NORMS = 165_019_648, 9_371_648 + 256, 5 * 6144 + 2048 + 512
MTP_EXPERTS, MTP_PROJECTION = 3 * 6144 * 2048 * 257 + 256 * 6144, 6144 * 12288


def test_parameter_count_of_glm_5_without_allocating_it():
    arrays = len(jax.live_arrays())
    assert GLM_5.parameter_count() == WITH_MTP - MTP_ATTENTION - MTP_INDEXER - MTP_NORMS - MTP_EXPERTS - MTP_PROJECTION
    assert GLM_5.parameter_count(include_router_bias=True) - GLM_5.parameter_count() == 75 * 256
    assert len(jax.live_arrays()) == arrays


@pytest.mark.parametrize("config", [small_config(), dataclasses.replace(small_config(), dense_layers=0), get_preset("tiny")])
def test_parameter_count_is_the_sum_of_the_leaves(config):
    model = jax.eval_shape(lambda: init_model(config, jax.random.key(0)))
    assert config.parameter_count(include_router_bias=True) == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))


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


@pytest.mark.parametrize("change, message", [
    ({"dense_layers": 4}, "dense_layers=4 exceeds layers=3"),
    ({"vocab_size": 0}, "vocab_size=0 must be positive"),
    ({"moe__experts_per_token": 9}, "moe.experts_per_token=9 exceeds moe.experts=8"),
    ({"mla__qk_rope_head_dim": 7}, "must be even"),
    ({"indexer__head_dim": 4}, "indexer.head_dim=4 is below"),
    ({"indexer__topk": -1}, "topk=-1 must be positive"),
    ({"indexer__top_k": 4}, "no field 'indexer__top_k'"),
    ({"width": 4}, "no field 'width'"),
])
def test_contradictions_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        get_preset("tiny", **change)


def test_unknown_preset_names_those_there_are():
    with pytest.raises(ValueError, match="no model preset 'glm-6'; there are: tiny"):
        get_preset("glm-6")
