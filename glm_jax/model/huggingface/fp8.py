"""Block-scaled float8: a weight is stored as float8_e4m3fn with one float32 factor for each block of rows and columns.

Source: DeepSeek-V3 §3.3 and its `weight_scale_inv` (the factor multiplies, whatever the name says); GLM-5-FP8 uses the same form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

BLOCK = (128, 128)
SCALE = "_scale_inv"  # what follows the name of a tensor in that of its factors
LARGEST = np.float32(448)  # of float8_e4m3fn
VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)  # by code


def scale_shape(shape: Sequence[int], block: tuple[int, int] = BLOCK) -> tuple[int, ...]:
    """Shape of the factors of a weight [..., rows, columns]; the last block of either axis may be cut."""
    return (*shape[:-2], math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1]))


def spread(scale: np.ndarray, rows: np.ndarray, columns: np.ndarray, block: tuple[int, int] = BLOCK) -> np.ndarray:
    """The factor of each entry: scale [..., R, C] taken at these row and column numbers of the weight -> [..., rows, columns]."""
    return scale[..., rows // block[0], :][..., columns // block[1]]


def dequantise(codes: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """float32, correctly rounded."""
    return VALUES.take(codes.view(np.uint8), mode="clip") * factors


def quantise(
    weight: np.ndarray, block: tuple[int, int] = BLOCK, known: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(codes float8 [..., rows, columns], scale float32) of a weight of any float type.

    A block that some scale reproduces bit for bit is what dequantising made of codes, and gets those codes and that scale back. Tried are
    the scale in `known` (which a checkpoint stores), amax / 448, and the latter's two float32 neighbours, as the division does not always
    undo the rounded product. A block that none reproduces has changed since; it gets amax / 448, a block of zeros 1.

    Without `known`, then, those blocks come back whose scale was amax / 448, with 448 as the largest code, and whose weight is float32.
    Others keep their values, to float8's precision or exactly, but not their bits: those with other scales, powers of two for one; those
    rounded to bfloat16 in between; and those in which no code is a power of two, where the scale may differ in its last bit.
    """
    rows, columns = np.arange(weight.shape[-2]), np.arange(weight.shape[-1])
    row_starts, column_starts = rows[:: block[0]], columns[:: block[1]]
    per_block = lambda operation, x: operation.reduceat(operation.reduceat(x, row_starts, axis=-2), column_starts, axis=-1)
    values, bits = weight.astype(np.float32, copy=False), f"u{weight.dtype.itemsize}"
    amax = per_block(np.fmax, np.abs(values))
    plain = np.maximum(np.where(amax > 0, amax / LARGEST, np.float32(1)), np.finfo(np.float32).smallest_subnormal)

    def encode(scale):
        factors = spread(scale, rows, columns, block)
        with np.errstate(all="ignore"):
            codes = (values / factors).astype(ml_dtypes.float8_e4m3fn)
            back = dequantise(codes, factors)
        return codes, back, per_block(np.logical_and, back.astype(weight.dtype).view(bits) == weight.view(bits))

    scale = plain if known is None else known
    codes, back, done = encode(scale)
    if done.all():
        return codes, scale
    candidates = [] if known is None else [plain]
    if weight.dtype == np.float32 and per_block(np.logical_and, np.abs(back - values) <= np.abs(values) * 2**-20).any():
        candidates += [np.nextafter(plain, np.float32(np.inf)), np.nextafter(plain, np.float32(0))]
    for candidate in candidates:
        others, _, fits = encode(candidate)
        better = ~done if candidate is plain else fits & ~done
        scale = np.where(better, candidate, scale)
        codes = np.where(spread(better, rows, columns, block), others, codes)
        done |= fits
    return codes, scale
