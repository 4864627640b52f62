"""A Llama model in GGUF, dequantised to the files of a Hugging Face checkpoint.

GGUF is llama.cpp's format: metadata, tokenizer and quantised tensors in one file. Three things differ from Hugging Face's form:
names (`TENSORS`), the order of the rows of the query and key projections (`unpermute`), and the tokenizer, of which GGUF holds the
vocabulary, the merges and the name of a pre-tokenizer, here rebuilt as a `tokenizer.json`.
Needs the package `gguf`. JAX-free.
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from typing import Any

import numpy as np

TENSORS = {  # GGUF name: Hugging Face name; {} is the layer
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE_TOKENIZERS = {  # GGUF's name of a pre-tokenizer: its definition. Digits stand alone, then GPT-2's regular expression
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
}
TOKEN_KEYS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # Hugging Face's name of a special token: GGUF's
CONTROL, USER_DEFINED = 3, 4  # gguf.TokenType: the tokens that are added to the vocabulary, special ones and ordinary ones


class GGUFError(ValueError):
    """The file is not a Llama model that this module can convert."""


def convert(file: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes config.json, model.safetensors (float32), tokenizer.json, tokenizer_config.json and generation_config.json.

    Raises: GGUFError naming the metadata or tensor that is missing or that Hugging Face's Llama has no place for. Nothing is then written.
    """
    import gguf
    from safetensors.numpy import save_file

    try:
        reader = gguf.GGUFReader(file)
    except ValueError as error:
        raise GGUFError(f"{file} is no GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(metadata, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    files = {
        "config.json": config,
        "generation_config.json": {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "tokenizer.json": tokenizer_definition(metadata),
        "tokenizer_config.json": tokenizer_config(metadata),
    }
    weights = read_weights(reader.tensors, config)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors makes it readable to its owner only


def model_config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    """Hugging Face's LlamaForCausalLM config. Raises: GGUFError for another architecture or a scaled rotary embedding."""
    if (architecture := metadata.get("general.architecture")) != "llama":
        raise GGUFError(f"general.architecture is {architecture!r}, expected 'llama'")
    if scaled := [name for name in metadata if name.startswith("llama.rope.scaling.")]:
        raise GGUFError(f"scaled rotary embeddings are not converted: {', '.join(scaled)}")
    heads = _get(metadata, "llama.attention.head_count")
    hidden = _get(metadata, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_get(metadata, "tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": _get(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": _get(metadata, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": _get(metadata, "llama.context_length"),
        "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        "rms_norm_eps": _shortest(_get(metadata, "llama.attention.layer_norm_rms_epsilon")),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "initializer_range": _shortest(hidden**-0.5),  # SmolLM2's; GGUF does not record it, and loading draws nothing
        "torch_dtype": "float32",
        **{f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in TOKEN_KEYS.items() if name != "unk"},
    }


def read_weights(tensors, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """float32 weights, [out, in], under Hugging Face's names, of GGUFReader.tensors.

    Raises: GGUFError for unknown, missing or misshaped ones.
    """
    import gguf

    expected = weight_shapes(config)
    weights, wrong = {}, []
    for tensor in tensors:
        name = hugging_face_name(tensor.name)
        shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF lists the innermost axis first
        if expected.get(name) != shape:
            wrong.append(f"{tensor.name} {list(shape)}, expected {list(expected[name]) if name in expected else 'none of this name'}")
            continue
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("self_attn.q_proj.weight"):
            weight = unpermute(weight, config["num_attention_heads"])
        elif name.endswith("self_attn.k_proj.weight"):
            weight = unpermute(weight, config["num_key_value_heads"])
        weights[name] = np.ascontiguousarray(weight, np.float32)
    wrong += [f"{name} is missing" for name in expected.keys() - weights.keys()] if not wrong else []
    if wrong:
        raise GGUFError(f"tensors that are no Llama's of this config: {'; '.join(sorted(wrong)[:8])} ({len(wrong)} in all)")
    return weights


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """{Hugging Face name: shape} of every weight."""
    hidden, wide, vocab, size = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    layer = {
        "attn_norm": (hidden,), "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
        "attn_output": (hidden, queries), "ffn_norm": (hidden,), "ffn_gate": (wide, hidden), "ffn_up": (wide, hidden),
        "ffn_down": (hidden, wide)}
    shapes = {TENSORS["token_embd.weight"]: (vocab, hidden), TENSORS["output_norm.weight"]: (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes[TENSORS["output.weight"]] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        shapes |= {TENSORS[f"blk.{{}}.{name}.weight"].format(i): shape for name, shape in layer.items()}
    return shapes


def hugging_face_name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor, None where its Llama has no such weight."""
    layer = re.match(r"blk\.(\d+)\.", name)
    if layer is None:
        return TENSORS.get(name)
    pattern = TENSORS.get(f"blk.{{}}.{name[layer.end():]}")
    return pattern and pattern.format(layer[1])


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Query or key projection [heads * head_dim, in] from llama.cpp's row order to Hugging Face's.

    llama.cpp rotates neighbouring pairs of a head's dimensions (2i, 2i + 1), Hugging Face halves (i, i + head_dim / 2). Its converter
    therefore interleaves the two halves of every head's rows (convert_hf_to_gguf.py, LlamaModel.permute); this takes them apart again.
    """
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def tokenizer_definition(metadata: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer.json of a byte-level BPE. Raises: GGUFError for another kind of tokenizer or an unknown pre-tokenizer."""
    if (model := metadata.get("tokenizer.ggml.model")) != "gpt2":
        raise GGUFError(f"tokenizer.ggml.model is {model!r}, expected 'gpt2' (byte-level BPE)")
    if (name := metadata.get("tokenizer.ggml.pre")) not in PRE_TOKENIZERS:
        raise GGUFError(f"tokenizer.ggml.pre is {name!r}; known are {', '.join(PRE_TOKENIZERS)}")
    tokens, kinds = _get(metadata, "tokenizer.ggml.tokens"), _get(metadata, "tokenizer.ggml.token_type")
    as_spelled = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, "special": kind == CONTROL, **as_spelled}
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[name],
        "post_processor": None,
        "decoder": {**BYTE_LEVEL, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in _get(metadata, "tokenizer.ggml.merges")],  # byte-level tokens hold no space
        },
    }
    if len(definition["model"]["vocab"]) != len(tokens):
        raise GGUFError(f"tokenizer.ggml.tokens: {len(tokens) - len(definition['model']['vocab'])} tokens are listed twice")
    return definition


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Special tokens by name and the chat template, as transformers reads them."""
    tokens = _get(metadata, "tokenizer.ggml.tokens")
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in TOKEN_KEYS.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # "as tokenizer.json says"
        "model_max_length": _get(metadata, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
        **{f"{name}_token": tokens[i] for name, i in ids.items() if i is not None},
        **({"chat_template": metadata["tokenizer.chat_template"]} if "tokenizer.chat_template" in metadata else {}),
    }


def _get(metadata: dict[str, Any], key: str) -> Any:
    if key not in metadata:
        raise GGUFError(f"the metadata lacks {key}")
    return metadata[key]


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF keeps 1e-05 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))
