"""The objective with multi-token prediction against the equations in float64: values, and gradients by finite differences of them."""

import dataclasses

import glm_oracle
import jax
import numpy as np
import pytest
from packed_run import A, B, C, assert_same, compiled_run
from small_model import random_model, small_config

from glm_jax.model import GQAConfig, MTPConfig
from glm_jax.model.transformer import Transformer
from glm_jax.parallel import make_mesh, sharding_of
from glm_jax.training.mtp_loss import mtp_tokens
from glm_jax.training.optimizers import path_name

LAMBDA, BALANCE, INDEXER = 0.3, 0.2, 0.5
DSA = dataclasses.replace(small_config(topk=3), layers=2)
GQA = dataclasses.replace(
    DSA, mla=None, indexer=None, heads=4, gqa=GQAConfig(kv_heads=2, head_dim=8, rotary_dim=4, qk_norm=True, bias=True))
CASES = {  # what it is: (config, steps)
    "shared selection": (dataclasses.replace(DSA, mtp=MTPConfig(share_selection=True)), 3),
    "raw state recycled, own embedding and head": (dataclasses.replace(DSA, mtp=MTPConfig(recycle="pre_norm", own_embeddings=True)), 2),
    "grouped queries": (dataclasses.replace(GQA, mtp=MTPConfig()), 2),
    "latent attention without indexer or experts": (
        dataclasses.replace(DSA, indexer=None, moe=None, layers=1, dense_layers=1, mtp=MTPConfig()), 2),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """(model, steps, run)"""
    config, steps = CASES[request.param]
    model = random_model(config)
    return model, steps, compiled_run(
        model, indexer_coefficient=INDEXER if config.indexer is not None else 0.0, mtp_coefficient=LAMBDA, mtp_steps=steps,
        balance_coefficient=BALANCE if config.moe is not None else 0.0, count_experts=config.moe is not None)


def reference(model, sequences, steps):
    """The metrics of an update over `sequences`, each on its own, and the loss in two parts: all but the indexers' term, and that term."""
    config = model.config
    nll = loss_tokens = correct = balance = kl = 0.0
    further = np.zeros((3, steps))  # negative log-likelihood, tokens, correct ones
    loads = {}

    def count(name, at, experts):
        load = loads.setdefault(name, np.zeros((config.moe_layers if name == "expert_load" else 1, config.moe.experts), int))
        np.add.at(load[at], experts, 1)

    for tokens, mask in sequences:
        out = glm_oracle.forward(model, tokens)
        for t in range(1, len(tokens)):
            p = glm_oracle.softmax(out.logits[t - 1])
            nll -= mask[t] * np.log(p[tokens[t]])
            loss_tokens, correct = loss_tokens + mask[t], correct + mask[t] * (p.argmax() == tokens[t])
        kl += np.sum(out.indexer_kl)
        balance += sum(glm_oracle.sequence_balance(config, scores) for scores in out.scores.values())
        for number, experts in out.routing.items():
            count("expert_load", number - config.dense_layers, experts)
        for k, step in enumerate(glm_oracle.multi_token_prediction(model, tokens, steps)):
            for t in range(len(tokens) - k - 2):
                p, target = glm_oracle.softmax(step.logits[t]), t + k + 2
                further[:, k] += mask[target] * np.array([-np.log(p[tokens[target]]), 1, p.argmax() == tokens[target]])
            kl += np.sum(step.indexer_kl) / steps
            if step.scores is not None and len(step.scores):
                balance += glm_oracle.sequence_balance(config, step.scores) / steps
                count("mtp_expert_load", 0, step.experts)
    real_tokens = sum(len(tokens) for tokens, _ in sequences)
    indexer_part = INDEXER * kl / real_tokens
    rest = nll / loss_tokens + LAMBDA / steps * sum(further[0] / further[1])
    metrics = {
        "nll": nll, "loss_tokens": loss_tokens, "correct_tokens": correct, "mtp_nll": further[0], "mtp_tokens": further[1],
        "mtp_correct": further[2]}
    if config.moe is not None:
        rest += BALANCE * balance / len(sequences)
        metrics |= loads | {"balance": balance, "sequences": len(sequences)}
    if config.indexer is not None:
        metrics |= {"indexer_kl": kl, "real_tokens": real_tokens}
    return metrics | {"loss": rest + indexer_part}, rest, indexer_part


def test_loss_and_metrics_are_those_of_the_equations(case):
    model, steps, run = case
    found = run([[A, B], [C]])[0]
    found.pop("gradient_norm")
    wanted = reference(model, [A, B, C], steps)[0]
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, err_msg=name)
    assert all(wanted["mtp_tokens"] > 0)


def test_gradients_are_the_slopes_of_the_equations(case):
    """Of every weight: the indexers learn from their own term only, everything else from the rest."""
    model, steps, run = case
    gradients = jax.tree_util.tree_leaves_with_path(run([[B], [C]])[1])
    weights, structure = jax.tree.flatten(jax.tree.map(lambda w: np.asarray(w, np.float64), model))
    rng, largest = np.random.default_rng(0), max(float(np.linalg.norm(g)) for _, g in gradients)
    for i, (path, gradient) in enumerate(gradients):
        direction = rng.normal(size=weights[i].shape)
        direction /= max(np.linalg.norm(direction), 1e-30)

        def loss(step, i=i, direction=direction, path=path):
            moved = [*weights[:i], weights[i] + step * direction, *weights[i + 1:]]
            _, rest, indexer_part = reference(jax.tree.unflatten(structure, moved), [B, C], steps)
            return indexer_part if "indexer" in path_name(path).split("/") else rest

        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
        np.testing.assert_allclose(np.sum(np.asarray(gradient) * direction), slope, rtol=1e-4, atol=1e-6 * largest, err_msg=path_name(path))


def test_packing_and_microbatches_change_nothing(case):
    run = case[2]
    together = run([[A], [B]])
    for rows in ([[[A, B]]], [[[], [B, A]]], [[[A]], [[B]]], [[[], [B]], [[A]]]):
        assert_same(run(*rows), together)


def test_a_mesh_changes_nothing():
    """Rows over two devices, heads and the vocabulary over two; the loads count the rows of all."""
    moe = dataclasses.replace(GQA.moe, experts=6, intermediate_size=8)
    config = dataclasses.replace(GQA, layers=1, dense_layers=0, moe=moe, mtp=MTPConfig())
    model = random_model(config)
    options = {
        "indexer_coefficient": 0.0, "mtp_coefficient": LAMBDA, "mtp_steps": 1, "balance_coefficient": BALANCE, "count_experts": True,
        "bias_rate": 1e-3}
    wanted = compiled_run(model, **options)([[A, B], [C]])
    mesh = make_mesh(expert=2, model=2)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda declared, w: jax.device_put(w, sharding_of(declared, mesh)), Transformer.declare_tree(config), model)
        found = compiled_run(placed, **options)([[A, B], [C]])
    for name in ("expert_load", "mtp_expert_load", "loss_tokens", "mtp_tokens"):
        np.testing.assert_array_equal(found[0][name], wanted[0][name])
    assert_same(found, wanted)
    for on_mesh, alone in ((found[2].moe_layers, wanted[2].moe_layers), (found[2].mtp.layer, wanted[2].mtp.layer)):
        np.testing.assert_array_equal(on_mesh.moe.router_bias, alone.moe.router_bias)


def test_tokens_of_a_step_have_its_place_in_their_sequence():
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 0, 0, 0, 0, 0, 0]])
    mask = np.array([[0, 0, 1, 0, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0, 0, 0]], np.float32)
    np.testing.assert_array_equal(mtp_tokens(segments, mask, 3), [3, 1, 0])
    np.testing.assert_array_equal(mtp_tokens(segments[None], mask[None], 7), [3, 1, 0, 0, 0, 0, 0])
