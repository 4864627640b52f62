"""What each parallel form sends: read from the compiled program, and nothing but what is meant."""

import dataclasses
import functools
import math
import re

import jax
import pytest
from sharded_models import CONFIGS, LENGTH, ROWS, abstract, loss_of, packed_rows

from glm_jax.model.transformer import Transformer
from glm_jax.parallel import make_mesh

_DSA = CONFIGS["dsa"]
CONFIG = dataclasses.replace(_DSA, layers=3, indexer=dataclasses.replace(_DSA.indexer, pattern="FFS"))
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
STACKS = ("dense_layers", "moe_layers", "indexer")
SPLIT_BY_MODEL = {"heads", "ff", "shared_ff", "expert_ff", "vocab"}


def collectives(text: str) -> dict[str, set[int]]:
    """The sizes of the results of each kind of collective in a compiled program, in numbers."""
    found = {kind: set() for kind in KINDS}
    for line in text.splitlines():
        if match := re.search(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(", line):
            for dims in re.findall(r"\w+\[([\d,]*)\]", match[1]):
                found[match[2]].add(math.prod(int(d) for d in dims.split(",") if d))
    return found


def sent(remat: str, **mesh: int) -> dict[str, set[int]]:
    with jax.set_mesh(make_mesh(**mesh)):
        arguments = abstract(CONFIG, make_mesh(**mesh)), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in packed_rows())
        gradient = jax.jit(jax.grad(functools.partial(loss_of, remat=remat), has_aux=True))
        return collectives(gradient.lower(*arguments).compile({"xla_backend_optimization_level": 0}).as_text())


def weights(of=lambda declared: True) -> set[int]:
    """Sizes of single layers' weights, whole."""
    return {math.prod(d.shape[1:] if d.path.split("/")[0] in STACKS else d.shape) for d in Transformer.declare(CONFIG) if of(d)}


is_expert = lambda d: d.axes[1:2] == ("experts",) and "embed" in d.axes
tokens = lambda *widths: {ROWS * LENGTH * width for width in widths}
parts = lambda sizes: {size // n for size in sizes for n in (1, 2, 4, 8)}
GATHERED_CHOICES = tokens(CONFIG.hidden_size, CONFIG.moe.experts_per_token)
ACTIVATIONS = tokens(
    CONFIG.hidden_size, CONFIG.heads * CONFIG.mla.qk_head_dim, CONFIG.heads * CONFIG.mla.v_head_dim, CONFIG.intermediate_size)


def test_sizes_tell_arrays_apart():
    activations = tokens(CONFIG.hidden_size, CONFIG.heads * CONFIG.mla.qk_head_dim, CONFIG.vocab_size, CONFIG.mla.kv_lora_rank)
    assert not activations & weights() and not parts(ACTIVATIONS) & parts(weights())
    assert not weights(is_expert) & weights(lambda d: not is_expert(d))


@pytest.mark.parametrize("remat", ["none", pytest.param("layer", marks=pytest.mark.slow)])
def test_data_parallel_sends_gradients_only(remat):
    found = sent(remat, data=8)
    assert found["all-reduce"] <= weights() | {1}
    assert not any(found[kind] for kind in KINDS if kind != "all-reduce")


@pytest.mark.parametrize("remat", ["none", pytest.param("layer", marks=pytest.mark.slow)])
def test_fsdp_gathers_weights_and_scatters_the_experts_gradients(remat):
    found = sent(remat, fsdp=8)
    assert weights(is_expert) <= found["all-gather"] <= weights()
    assert found["reduce-scatter"] == {size // 8 for size in weights(is_expert)}
    assert found["all-reduce"] <= weights(lambda d: not is_expert(d)) | {1}
    assert not found["all-to-all"] | found["collective-permute"]


@pytest.mark.parametrize("remat", ["none", pytest.param("layer", marks=pytest.mark.slow)])
def test_expert_parallel_gathers_tokens_and_no_expert(remat):
    found = sent(remat, expert=8)
    assert GATHERED_CHOICES <= found["all-gather"] <= weights(lambda d: not is_expert(d)) | GATHERED_CHOICES
    assert found["reduce-scatter"] == {size // 8 for size in GATHERED_CHOICES}
    assert found["all-reduce"] <= weights(lambda d: not is_expert(d)) | {1}
    assert not found["all-to-all"] | found["collective-permute"]


@pytest.mark.parametrize("remat", ["none", pytest.param("layer", marks=pytest.mark.slow)])
def test_context_parallel_gathers_latents_and_no_hidden_state(remat):
    found = sent(remat, context=8)
    mla, indexer = CONFIG.mla, CONFIG.indexer
    latents = tokens(mla.kv_lora_rank, mla.qk_rope_head_dim, indexer.head_dim)
    # positions and segments, rotary angles, the router's scores for the balance loss
    per_token = tokens(1, mla.qk_rope_head_dim // 2, CONFIG.moe.experts)
    assert latents <= found["all-gather"] <= weights() | latents | per_token
    summed = tokens(mla.kv_lora_rank + mla.qk_rope_head_dim)  # gradients of the keys that all queries read
    assert found["all-reduce"] <= weights(lambda d: not is_expert(d)) | latents | summed | per_token | {1}
    assert not found["all-to-all"] | found["collective-permute"]


@pytest.mark.parametrize("remat", ["none", pytest.param("layer", marks=pytest.mark.slow)])
def test_tensor_parallel_gathers_no_activation_and_no_split_weight(remat):
    found = sent(remat, model=8)
    assert found["all-gather"] <= weights(lambda d: not SPLIT_BY_MODEL & set(d.axes))
    assert not found["all-to-all"] | found["collective-permute"]
    heads = tokens(CONFIG.heads * CONFIG.mla.qk_head_dim, CONFIG.heads * CONFIG.mla.kv_lora_rank, CONFIG.vocab_size)
    assert not found["all-reduce"] & heads


@pytest.mark.parametrize("mesh", [
    {"fsdp": 2, "expert": 2, "context": 2},
    *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in (
        {"data": 2, "fsdp": 2, "expert": 2}, {"expert": 2, "context": 2, "model": 2}, {"fsdp": 2, "context": 2, "model": 2}))],
    ids=lambda mesh: "-".join(f"{axis}{size}" for axis, size in mesh.items()))
def test_together_they_gather_what_each_of_them_does(mesh):
    """Weights, or what of them one axis brings together; the latents of a context group's rows; the tokens of an expert group."""
    found = sent("none", **mesh)
    gathered = found["all-gather"]
    mla, indexer = CONFIG.mla, CONFIG.indexer
    per_token = 1, mla.qk_rope_head_dim // 2, CONFIG.moe.experts, mla.kv_lora_rank, mla.qk_rope_head_dim, indexer.head_dim
    of_context = parts(tokens(*per_token)) if "context" in mesh else set()
    group = {size * mesh.get("expert", 1) // (8 // mesh.get("model", 1)) for size in GATHERED_CHOICES} if "expert" in mesh else set()
    assert group <= gathered <= parts(weights()) | of_context | group
    assert not gathered & (parts(ACTIVATIONS) - group)
    if "expert" in mesh:
        assert max(gathered) < max(weights(is_expert)) and {size // 2 for size in group} <= found["reduce-scatter"]
    assert not found["all-to-all"] | found["collective-permute"]


def test_the_reader_sees_collectives():
    text = "%a = f32[8,4]{1,0} all-gather(%x), dimensions={0}\n%b = (f32[3], s32[5]) all-reduce-start(%y, %z)\n%c = f32[2] add(%x, %x)"
    found = collectives(text)
    assert found["all-gather"] == {32} and found["all-reduce"] == {3, 5} and not found["reduce-scatter"]
    assert sum(len(sizes) for sizes in found.values()) == 3
