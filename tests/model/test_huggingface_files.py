"""safetensors files: boxes, what reading them touches, damaged files; block-scaled float8; the tables of names."""

import json
import math
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from huggingface_folders import CASES, golden
from hypothesis import given, settings
from hypothesis import strategies as st
from random_configs import FAMILIES, random_config

from glm_jax.model import get_preset
from glm_jax.model.huggingface import files, fp8
from glm_jax.model.huggingface.config import config_from_huggingface
from glm_jax.model.huggingface.names import tensors_of
from glm_jax.model.transformer import Transformer

KINDS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F16": np.float16}


def stored(folder, array):
    safetensors.numpy.save_file({"before": np.zeros(3, np.float32), "x": array}, folder / "file.safetensors")
    tensors, problems = files.read_header(folder / "file.safetensors")
    assert not problems
    return tensors["x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_box_is_the_slice(folder, data):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    kind = data.draw(st.sampled_from(list(KINDS)))
    array = np.arange(math.prod(shape)).reshape(shape).astype(KINDS[kind])
    box = [tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape]
    with pytest.MonkeyPatch.context() as patch:  # small enough that rows are read together, and that they are not
        patch.setattr(files, "PAGE", data.draw(st.sampled_from([0, 16, 4096])))
        patch.setattr(files, "READ_AHEAD", data.draw(st.sampled_from([0, 32, 65536])))
        found = files.read_box(stored(folder, array), shape, box)
    expected = array[tuple(slice(*ends) for ends in box)]
    assert found.dtype == array.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()


def count_reads(monkeypatch):
    counted = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: counted.append(preadv(*arguments)) or counted[-1])
    return counted


def test_only_the_box_is_read(folder, monkeypatch):
    array = np.arange(64 * 4096, dtype=np.float32).reshape(64, 4096)
    tensor, reads = stored(folder, array), count_reads(monkeypatch)
    files.read_box(tensor, array.shape, [(8, 16), (0, 4096)])
    assert reads == [8 * 4096 * 4]  # rows: one call
    reads.clear()
    files.read_box(tensor, array.shape, [(8, 16), (1024, 2048)])
    assert reads == [1024 * 4] * 8  # columns of a page or more: a call for each row
    reads.clear()
    files.read_box(tensor, array.shape, [(8, 16), (0, 8)])
    assert reads == [8 * 4096 * 4]  # a few columns: pages would be read anyway


def test_the_library_reads_what_is_written(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"{kind}_{n}": rng.normal(size=(5, n)).astype(KINDS[kind]) for n in (1, 3) for kind in KINDS}
    writer = files.Writer(tmp_path / "x.safetensors", [(name, files.NAMES[a.dtype], a.shape) for name, a in arrays.items()])
    for name, array in reversed(arrays.items()):  # in pieces and in any order
        writer.write(name, array[3:], 3 * array.shape[1])
        writer.write(name, array[:3])
    writer.finish()
    raw = (tmp_path / "x.safetensors").read_bytes()
    found = dict(safetensors.deserialize(raw))
    assert {name: bytes(t["data"]) for name, t in found.items()} == {name: a.tobytes() for name, a in arrays.items()}
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    for name, array in arrays.items():
        assert header[name]["data_offsets"][0] % array.dtype.itemsize == 0


@pytest.mark.parametrize(("content", "words"), [
    (b"", "truncated"), (b"\xff" * 4, "truncated"), (b"\xff" * 20, "truncated"), (b"\x02" + b"\0" * 7 + b"[]", "not a safetensors file"),
    (b"\x04" + b"\0" * 7 + b"{{}}", "not a safetensors file"), (b"\x0a" + b"\0" * 7 + b'{"a": {}  ', "not a safetensors file"),
])
def test_what_is_no_safetensors_file(tmp_path, content, words):
    (tmp_path / "x.safetensors").write_bytes(content)
    tensors, problems = files.read_header(tmp_path / "x.safetensors")
    assert not tensors and len(problems) == 1 and words in problems[0]


def test_headers_that_contradict_themselves(tmp_path):
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [3], "data_offsets": [8, 16]},
              "c": {"dtype": "F32", "shape": [1], "data_offsets": [16, 20]}, "d": {"dtype": "I8", "shape": [2], "data_offsets": [16, 18]}}
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(18))
    _, problems = files.read_header(tmp_path / "x.safetensors")
    assert [(p.split()[0], p.split()[1]) for p in problems] == [("unreadable", "b"), ("truncated", "c"), ("unsupported", "d")]


# Block-scaled float8


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32), st.sampled_from([1.0, 1e-3, 1e4]))
@settings(max_examples=30, deadline=None)
def test_blocks_scaled_by_their_largest_entry_come_back_bit_for_bit(rows, columns, seed, spread):
    weight = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32) * np.float32(spread)
    codes, scale = fp8.quantise(weight)
    assert scale.shape == fp8.scale_shape(weight.shape)
    wide = lambda s: np.repeat(np.repeat(s, 128, 0), 128, 1)[:rows, :columns]
    back = fp8.dequantise(codes, wide(scale))
    np.testing.assert_array_less(np.abs(back - weight), np.abs(weight) / 16 + wide(scale) / 512 + 1e-30)
    again, same = fp8.quantise(back)
    assert again.tobytes() == codes.tobytes()
    # A scale is determined to its last bit where some code is a power of two, which most blocks of any size have.
    mantissa = np.abs(np.frexp(np.abs(codes.astype(np.float32)))[0]) == 0.5
    determined = np.logical_or.reduceat(np.logical_or.reduceat(mantissa, np.arange(0, rows, 128), 0), np.arange(0, columns, 128), 1)
    np.testing.assert_array_equal(same[determined], scale[determined])
    np.testing.assert_allclose(same, scale, rtol=2e-7)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_known_scales_are_kept_for_blocks_that_did_not_change(dtype):
    rng = np.random.default_rng(0)
    codes = rng.normal(scale=40, size=(200, 300)).astype(ml_dtypes.float8_e4m3fn)
    known = np.exp2(rng.integers(-12, -6, (2, 3))).astype(np.float32) * np.where(rng.random((2, 3)) < 0.5, 1, np.float32(1.234567))
    weight = fp8.dequantise(codes, fp8.spread(known, np.arange(200), np.arange(300))).astype(dtype)
    again, scale = fp8.quantise(weight, known=known)
    assert again.tobytes() == codes.tobytes() and scale.tobytes() == known.tobytes()
    weight[150, 290] *= 1.1  # in the last block
    again, scale = fp8.quantise(weight, known=known)
    np.testing.assert_array_equal(scale.ravel()[:-1], known.ravel()[:-1])
    assert scale[1, 2] == np.float32(np.abs(weight[128:, 256:]).max()) / np.float32(448)
    assert again[:128].tobytes() == codes[:128].tobytes()


def test_zeros_and_signs():
    weight = np.zeros((130, 1), np.float32)
    weight[3], weight[129] = -0.0, -1
    codes, scale = fp8.quantise(weight)
    assert scale.tolist() == [[1], [np.float32(1) / np.float32(448)]]
    assert codes.view(np.uint8)[3] == 0x80 and codes.view(np.uint8)[2] == 0 and codes[129] == -448


# Names


def tensors_and_shapes(config, fused):
    shapes = {d.path: d.shape for d in Transformer.declare(config)}
    return tensors_of(config, shapes, lambda layer: fused), shapes


@given(st.sampled_from(FAMILIES), st.integers(0, 2**32), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_entry_of_every_weight_is_in_one_tensor(family, seed, fused, mtp):
    config = random_config(family, seed)
    if mtp:
        config = get_preset("tiny", mtp=get_preset("glm-5").mtp)
    tensors, shapes = tensors_and_shapes(config, fused)
    held = {path: np.zeros(shape, int) for path, shape in shapes.items()}
    for tensor in tensors.values():
        used = np.zeros(tensor.axes, int)
        for share in tensor.shares:
            used[tuple(slice(*ends) for ends in share.box)] += 1
            sizes = [slice(None) if axis is not None else index for axis, index in zip(share.axis, share.index, strict=True)]
            held[share.path][tuple(sizes)] += 1
        assert (used == 1).all() and math.prod(tensor.axes) == math.prod(tensor.shape)
    assert all((count == 1).all() for count in held.values())


@pytest.mark.parametrize("case", CASES)
def test_names_and_shapes_of_the_reference(case):
    raw, expected = golden(case)
    tensors, _ = tensors_and_shapes(config_from_huggingface(raw | {"num_nextn_predict_layers": 0}), False)
    assert {name: t.shape for name, t in tensors.items()} == {name: t.shape for name, t in expected.items()}


def test_names_and_shapes_of_glm_5_2():
    """Those of zai-org/GLM-5.2, MTP layer 78 included; allocates nothing."""
    tensors, _ = tensors_and_shapes(get_preset("glm-5.2"), False)
    assert len(tensors) == 59585
    assert sum(name.endswith("indexer.wk.weight") for name in tensors) == 22
    for name, shape in {
            "model.embed_tokens.weight": (154880, 6144), "lm_head.weight": (154880, 6144), "model.norm.weight": (6144,),
            "model.layers.77.self_attn.q_a_proj.weight": (2048, 6144), "model.layers.0.self_attn.q_b_proj.weight": (16384, 2048),
            "model.layers.5.self_attn.kv_a_proj_with_mqa.weight": (576, 6144), "model.layers.9.self_attn.kv_b_proj.weight": (28672, 512),
            "model.layers.78.self_attn.o_proj.weight": (6144, 16384), "model.layers.74.self_attn.indexer.wq_b.weight": (4096, 2048),
            "model.layers.78.self_attn.indexer.weights_proj.weight": (32, 6144), "model.layers.2.mlp.down_proj.weight": (6144, 12288),
            "model.layers.3.mlp.gate.e_score_correction_bias": (256,), "model.layers.3.mlp.experts.255.up_proj.weight": (2048, 6144),
            "model.layers.78.mlp.experts.0.down_proj.weight": (6144, 2048), "model.layers.78.eh_proj.weight": (6144, 12288),
            "model.layers.78.shared_head.norm.weight": (6144,)}.items():
        assert tensors[name].shape == shape
    fused, _ = tensors_and_shapes(get_preset("glm-5.2"), True)
    assert fused["model.layers.3.mlp.experts.gate_up_proj"].shape == (256, 4096, 6144)
