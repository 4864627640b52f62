"""Mixture of experts: sigmoid router with a selection-only bias, dropless dispatch, a shared expert (GLM-4.5 §2; GLM-5 §2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from glm_jax.model.config import ModelConfig
from glm_jax.model.parameters import weight
from pallas_kernels.grouped_matmul.api import grouped_matmul


@jax.custom_vjp
def permute(x_NxD: Array, source_M: Array, places_NxK: Array) -> Array:
    """out[m] = x[source[m]], 0 where source[m] = N; `places` lists each n's K rows of out. Both directions are gathers, never a scatter."""
    return jnp.take(x_NxD, source_M, axis=0, mode="fill", fill_value=0)


def _permute_forward(x_NxD, source_M, places_NxK):
    return permute(x_NxD, source_M, places_NxK), places_NxK


def _permute_backward(places_NxK, gradient_MxD):
    return jnp.take(gradient_MxD, places_NxK, axis=0, mode="clip").sum(axis=1), None, None


permute.defvjp(_permute_forward, _permute_backward)


@jax.custom_vjp
def collect(x_MxD: Array, source_M: Array, places_NxK: Array) -> Array:
    """out[n, k] = x[places[n, k]], the inverse of `permute`; `source[m]` = n K + k (N K for padding)."""
    return jnp.take(x_MxD, places_NxK, axis=0, mode="clip")


def _collect_forward(x_MxD, source_M, places_NxK):
    return collect(x_MxD, source_M, places_NxK), source_M


def _collect_backward(source_M, gradient_NxKxD):
    flat = gradient_NxKxD.reshape(-1, gradient_NxKxD.shape[-1])
    return jnp.take(flat, source_M, axis=0, mode="fill", fill_value=0), None, None


collect.defvjp(_collect_forward, _collect_backward)


@struct.dataclass
class MoE:
    """y = sum over the chosen experts of gate * SwiGLU(x), and the shared expert's SwiGLU(x)."""

    router: Array = weight("embed", "experts", fan_in=("embed",))
    router_bias: Array = weight("experts", init="zeros")  # float32 whatever the model's type: it decides ties (GLM-4.5 §2)
    gate_up: Array = weight("experts", "embed", "expert_ff2", fan_in=("embed",))
    down: Array = weight("experts", "expert_ff", "embed", fan_in=("expert_ff",))
    shared_gate: Array = weight("embed", "shared_ff", fan_in=("embed",))
    shared_up: Array = weight("embed", "shared_ff", fan_in=("embed",))
    shared_down: Array = weight("shared_ff", "embed", fan_in=("shared_ff",))

    def __call__(self, config: ModelConfig, x_BxTxD: Array, replay_BxTxK: Array | None) -> tuple[Array, Array]:
        """Returns y [B, T, D] and the experts used, int32 [B, T, K].

        Recorded experts (not -1) are used in place of the router's choice; their gates are the router's own, so that it keeps its gradient.
        """
        x = x_BxTxD.reshape(-1, x_BxTxD.shape[-1])
        scores = jax.nn.sigmoid(x.astype(jnp.float32) @ self.router.astype(jnp.float32))
        _, experts = jax.lax.top_k(jax.lax.stop_gradient(scores) + self.router_bias, config.moe.experts_per_token)
        if replay_BxTxK is not None:
            recorded = replay_BxTxK.reshape(experts.shape).astype(experts.dtype)
            experts = jnp.where(recorded >= 0, recorded, experts)
        gates = jnp.take_along_axis(scores, experts, axis=-1)
        if config.moe.norm_topk_prob:
            gates = gates / (gates.sum(axis=-1, keepdims=True) + 1e-20)
        gates = (gates * config.moe.routed_scaling_factor).astype(x.dtype)
        y = self.routed(x, experts, gates)
        y += (jax.nn.silu(x @ self.shared_gate) * (x @ self.shared_up)) @ self.shared_down
        return y.reshape(x_BxTxD.shape), experts.reshape(*x_BxTxD.shape[:2], -1)

    def routed(self, x_NxD: Array, experts_NxK: Array, gates_NxK: Array) -> Array:
        """The routed part, dropless: rows are laid out by expert, every expert's rows padded to whole blocks."""
        tokens, chosen = experts_NxK.shape
        count = self.gate_up.shape[0]
        rows = tokens * chosen
        block = min(64, max(8, rows // count // 2))
        blocks = -(-rows // block) + count
        flat = experts_NxK.reshape(-1)
        one_hot = flat[:, None] == jnp.arange(count)
        sizes = one_hot.sum(axis=0, dtype=jnp.int32)
        padded = -(-sizes // block) * block
        rank = jnp.take_along_axis(jnp.cumsum(one_hot, axis=0, dtype=jnp.int32), flat[:, None], axis=1)[:, 0] - 1
        places = (jnp.cumsum(padded) - padded)[flat] + rank
        source = jnp.full(blocks * block, rows, jnp.int32).at[places].set(jnp.arange(rows, dtype=jnp.int32), unique_indices=True)
        laid_out = permute(x_NxD, jnp.where(source < rows, source // chosen, tokens), places.reshape(tokens, chosen))
        hidden = grouped_matmul(laid_out, self.gate_up, padded, alignment=block)
        gate, up = jnp.split(hidden, 2, axis=-1)
        out = grouped_matmul(jax.nn.silu(gate) * up, self.down, padded, alignment=block)
        return jnp.einsum("nkd,nk->nd", collect(out, source, places.reshape(tokens, chosen)), gates_NxK)
