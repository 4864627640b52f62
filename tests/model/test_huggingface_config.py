"""config.json <-> ModelConfig: every spelling, and what is refused."""

import dataclasses
import json

import pytest
from huggingface_folders import CASES, GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from random_configs import FAMILIES, random_config

from glm_jax.model import MTPConfig, get_preset
from glm_jax.model.huggingface import CheckpointError, config_from_huggingface, config_to_huggingface
from glm_jax.model.presets import PRESETS

golden = lambda case: json.loads((GOLDEN / case / "config.json").read_text())
without = lambda raw, *names: {key: value for key, value in raw.items() if key not in names}

# config.json of zai-org/GLM-5.2 as released, in the spelling of transformers 4; head_dim is as misleading there.
GLM_5_2 = {
    "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "ep_size": 1,
    "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 3, "head_dim": 192, "hidden_act": "silu", "hidden_size": 6144,
    "index_head_dim": 128, "index_n_heads": 32, "index_share_for_mtp_iteration": True, "index_skip_topk_offset": 3, "index_topk": 2048,
    "index_topk_freq": 4, "indexer_rope_interleave": True, "initializer_range": 0.02, "intermediate_size": 12288, "kv_lora_rank": 512,
    "max_position_embeddings": 1048576, "model_type": "glm_moe_dsa", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "moe_router_dtype": "float32", "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1, "pad_token_id": 154820, "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_interleave": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": 256, "vocab_size": 154880,
}


def test_a_released_configuration_is_the_preset():
    assert config_from_huggingface(GLM_5_2) == get_preset("glm-5.2")
    full = without(GLM_5_2, "index_topk_freq", "index_skip_topk_offset", "index_share_for_mtp_iteration")
    glm_5 = full | {"rope_parameters": {"rope_theta": 1e6}, "max_position_embeddings": 202752, "head_dim": 64}
    assert config_from_huggingface(glm_5) == get_preset("glm-5")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_come_back(name):
    assert config_from_huggingface(config_to_huggingface(PRESETS[name])) == PRESETS[name]


@pytest.mark.parametrize("case", CASES)
def test_reference_configurations_come_back(case):
    config = config_from_huggingface(golden(case))
    written = config_to_huggingface(config)
    assert config_from_huggingface(json.loads(json.dumps(written))) == config
    assert written["architectures"] == golden(case)["architectures"] and written["model_type"] == golden(case)["model_type"]
    # What both write, both write alike.
    assert {key: written[key] for key in written if key in golden(case) and key not in ("num_nextn_predict_layers", "rope_parameters")} == {
        key: golden(case)[key] for key in written if key in golden(case) and key not in ("num_nextn_predict_layers", "rope_parameters")}
    assert golden(case)["rope_parameters"].items() <= written["rope_parameters"].items()


@settings(deadline=None)
@given(st.sampled_from(FAMILIES), st.integers(0, 2**32), st.sampled_from([None, "post_norm", "pre_norm"]), st.booleans(), st.booleans())
def test_any_configuration_comes_back(family, seed, recycle, share, own):
    config = random_config(family, seed)
    mtp = None if recycle is None else MTPConfig(
        recycle=recycle, share_selection=share and config.indexer is not None, own_embeddings=own)
    config = dataclasses.replace(config, mtp=mtp)
    assert config_from_huggingface(json.loads(json.dumps(config_to_huggingface(config)))) == config


@settings(deadline=None)
@given(st.integers(1, 200), st.data())
def test_any_rotary_part_comes_back(half, data):
    head_dim = data.draw(st.integers(2 * half, 500))
    config = get_preset("glm-4.5")
    config = dataclasses.replace(config, gqa=dataclasses.replace(config.gqa, head_dim=head_dim, rotary_dim=2 * half))
    assert config_from_huggingface(config_to_huggingface(config)) == config


ROPE = {  # spellings of theta 5e5 and no scaling
    "nested": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "nested, no type": {"rope_parameters": {"rope_theta": 500000}},
    "top": {"rope_theta": 500000},
    "top, scaling null": {"rope_theta": 5e5, "rope_scaling": None},
    "top, scaling default": {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    "top, scaling default, newer": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
    "both, nested counts": {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "scaling holds theta": {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
}


@pytest.mark.parametrize("spelling", ROPE)
@pytest.mark.parametrize("case", ["glm5", "llama_dense"])
def test_rope_theta(case, spelling):
    assert config_from_huggingface(without(golden(case), "rope_parameters") | ROPE[spelling]).rope_theta == 5e5


def test_llama_alone_has_a_default_theta():
    assert config_from_huggingface(without(golden("llama_dense"), "rope_parameters")).rope_theta == 1e4
    with pytest.raises(CheckpointError, match="rope_theta is missing"):
        config_from_huggingface(without(golden("glm5"), "rope_parameters"))


@pytest.mark.parametrize(("change", "rotary_dim"), [
    ({"rope_parameters": {"rope_theta": 1e6}}, 8),  # Glm4Moe's default is one half
    ({"rope_parameters": {"rope_theta": 1e6}, "partial_rotary_factor": 0.25}, 4),
    ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}}, 4),
    ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5}, 4),
])
def test_partial_rotary_factor(change, rotary_dim):
    assert config_from_huggingface(golden("glm4_5") | change).gqa.rotary_dim == rotary_dim


@pytest.mark.parametrize(("change", "pattern"), [
    ({}, ""),
    ({"indexer_types": None}, ""),
    ({"indexer_types": ["full", "full", "shared", "shared", "full", "shared", "full"]}, "FFSSFSF"),
    ({"index_topk_pattern": "FSSSFSS"}, "FSSSFSS"),
    ({"index_topk_pattern": ["full", *["shared"] * 6]}, "FSSSSSS"),
    ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFSSSF"),
    ({"index_topk_freq": 4}, "FFSSSFS"),  # transformers' default offset is 2
    ({"index_topk_freq": 1, "index_skip_topk_offset": 0}, ""),
    ({"index_topk_freq": 4, "indexer_types": ["full"] * 7}, ""),  # the explicit list counts
    ({"index_topk_freq": 4, "index_topk_pattern": "FSFSFSF"}, "FSFSFSF"),
])
def test_indexer_patterns(change, pattern):
    raw = without(golden("glm5_2_shared_indexer"), "indexer_types", "index_topk_freq", "index_skip_topk_offset")
    assert config_from_huggingface(raw | change).indexer.pattern == pattern


@pytest.mark.parametrize(("change", "dense"), [
    ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}, 2),  # the explicit list counts
    ({"mlp_layer_types": None}, 1), ({"mlp_layer_types": None, "first_k_dense_replace": 0}, 0),
    ({"mlp_layer_types": None, "first_k_dense_replace": None}, 3), ({"mlp_layer_types": None, "first_k_dense_replace": 9}, 4),
])
def test_dense_layers(change, dense):
    assert config_from_huggingface(golden("glm5") | change).dense_layers == dense


@pytest.mark.parametrize(("change", "rope_dim"), [
    ({"head_dim": 192}, 8), ({"qk_rope_head_dim": 192}, 8), ({"qk_head_dim": None}, 8), ({"qk_rope_head_dim": None}, 8),
])
def test_head_dim_does_not_mislead(change, rope_dim):
    assert config_from_huggingface(golden("glm5") | change).mla.qk_rope_head_dim == rope_dim


def test_layouts_of_the_indexer_by_family():
    assert config_from_huggingface(golden("glm5")).indexer.rope_interleaved
    assert not config_from_huggingface(golden("deepseek_v3_2")).indexer.rope_interleaved
    assert not config_from_huggingface(golden("glm5") | {"indexer_rope_interleave": False}).indexer.rope_interleaved


def test_architecture_from_the_model_type():
    assert config_from_huggingface(without(golden("glm4_5"), "architectures")) == config_from_huggingface(golden("glm4_5"))


def test_eps_of_the_latent_norms_is_written_where_it_differs():
    config = config_from_huggingface(golden("glm5"))
    assert config.mla.latent_norm_eps == 1e-6 and "latent_norm_eps" not in config_to_huggingface(config)
    other = dataclasses.replace(config, mla=dataclasses.replace(config.mla, latent_norm_eps=1e-5))
    assert config_to_huggingface(other)["latent_norm_eps"] == 1e-5


@pytest.mark.parametrize(("case", "change", "words"), [
    ("glm5", {"architectures": ["MixtralForCausalLM"]}, "unknown architecture 'MixtralForCausalLM'"),
    ("glm5", {"architectures": "GlmMoeDsaForCausalLM?"}, "unknown architecture"),
    ("glm5", {"architectures": None, "model_type": None}, "unknown architecture None"),
    ("glm5", {"rope_scaling": {"type": "yarn", "factor": 40}}, "'yarn' is not built"),
    ("llama_dense", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "'llama3' is not built"),
    ("qwen3_dense", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "'sliding_attention' is not built"),
    ("qwen3_dense", {"layer_types": None, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding_window=64"),
    ("qwen3_dense", {"attention_bias": True}, "attention_bias"),
    ("llama_dense", {"mlp_bias": True}, "mlp_bias"),
    ("glm5", {"attention_bias": True}, "attention_bias"),
    ("glm5", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("glm5", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("glm5", {"q_lora_rank": None}, "q_lora_rank=null"),
    ("glm5", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("glm5", {"quantization_config": {"quant_method": "awq"}}, "'awq' is not built"),
    ("glm5", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, "mlp_layer_types"),
    ("glm5", {"indexer_types": ["full", "none", "full", "full"]}, "may hold 'full' and 'shared'"),
    ("glm5", {"indexer_types": ["shared", "full", "full", "full"]}, "begins with S"),
    ("glm5", {"indexer_types": ["full"] * 3}, "3 letters for layers=4"),
    ("glm5", {"num_experts_per_tok": 9}, "impossible.*exceeds moe.experts=8"),
    ("glm5", {"qk_head_dim": 16}, "leaves no rotary part"),
    ("glm5", {"hidden_size": -48}, "hidden_size=-48 must be int of at least 1"),
    ("glm5", {"vocab_size": "128"}, "vocab_size='128'"),
    ("glm5", {"rms_norm_eps": True}, "rms_norm_eps=True"),
    ("glm5", {"num_nextn_predict_layers": 3}, "mtp.layers=3"),
    ("glm4_5", {"num_key_value_heads": 3}, "not a multiple of gqa.kv_heads=3"),
])
def test_refusals(case, change, words):
    with pytest.raises(CheckpointError, match=words):
        config_from_huggingface(golden(case) | change)


def test_a_window_that_never_cuts_is_no_window():
    raw = golden("qwen3_dense") | {"layer_types": None, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}
    assert config_from_huggingface(raw) == config_from_huggingface(golden("qwen3_dense"))


def test_everything_wrong_is_said_at_once():
    raw = without(golden("glm5"), "hidden_size", "kv_lora_rank") | {"hidden_act": "relu", "index_topk": 0}
    with pytest.raises(ValueError) as caught:
        config_from_huggingface(raw)
    assert len(caught.value.problems) == 4
    for words in ("hidden_size is missing", "kv_lora_rank is missing", "hidden_act", "index_topk=0"):
        assert words in str(caught.value)
