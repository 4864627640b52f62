"""AdamW against its equations on a handful of named weights: warm-up, clipping, decay of matrices only, freezing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from glm_jax.training.optimizers import adamw, path_name

WEIGHTS = {
    "embedding": [0.5, -1.0], "head": [2.0, 1.0], "final_norm": [1.0, 1.0],
    "layer": {"attention_norm": [1.0, 2.0], "k_norm_gain": [1.0, 3.0], "k_norm_bias": [0.1, 0.2], "q_up": [1.0, -2.0],
              "router_bias": [0.3, 0.0], "q_bias": [0.2, -0.1], "q_norm": [1.0, 0.5]},
    "mtp": {"embedding": [0.4, 1.0], "embedding_norm": [1.0, 2.0], "hidden_norm": [1.0, 0.5], "final_norm": [1.0, 2.0],
            "project": [1.0, -1.0], "head": [0.3, 1.0]},
}
UNDECAYED = {
    "embedding", "final_norm", "layer/attention_norm", "layer/k_norm_gain", "layer/k_norm_bias", "layer/q_bias", "layer/q_norm",
    "mtp/embedding", "mtp/embedding_norm", "mtp/hidden_norm", "mtp/final_norm"}
RATE, DECAY, B1, B2 = 0.1, 0.3, 0.9, 0.95


def weights():
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), WEIGHTS, is_leaf=lambda x: isinstance(x, list))


def flat(tree):
    return {path_name(path): np.asarray(leaf, np.float64) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def train(optimizer, gradients):
    model = weights()
    state, trail = optimizer.init(model), []
    step = jax.jit(lambda g, s, m: (lambda changes, s: (optax.apply_updates(m, changes), s))(*optimizer.update(g, s, m)))
    for gradient in gradients:
        model, state = step(gradient, state, model)
        trail.append(flat(model))
    return trail


@pytest.mark.parametrize("warmup", [0, 2])
def test_adamw_equations(warmup):
    rng = np.random.default_rng(0)
    gradients = [jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), weights()) for _ in range(4)]
    trail = train(adamw(RATE, warmup_steps=warmup, weight_decay=DECAY, b1=B1, b2=B2, clip=1.0), gradients)

    model, m, v = flat(weights()), dict.fromkeys(flat(weights()), 0.0), dict.fromkeys(flat(weights()), 0.0)
    for t, gradient in enumerate(map(flat, gradients)):
        gradient.pop("layer/router_bias")  # frozen: neither clipped against nor changed
        norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
        rate = RATE * min(1, t / warmup) if warmup else RATE
        for name, g in gradient.items():
            g = g / max(norm, 1)
            m[name], v[name] = B1 * m[name] + (1 - B1) * g, B2 * v[name] + (1 - B2) * g**2
            direction = m[name] / (1 - B1 ** (t + 1)) / (np.sqrt(v[name] / (1 - B2 ** (t + 1))) + 1e-8)
            model[name] = model[name] - rate * (direction + (0 if name in UNDECAYED else DECAY) * model[name])
        for name, value in model.items():
            np.testing.assert_allclose(trail[t][name], value, rtol=2e-5, atol=1e-6, err_msg=name)


def test_decay_alone_moves_matrices_only():
    nothing = jax.tree.map(jnp.zeros_like, weights())
    (after,) = train(adamw(RATE, weight_decay=DECAY), [nothing])
    for name, before in flat(weights()).items():
        decayed = name in ("head", "layer/q_up", "mtp/project", "mtp/head")
        np.testing.assert_allclose(after[name], before * (1 - RATE * DECAY * decayed), rtol=1e-6)


def test_frozen_parts_never_change_a_bit():
    """A name freezes every weight below it, decay included."""
    ones = jax.tree.map(jnp.ones_like, weights())
    before, optimizer = weights(), adamw(RATE, weight_decay=DECAY, frozen=("layer", "head"))
    state, model = optimizer.init(before), before
    for _ in range(3):
        changes, state = optimizer.update(ones, state, model)
        model = optax.apply_updates(model, changes)
    for name in ("layer", "head"):
        for a, b in zip(jax.tree.leaves(model[name]), jax.tree.leaves(before[name]), strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32))
    assert (np.asarray(model["embedding"]) != before["embedding"]).all()
