"""Meshes, and the one table from logical axes to mesh axes."""

from glm_jax.parallel.axes import DECODE_RULES, RULES, einsum, island, mesh_axes, shard, sharding_of, spec, sum_over, use_rules
from glm_jax.parallel.mesh import AXES, make_mesh

__all__ = [
    "AXES", "DECODE_RULES", "RULES", "einsum", "island", "make_mesh", "mesh_axes", "shard", "sharding_of", "spec", "sum_over", "use_rules",
]
