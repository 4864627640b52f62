"""Loss, gradients, choices and updates on every mesh are those of one device."""

import functools

import jax
import numpy as np
import optax
import pytest
from sharded_models import CONFIGS, abstract, loss_of, packed_rows, placed, random_weights

from glm_jax.parallel import AXES, make_mesh
from glm_jax.training.optimizers import adamw

SINGLE = [{axis: 8} for axis in AXES]
TOGETHER = [
    {"data": 2, "fsdp": 2, "expert": 2}, {"fsdp": 2, "expert": 4}, {"data": 2, "expert": 2, "context": 2},
    {"fsdp": 2, "context": 2, "model": 2}, {"expert": 2, "context": 2, "model": 2}, {"data": 2, "fsdp": 2, "model": 2},
]
QUICK = {  # the others run with the slow tests
    "dsa": ({"data": 2, "expert": 2, "context": 2},),
    "dsa_masked": ({"fsdp": 2, "context": 2, "model": 2},),
    "moe": ({"fsdp": 2, "expert": 4},), "mla": ({"model": 8},), "gqa": ({"fsdp": 8},),
}
RATE = 1e-2


def cases():
    found = []
    for case in CONFIGS:
        for mesh in SINGLE + TOGETHER:
            name = "-".join(f"{axis}{size}" for axis, size in mesh.items())
            found.append(pytest.param(case, mesh, id=f"{case}-{name}", marks=() if mesh in QUICK[case] else pytest.mark.slow))
    return found


def step(model, tokens, segments, labels, remat="none"):
    """The loss, the experts and selections, the gradients, and the changes that SGD and the run's AdamW make of them."""
    (loss, choices), gradients = jax.value_and_grad(loss_of, has_aux=True)(model, tokens, segments, labels, remat=remat)
    optimizer = adamw(RATE, weight_decay=0.1, clip=1e6)
    changes = {}
    for name, rule in (("sgd", optax.sgd(RATE)), ("adamw", optimizer)):
        changes[name], _ = rule.update(gradients, rule.init(model), model)
    return loss, choices, gradients, changes


@functools.cache
def on_one_device(case):
    config = CONFIGS[case]
    return jax.device_get(jax.jit(step)(placed(config, random_weights(config), None), *packed_rows()))


def on_mesh(case, mesh, remat="none"):
    config = CONFIGS[case]
    with jax.set_mesh(make_mesh(**mesh)):
        model = placed(config, random_weights(config), make_mesh(**mesh))
        return jax.jit(step, static_argnames="remat")(model, *packed_rows(), remat=remat)


def paths(tree):
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


@pytest.mark.parametrize("case, mesh", cases())
def test_a_step_on_a_mesh_is_that_of_one_device(case, mesh):
    wanted_loss, wanted_choices, wanted_gradients, wanted_changes = on_one_device(case)
    loss, choices, gradients, changes = on_mesh(case, mesh)
    assert abs(float(loss) - float(wanted_loss)) <= 1e-6 * abs(float(wanted_loss))

    for found, wanted in zip(jax.tree.leaves(choices), jax.tree.leaves(wanted_choices), strict=True):
        for shard in found.addressable_shards:  # of every device, replicas too
            np.testing.assert_array_equal(shard.data, wanted[shard.index])

    for leaf, declared in zip(jax.tree.leaves(gradients), jax.tree.leaves(abstract(CONFIGS[case], make_mesh(**mesh))), strict=True):
        assert leaf.sharding.is_equivalent_to(declared.sharding, leaf.ndim)
    found, wanted = paths(gradients), paths(wanted_gradients)
    for path, gradient in wanted.items():
        assert gradient.any() != path.endswith("router_bias"), path  # biases have no gradient, everything else has
        assert np.abs(found[path] - gradient).max() <= 1e-5 * np.abs(gradient).max(), path

    found = paths(changes["sgd"])
    for path, change in paths(wanted_changes["sgd"]).items():
        assert np.abs(found[path] - change).max() <= 1e-6, path
    found, wanted = (np.concatenate([x.ravel() for x in paths(tree["adamw"]).values()]) for tree in (changes, wanted_changes))
    assert np.linalg.norm(found - wanted) <= 1e-3 * np.linalg.norm(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["layer", "ffn"])
def test_rematerialisation_changes_nothing_on_a_mesh(remat):
    _, _, wanted, _ = on_one_device("dsa")
    found = paths(on_mesh("dsa", {"data": 2, "expert": 2, "context": 2}, remat)[2])
    for path, gradient in paths(wanted).items():
        assert np.abs(found[path] - gradient).max() <= 1e-5 * np.abs(gradient).max(), path
