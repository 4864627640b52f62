"""GGUF to a Hugging Face folder: names, row order, tokenizer; and what is refused."""

import json

import numpy as np
import pytest
import tiny_gguf
from safetensors.numpy import load_file

from experiments import gguf_llama
from glm_jax.data.chatml import load_chat_template


def convert(tmp_path, **kwargs):
    folder = tmp_path / "folder"
    folder.mkdir()
    gguf_llama.convert(tiny_gguf.write(tmp_path / "model.gguf", **kwargs), folder)
    return folder


@pytest.mark.parametrize("heads, size", [(1, 2), (3, 4), (9, 64)])
def test_unpermute_takes_the_halves_of_a_head_apart(heads, size):
    weight = np.arange(heads * size * 5).reshape(heads * size, 5)
    stored = tiny_gguf.permute(weight, heads)
    assert size == 2 or not (stored == weight).all()
    np.testing.assert_array_equal(gguf_llama.unpermute(stored, heads), weight)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_bit_for_bit_under_hugging_faces_names(tmp_path, tied):
    folder = convert(tmp_path, tied=tied)
    weights, expected = load_file(folder / "model.safetensors"), tiny_gguf.hugging_face_weights(tied)
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert weights[name].dtype == np.float32
        np.testing.assert_array_equal(weights[name], weight, err_msg=name)

    config = json.loads((folder / "config.json").read_text())
    assert config.items() >= {**tiny_gguf.CONFIG, "tie_word_embeddings": tied, "vocab_size": len(tiny_gguf.TOKENS)}.items()
    assert config["rope_theta"] == 100000.0 and config["rms_norm_eps"] == 1e-5  # as decimals, not as float32 spells them
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 2, 2]


def test_quantised_weights_are_dequantised_to_float32(tmp_path):
    weights, expected = load_file(convert(tmp_path, quantised=True) / "model.safetensors"), tiny_gguf.hugging_face_weights()
    for name, weight in expected.items():
        assert weights[name].dtype == np.float32
        step = 0 if weight.ndim == 1 else (weight.max() - weight.min()) / 15  # a block of 32 has 16 levels between its own extremes
        assert np.abs(weights[name] - weight).max() <= step * 0.51, name


def test_tokenizer_is_byte_level_bpe_with_digits_apart(tmp_path):
    template = load_chat_template(convert(tmp_path))
    tokenizer = template.tokenizer
    spell = lambda text: [tiny_gguf.TOKENS[i] for i in tokenizer.encode(text)]
    assert spell("ab ab") == ["ab", "Ġab"]
    assert spell("a12 3") == ["a", "1", "2", "Ġ", "3"]  # "1 2" is a merge, but digits never meet
    assert spell("<|im_end|>") == list("<|im_end|>")
    assert tokenizer.vocab_size == len(tiny_gguf.TOKENS)
    for text in ("naïve 中文 🐧\t\n", " <|im_start|>", "12\r\n  x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.special == {marker: i for i, marker in enumerate(tiny_gguf.SPECIAL)}
    assert template.system is None
    assert tokenizer.decode(template.prompt([("user", "ab")])) == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("kwargs, message", [
    (dict(architecture="gemma"), "general.architecture is 'gemma'"),
    (dict(pre="qwen2"), "tokenizer.ggml.pre is 'qwen2'; known are smollm"),
    (dict(metadata=[("add_rope_scaling_factor", 8.0)]), "llama.rope.scaling.factor"),
    (dict(drop=["blk.1.attn_k.weight"]), "model.layers.1.self_attn.k_proj.weight is missing"),
    (dict(extra={"rope_freqs.weight": np.ones(8, np.float32)}), r"rope_freqs.weight \[8\], expected none of this name"),
    (dict(drop=["blk.0.ffn_up.weight"], extra={"blk.0.ffn_up.weight": np.ones((3, 64), np.float32)}),
     r"blk.0.ffn_up.weight \[3, 64\], expected \[96, 64\]"),
])
def test_what_is_no_plain_llama_is_refused_by_name_and_writes_nothing(tmp_path, kwargs, message):
    with pytest.raises(gguf_llama.GGUFError, match=message):
        convert(tmp_path, **kwargs)
    assert not list((tmp_path / "folder").iterdir())


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not a model" * 10)
    with pytest.raises(gguf_llama.GGUFError, match="is no GGUF file"):
        gguf_llama.convert(tmp_path / "model.gguf", tmp_path)
