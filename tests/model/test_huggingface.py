"""load_pretrained and save_pretrained: every stored form, bit for bit there and back; damage; meshes; nothing half done."""

import contextlib
import dataclasses
import json
import os
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from huggingface_folders import CASES, GOLDEN, add_mtp, copy, fuse_experts, golden, identical, read, to_bfloat16, to_fp8, write
from small_model import random_model

from glm_jax.model import MTPConfig, get_preset
from glm_jax.model.huggingface import CheckpointError, files, load_pretrained, save_pretrained
from glm_jax.parallel import make_mesh, sharding_of

MOE = ("glm4_5", "glm5_2_shared_indexer", "deepseek_v3_2")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def same(one, other):
    """Whether two models agree in configuration, tree, types and bits."""
    assert one.config == other.config
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return True


# There and back


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shard_bytes", [5 * 2**30, 30_000])
def test_reference_checkpoints_come_back(case, shard_bytes, tmp_path):
    model = load_pretrained(GOLDEN / case)
    save_pretrained(model, tmp_path / "saved", shard_bytes=shard_bytes)
    assert identical(read(tmp_path / "saved"), read(GOLDEN / case))
    assert same(load_pretrained(tmp_path / "saved"), model)
    sizes = [file.stat().st_size for file in (tmp_path / "saved").glob("*.safetensors")]
    assert len(sizes) == 1 if shard_bytes == 5 * 2**30 else len(sizes) > 5 and max(sizes) < 2 * shard_bytes


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", MOE)
def test_fused_experts(case, fused, files, tmp_path):
    config, tensors = golden(case)
    tensors = fuse_experts(tensors) if fused else tensors
    model = load_pretrained(write(tmp_path / "stored", config, tensors, files))
    assert same(model, load_pretrained(GOLDEN / case))
    save_pretrained(model, tmp_path / "saved", fused_experts=fused)
    assert identical(read(tmp_path / "saved"), tensors)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16(case, tmp_path):
    config, tensors = golden(case)
    tensors = to_bfloat16(tensors)
    write(tmp_path / "stored", config | {"dtype": "bfloat16"}, tensors)
    model = load_pretrained(tmp_path / "stored", dtype=None)
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        assert leaf.dtype == (jnp.float32 if "router_bias" in str(path) else jnp.bfloat16)
    save_pretrained(model, tmp_path / "saved")
    assert identical(read(tmp_path / "saved"), tensors)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    save_pretrained(load_pretrained(tmp_path / "stored"), tmp_path / "again", dtype=jnp.bfloat16)  # through float32
    assert identical(read(tmp_path / "again"), tensors)


@pytest.mark.parametrize("block", [(128, 128), (32, 16)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", [*MOE, "llama_dense"])
def test_fp8(case, fused, block, tmp_path):
    config, tensors = golden(case)
    tensors = to_fp8(fuse_experts(tensors) if fused else tensors, block)
    assert sum(t.dtype == ml_dtypes.float8_e4m3fn for t in tensors.values()) > 20
    write(tmp_path / "stored", config | {"quantization_config": FP8 | {"weight_block_size": block}}, tensors, 3)
    model = load_pretrained(tmp_path / "stored")
    name = "model.layers.1.self_attn.o_proj.weight"
    scale = np.repeat(np.repeat(tensors[f"{name}_scale_inv"], block[0], 0), block[1], 1)[:48, : tensors[name].shape[1]]
    out = model.moe_layers.attention.out[0] if model.moe_layers is not None else model.dense_layers.attention.out[1]
    np.testing.assert_array_equal(out.reshape(-1, 48).T, tensors[name].astype(np.float32) * scale)
    save_pretrained(model, tmp_path / "like", like=tmp_path / "stored")
    assert identical(read(tmp_path / "like"), tensors)
    if block == (128, 128):  # without the original at hand: scales of amax / 448 are found again
        save_pretrained(model, tmp_path / "saved", fp8=True, fused_experts=fused, dtype=jnp.bfloat16)
        assert identical(read(tmp_path / "saved"), tensors)
        assert same(load_pretrained(tmp_path / "saved"), model)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_fp8_with_any_scales_in_the_form_of_the_original(fused, dtype, tmp_path):
    """Scales that are powers of two, and a model loaded in bfloat16, which does not hold codes times scales exactly."""
    config, tensors = golden("glm5_2_shared_indexer")
    config["quantization_config"] = FP8 | {"weight_block_size": [128, 128]}
    powers_of_two = lambda amax: np.exp2(np.ceil(np.log2(amax / 448))).astype(np.float32)
    for name, scale_of in (("powers", powers_of_two), ("odd", lambda amax: np.float32(amax / 300))):
        quantised = to_fp8(fuse_experts(tensors) if fused else tensors, scale_of=scale_of)
        stored = write(tmp_path / name, config, quantised, 2)
        save_pretrained(load_pretrained(stored, dtype), tmp_path / f"{name}_saved", like=stored)
        assert identical(read(tmp_path / f"{name}_saved"), quantised)


def test_fp8_of_real_block_size_and_ragged_edges(tmp_path):
    """Weights of several blocks with cut edges, among them kv_b_proj, whose heads do not end where blocks do."""
    config = get_preset(
        "tiny", hidden_size=200, heads=5, mla__qk_nope_head_dim=60, mla__v_head_dim=52, mla__kv_lora_rank=150, intermediate_size=300,
        mtp=MTPConfig(own_embeddings=True))
    model = random_model(config)
    for fused in (False, True):
        save_pretrained(model, tmp_path / f"first{fused}", fp8=True, fused_experts=fused)
        loaded = load_pretrained(tmp_path / f"first{fused}")
        for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(loaded), strict=True):
            np.testing.assert_allclose(a, b, rtol=1 / 15, atol=2e-3)
        save_pretrained(loaded, tmp_path / f"second{fused}", fp8=True, fused_experts=fused)
        assert identical(read(tmp_path / f"second{fused}"), read(tmp_path / f"first{fused}"))
    kept = json.loads((tmp_path / "firstFalse" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {"lm_head", "model.embed_tokens", "model.layers.1.mlp.gate", "model.layers.3.eh_proj",
            "model.layers.0.self_attn.indexer.weights_proj"} <= set(kept)
    assert not [name for name in kept if "experts" in name or name.endswith(("wk", "o_proj"))]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("case", MOE)
def test_mtp_layer(case, own, tmp_path):
    config, tensors = add_mtp(*golden(case), own)
    write(tmp_path / "stored", config, tensors)
    model = load_pretrained(tmp_path / "stored")
    name = f"model.layers.{config['num_hidden_layers']}."
    assert model.config.mtp == MTPConfig(own_embeddings=own)
    assert (model.mtp.embedding is not None) == own and (model.mtp.indexer is not None) == (case != "glm4_5")
    for half in (0, 1):  # eh_proj reads [embedding; hidden state]
        np.testing.assert_array_equal(model.mtp.project[0, half].T, tensors[name + "eh_proj.weight"][:, 48 * half : 48 * half + 48])
    np.testing.assert_array_equal(model.mtp.embedding_norm[0], tensors[name + "enorm.weight"])
    np.testing.assert_array_equal(model.mtp.hidden_norm[0], tensors[name + "hnorm.weight"])
    np.testing.assert_array_equal(model.mtp.final_norm[0], tensors[name + "shared_head.norm.weight"])
    save_pretrained(model, tmp_path / "saved")
    assert identical(read(tmp_path / "saved"), tensors)
    assert same(load_pretrained(tmp_path / "saved"), model)
    plain = load_pretrained(tmp_path / "stored", with_mtp=False)
    assert same(plain, load_pretrained(GOLDEN / case))
    # Fine-tuned without it, and saved in the original's form.
    save_pretrained(plain, tmp_path / "plain", like=tmp_path / "stored")
    assert identical(read(tmp_path / "plain"), golden(case)[1])
    assert same(load_pretrained(tmp_path / "plain"), plain)


def test_mtp_layer_announced_but_absent_or_present_but_not_announced(tmp_path):
    config, tensors = golden("glm4_5")
    assert config["num_nextn_predict_layers"] == 1
    assert load_pretrained(GOLDEN / "glm4_5").config.mtp is None
    announced, with_layer = add_mtp(config, tensors, False)
    write(tmp_path / "stored", {key: value for key, value in announced.items() if key != "num_nextn_predict_layers"}, with_layer)
    assert load_pretrained(tmp_path / "stored").config.mtp == MTPConfig()


def test_tied_embeddings(tmp_path):
    config, tensors = golden("qwen3_dense")
    assert "lm_head.weight" not in tensors and load_pretrained(GOLDEN / "qwen3_dense").head is None
    both = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    model = load_pretrained(write(tmp_path / "both", config, both))
    assert same(model, load_pretrained(GOLDEN / "qwen3_dense"))
    save_pretrained(model, tmp_path / "saved")
    assert identical(read(tmp_path / "saved"), tensors)
    save_pretrained(model, tmp_path / "saved_like", like=tmp_path / "both")
    assert identical(read(tmp_path / "saved_like"), both)
    changed = both | {"lm_head.weight": both["lm_head.weight"] + 1}
    with pytest.raises(CheckpointError, match="differs from model.embed_tokens.weight"):
        load_pretrained(write(tmp_path / "changed", config, changed))


def test_like_keeps_everything_of_the_original(tmp_path):
    """Types mixed tensor by tensor, files, keys of config.json that mean nothing here, tokenizer files; but no foreign weights."""
    config, tensors = golden("glm5")
    mixed = {name: t.astype(ml_dtypes.bfloat16) if number % 3 == 0 else t for number, (name, t) in enumerate(tensors.items())}
    mixed = {name: t.astype(np.float16) if number % 7 == 1 else t for number, (name, t) in enumerate(mixed.items())}
    stored = write(tmp_path / "stored", config | {"eos_token_id": [1, 2], "quirk": {"a": [None]}}, mixed, 4)
    (stored / "tokenizer.json").write_text("{}")
    (stored / "chat_template.jinja").write_text("[gMASK]")
    (stored / "pytorch_model.bin").write_text("not ours")
    save_pretrained(load_pretrained(stored), tmp_path / "saved", like=stored)
    assert identical(read(tmp_path / "saved"), mixed)
    names = {file.name for file in (tmp_path / "saved").iterdir()}
    assert names == {file.name for file in stored.iterdir()} - {"pytorch_model.bin"}
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == json.loads((stored / "config.json").read_text())
    index = lambda folder: json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index(tmp_path / "saved") == index(stored)
    save_pretrained(load_pretrained(stored), stored, like=stored, overwrite=True)  # in place
    assert identical(read(stored), mixed)
    with pytest.raises(CheckpointError, match="holds another model"):
        save_pretrained(load_pretrained(GOLDEN / "glm5"), tmp_path / "other", like=GOLDEN / "deepseek_v3_2")
    with pytest.raises(ValueError, match="go without it"):
        save_pretrained(load_pretrained(stored), tmp_path / "other", like=stored, dtype=jnp.bfloat16)


def test_latent_norm_eps(tmp_path):
    model = load_pretrained(GOLDEN / "glm5", latent_norm_eps=1e-5)
    assert model.config.mla.latent_norm_eps == 1e-5
    save_pretrained(model, tmp_path / "saved")
    assert load_pretrained(tmp_path / "saved").config == model.config
    save_pretrained(model, tmp_path / "like", like=GOLDEN / "glm5")
    assert load_pretrained(tmp_path / "like").config == model.config
    with pytest.raises(ValueError, match="does not have"):
        load_pretrained(GOLDEN / "glm4_5", latent_norm_eps=1e-5)


def test_models_of_our_own(tmp_path):
    """Shapes that no released checkpoint has: no shared expert, an empty stack of dense layers, dense layers only."""
    changes = {"moe__shared_experts": 0}, {"dense_layers": 0}, {"dense_layers": 3}, {"indexer": None, "mtp": MTPConfig()}
    for number, change in enumerate(changes):
        model = random_model(get_preset("tiny", **change))
        save_pretrained(model, tmp_path / str(number), shard_bytes=100_000)
        assert same(load_pretrained(tmp_path / str(number)), model)
    with pytest.raises(ValueError, match="int8 are not written"):
        save_pretrained(model, tmp_path / "int8", dtype=jnp.int8)


# What is wrong with a checkpoint


def damage(tensors):
    """Of every kind something, and the words that must name it."""
    tensors, change = dict(tensors), lambda name, how: tensors.update({name: how(tensors[name])})
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.2.self_attn.rope.weight"] = np.zeros((2, 3), np.float32)
    change("model.layers.2.self_attn.o_proj.weight", np.transpose)
    change("model.layers.0.self_attn.q_a_proj.weight", lambda t: t.astype(np.int8))
    change("model.layers.0.self_attn.q_b_proj.weight", lambda t: t.astype(ml_dtypes.float8_e4m3fn))
    return tensors, [
        r"missing +model.layers.1.mlp.experts.3.up_proj.weight \[24, 48\]", r"missing +model.norm.weight \[48\]",
        r"misshaped +model.layers.2.self_attn.o_proj.weight \[96, 48\]; must be \[48, 96\]",
        r"unexpected +model.layers.2.self_attn.rope.weight \[2, 3\]",
        r"unsupported +model.layers.0.self_attn.q_a_proj.weight \[32, 48\]: dtype I8",
        r"missing +model.layers.0.self_attn.q_b_proj.weight_scale_inv \[1, 1\]"]


@pytest.mark.parametrize("files", [1, 3])
def test_everything_wrong_is_in_one_error_before_anything_is_allocated(files, tmp_path, monkeypatch):
    config, tensors = golden("glm5")
    tensors, words = damage(tensors)
    stored = write(tmp_path / "stored", config, tensors, files)
    monkeypatch.setattr("glm_jax.model.huggingface.load.read_box", lambda *_: pytest.fail("read"))
    monkeypatch.setattr("glm_jax.model.huggingface.load._aligned_empty", lambda *_: pytest.fail("allocated"))
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(stored)
    for pattern in words:
        assert re.search(pattern, str(caught.value)), pattern
    assert len(caught.value.problems) == len(words) and str(stored) in str(caught.value)


def test_a_long_list_is_cut(tmp_path):
    config, tensors = golden("glm5")
    write(tmp_path / "stored", config, {name: t for name, t in tensors.items() if "experts" not in name})
    with pytest.raises(CheckpointError, match="and 61 more") as caught:
        load_pretrained(tmp_path / "stored")
    assert len(caught.value.problems) == 81 and str(caught.value).count("\n") == 21


def test_truncated_and_absent_files(tmp_path):
    stored = write(tmp_path / "stored", *golden("glm5"), 3)
    cut, gone = stored / "model-00002-of-00003.safetensors", stored / "model-00003-of-00003.safetensors"
    os.truncate(cut, cut.stat().st_size - 5000)
    gone.unlink()
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(stored)
    of_kind = lambda kind: [p for p in caught.value.problems if p.startswith(kind)]
    assert of_kind("truncated") and of_kind("unreadable")[0].endswith("No such file or directory")
    assert len(of_kind("missing")) == len(golden("glm5")[1]) // 3
    os.truncate(cut, 100)
    with pytest.raises(CheckpointError, match="less than its header"):
        load_pretrained(stored)


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="config.json: No such file"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not a JSON object"):
        load_pretrained(tmp_path)
    copy("glm5", tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").rename(tmp_path / "copy" / "weights.safetensors")
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        load_pretrained(tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        load_pretrained(tmp_path / "copy")


@pytest.mark.parametrize(("change", "words"), [
    ({"architectures": ["MambaForCausalLM"]}, "unknown architecture 'MambaForCausalLM'"), ({"num_experts_per_tok": 20}, "impossible"),
    ({"num_hidden_layers": 3}, r"unexpected +model.layers.3.input_layernorm.weight \[48\]"),
    ({"num_hidden_layers": 5, "mlp_layer_types": None, "indexer_types": None}, r"missing +model.layers.4.input_layernorm.weight \[48\]"),
    ({"v_head_dim": 20}, r"misshaped +model.layers.0.self_attn.kv_b_proj.weight \[160, 24\]; must be \[144, 24\]"),
])
def test_configurations_that_do_not_fit(change, words, tmp_path):
    config, tensors = golden("glm5")
    if change.get("num_hidden_layers") == 3:
        change = change | {"mlp_layer_types": None, "indexer_types": None}
    with pytest.raises(CheckpointError, match=words) as caught:
        load_pretrained(write(tmp_path / "stored", config | change, tensors))
    assert str(tmp_path / "stored") in str(caught.value)


# Saving is all or nothing


def test_nothing_is_left_of_a_save_that_fails(tmp_path, monkeypatch):
    model = load_pretrained(GOLDEN / "glm5")
    write_piece, count = files.Writer.write, []

    def failing(*arguments):
        count.append(None)
        if len(count) == 40:
            raise OSError(28, "No space left on device")
        write_piece(*arguments)

    monkeypatch.setattr(files.Writer, "write", failing)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    save_pretrained(model, tmp_path / "saved")
    count.clear()
    monkeypatch.setattr(files.Writer, "write", failing)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(model, tmp_path / "saved", overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]
    assert same(load_pretrained(tmp_path / "saved"), model)


def test_what_is_there_is_replaced_only_when_asked(tmp_path):
    model, other = load_pretrained(GOLDEN / "glm5"), load_pretrained(GOLDEN / "glm4_5")
    (tmp_path / "saved").mkdir()
    save_pretrained(model, tmp_path / "saved")  # an empty folder is free
    with pytest.raises(CheckpointError, match="overwrite=True"):
        save_pretrained(other, tmp_path / "saved")
    assert same(load_pretrained(tmp_path / "saved"), model)
    save_pretrained(other, tmp_path / "saved", overwrite=True)
    assert same(load_pretrained(tmp_path / "saved"), other)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    (tmp_path / "file").write_text("")
    for name in ("thesis", "file"):
        with pytest.raises(CheckpointError, match="not overwritten"):
            save_pretrained(other, tmp_path / name, overwrite=True)
    assert {file.name for file in tmp_path.iterdir()} == {"saved", "thesis", "file"}


# Meshes


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "expert": 2, "model": 2}, {"data": 2, "expert": 4}, {"data": 2}])
@pytest.mark.parametrize("case", ["glm5", "glm4_5", "llama_dense"])
def test_on_a_mesh_each_device_holds_its_shard(case, sizes, tmp_path):
    mesh, plain = make_mesh(**sizes), load_pretrained(GOLDEN / case)
    model = load_pretrained(GOLDEN / case, mesh=mesh)
    assert same(model, plain)
    divided = 0
    for declared, leaf, whole in zip(type(model).declare(model.config), jax.tree.leaves(model), jax.tree.leaves(plain), strict=True):
        assert leaf.sharding == sharding_of(declared, mesh)
        for shard in leaf.addressable_shards:
            assert shard.data.shape == leaf.sharding.shard_shape(leaf.shape)
            np.testing.assert_array_equal(shard.data, np.asarray(whole)[shard.index])
        divided += leaf.sharding.shard_shape(leaf.shape) != leaf.shape
    assert (divided > 5) == (sizes != {"data": 2})
    with jax.set_mesh(mesh):
        within = load_pretrained(GOLDEN / case)
        assert [leaf.sharding for leaf in jax.tree.leaves(within)] == [leaf.sharding for leaf in jax.tree.leaves(model)]
        save_pretrained(within, tmp_path / "within")
    save_pretrained(model, tmp_path / "saved")
    assert identical(read(tmp_path / "saved"), read(GOLDEN / case)) and identical(read(tmp_path / "within"), read(GOLDEN / case))


@pytest.mark.parametrize("form", ["plain", "fused", "fp8"])
def test_on_a_mesh_nothing_is_read_twice_or_in_vain(form, tmp_path, monkeypatch):
    """Replicas are read once; of a mesh's half, half; rows of the test's weights are longer than a page where it counts."""
    config = get_preset("tiny", hidden_size=256, layers=2, intermediate_size=512, moe__intermediate_size=256, mla__q_lora_rank=256)
    model = random_model(config)
    save_pretrained(model, tmp_path / "stored", fused_experts=form == "fused", fp8=form == "fp8")
    monkeypatch.setattr(files, "PAGE", 64)
    read_bytes, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: read_bytes.append(preadv(*arguments)) or read_bytes[-1])
    stored = sum(t.nbytes for t in read(tmp_path / "stored").values())
    load_pretrained(tmp_path / "stored", mesh=make_mesh(data=2, expert=2, model=2))
    assert stored <= sum(read_bytes) < 1.1 * stored
    # One process of two, each with half of an expert axis, reads its own half: only what its devices need.
    mesh = make_mesh(expert=2)
    first = mesh.devices.ravel()[0]
    real = jax.sharding.NamedSharding.addressable_devices_indices_map
    monkeypatch.setattr(jax.sharding.NamedSharding, "addressable_devices_indices_map",
                        lambda self, shape: {d: index for d, index in real(self, shape).items() if d == first})
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda shape, sharding, shards: shards[0])
    read_bytes.clear()
    half = load_pretrained(tmp_path / "stored", mesh=mesh)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(half)) / sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert held < 0.6 and sum(read_bytes) < (held + 0.1) * stored


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "model": 2}, {}])
def test_saving_from_an_accelerator(sizes, tmp_path, monkeypatch):
    """There the device cuts the pieces out, with and without a mesh set; here the CPU plays the accelerator."""
    monkeypatch.setattr("glm_jax.model.huggingface.save._in_place", lambda data: False)
    with jax.set_mesh(make_mesh(**sizes)) if sizes else contextlib.nullcontext():
        save_pretrained(load_pretrained(GOLDEN / "glm5"), tmp_path / "saved")
    assert identical(read(tmp_path / "saved"), read(GOLDEN / "glm5"))


def test_weights_are_taken_over_without_a_copy(monkeypatch):
    """On a CPU the array that was filled is the weight: the model exists once."""
    filled = []
    make = lambda shape, dtype: filled.append(aligned(shape, dtype)) or filled[-1]
    from glm_jax.model.huggingface import load
    aligned = load._aligned_empty
    monkeypatch.setattr(load, "_aligned_empty", make)
    model = load_pretrained(GOLDEN / "glm5")
    for array, leaf in zip(filled, jax.tree.leaves(model), strict=True):
        assert leaf.size == 0 or leaf.unsafe_buffer_pointer() == array.ctypes.data


def test_a_model_that_does_not_fit_its_config_is_not_saved(tmp_path):
    model = load_pretrained(GOLDEN / "glm5")
    with pytest.raises(ValueError, match="not those of its config"):
        save_pretrained(model.replace(config=dataclasses.replace(model.config, layers=5)), tmp_path / "saved")


def test_buffers_of_old_checkpoints(tmp_path):
    config, tensors = golden("llama_dense")
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.arange(4, dtype=np.float32) for i in range(3)}
    model = load_pretrained(write(tmp_path / "stored", config, tensors))
    assert same(model, load_pretrained(GOLDEN / "llama_dense"))
    save_pretrained(model, tmp_path / "saved", like=tmp_path / "stored")
    assert identical(read(tmp_path / "saved"), tensors)
