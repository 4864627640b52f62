"""Checkpoint folders for the tests of glm_jax.model.huggingface, read and written by the safetensors library and plain NumPy alone."""

import json
import pathlib
import re
import shutil

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
CASES = ("glm4_5", "glm4_5_air", "glm4_7_flash", "glm5", "glm5_2_shared_indexer", "deepseek_v3_2", "qwen3_dense", "llama_dense")
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
LINEAR = re.compile(r"(q_a|q_b|kv_a|kv_b|[qkvo]|gate|up|down)_proj|wq_b|indexer\.wk|experts\.(gate_up|down)_proj$")


def read(folder):
    """{name: array} of all files of a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in safetensors.deserialize(file.read_bytes()):
            assert name not in found
            found[name] = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return found


def write(folder, config, tensors, files=1):
    """A checkpoint of `files` files, which may divide the tensors of a layer, and an FP8 tensor and its scale, between them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    if files == 1:
        safetensors.numpy.save_file({name: np.ascontiguousarray(tensors[name]) for name in names}, folder / "model.safetensors")
        return folder
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        safetensors.numpy.save_file({name: np.ascontiguousarray(tensors[name]) for name in names[number::files]}, folder / file)
        weight_map |= dict.fromkeys(names[number::files], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def golden(case):
    """(config.json, tensors) of a reference case."""
    return json.loads((GOLDEN / case / "config.json").read_text()), read(GOLDEN / case)


def copy(case, folder):
    shutil.copytree(GOLDEN / case, folder, ignore=shutil.ignore_patterns("reference*"))
    return folder


def identical(one, other):
    """Whether two {name: array} agree in every name, type, shape and bit; an assertion that says where not."""
    assert one.keys() == other.keys()
    for name, a in one.items():
        b = other[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.tobytes() == b.tobytes(), name
    return True


def fuse_experts(tensors):
    """transformers 5's form: gate_up_proj [E, 2I, H], the gate's rows first, and down_proj [E, H, I]."""
    kept, experts = {}, {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
            experts.setdefault(match[1], {})[match[3], int(match[2])] = tensor
        else:
            kept[name] = tensor
    for name, of in experts.items():
        count = len(of) // 3
        kept[f"{name}.gate_up_proj"] = np.stack([np.concatenate([of["gate", e], of["up", e]]) for e in range(count)])
        kept[f"{name}.down_proj"] = np.stack([of["down", e] for e in range(count)])
    return kept


def to_bfloat16(tensors):
    return {name: t if name.endswith("e_score_correction_bias") else t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()}


def to_fp8(tensors, block=(128, 128), scale_of=lambda amax: amax / np.float32(448)):
    """Linear layers block by block, the rest in bfloat16."""
    found = {}
    for name, tensor in to_bfloat16(tensors).items():
        if tensor.ndim == 1 or not LINEAR.search(name):
            found[name] = tensor
            continue
        whole = tensors[name].reshape(-1, *tensor.shape[-2:])
        codes = np.empty(whole.shape, ml_dtypes.float8_e4m3fn)
        scales = np.empty((len(whole), -(-whole.shape[1] // block[0]), -(-whole.shape[2] // block[1])), np.float32)
        for e, i, j in np.ndindex(*scales.shape):
            at = e, slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[e, i, j] = scale_of(np.abs(whole[at]).max())
            codes[at] = np.clip(whole[at] / scales[e, i, j], -448, 448).astype(codes.dtype)
        found[name] = codes.reshape(tensor.shape)
        found[f"{name}_scale_inv"] = scales.reshape(*tensor.shape[:-2], *scales.shape[-2:])
    return found


def add_mtp(config, tensors, own_embeddings, seed=0):
    """The MTP layer that transformers does not save: after the last layer, a copy of it under other numbers, and the module's own."""
    rng, last, name = np.random.default_rng(seed), config["num_hidden_layers"] - 1, f"model.layers.{config['num_hidden_layers']}."
    # A full layer of the last layer's kind: its own indexer comes from layer 0.
    layer = {n: t for n, t in tensors.items() if n.startswith("model.layers.0.self_attn.indexer")}
    layer |= {n: t for n, t in tensors.items() if n.startswith(f"model.layers.{last}.")}
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = {re.sub(r"model\.layers\.\d+\.", name, n): t.shape for n, t in layer.items()}
    shapes |= {name + "enorm.weight": (hidden,), name + "hnorm.weight": (hidden,), name + "eh_proj.weight": (hidden, 2 * hidden),
               name + "shared_head.norm.weight": (hidden,)}
    if own_embeddings:
        shapes |= {name + "embed_tokens.weight": (vocab, hidden), name + "shared_head.head.weight": (vocab, hidden)}
    drawn = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
    return config | {"num_nextn_predict_layers": 1}, tensors | drawn
