"""Grouped matmul for CPU: blocks of rows that belong to one group, so FLOPs follow the routed rows.

`lax.ragged_dot` on CPU is a dense masked product over all groups. Here the groups are padded to whole blocks and a loop multiplies each
block with its group's matrix, which is read in place: FLOPs are those of N rows plus at most one block a group.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import varying_alike


def padded_layout(group_sizes_E, rows, block):
    """Where rows go when every group is padded to whole blocks.

    Returns (starts int32 [E] of the padded groups, the static number of blocks that always suffices, group_of_block int32 [blocks]).
    """
    blocks = -(-rows // block) + group_sizes_E.shape[0]
    ends = jnp.cumsum(-(-group_sizes_E // block))
    starts = (ends - (-(-group_sizes_E // block))) * block
    group_of_block = jnp.searchsorted(ends, jnp.arange(blocks), side="right")
    return starts, blocks, jnp.minimum(group_of_block, group_sizes_E.shape[0] - 1)


@jax.custom_vjp
def multiply_blocks(x_NxbxD, w_ExDxF, group_N):
    """out[n] = x[n] @ w[group[n]], [N, b, F]."""
    return jax.lax.map(lambda block: block[0] @ w_ExDxF[block[1]], (x_NxbxD, group_N))


def _forward(x_NxbxD, w_ExDxF, group_N):
    return multiply_blocks(x_NxbxD, w_ExDxF, group_N), (x_NxbxD, w_ExDxF, group_N)


def _backward(saved, gradient_NxbxF):
    x_NxbxD, w_ExDxF, group_N = saved

    def step(gradient_w, block):  # differentiating the loop would add a whole [E, D, F] a block
        x, gradient, group = block
        return gradient_w.at[group].add(x.T @ gradient), gradient @ w_ExDxF[group].T

    zeros = varying_alike(jnp.zeros_like(w_ExDxF), gradient_NxbxF)[0]
    gradient_w, gradient_x = jax.lax.scan(step, zeros, (x_NxbxD, gradient_NxbxF, group_N))
    return gradient_x, gradient_w, None


multiply_blocks.defvjp(_forward, _backward)


def block_matmul(x_NxD, w_ExDxF, group_of_block, block):
    x_NxD, w_ExDxF = varying_alike(x_NxD, w_ExDxF)
    out = multiply_blocks(x_NxD.reshape(-1, block, x_NxD.shape[-1]), w_ExDxF, group_of_block)
    return out.reshape(x_NxD.shape[0], -1)


def grouped_matmul(x_NxD, w_ExDxF, group_sizes_E, *, alignment=1):
    rows = x_NxD.shape[0]
    if alignment > 1:  # groups are whole blocks already
        ends = jnp.cumsum(group_sizes_E)
        group = jnp.searchsorted(ends, jnp.arange(0, rows, alignment), side="right")
        return block_matmul(x_NxD, w_ExDxF, jnp.minimum(group, w_ExDxF.shape[0] - 1), alignment)
    block = 8
    starts, blocks, group_of_block = padded_layout(group_sizes_E, rows, block)
    ends = jnp.cumsum(group_sizes_E)
    group_of_row = jnp.minimum(jnp.searchsorted(ends, jnp.arange(rows), side="right"), w_ExDxF.shape[0] - 1)
    place = starts[group_of_row] + jnp.arange(rows) - (ends - group_sizes_E)[group_of_row]
    padded = jnp.zeros((blocks * block, x_NxD.shape[1]), x_NxD.dtype).at[place].set(x_NxD)
    out = block_matmul(padded, w_ExDxF, group_of_block, block)[place]
    return jnp.where((jnp.arange(rows) < ends[-1])[:, None], out, 0)
