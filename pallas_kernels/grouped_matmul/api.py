"""One matrix product per group of rows: the experts of a dropless mixture."""

from __future__ import annotations

from jax import Array

from pallas_kernels.dispatch import choose
from pallas_kernels.grouped_matmul import reference, xla


def grouped_matmul(
    x_NxD: Array, w_ExDxF: Array, group_sizes_E: Array, *, alignment: int = 1, share: float = 1.0, implementation: str = "auto",
) -> Array:
    """out[n] = x[n] @ w[group of row n], [N, F]. Rows are sorted by group; group e has group_sizes[e] rows, int32 [E].

    The groups may end before N: work follows the rows that they have. `share` of N is what they are expected to have, for accounting only.
    `alignment` is the caller's promise that N and every group size but the last are multiples of it; then rows need no moving. Rows past
    the last group are 0 where alignment is 1, and unspecified otherwise. Differentiable in x and w. ValueError when N breaks the promise.
    """
    if x_NxD.shape[0] % alignment:
        raise ValueError(f"grouped_matmul: {x_NxD.shape[0]} rows are not a multiple of alignment={alignment}")
    available = {"reference": reference.grouped_matmul, "xla": xla.grouped_matmul}
    return choose("grouped_matmul", implementation, available)(
        x_NxD, w_ExDxF, group_sizes_E, alignment=alignment, share=share)
