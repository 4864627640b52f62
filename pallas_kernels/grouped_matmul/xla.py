"""Grouped matmul for CPU: blocks of rows that belong to one group, so FLOPs follow the routed rows.

`lax.ragged_dot` on CPU is a dense masked product over all groups. Here the groups are padded to whole blocks and a loop multiplies each
block with its group's matrix, which is read in place: FLOPs are those of N rows plus at most one block a group.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import varying_alike


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def multiply_blocks(x_NxbxD, w_ExDxF, group_N, used, expected):
    """out[n] = x[n] @ w[group[n]] for n < used, else 0, [N, b, F]; about `expected` blocks are used."""
    x_NxbxD, w_ExDxF, group_N, used = varying_alike(x_NxbxD, w_ExDxF, group_N, used)

    def step(n, out):
        return out.at[n].set(x_NxbxD[n] @ w_ExDxF[group_N[n]])

    zeros = jnp.zeros((*x_NxbxD.shape[:2], w_ExDxF.shape[-1]), x_NxbxD.dtype)
    return _loop(used, step, varying_alike(zeros, x_NxbxD)[0], expected)


def _forward(x_NxbxD, w_ExDxF, group_N, used, expected):
    return multiply_blocks(x_NxbxD, w_ExDxF, group_N, used, expected), (x_NxbxD, w_ExDxF, group_N, used)


def _backward(expected, saved, gradient_NxbxF):
    x_NxbxD, w_ExDxF, group_N, used = saved

    def step(n, gradients):  # differentiating the loop would add a whole [E, D, F] a block
        gradient_x, gradient_w = gradients
        x, gradient, group = x_NxbxD[n], gradient_NxbxF[n], group_N[n]
        return gradient_x.at[n].set(gradient @ w_ExDxF[group].T), gradient_w.at[group].add(x.T @ gradient)

    zeros = varying_alike(jnp.zeros_like(x_NxbxD), jnp.zeros_like(w_ExDxF), gradient_NxbxF)[:2]
    return *_loop(used, step, zeros, expected), None, None


multiply_blocks.defvjp(_forward, _backward)


def _loop(used, step, start, expected):
    """A loop whose length depends on data. Its scope's name tells whoever counts the program's work how long to expect it."""
    with jax.named_scope(f"expected_trips_{expected}"):
        return jax.lax.fori_loop(0, used, step, start)


def block_matmul(x_NxD, w_ExDxF, ends_E, block, share):
    """Rows in whole blocks of one group each, the groups' ends in rows given."""
    blocks, groups = x_NxD.shape[0] // block, w_ExDxF.shape[0]
    group_N = jnp.minimum(jnp.searchsorted(ends_E, jnp.arange(0, x_NxD.shape[0], block), side="right"), groups - 1)
    arguments = varying_alike(x_NxD.reshape(blocks, block, -1), w_ExDxF, group_N, -(-ends_E[-1] // block))
    return multiply_blocks(*arguments, max(1, round(blocks * share))).reshape(x_NxD.shape[0], -1)


def grouped_matmul(x_NxD, w_ExDxF, group_sizes_E, *, alignment=1, share=1.0):
    ends = jnp.cumsum(group_sizes_E)
    if alignment > 1:  # groups are whole blocks already
        return block_matmul(x_NxD, w_ExDxF, ends, alignment, share)
    block, rows, groups = 8, x_NxD.shape[0], w_ExDxF.shape[0]
    padded_sizes = -(-group_sizes_E // block) * block
    padded_ends = jnp.cumsum(padded_sizes)
    group_of_row = jnp.minimum(jnp.searchsorted(ends, jnp.arange(rows), side="right"), groups - 1)
    place = (padded_ends - padded_sizes)[group_of_row] + jnp.arange(rows) - (ends - group_sizes_E)[group_of_row]
    padded = jnp.zeros(((-(-rows // block) + groups) * block, x_NxD.shape[1]), x_NxD.dtype).at[place].set(x_NxD)
    out = block_matmul(padded, w_ExDxF, padded_ends, block, share)[place]
    return jnp.where((jnp.arange(rows) < ends[-1])[:, None], out, 0)
