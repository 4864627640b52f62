"""Presets against the published numbers: hyper-parameters written out once more, and parameter counts."""

import dataclasses
import math

import jax
import pytest
from small_model import small_config

from glm_jax.model import get_preset, init_model
from glm_jax.model.config import GQAConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig
from glm_jax.model.presets import PRESETS

GLM_5_2_FULL = (0, 1, 2, *range(6, 75, 4))

# Column by column from the GLM-5 report and config.json of GLM-5 and GLM-5.2.
GLM_5 = {
    "hidden_size": 6144, "layers": 78, "dense_layers": 3, "intermediate_size": 12288, "vocab_size": 154880, "heads": 64,
    "rope_theta": 1_000_000, "max_positions": 202_752, "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tied_embeddings": False,
    "mla.q_lora_rank": 2048, "mla.kv_lora_rank": 512, "mla.qk_nope_head_dim": 192, "mla.qk_rope_head_dim": 64, "mla.qk_head_dim": 256,
    "mla.v_head_dim": 256, "mla.latent_norm_eps": 1e-6, "mla.rope_interleaved": True,
    "indexer.heads": 32, "indexer.head_dim": 128, "indexer.topk": 2048, "indexer.key_norm_eps": 1e-6, "indexer.rope_interleaved": True,
    "moe.experts": 256, "moe.experts_per_token": 8, "moe.shared_experts": 1, "moe.intermediate_size": 2048,
    "moe.routed_scaling_factor": 2.5, "moe.norm_topk_prob": True, "moe.groups": 1, "moe.topk_groups": 1,
    "mtp.layers": 1, "mtp.recycle": "post_norm", "mtp.share_selection": False, "mtp.own_embeddings": False,
    "gqa": None, "full_layers": tuple(range(78)),
}
GLM_4_5 = {
    "hidden_size": 5120, "layers": 92, "dense_layers": 3, "intermediate_size": 12288, "vocab_size": 151552, "heads": 96,
    "rope_theta": 1_000_000, "max_positions": 131_072, "rms_norm_eps": 1e-5, "tied_embeddings": False,
    "gqa.kv_heads": 8, "gqa.head_dim": 128, "gqa.rotary_dim": 64, "gqa.qk_norm": True, "gqa.bias": True,
    "moe.experts": 160, "moe.experts_per_token": 8, "moe.shared_experts": 1, "moe.intermediate_size": 1536,
    "moe.routed_scaling_factor": 2.5, "moe.norm_topk_prob": True, "moe.groups": 1, "moe.topk_groups": 1, "mtp.layers": 1,
    "mla": None, "indexer": None, "full_layers": (),
}
PUBLISHED = {
    "glm-5": GLM_5,
    "glm-5.2": GLM_5 | {
        "rope_theta": 8_000_000, "max_positions": 1_048_576, "mtp.share_selection": True, "full_layers": GLM_5_2_FULL},
    "glm-4.5": GLM_4_5,
    "glm-4.5-air": GLM_4_5 | {
        "hidden_size": 4096, "layers": 46, "dense_layers": 1, "intermediate_size": 10944, "gqa.qk_norm": False,
        "moe.experts": 128, "moe.intermediate_size": 1408, "moe.routed_scaling_factor": 1.0},
    "glm-4.7-flash": {
        "hidden_size": 2048, "layers": 47, "dense_layers": 1, "intermediate_size": 10240, "vocab_size": 154880, "heads": 20,
        "rope_theta": 1_000_000, "max_positions": 202_752, "rms_norm_eps": 1e-5, "tied_embeddings": False,
        "mla.q_lora_rank": 768, "mla.kv_lora_rank": 512, "mla.qk_nope_head_dim": 192, "mla.qk_rope_head_dim": 64, "mla.v_head_dim": 256,
        "mla.rope_interleaved": True, "moe.experts": 64, "moe.experts_per_token": 4, "moe.shared_experts": 1,
        "moe.intermediate_size": 1536, "moe.routed_scaling_factor": 1.8, "moe.groups": 1, "mtp.layers": 1, "gqa": None, "indexer": None},
    "deepseek-v3.2": {
        "hidden_size": 7168, "layers": 61, "dense_layers": 3, "intermediate_size": 18432, "vocab_size": 129280, "heads": 128,
        "rope_theta": 10_000, "max_positions": 163_840, "rms_norm_eps": 1e-6, "tied_embeddings": False,
        "mla.q_lora_rank": 1536, "mla.kv_lora_rank": 512, "mla.qk_nope_head_dim": 128, "mla.qk_rope_head_dim": 64, "mla.v_head_dim": 128,
        "mla.rope_interleaved": True, "indexer.heads": 64, "indexer.head_dim": 128, "indexer.topk": 2048,
        "indexer.rope_interleaved": False, "moe.experts": 256, "moe.experts_per_token": 8, "moe.shared_experts": 1,
        "moe.intermediate_size": 2048, "moe.routed_scaling_factor": 2.5, "moe.groups": 8, "moe.topk_groups": 4, "mtp.layers": 1,
        "gqa": None, "full_layers": tuple(range(61))},
    "qwen3-0.6b": {
        "hidden_size": 1024, "layers": 28, "dense_layers": 28, "intermediate_size": 3072, "vocab_size": 151936, "heads": 16,
        "rope_theta": 1_000_000, "rms_norm_eps": 1e-6, "tied_embeddings": True, "gqa.kv_heads": 8, "gqa.head_dim": 128,
        "gqa.rotary_dim": 128, "gqa.qk_norm": True, "gqa.bias": False, "mla": None, "moe": None, "mtp": None},
    "smollm2-135m": {
        "hidden_size": 576, "layers": 30, "dense_layers": 30, "intermediate_size": 1536, "vocab_size": 49152, "heads": 9,
        "rope_theta": 100_000, "rms_norm_eps": 1e-5, "tied_embeddings": True, "gqa.kv_heads": 3, "gqa.head_dim": 64,
        "gqa.rotary_dim": 64, "gqa.qk_norm": False, "gqa.bias": False, "mla": None, "moe": None, "mtp": None},
    "bench-20m": {
        "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 1024, "layers": 6, "dense_layers": 1, "heads": 8,
        "moe.intermediate_size": 256, "moe.experts": 16, "moe.experts_per_token": 4, "moe.shared_experts": 1,
        "mla.q_lora_rank": 192, "mla.kv_lora_rank": 128, "mla.qk_nope_head_dim": 48, "mla.qk_rope_head_dim": 16, "mla.v_head_dim": 64,
        "indexer.heads": 8, "indexer.head_dim": 32, "indexer.topk": 128},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_hyper_parameters(name):
    config, found = get_preset(name), {}
    for path in PUBLISHED[name]:
        found[path] = config
        for field in path.split("."):
            found[path] = getattr(found[path], field)
    assert found == PUBLISHED[name]


def test_shared_layers_of_glm_5_2():
    config = get_preset("glm-5.2")
    assert len(config.full_layers) == 21
    assert config.indexer.pattern == "FFF" + 18 * "SSSF" + "SSS"
    assert [config.source_layer(layer) for layer in (0, 2, 3, 5, 6, 73, 74, 77)] == [0, 2, 2, 2, 6, 70, 74, 74]


# What a published number includes: the MTP layer, the embedding and the head, the indexers; and the number, in units of its last digit.
COUNTS = [
    ("glm-5.2", True, True, True, 753_329_921_024, 1),  # total of the released files
    ("glm-5", True, True, True, 753_864_119_552, 1),  # that, with an indexer in all 78 + 1 layers in place of 22
    ("glm-5", False, True, True, 744, 1e9),  # the report's 744B
    ("glm-4.5", True, False, True, 355, 1e9),  # the report's Table 1: with MTP, without embedding and head
    ("glm-4.5-air", False, False, True, 106, 1e9),  # neither, though the same table
    ("glm-4.7-flash", False, True, True, 30, 1e9),
    ("deepseek-v3.2", True, True, True, 685, 1e9),  # its model card; the MTP module has an embedding and a head of its own
    ("deepseek-v3.2", False, True, False, 671, 1e9),  # the DeepSeek-V3 report's number, before there were indexers
    ("qwen3-0.6b", False, True, True, 0.6, 1e9),
    ("qwen3-0.6b", False, False, True, 0.44, 1e9),  # its model card's non-embedding parameters
    ("smollm2-135m", False, True, True, 134.5, 1e6),
]


@pytest.mark.parametrize("name, mtp, ends, indexers, published, unit", COUNTS)
def test_parameter_counts(name, mtp, ends, indexers, published, unit):
    """Within the rounding of the published number's last digit, and without an array."""
    arrays = len(jax.live_arrays())
    config = get_preset(name) if indexers else get_preset(name, indexer=None)
    count = config.parameter_count(include_mtp=mtp)
    if not ends:
        count -= config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    digits = len(str(published).partition(".")[2])
    assert round(count / unit, digits) == published
    assert len(jax.live_arrays()) == arrays


def test_router_biases_count_when_asked_for():
    for name, layers in (("glm-5.2", 76), ("glm-5", 76), ("deepseek-v3.2", 59)):
        config = get_preset(name)
        assert config.parameter_count(include_router_bias=True) - config.parameter_count() == layers * 256
    without = get_preset("glm-5").parameter_count(include_mtp=False, include_router_bias=True)
    assert without - get_preset("glm-5").parameter_count(include_mtp=False) == 75 * 256


def variants():
    """Small models with and without every optional part."""
    small = small_config()
    gqa = ModelConfig(vocab_size=31, hidden_size=12, layers=2, dense_layers=2, intermediate_size=9, heads=4,
                      gqa=GQAConfig(kv_heads=2, head_dim=6, rotary_dim=4))
    moe = MoEConfig(experts=4, experts_per_token=2, shared_experts=0, intermediate_size=5)
    return {
        "tiny": get_preset("tiny"), "bench-20m": get_preset("bench-20m"), "small": small,
        "no dense layer": dataclasses.replace(small, dense_layers=0), "no experts": dataclasses.replace(small, dense_layers=3, moe=None),
        "shared indexers": dataclasses.replace(small, indexer=dataclasses.replace(small.indexer, pattern="FSF")),
        "no indexer": dataclasses.replace(small, indexer=None), "tied": dataclasses.replace(small, tied_embeddings=True),
        "mtp": dataclasses.replace(small, mtp=MTPConfig()), "mtp ends": dataclasses.replace(small, mtp=MTPConfig(own_embeddings=True)),
        "gqa": gqa, "gqa parts": dataclasses.replace(gqa, gqa=dataclasses.replace(gqa.gqa, qk_norm=True, bias=True)),
        "gqa experts": dataclasses.replace(gqa, dense_layers=1, moe=moe, mtp=MTPConfig()),
    }


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in variants().items()])
def test_parameter_count_is_the_sum_of_the_leaves(config):
    model = jax.eval_shape(lambda: init_model(config, jax.random.key(0)))
    size = lambda tree: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
    assert config.parameter_count(include_router_bias=True) == size(model)
    assert config.parameter_count(include_mtp=False, include_router_bias=True) == size(model) - size(model.mtp)


def test_every_preset_is_checked_here():
    assert set(PUBLISHED) | {"tiny"} == set(PRESETS)


def test_overrides():
    config = get_preset("glm-5.2", rope_theta=5.0, indexer__topk=7, mtp=None)
    assert (config.rope_theta, config.indexer.topk, config.indexer.heads, config.mtp) == (5.0, 7, 32, None)
    assert get_preset("glm-5.2") == PRESETS["glm-5.2"]


def small(**changes):
    return lambda: dataclasses.replace(small_config(), **changes)


MLA, INDEXER = small_config().mla, small_config().indexer
GQA_PART = GQAConfig(kv_heads=3, head_dim=8, rotary_dim=4)
CONTRADICTIONS = [
    (small(dense_layers=4), "dense_layers=4 exceeds layers=3"),
    (small(vocab_size=0), "vocab_size=0 must be positive"),
    (small(gqa=GQA_PART), "exactly one of mla and gqa"),
    (small(mla=None, indexer=None), "exactly one of mla and gqa"),
    (small(mla=None, gqa=GQA_PART), "an indexer reads MLA's query latent"),
    (small(moe=None), "the rest needs moe"),
    (small(moe=MoEConfig(8, 9, 1, 4)), "moe.experts_per_token=9 exceeds moe.experts=8"),
    (small(moe=MoEConfig(8, 2, 1, 4, groups=3)), "moe.experts=8 is not a multiple of moe.groups=3"),
    (small(moe=MoEConfig(8, 2, 1, 4, groups=2, topk_groups=3)), "moe.topk_groups=3 exceeds moe.groups=2"),
    (small(moe=MoEConfig(8, 3, 1, 4, groups=4, topk_groups=1)), "groups hold fewer than moe.experts_per_token=3"),
    (small(mla=dataclasses.replace(MLA, qk_rope_head_dim=7)), "must be even"),
    (small(mla=None, indexer=None, gqa=dataclasses.replace(GQA_PART, kv_heads=2)), "heads=3 is not a multiple of gqa.kv_heads=2"),
    (small(mla=None, indexer=None, gqa=dataclasses.replace(GQA_PART, rotary_dim=3)), "gqa.rotary_dim=3 must be even"),
    (small(mla=None, indexer=None, gqa=dataclasses.replace(GQA_PART, rotary_dim=10)), "at most gqa.head_dim=8"),
    (small(indexer=dataclasses.replace(INDEXER, head_dim=2)), "indexer.head_dim=2 is below"),
    (small(indexer=dataclasses.replace(INDEXER, topk=-1)), "topk=-1 must be positive"),
    (small(indexer=dataclasses.replace(INDEXER, pattern="FxF")), "may hold F .full. and S .shared. only"),
    (small(indexer=dataclasses.replace(INDEXER, pattern="FS")), "has 2 letters for layers=3"),
    (small(indexer=dataclasses.replace(INDEXER, pattern="SFF")), "begins with S"),
    (small(mtp=MTPConfig(recycle="norm")), "mtp.recycle='norm' must be post_norm or pre_norm"),
    (small(indexer=None, mtp=MTPConfig(share_selection=True)), "mtp.share_selection needs an indexer"),
    (small(mtp=MTPConfig(layers=2)), "mtp.layers=2"),
    (lambda: get_preset("tiny", indexer__top_k=4), "no field 'indexer__top_k'"),
    (lambda: get_preset("tiny", width=4), "no field 'width'"),
    (lambda: get_preset("tiny", gqa__head_dim=4), "no field 'gqa__head_dim'"),
    (lambda: get_preset("glm-6"), "no model preset 'glm-6'; there are: tiny"),
]


@pytest.mark.parametrize("build, message", [pytest.param(*pair, id=pair[1]) for pair in CONTRADICTIONS])
def test_contradictions_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_part_is_frozen():
    for part in (MLAConfig(1, 1, 1, 2, 1), IndexerConfig(1, 2, 1), MoEConfig(1, 1, 0, 1), MTPConfig(), GQA_PART, small_config()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.layers = 3
