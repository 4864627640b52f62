"""Grouped matmul for CPU: blocks of rows that belong to one group, so FLOPs follow the routed rows.

`lax.ragged_dot` on CPU is a dense masked product over all groups. Here the groups are padded to whole blocks and each block is multiplied
with its group's matrix, one batched product: FLOPs are those of N rows plus at most one block a group.
"""

import jax.numpy as jnp


def padded_layout(group_sizes_E, rows, block):
    """Where rows go when every group is padded to whole blocks.

    Returns (starts int32 [E] of the padded groups, the static number of blocks that always suffices, group_of_block int32 [blocks]).
    """
    blocks = -(-rows // block) + group_sizes_E.shape[0]
    ends = jnp.cumsum(-(-group_sizes_E // block))
    starts = (ends - (-(-group_sizes_E // block))) * block
    group_of_block = jnp.searchsorted(ends, jnp.arange(blocks), side="right")
    return starts, blocks, jnp.minimum(group_of_block, group_sizes_E.shape[0] - 1)


def block_matmul(x_NxD, w_ExDxF, group_of_block, block):
    blocks_of_rows = x_NxD.reshape(-1, block, x_NxD.shape[-1])
    return jnp.einsum("nbd,ndf->nbf", blocks_of_rows, w_ExDxF[group_of_block]).reshape(x_NxD.shape[0], -1)


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
