"""From tokens to their experts and back, dropless, on one device or on many (ring form: gather tokens, scatter partial results)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import varying_alike
from pallas_kernels.grouped_matmul.api import grouped_matmul

# Rows of expert inputs that one pass may lay out, were every choice in it one of this device's experts. More tokens take more passes.
PASS_ROWS = 2**15


def to_experts(
    x_NxD: Array, experts_NxK: Array, gates_NxK: Array, gate_up_ExDx2xF: Array, down_ExFxD: Array, *, over: tuple[str, ...], ring: bool,
) -> Array:
    """sum over k of gate[n, k] SwiGLU_(expert[n, k])(x[n]), [N, D]. Inside an island: the weights are those of this device's experts.

    Experts are split over the mesh axes `over`, in order; none: all are here. With `ring` the tokens are split over the same axes: they
    are gathered, every device adds up what its experts give, and the sums are scattered to the tokens' devices. Otherwise each device has
    all tokens, and the sums are added. No token is dropped, however uneven the choice.
    """
    # Once, here: where devices share an argument its gradient is summed over them, and that must not be in a loop.
    x_NxD, gates_NxK, gate_up_ExDx2xF, down_ExFxD = varying_alike(x_NxD, gates_NxK, gate_up_ExDx2xF, down_ExFxD)
    parts = jax.lax.axis_size(over) if over else 1
    local = down_ExFxD.shape[0]

    def one_pass(x, experts, gates):
        if ring:
            x, experts, gates = (jax.lax.all_gather(a, over, axis=0, tiled=True) for a in (x, experts, gates))
        if over:
            experts = experts - jax.lax.axis_index(over) * local
        y = routed(x, experts, gates, gate_up_ExDx2xF, down_ExFxD, share=1 / parts)
        if ring:
            return jax.lax.psum_scatter(y, over, scatter_dimension=0, tiled=True)
        return jax.lax.psum(y, over) if over else y

    tokens, chosen = experts_NxK.shape
    most = tokens * (parts if ring else 1) * min(chosen, local)
    passes = min(-(-most // PASS_ROWS), tokens)
    if passes <= 1:
        return one_pass(x_NxD, experts_NxK, gates_NxK)

    def split(array, filler):  # tokens next to each other stay together; what fills the last pass up goes to no expert
        padded = jnp.pad(array, ((0, -tokens % passes), (0, 0)), constant_values=filler)
        return padded.reshape(passes, -1, array.shape[-1])

    # Each pass is computed again in the backward pass.
    out = jax.lax.map(
        lambda arrays: jax.checkpoint(one_pass, prevent_cse=False)(*arrays), (split(x_NxD, 0), split(experts_NxK, -1), split(gates_NxK, 0)))
    return out.reshape(-1, x_NxD.shape[-1])[:tokens]


def routed(x_NxD: Array, experts_NxK: Array, gates_NxK: Array, gate_up_ExDx2xF: Array, down_ExFxD: Array, *, share: float = 1.0) -> Array:
    """The gated sum [N, D] over the chosen experts among 0 .. E-1; others count as 0. `share` of all choices is expected to be among them.

    Rows are laid out by expert, every expert's rows padded to whole blocks. A token's experts differ from each other.
    """
    tokens, chosen = experts_NxK.shape
    count, width = down_ExFxD.shape[:2]
    rows = tokens * chosen
    block = block_size(int(rows * share), count)
    most = tokens * min(chosen, count)
    size = (-(-most // block) + count) * block
    flat = experts_NxK.reshape(-1)
    one_hot = flat[:, None] == jnp.arange(count)
    sizes = one_hot.sum(axis=0, dtype=jnp.int32)
    padded = -(-sizes // block) * block
    here = (flat >= 0) & (flat < count)
    expert, number = jnp.clip(flat, 0, count - 1), jnp.arange(rows, dtype=jnp.int32)
    rank = jnp.take_along_axis(jnp.cumsum(one_hot, axis=0, dtype=jnp.int32), expert[:, None], axis=1)[:, 0] - 1
    places = jnp.where(here, (jnp.cumsum(padded) - padded)[expert] + rank, size + number)
    source = jnp.full(size, rows, jnp.int32).at[places].set(number, mode="drop", unique_indices=True)
    source, places, x_NxD = varying_alike(source, places.reshape(tokens, chosen), x_NxD)
    laid_out = permute(x_NxD, jnp.where(source < rows, source // chosen, tokens), places)
    used = expected_blocks(rows * share, count, block) * block / size
    multiply = lambda x, w: grouped_matmul(x, w, padded, alignment=block, share=used)
    gate, up = jnp.split(multiply(laid_out, gate_up_ExDx2xF.reshape(count, -1, 2 * width)), 2, axis=-1)
    out = multiply(jax.nn.silu(gate) * up, down_ExFxD)
    return jnp.einsum("nkd,nk->nd", collect(*varying_alike(out, source, places)), gates_NxK)


def block_size(rows: int, experts: int) -> int:
    """Rows of a block, all experts having one more than they may need: a quarter of an expert's mean share, at most 256."""
    return min(256, max(8, rows // experts // 4))


def expected_blocks(rows: float, experts: int, block: int) -> float:
    """About how many blocks the experts' rows fill, should every one of `rows` choices be as likely to fall on any of them."""
    mean = rows / experts
    chosen = 1 - math.exp(-mean)  # share of the experts that have a row at all
    return experts * max(chosen, mean / block + chosen / 2)


@jax.custom_vjp
def permute(x_NxD: Array, source_M: Array, places_NxK: Array) -> Array:
    """out[m] = x[source[m]], 0 where source[m] = N; `places` lists each n's K rows of out, M and above where it has none.

    Both directions are gathers, never a scatter.
    """
    return jnp.take(x_NxD, source_M, axis=0, mode="fill", fill_value=0)


def _permute_forward(x_NxD, source_M, places_NxK):
    return permute(x_NxD, source_M, places_NxK), places_NxK


def _permute_backward(places_NxK, gradient_MxD):
    return jnp.take(gradient_MxD, places_NxK, axis=0, mode="fill", fill_value=0).sum(axis=1), None, None


permute.defvjp(_permute_forward, _permute_backward)


@jax.custom_vjp
def collect(x_MxD: Array, source_M: Array, places_NxK: Array) -> Array:
    """out[n, k] = x[places[n, k]], 0 where that is M or above: the inverse of `permute`; `source[m]` = n K + k (N K for padding)."""
    return jnp.take(x_MxD, places_NxK, axis=0, mode="fill", fill_value=0)


def _collect_forward(x_MxD, source_M, places_NxK):
    return collect(x_MxD, source_M, places_NxK), source_M


def _collect_backward(source_M, gradient_NxKxD):
    flat = gradient_NxKxD.reshape(-1, gradient_NxKxD.shape[-1])
    return jnp.take(flat, source_M, axis=0, mode="fill", fill_value=0), None, None


collect.defvjp(_collect_forward, _collect_backward)
