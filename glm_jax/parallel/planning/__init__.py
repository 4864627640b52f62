"""Plans: what a compiled program asks of hardware that is not there."""

from glm_jax.parallel.planning.accounting import Work, account
from glm_jax.parallel.planning.hardware import CHIPS, GIB, Chip, PlanError, Topology, describe
from glm_jax.parallel.planning.meshes import Choice, check_mesh, choose_mesh, parse_mesh, plan_mesh

__all__ = [
    "CHIPS", "GIB", "Chip", "Choice", "PlanError", "Topology", "Work", "account", "check_mesh", "choose_mesh", "describe",
    "parse_mesh", "plan_mesh",
]
