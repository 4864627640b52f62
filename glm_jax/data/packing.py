"""Packing segments into fixed rows, best-fit decreasing. NumPy only: it runs in the learner's loop."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from glm_jax.data.trajectory import Segment


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """R rows of T tokens; entry t describes, and scores, token t.

    tokens          int32 [R, T]    0 in padding
    segment_ids     int32 [R, T]    1, 2, … in each row; 0: padding
    positions       int32 [R, T]    from 0 in each segment; 0 in padding
    loss_mask       float32 [R, T]  1 where the token is trained
    behaviour_logp  float32 [R, T]  0 where the token was not sampled
    versions        int32 [R, T]    -1 where the token was not sampled
    item            int32 [R, T]    index of the segment that the token comes from; -1: padding
    experts         int16 [R, T, MoE layers, experts per token] or None    -1: not recorded
    selections      int16, or int32 for rows over 32767, [R, T, full layers, index_topk] or None    positions in the row, -1 last
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    loss_mask: np.ndarray
    behaviour_logp: np.ndarray
    versions: np.ndarray
    item: np.ndarray
    experts: np.ndarray | None = None
    selections: np.ndarray | None = None


class BestFit:
    """Rows filled one item at a time: an item goes to the row that it leaves fullest, the earliest of equals."""

    def __init__(self, row_length: int, max_rows: int | None = None):
        self.row_length = row_length
        self.max_rows = max_rows
        self.rows: list[list[int]] = []
        self._room: list[tuple[int, int]] = []  # (tokens left, row), sorted

    def add(self, item: int, length: int) -> bool:
        """Places an item; False when it fits no row and no row may be opened. ValueError when no row could ever hold it."""
        if not 0 < length <= self.row_length:
            raise ValueError(f"segment {item} has {length} tokens; a row holds 1 to {self.row_length}")
        at = bisect.bisect_left(self._room, (length, -1))
        if at < len(self._room):
            left, row = self._room.pop(at)
        elif self.max_rows is None or len(self.rows) < self.max_rows:
            left, row = self.row_length, len(self.rows)
            self.rows.append([])
        else:
            return False
        self.rows[row].append(item)
        bisect.insort(self._room, (left - length, row))
        return True


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Rows of item indices, by best-fit decreasing: the longest items first, ties by index. Deterministic.

    ValueError names an item that is empty or longer than a row.
    """
    lengths = [int(length) for length in lengths]
    packer = BestFit(row_length)
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        packer.add(item, lengths[item])
    return packer.rows


def pack_segments(segments: Sequence[Segment], row_length: int, rows: int) -> PackedBatch:
    """Packs segments into `rows` rows of `row_length`; rows that are not needed are padding.

    Segments are never split. ValueError when one is longer than a row or trains its first token, or when the rows do not suffice.
    """
    return lay_out(segments, pack([len(s) for s in segments], row_length), row_length, rows)


def lay_out(segments: Sequence[Segment], assignment: Sequence[Sequence[int]], row_length: int, rows: int) -> PackedBatch:
    """The batch in which row r holds the segments assignment[r], in that order."""
    if len(assignment) > rows:
        total = sum(len(s) for s in segments)
        raise ValueError(
            f"{len(segments)} segments of {total} tokens need {len(assignment)} rows of {row_length}, but the batch has {rows}: "
            "use more or longer rows, or fewer segments"
        )
    # The rows end to end are runs: each row's segments, then its padding. Every field is one repeat or one concatenation over runs.
    items, ranks, lengths = [], [], []
    for row in [*assignment, *[[]] * (rows - len(assignment))]:
        sizes = [len(segments[item]) for item in row]
        items += [*row, -1]
        ranks += [*range(1, len(row) + 1), 0]
        lengths += [*sizes, row_length - sum(sizes)]
    items, lengths = np.array(items, np.int32), np.array(lengths, np.int32)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    ordered = [segments[item] for item in items if item >= 0]

    def runs(values) -> np.ndarray:
        return np.repeat(np.asarray(values, np.int32), lengths).reshape(rows, row_length)

    def join(field: str, dtype, fill: int) -> np.ndarray:
        tail = getattr(ordered[0], field).shape[1:] if ordered else ()
        padding = np.full((row_length, *tail), fill, dtype)
        parts = [padding[:n] if item < 0 else getattr(segments[item], field) for item, n in zip(items, lengths, strict=True)]
        return np.concatenate(parts, dtype=dtype, casting="unsafe").reshape(rows, row_length, *tail)

    item, segment_ids = runs(items), runs(ranks)
    position = np.arange(rows * row_length, dtype=np.int32).reshape(rows, row_length) - runs(starts)
    loss_mask = join("loss_mask", np.float32, 0)
    trained_first = items[(items >= 0) & (loss_mask.reshape(-1)[np.minimum(starts, loss_mask.size - 1)] != 0)]
    if trained_first.size:
        raise ValueError(f"segment {trained_first[0]} has loss mask 1 on its first token, which nothing predicts")

    experts = selections = None
    if ordered and all(s.experts is not None for s in ordered):
        experts = join("experts", np.int16, -1)
    if ordered and all(s.selections is not None for s in ordered):
        dtype = np.int16 if row_length <= np.iinfo(np.int16).max else np.int32
        selections = join("selections", dtype, -1)
        selections += np.where(selections >= 0, runs(starts % row_length).astype(dtype)[:, :, None, None], dtype(0))
    return PackedBatch(
        tokens=join("tokens", np.int32, 0),
        segment_ids=segment_ids,
        positions=np.where(segment_ids > 0, position, 0),
        loss_mask=loss_mask,
        behaviour_logp=join("logp", np.float32, 0),
        versions=join("versions", np.int32, -1),
        item=item,
        experts=experts,
        selections=selections,
    )
