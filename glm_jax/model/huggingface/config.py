"""config.json <-> ModelConfig, in every spelling that released checkpoints and transformers 4 and 5 use."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from glm_jax.model.config import GQAConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig, shared_pattern
from glm_jax.model.huggingface.files import CheckpointError


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What an architecture fixes, and the values its transformers class gives to keys that config.json leaves out."""

    model_type: str
    mla: bool = False
    indexer: bool = False
    moe: bool = False
    qk_norm: bool = False
    may_have_bias: bool = False
    first_k_dense_replace: int = 0
    n_group: int = 1
    topk_group: int = 1
    indexer_rope_interleave: bool = True
    partial_rotary_factor: float = 1.0
    head_dim: int | None = None  # None: hidden_size / heads
    rope_theta: float | None = None  # None: must be given


ARCHITECTURES = {
    "GlmMoeDsaForCausalLM": Architecture("glm_moe_dsa", mla=True, indexer=True, moe=True, first_k_dense_replace=3),
    "DeepseekV32ForCausalLM": Architecture(
        "deepseek_v32", mla=True, indexer=True, moe=True, first_k_dense_replace=3, n_group=8, topk_group=4, indexer_rope_interleave=False),
    "Glm4MoeLiteForCausalLM": Architecture("glm4_moe_lite", mla=True, moe=True, first_k_dense_replace=1),
    "Glm4MoeForCausalLM": Architecture("glm4_moe", moe=True, may_have_bias=True, first_k_dense_replace=1, partial_rotary_factor=0.5),
    "Qwen3ForCausalLM": Architecture("qwen3", qk_norm=True, head_dim=128),
    "LlamaForCausalLM": Architecture("llama", rope_theta=1e4),
}
# Keys of our own, written where a model differs from what transformers builds: it has no key for these, and ignores them.
LATENT_NORM_EPS, KEY_NORM_EPS, RECYCLE, OWN_EMBEDDINGS = "latent_norm_eps", "index_key_norm_eps", "mtp_recycle", "mtp_own_embeddings"
# What a checkpoint may say otherwise and still hold the same network.
EXTENSIONS = (LATENT_NORM_EPS, KEY_NORM_EPS, RECYCLE, OWN_EMBEDDINGS, "num_nextn_predict_layers", "index_share_for_mtp_iteration")
REQUIRED = object()


class _Keys:
    """config.json's keys, read with their types; what is wrong is collected, so that it can be said at once."""

    def __init__(self, raw: dict[str, Any]):
        self.raw, self.problems = raw, []

    def get(self, *names: str, default: Any = REQUIRED, kind: type | tuple = int, least: float = 1) -> Any:
        """The first of `names` that is there and not null. A bad value is reported and the least one returned in its place."""
        name = next((name for name in names if self.raw.get(name) is not None), None)
        if name is None:
            if default is REQUIRED:
                self.problems.append(f"{' or '.join(names)} is missing")
                return least
            return default
        value = self.raw[name]
        if kind is float:
            good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= least
            value = float(value) if good else value
        else:
            good = isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) and (kind is not int or value >= least)
        if not good:
            bound = f" of at least {least}" if kind in (int, float) else ""
            self.problems.append(f"{name}={value!r} must be {getattr(kind, '__name__', kind)}{bound}")
            return least
        return value

    def refuse(self, condition: Any, problem: str) -> None:
        if condition:
            self.problems.append(problem)


def config_from_huggingface(raw: dict[str, Any]) -> ModelConfig:
    """The ModelConfig that a config.json describes. Keys without meaning for the network are passed over.

    Raises CheckpointError, which lists everything wrong at once: an architecture that is not in ARCHITECTURES, keys missing or of the wrong
    type, features that are not built (rotary scaling, sliding windows, biases elsewhere than in GLM-4.5's projections, other activations
    and routers, quantisations other than block-scaled FP8), and contradictions.
    """
    keys = _Keys(raw)
    named = raw.get("architectures") or [name for name, a in ARCHITECTURES.items() if a.model_type == raw.get("model_type")] or [None]
    if not isinstance(named, list) or named[0] not in ARCHITECTURES:
        raise CheckpointError("config.json", [f"unknown architecture {named[0] if isinstance(named, list) else named!r} "
                                              f"(model_type {raw.get('model_type')!r}); known are {', '.join(ARCHITECTURES)}"])
    architecture = ARCHITECTURES[named[0]]
    layers, heads, hidden = keys.get("num_hidden_layers"), keys.get("num_attention_heads"), keys.get("hidden_size")
    rope = _rope(keys)
    mla = _mla(keys, heads) if architecture.mla else None
    moe = _moe(keys, architecture) if architecture.moe else None
    dense = _dense_layers(keys, architecture, layers) if architecture.moe else layers
    _refuse_what_is_not_built(keys, architecture, layers)
    parts = {
        "mla": mla, "moe": moe, "mtp": _mtp(keys), "dense_layers": dense,
        "gqa": None if architecture.mla else _gqa(keys, architecture, rope, hidden, heads),
        "indexer": _indexer(keys, architecture, layers) if architecture.indexer else None,
        "rope_theta": _theta(keys, architecture, rope),
    }
    scalars = {
        "vocab_size": keys.get("vocab_size"), "hidden_size": hidden, "layers": layers, "heads": heads,
        "intermediate_size": keys.get("intermediate_size"), "max_positions": keys.get("max_position_embeddings"),
        "rms_norm_eps": keys.get("rms_norm_eps", kind=float, least=0),
        "initializer_range": keys.get("initializer_range", default=0.02, kind=float, least=0),
        "tied_embeddings": keys.get("tie_word_embeddings", default=False, kind=bool),
    }
    if keys.problems:
        raise CheckpointError("config.json", keys.problems)
    try:
        return ModelConfig(**scalars, **parts)
    except ValueError as error:
        raise CheckpointError("config.json", [f"impossible: {error}"]) from error


def _rope(keys: _Keys) -> dict[str, Any]:
    """Rotary parameters: rope_parameters (transformers 5), rope_scaling (4), or top-level keys. Anything but plain rotation is refused."""
    rope = {}
    for name in ("rope_scaling", "rope_parameters"):
        nested = keys.get(name, default={}, kind=dict)
        kind = nested.get("rope_type", nested.get("type")) or "default"
        keys.refuse(kind != "default", f"{name}: rotary scaling of type {kind!r} is not built; plain (default) rotation is")
        rope |= {key: value for key, value in nested.items() if value is not None}
    for name in ("rope_theta", "partial_rotary_factor"):
        if keys.raw.get(name) is not None:
            rope.setdefault(name, keys.raw[name])
    return rope


def _theta(keys: _Keys, architecture: Architecture, rope: dict[str, Any]) -> float:
    nested = _Keys(rope)
    theta = nested.get("rope_theta", default=REQUIRED if architecture.rope_theta is None else architecture.rope_theta, kind=float)
    keys.problems += nested.problems
    return theta


def _mla(keys: _Keys, heads: int) -> MLAConfig:
    nope, rope = keys.get("qk_nope_head_dim"), keys.get("qk_rope_head_dim", default=0)
    # transformers has overwritten qk_rope_head_dim with head_dim in places; the sum tells what it was.
    rope = keys.get("qk_head_dim", default=nope + rope) - nope
    keys.refuse(rope < 1, f"qk_rope_head_dim is missing or qk_head_dim={keys.raw.get('qk_head_dim')} leaves no rotary part")
    keys.refuse(keys.get("num_key_value_heads", default=heads) != heads, "num_key_value_heads differs from num_attention_heads under MLA")
    keys.refuse("q_lora_rank" in keys.raw and keys.raw["q_lora_rank"] is None, "q_lora_rank=null: queries without a latent are not built")
    return MLAConfig(
        q_lora_rank=keys.get("q_lora_rank") if keys.raw.get("q_lora_rank", 0) is not None else 1, kv_lora_rank=keys.get("kv_lora_rank"),
        qk_nope_head_dim=nope, qk_rope_head_dim=max(rope, 1), v_head_dim=keys.get("v_head_dim"),
        latent_norm_eps=keys.get(LATENT_NORM_EPS, default=1e-6, kind=float, least=0),
        rope_interleaved=keys.get("rope_interleave", default=True, kind=bool))


def _gqa(keys: _Keys, architecture: Architecture, rope: dict[str, Any], hidden: int, heads: int) -> GQAConfig:
    head_dim = keys.get("head_dim", default=architecture.head_dim or max(hidden // heads, 1))
    nested = _Keys(rope)
    factor = nested.get("partial_rotary_factor", default=architecture.partial_rotary_factor, kind=float, least=0)
    keys.problems += nested.problems
    bias = keys.get("attention_bias", default=False, kind=bool)
    return GQAConfig(
        kv_heads=keys.get("num_key_value_heads", default=heads), head_dim=head_dim, rotary_dim=int(head_dim * factor),
        qk_norm=architecture.qk_norm or architecture.may_have_bias and keys.get("use_qk_norm", default=False, kind=bool),
        bias=architecture.may_have_bias and bias)


def _indexer(keys: _Keys, architecture: Architecture, layers: int) -> IndexerConfig:
    """An explicit list goes before a pattern, and that before the rule of freq and offset (as in transformers' GlmMoeDsaConfig)."""
    types = keys.get("indexer_types", "index_topk_pattern", default=None, kind=(list, str))
    if types:
        letters = [{"full": "F", "shared": "S", "F": "F", "S": "S"}.get(kind) for kind in types]
        keys.refuse(None in letters, f"indexer_types={types!r} may hold 'full' and 'shared' (F and S) only")
        pattern = "".join(letter or "F" for letter in letters)
    else:
        pattern = shared_pattern(layers, keys.get("index_topk_freq", default=1), keys.get("index_skip_topk_offset", default=2, least=0))
    return IndexerConfig(
        heads=keys.get("index_n_heads"), head_dim=keys.get("index_head_dim"), topk=keys.get("index_topk"),
        key_norm_eps=keys.get(KEY_NORM_EPS, default=1e-6, kind=float, least=0),
        rope_interleaved=keys.get("indexer_rope_interleave", default=architecture.indexer_rope_interleave, kind=bool),
        pattern=pattern if "S" in pattern or len(pattern) != layers else "")


def _moe(keys: _Keys, architecture: Architecture) -> MoEConfig | None:
    if all(keys.raw.get(name) is None for name in ("n_routed_experts", "num_local_experts", "num_experts")):
        return None
    return MoEConfig(
        experts=keys.get("n_routed_experts", "num_local_experts", "num_experts"), experts_per_token=keys.get("num_experts_per_tok"),
        shared_experts=keys.get("n_shared_experts", default=1, least=0), intermediate_size=keys.get("moe_intermediate_size"),
        routed_scaling_factor=keys.get("routed_scaling_factor", kind=float, least=0),
        norm_topk_prob=keys.get("norm_topk_prob", default=True, kind=bool),
        groups=keys.get("n_group", default=architecture.n_group), topk_groups=keys.get("topk_group", default=architecture.topk_group))


def _dense_layers(keys: _Keys, architecture: Architecture, layers: int) -> int:
    types = keys.get("mlp_layer_types", default=None, kind=list)
    if types is None:
        return min(keys.get("first_k_dense_replace", default=architecture.first_k_dense_replace, least=0), layers)
    dense = types.count("dense")
    keys.refuse(types != ["dense"] * dense + ["sparse"] * (layers - dense),
                f"mlp_layer_types={types!r} must be 'dense' first and 'sparse' after, {layers} in all")
    return min(dense, layers)


def _mtp(keys: _Keys) -> MTPConfig | None:
    count = keys.get("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0)
    return None if count == 0 else MTPConfig(
        layers=count, recycle=keys.get(RECYCLE, default="post_norm", kind=str),
        share_selection=keys.get("index_share_for_mtp_iteration", default=False, kind=bool),
        own_embeddings=keys.get(OWN_EMBEDDINGS, default=False, kind=bool))


def _refuse_what_is_not_built(keys: _Keys, architecture: Architecture, layers: int) -> None:
    raw = keys.raw
    for name, built in (("hidden_act", "silu"), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        keys.refuse(raw.get(name) not in (None, built), f"{name}={raw.get(name)!r} is not built; {built!r} is")
    keys.refuse(raw.get("mlp_bias"), "mlp_bias=true is not built")
    keys.refuse(raw.get("attention_bias") and not architecture.may_have_bias, "attention_bias=true is built for Glm4MoeForCausalLM only")
    types = raw.get("layer_types") or []
    other = [kind for kind in types if kind not in ("full_attention", "indexed_attention")]
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    slides = isinstance(window, int) and window < (raw.get("max_position_embeddings") or 0) and (raw.get("max_window_layers") or 0) < layers
    keys.refuse(other, f"layer_types: attention of type {other and other[0]!r} is not built")
    keys.refuse(slides and not types, f"sliding_window={window} of the layers from {raw.get('max_window_layers') or 0} on is not built")
    quantisation = raw.get("quantization_config") or {}
    fp8 = quantisation.get("quant_method") == "fp8" and quantisation.get("fmt", "e4m3") == "e4m3" and quantisation.get("weight_block_size")
    keys.refuse(quantisation and not fp8,
                f"quantization_config: {quantisation.get('quant_method')!r} is not built; fp8 (e4m3) with a weight_block_size is")


def config_to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model: config_from_huggingface of it gives `config` back (an indexer pattern of F only, as the empty one).

    Written in the spelling of transformers 5, with rope_theta at the top as well, where transformers 4 and serving engines look.
    """
    mla, gqa, indexer, moe, mtp = config.mla, config.gqa, config.indexer, config.moe, config.mtp
    name = _architecture_of(config)
    sparse = config.layers - config.dense_layers
    raw: dict[str, Any] = {
        "architectures": [name], "model_type": ARCHITECTURES[name].model_type,
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "hidden_act": "silu",
        "max_position_embeddings": config.max_positions, "rms_norm_eps": config.rms_norm_eps, "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tied_embeddings, "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }
    if mla is not None:
        raw |= {
            "attention_bias": False, "num_key_value_heads": config.heads, "q_lora_rank": mla.q_lora_rank, "kv_lora_rank": mla.kv_lora_rank,
            "qk_nope_head_dim": mla.qk_nope_head_dim, "qk_rope_head_dim": mla.qk_rope_head_dim, "qk_head_dim": mla.qk_head_dim,
            "head_dim": mla.qk_rope_head_dim, "v_head_dim": mla.v_head_dim, "rope_interleave": mla.rope_interleaved}
        if mla.latent_norm_eps != 1e-6:
            raw[LATENT_NORM_EPS] = mla.latent_norm_eps
    if gqa is not None:
        raw |= {"attention_bias": gqa.bias, "num_key_value_heads": gqa.kv_heads, "head_dim": gqa.head_dim}
    if name == "Glm4MoeForCausalLM":
        factor = _rotary_factor(gqa.head_dim, gqa.rotary_dim)
        raw |= {"use_qk_norm": gqa.qk_norm, "partial_rotary_factor": factor}
        raw["rope_parameters"]["partial_rotary_factor"] = factor
    if indexer is not None:
        raw |= {
            "index_n_heads": indexer.heads, "index_head_dim": indexer.head_dim, "index_topk": indexer.topk,
            "indexer_rope_interleave": indexer.rope_interleaved}
        if "S" in indexer.pattern:
            raw |= {"indexer_types": [{"F": "full", "S": "shared"}[letter] for letter in indexer.pattern],
                    "index_topk_pattern": indexer.pattern}
        if indexer.key_norm_eps != 1e-6:
            raw[KEY_NORM_EPS] = indexer.key_norm_eps
    if ARCHITECTURES[name].moe:
        raw |= {"first_k_dense_replace": config.dense_layers, "mlp_layer_types": ["dense"] * config.dense_layers + ["sparse"] * sparse}
    if moe is not None:
        raw |= {
            "n_routed_experts": moe.experts, "num_experts_per_tok": moe.experts_per_token, "n_shared_experts": moe.shared_experts,
            "moe_intermediate_size": moe.intermediate_size, "routed_scaling_factor": moe.routed_scaling_factor,
            "norm_topk_prob": moe.norm_topk_prob, "n_group": moe.groups, "topk_group": moe.topk_groups,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    raw["num_nextn_predict_layers"] = 0 if mtp is None else mtp.layers
    if mtp is not None:
        raw |= {key: value for key, value, plain in (
            ("index_share_for_mtp_iteration", mtp.share_selection, False), (RECYCLE, mtp.recycle, "post_norm"),
            (OWN_EMBEDDINGS, mtp.own_embeddings, False)) if value != plain}
    return raw


def _architecture_of(config: ModelConfig) -> str:
    if config.indexer is not None:
        deepseek = not config.indexer.rope_interleaved and "S" not in config.indexer.pattern
        return "DeepseekV32ForCausalLM" if deepseek else "GlmMoeDsaForCausalLM"
    if config.mla is not None:
        return "Glm4MoeLiteForCausalLM"
    if config.moe is not None or config.gqa.bias or config.gqa.rotary_dim != config.gqa.head_dim:
        return "Glm4MoeForCausalLM"
    return "Qwen3ForCausalLM" if config.gqa.qk_norm else "LlamaForCausalLM"


def _rotary_factor(head_dim: int, rotary_dim: int) -> float:
    """The factor that int(head_dim * factor) turns into rotary_dim."""
    factor = rotary_dim / head_dim
    return factor if int(head_dim * factor) == rotary_dim else math.nextafter(factor, 2)
