"""Meshes, and the one table from logical axes to mesh axes."""

from glm_jax.parallel.axes import RULES, einsum, island, mesh_axes, shard, sharding_of, spec, sum_over
from glm_jax.parallel.mesh import AXES, make_mesh

__all__ = ["AXES", "RULES", "einsum", "island", "make_mesh", "mesh_axes", "shard", "sharding_of", "spec", "sum_over"]
