"""A Llama in GGUF, small enough to write in a test, as llama.cpp's converter would write it, and the Hugging Face weights it came from."""

import gguf
import numpy as np
import tokenizers

CONFIG = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("a b", "Ġ ab", "1 2")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}")
TOKENS = [*SPECIAL, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows from Hugging Face's order to llama.cpp's, written out: row 2i + s of a head comes from its row i + s * head_dim / 2."""
    size = weight.shape[0] // heads
    source = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[source]


def hugging_face_weights(tied: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    hidden, wide = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    keys = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    shapes = {"model.embed_tokens": (len(TOKENS), hidden), "model.norm": (hidden,)} | ({} if tied else {"lm_head": (len(TOKENS), hidden)})
    for i in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}.items()}
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def write(path, *, tied=True, quantised=False, architecture="llama", pre="smollm", drop=(), extra=None, metadata=()):
    """quantised: matrices as Q4_1; drop: GGUF names left out; extra: {GGUF name: tensor}; metadata: [(writer's method, value)]."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for method, value in metadata:
        getattr(writer, method)(value)
    for name, weight in hugging_face_weights(tied).items():
        stem = name.removesuffix(".weight")
        layer, part = stem.split(".", 3)[2:] if stem.startswith("model.layers.") else (None, stem)
        gguf_name = (f"blk.{layer}." if layer is not None else "") + GGUF_NAMES[part] + ".weight"
        if gguf_name in drop:
            continue
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            weight = permute(weight, CONFIG["num_attention_heads" if part == "self_attn.q_proj" else "num_key_value_heads"])
        if quantised and weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(gguf_name, gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, weight)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
