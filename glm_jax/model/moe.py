"""Mixture of experts: sigmoid router with a selection-only bias, a shared expert (GLM-4.5 §2; GLM-5 §2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from glm_jax.model.config import ModelConfig
from glm_jax.model.dispatch import to_experts
from glm_jax.model.layers import swiglu
from glm_jax.model.parameters import weight
from glm_jax.parallel.axes import island, mesh_axes, shared_storage, spec, sum_over


@struct.dataclass
class MoE:
    """y = sum over the chosen experts of gate * SwiGLU(x), and the shared expert's SwiGLU(x)."""

    router: Array = weight("embed", "experts", fan_in=("embed",))
    router_bias: Array = weight("experts", init="zeros")  # float32 whatever the model's type: it decides ties (GLM-4.5 §2)
    gate_up: Array = weight("experts", "embed", "two", "expert_ff", fan_in=("embed",))
    down: Array = weight("experts", "expert_ff", "embed", fan_in=("expert_ff",))
    shared_gate: Array = weight("embed", "shared_ff", fan_in=("embed",))
    shared_up: Array = weight("embed", "shared_ff", fan_in=("embed",))
    shared_down: Array = weight("shared_ff", "embed", fan_in=("shared_ff",))

    def __call__(self, config: ModelConfig, x_BxTxD: Array, replay_BxTxK: Array | None) -> tuple[Array, Array, Array]:
        """Returns y [B, T, D], the experts used int32 [B, T, K] and the router's scores float32 [B, T, E].

        A token's recorded experts, if none of them is -1, are used in place of the router's choice; their gates are the router's own, so
        that it keeps its gradient.
        """
        over = mesh_axes("experts", config.moe.experts)
        ring = bool(over) and set(over) <= set(mesh_axes("batch", x_BxTxD.shape[0]))
        up, down, stored = self._placed(x_BxTxD.shape[:2])

        def mixture(x_BxTxD, router, router_bias, gate_up, down, replay_BxTxK):
            x = x_BxTxD.reshape(-1, x_BxTxD.shape[-1])
            replay = None if replay_BxTxK is None else replay_BxTxK.reshape(x.shape[0], -1)
            experts, gates, scores = route(config, x, router, router_bias, replay)
            if stored:  # here, so that the transpose scatters the gradients
                gate_up = jax.lax.all_gather(gate_up, stored, axis=1, tiled=True)
                down = jax.lax.all_gather(down, stored, axis=2, tiled=True)
            y = to_experts(x, experts, gates.astype(x.dtype), gate_up, down, over=over, ring=ring)
            y = sum_over(y, "expert_ff", config.moe.intermediate_size)
            return tuple(a.reshape(*x_BxTxD.shape[:2], -1) for a in (y, experts, scores))

        rows = ("batch", "queries", None)
        y, experts, scores = island(mixture, (rows, (None, None), (None,), up, down, rows), (rows,) * 3)(
            x_BxTxD, self.router, self.router_bias, self.gate_up, self.down, replay_BxTxK)
        if config.moe.shared_experts:
            y += swiglu(x_BxTxD, self.shared_gate, self.shared_up, self.shared_down)
        return y, experts, scores

    def _placed(self, tokens: tuple[int, int]) -> tuple[PartitionSpec | None, PartitionSpec | None, tuple[str, ...]]:
        """How the island takes the experts' matrices, and the mesh axes it gathers them over: see shared_storage."""
        if jax.sharding.get_abstract_mesh().empty:
            return None, None, ()
        axes = ("experts", "embed", "two", "expert_ff")
        experts, _, _, width = spec(axes, self.gate_up.shape)
        stored = shared_storage(axes, self.gate_up.shape, tokens)
        return PartitionSpec(experts, stored or None, None, width), PartitionSpec(experts, width, stored or None), stored


def route(config: ModelConfig, x_NxD: Array, router: Array, router_bias: Array, replay_NxK: Array | None) -> tuple[Array, Array, Array]:
    """Experts of every token int32 [N, K], their gates float32 [N, K], all scores float32 [N, E] (GLM-4.5 §2; DeepSeek-V3 eq. 12-16)."""
    moe = config.moe
    # Float32 products too, where the device's default is less: near ties decide.
    scores = jax.nn.sigmoid(jnp.matmul(x_NxD.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST))
    choice = jax.lax.stop_gradient(scores) + router_bias
    if moe.groups > 1:
        by_group = choice.reshape(*choice.shape[:-1], moe.groups, -1)
        best_two, _ = jax.lax.top_k(by_group, min(2, by_group.shape[-1]))
        _, groups = jax.lax.top_k(best_two.sum(axis=-1), moe.topk_groups)
        allowed = jax.nn.one_hot(groups, moe.groups, dtype=bool).any(axis=-2)
        choice = jnp.where(allowed[..., None], by_group, -jnp.inf).reshape(choice.shape)
    _, experts = jax.lax.top_k(choice, moe.experts_per_token)
    if replay_NxK is not None:
        experts = jnp.where((replay_NxK >= 0).all(axis=-1, keepdims=True), replay_NxK.astype(experts.dtype), experts)
    experts = checkpoint_name(experts, "experts")
    gates = jnp.take_along_axis(scores, experts, axis=-1)
    if moe.norm_topk_prob:
        gates = gates / (gates.sum(axis=-1, keepdims=True) + 1e-20)
    return experts, gates * moe.routed_scaling_factor, scores


def sequence_balance(config: ModelConfig, scores_BxTxE: Array, segments_BxT: Array) -> Array:
    """The sequence-wise balance loss without its coefficient, float32 [B, T] (DeepSeek-V3 eq. 17-20).

    Summed over a sequence's tokens: sum_e f_e P_e, with f_e = E / (K T) times the number of the sequence's T tokens that have expert e
    among their K highest scores (before the bias), a constant, and P_e the mean of their normalised scores. A packed row holds one
    sequence a segment; padding (segment 0) gives 0.
    """
    moe = config.moe

    def balance(scores, segments):
        real = segments != 0
        _, chosen = jax.lax.top_k(jax.lax.stop_gradient(scores), moe.experts_per_token)
        hits = jax.nn.one_hot(chosen, moe.experts).sum(axis=-2) * real[..., None]
        rows, length = segments.shape
        # Segments are runs of real tokens, padding aside: number them by the tokens at which the id changes.
        previous = jnp.pad(last_real_segment(segments)[:, :-1], ((0, 0), (1, 0)))
        number = jnp.cumsum(real & (segments != previous), axis=1)
        row = jnp.arange(rows)[:, None]
        by_sequence = lambda x: jnp.zeros((rows, length + 1, *x.shape[2:])).at[row, number].add(x)[row, number]
        tokens = jnp.maximum(by_sequence(real.astype(jnp.float32)), 1)
        load = by_sequence(hits) * (moe.experts / moe.experts_per_token) / tokens[..., None]
        share = scores / scores.sum(axis=-1, keepdims=True)
        return jnp.where(real, jnp.sum(load * share, axis=-1) / tokens, 0)

    return island(balance, (("batch", None, None), ("batch", None)), ("batch", None))(scores_BxTxE, segments_BxT)


def last_real_segment(segments_BxT: Array) -> Array:
    """int32 [B, T]: the segment of the last real token up to and with each place; 0 before the first."""
    places = jnp.broadcast_to(jnp.arange(segments_BxT.shape[1], dtype=jnp.int32), segments_BxT.shape)
    last = jax.lax.cummax(jnp.where(segments_BxT != 0, places, 0), axis=1)
    return jnp.take_along_axis(segments_BxT, last, axis=1)
