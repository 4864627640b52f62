"""Every family against Hugging Face transformers: the cases of tests/golden, whose README says what is in them."""

import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.model import load_pretrained
from glm_jax.parallel import make_mesh, shard

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
CASES = ("glm4_5", "glm4_5_air", "glm4_7_flash", "glm5", "glm5_2_shared_indexer", "glm5_left_padded", "deepseek_v3_2", "qwen3_dense",
         "llama_dense")
QUICK_ON_A_MESH = {"glm4_5": 0, "glm5_2_shared_indexer": 2, "qwen3_dense": 1}  # case: number of the mesh
MESHES = ({"data": 2, "expert": 2, "model": 2}, {"fsdp": 4, "model": 2}, {"expert": 2, "context": 2, "model": 2})
# The reference's tensors below model.layers.N. (experts fused), and the weights of ours that they hold, by the part they belong to.
TENSORS = {
    "layer": {"input_layernorm.weight": ["attention_norm"], "post_attention_layernorm.weight": ["ffn_norm"]},
    "mla": {
        "self_attn.q_a_proj.weight": ["q_down"], "self_attn.q_a_layernorm.weight": ["q_norm"], "self_attn.q_b_proj.weight": ["q_up"],
        "self_attn.kv_a_proj_with_mqa.weight": ["kv_down"], "self_attn.kv_a_layernorm.weight": ["kv_norm"],
        "self_attn.kv_b_proj.weight": ["k_up", "v_up"], "self_attn.o_proj.weight": ["out"]},
    "gqa": {
        "self_attn.q_proj.weight": ["q"], "self_attn.k_proj.weight": ["k"], "self_attn.v_proj.weight": ["v"],
        "self_attn.q_proj.bias": ["q_bias"], "self_attn.k_proj.bias": ["k_bias"], "self_attn.v_proj.bias": ["v_bias"],
        "self_attn.q_norm.weight": ["q_norm"], "self_attn.k_norm.weight": ["k_norm"], "self_attn.o_proj.weight": ["out"]},
    "indexer": {
        "self_attn.indexer.wq_b.weight": ["q_up"], "self_attn.indexer.wk.weight": ["k"],
        "self_attn.indexer.k_norm.weight": ["k_norm_gain"], "self_attn.indexer.k_norm.bias": ["k_norm_bias"],
        "self_attn.indexer.weights_proj.weight": ["head_weights"]},
    "ffn": {"mlp.gate_proj.weight": ["gate"], "mlp.up_proj.weight": ["up"], "mlp.down_proj.weight": ["down"]},
    "moe": {
        "mlp.gate.weight": ["router"], "mlp.gate.e_score_correction_bias": ["router_bias"],
        "mlp.experts.gate_up_proj": ["gate_up"], "mlp.experts.down_proj": ["down"],
        "mlp.shared_experts.gate_proj.weight": ["shared_gate"], "mlp.shared_experts.up_proj.weight": ["shared_up"],
        "mlp.shared_experts.down_proj.weight": ["shared_down"]},
}
# Compiled without optimisation: each program runs once or a few times.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
name_of = lambda mesh: "-".join(f"{axis}{size}" for axis, size in mesh.items()) or "no_mesh"


def parameters():
    """Each case without a mesh; three of them on a mesh in every run of the tests, all on all meshes with the slow ones."""
    found = []
    for case in CASES:
        found.append(pytest.param(case, {}, id=f"{case}-no_mesh"))
        for at, mesh in enumerate(MESHES):
            slow = [] if QUICK_ON_A_MESH.get(case) == at else pytest.mark.slow
            found.append(pytest.param(case, mesh, id=f"{case}-{name_of(mesh)}", marks=slow))
    return found


@pytest.fixture
def golden(case, mesh):
    """(reference arrays and JSON, model, batch multiple), the mesh being set."""
    reference = {name: np.asarray(value) for name, value in np.load(GOLDEN / case / "reference.npz").items()}
    reference |= json.loads((GOLDEN / case / "reference.json").read_text())
    if not mesh:
        yield reference, load_pretrained(GOLDEN / case), 1
        return
    with jax.set_mesh(make_mesh(**mesh)):
        rows = math.prod(size for axis, size in mesh.items() if axis in ("data", "fsdp", "expert"))
        yield reference, load_pretrained(GOLDEN / case), rows


def on_mesh(*arrays):
    return [shard(jnp.asarray(a, jnp.int32), "batch", None) for a in arrays]


def mean_loss(model, tokens, mask, counted):
    """The reference's loss over the rows that count: cross entropy of token t+1 at query t, where both are real."""
    out = model(tokens, attention_mask=mask, return_selections=model.config.indexer is not None)
    log_probs = jax.nn.log_softmax(out.logits)
    following = jnp.roll(tokens, -1, axis=1)
    nll = -jnp.sum(log_probs * jax.nn.one_hot(following, log_probs.shape[-1]), axis=-1)
    pairs = (counted * mask).at[:, -1].set(0) * jnp.roll(mask, -1, axis=1)
    return jnp.sum(nll * pairs) / jnp.sum(pairs), out


def gradient_norms(config, gradients):
    """The norm of the gradient by the reference's names; a tensor of its is one layer's worth of one or two weights."""
    norm = lambda *weights: math.sqrt(sum(np.sum(np.asarray(w, np.float64) ** 2) for w in weights))
    norms = {"model.embed_tokens.weight": norm(gradients.embedding), "model.norm.weight": norm(gradients.final_norm)}
    if gradients.head is not None:
        norms["lm_head.weight"] = norm(gradients.head)
    for layer in range(config.layers):
        dense = layer < config.dense_layers
        stack, number = (gradients.dense_layers, layer) if dense else (gradients.moe_layers, layer - config.dense_layers)
        parts = [("layer", stack, number), ("mla" if config.mla is not None else "gqa", stack.attention, number),
                 ("ffn", stack.ffn, number) if dense else ("moe", stack.moe, number)]
        if layer in config.full_layers:
            parts.append(("indexer", gradients.indexer, config.full_layers.index(layer)))
        norms |= {f"model.layers.{layer}.{name}": norm(*(getattr(part, field)[at] for field in fields))
                  for kind, part, at in parts for name, fields in TENSORS[kind].items() if getattr(part, fields[0]) is not None}
    return norms


@pytest.mark.parametrize("case, mesh", parameters())
def test_forward_and_gradients(case, mesh, golden, record_property):
    """Logits, hidden states, loss, selections, greedy tokens, gradients. Row 2 is the greedy continuation; padding fills up the batch.

    Greedy decoding by full forward passes gives the reference's tokens if and only if, given those, each is the most likely one after
    those before it: one causal pass says so.
    """
    reference, model, multiple = golden
    tokens, greedy = reference["input_ids"], reference["greedy_output"][0]
    rows, length = tokens.shape
    batch = np.zeros((-(-(rows + 1) // multiple) * multiple, max(length, len(greedy)) + len(greedy) % 2), np.int32)
    mask, counted = np.zeros_like(batch), np.zeros_like(batch)
    batch[:rows, :length], batch[rows, : len(greedy)] = tokens, greedy
    real = reference.get("attention_mask", np.ones_like(tokens)).astype(bool)
    mask[:rows, :length], mask[rows, : len(greedy)], counted[:rows] = real, 1, 1
    found = compiled(jax.value_and_grad(mean_loss, has_aux=True))(model, *on_mesh(batch, mask, counted))
    (loss, out), gradients = jax.tree.map(np.asarray, found)

    def close(name, found, wanted, tolerance):
        error = float(np.abs(found - wanted).max())
        record_property(name, error)
        assert error <= tolerance, f"{name}: off by {error}, tolerance {tolerance}"

    close("logits", out.logits[:rows, :length][real], reference["logits"][real], 2e-4)
    close("hidden", out.hidden[:rows, :length][real], reference[f"hidden_{model.config.layers}"][real], 2e-4)
    close("loss", loss, reference["loss"], 1e-5)
    start = reference["greedy_prompt"].shape[1]
    np.testing.assert_array_equal(out.logits[rows].argmax(axis=-1)[start - 1 : len(greedy) - 1], greedy[start:])

    wanted = {name for name in reference if name.startswith("topk_")}
    assert wanted == {f"topk_{layer}" for layer in out.selections or {}} == {f"topk_{layer}" for layer in model.config.full_layers}
    for layer, selection in (out.selections or {}).items():
        for row, t in np.argwhere(real):
            visible = {int(s) for s in reference[f"topk_{layer}"][row, t] if s <= t and real[row, s]}
            assert {int(s) for s in selection[row, t] if s >= 0} == visible, f"layer {layer}, row {row}, query {t}"

    norms = gradient_norms(model.config, gradients)
    nothing = {name for name in norms if name.endswith("e_score_correction_bias")} | set(reference["parameters_without_gradient"])
    assert set(norms) == nothing | set(reference["gradient_norms"])
    assert {name for name, norm in norms.items() if norm == 0} == nothing
    relative = {name: abs(norms[name] / norm - 1) for name, norm in reference["gradient_norms"].items()}
    close("gradient norms", max(relative.values()), 0, 1e-3)


@pytest.mark.parametrize("case, mesh", parameters())
def test_greedy_decoding_through_the_cache(case, mesh, golden):
    """The prompt in one prefill, then token after token, in one program; all rows are the same."""
    reference, model, multiple = golden
    greedy, start = reference["greedy_output"][0], reference["greedy_prompt"].shape[1]

    def decode(model, prompt):
        out = model(prompt, cache=model.init_cache(prompt.shape[0], len(greedy)))
        best = lambda out: shard(out.logits, "batch", None, None)[:, -1].argmax(axis=-1).astype(jnp.int32)

        def step(carry, _):
            cache, token = carry
            out = model(token[:, None], cache=cache)
            return (out.cache, best(out)), token

        _, tokens = jax.lax.scan(step, (out.cache, best(out)), length=len(greedy) - start)
        return tokens

    tokens = compiled(decode)(model, *on_mesh(np.tile(greedy[:start], (multiple, 1))))
    np.testing.assert_array_equal(tokens.T, np.tile(greedy[start:], (multiple, 1)))
