"""The table from logical to mesh axes, and the helpers that do nothing without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from glm_jax.model.parameters import Declared
from glm_jax.parallel import (
    AXES,
    DECODE_RULES,
    einsum,
    island,
    make_mesh,
    mesh_axes,
    shard,
    sharding_of,
    spec,
    sum_over,
    use_rules,
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=2, expert=2, model=2)


def test_a_mesh_has_all_five_axes(mesh):
    assert mesh.axis_names == AXES and mesh.shape == {"data": 2, "fsdp": 1, "expert": 2, "context": 1, "model": 2}
    assert make_mesh().size == 1
    with pytest.raises(ValueError, match="data=4, model=4 needs 16 devices; there are 8"):
        make_mesh(data=4, model=4)


def test_rules_take_what_divides(mesh):
    assert mesh_axes("batch", 8, mesh) == ("data", "expert")
    assert mesh_axes("batch", 2, mesh) == ("data",)  # 2 rows over data; expert does not divide what is left
    assert mesh_axes("batch", 3, mesh) == ()
    assert mesh_axes("qk", 8, mesh) == () and mesh_axes(None, 8, mesh) == ()


def test_stored_axes_take_what_the_others_leave(mesh):
    assert spec(("embed", "heads"), (16, 4), mesh) == PartitionSpec(("expert",), ("model",))
    assert spec(("embed", "q_rank"), (16, 4), mesh) == PartitionSpec(("expert", "model"), None)
    assert spec(("q_rank", "heads", "qk"), (16, 3, 4), mesh) == PartitionSpec(("expert", "model"), None, None)  # 3 heads do not divide
    assert spec(("embed", "experts"), (16, 4), mesh) == PartitionSpec(("model",), ("expert",))


def test_other_rules_hold_where_they_are_used(mesh):
    with use_rules(DECODE_RULES):
        assert spec(("embed", "heads"), (16, 4), mesh) == PartitionSpec(None, ("model",))
        assert mesh_axes("batch", 8, mesh) == ("data",)
    assert mesh_axes("batch", 8, mesh) == ("data", "expert")


def test_one_mesh_axis_is_used_once_in_an_array(mesh):
    assert spec(("embed", "heads"), (16, 4), mesh) == PartitionSpec(("expert",), ("model",))
    assert spec(("experts", "embed", "two", "expert_ff"), (4, 16, 2, 6), mesh) == PartitionSpec(("expert",), None, None, ("model",))
    declared = Declared("w", ("moe_layers", "experts", "embed"), (3, 4, 16), "normal", 1.0)
    assert sharding_of(declared, mesh).spec == PartitionSpec(None, ("expert",), ("model",))


def test_without_a_mesh_nothing_happens():
    x = jnp.ones((4, 6))
    assert shard(x, "batch", None) is x
    function = lambda x: sum_over(x, "heads", 4)
    assert island(function, (("batch", None),), ("batch", None)) is function
    np.testing.assert_array_equal(island(function, (), ())(x), x)
    np.testing.assert_array_equal(einsum("ab,bc->ac", x, x.T, None, None), x @ x.T)


def test_a_product_over_a_sharded_axis_is_that_of_one_device(mesh):
    x, w = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((4, 6, 8), (8, 10)))
    with jax.set_mesh(mesh):
        split = shard(jnp.asarray(x), "batch", None, "ff"), shard(jnp.asarray(w), "ff", None)
        out = jax.jit(lambda x, w: einsum("btf,fd->btd", x, w, "batch", "queries", None))(*split)
        assert jax.typeof(out).sharding.spec == PartitionSpec(("data", "expert"), None, None)
    np.testing.assert_allclose(out, x @ w, rtol=1e-5, atol=1e-5)


def test_an_island_sees_pieces_and_sums_partial_results(mesh):
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)

    def rows(x, nothing):
        assert x.shape == (1, 4) and nothing is None  # 4 rows over data and expert, 8 columns over model
        return sum_over(x.sum(axis=1), "ff", 8), x

    with jax.set_mesh(mesh):
        split = island(rows, (("batch", "ff"), ("batch",)), (("batch",), ("batch", "ff")))
        total, same = jax.jit(split)(x, None)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(split(x, None)[0] ** 2)))(x)
    np.testing.assert_allclose(total, x.sum(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(same, x)
    np.testing.assert_allclose(gradient, np.repeat(2 * x.sum(axis=1)[:, None], 8, axis=1), rtol=1e-5)
