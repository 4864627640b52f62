"""Batches over Grain: records shuffled anew each epoch and packed into rows. Deterministic, and resumed exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import grain

from glm_jax.data.packing import BestFit, PackedBatch, lay_out
from glm_jax.data.trajectory import Segment


class PackedBatches(Iterator[PackedBatch]):
    """Infinite batches over records shuffled anew each epoch; see `packed_batches`.

    After every batch the numbers of times that any two records have been seen differ by at most one: an epoch begins only in
    the batch that ends the one before. What does not fit a batch goes first in the next.
    """

    def __init__(
        self,
        records: Sequence[Segment],
        rows: int,
        row_length: int,
        seed: int,
        first: Sequence[int] | None = None,
        opening_batches: int = 0,
    ):
        if not records:
            raise ValueError("there are no records to pack")
        for i, record in enumerate(records):
            if not 0 < len(record) <= row_length:
                raise ValueError(f"record {i} has {len(record)} tokens; a row holds 1 to {row_length}")
        if opening_batches and not first:
            raise ValueError(f"opening_batches={opening_batches} needs `first`, the indices of the records to open with")
        self._records, self._rows, self._row_length = records, rows, row_length
        self._lengths = [len(record) for record in records]
        self._opening_batches = opening_batches
        self._first = list(first or ())
        self._opening_stream = _epochs(len(self._first), seed) if opening_batches else None
        self._stream = _epochs(len(records), seed)
        self._batches = self._cursor = 0
        self._pending: list[tuple[int, int]] = []  # (place in the stream, record) drawn and not yet packed

    def __next__(self) -> PackedBatch:
        if self._batches == self._opening_batches:  # the opening phase ends: the stream of all records starts at its beginning
            self._cursor, self._pending = 0, []
        epoch_length = len(self._first) if self._batches < self._opening_batches else len(self._records)

        carried = self._cursor
        window = self._pending
        tokens = sum(self._lengths[record] for _, record in window)
        # A quarter more than the batch holds, so that best-fit has small records to fill the rows' ends with.
        while tokens < 1.25 * self._rows * self._row_length:
            window.append((self._cursor, self._draw(self._cursor)))
            tokens += self._lengths[window[-1][1]]
            self._cursor += 1

        # Epoch by epoch; in it what was carried over, lest it wait for ever; in that the longest first.
        window.sort(key=lambda drawn: (drawn[0] // epoch_length, drawn[0] >= carried, -self._lengths[drawn[1]], drawn[0]))
        packer = BestFit(self._row_length, self._rows)
        left: list[tuple[int, int]] = []
        for place, record in window:
            unfinished = bool(left) and left[0][0] // epoch_length < place // epoch_length  # an earlier epoch has records left
            if unfinished or not packer.add(record, self._lengths[record]):
                left.append((place, record))
        self._pending = left
        self._batches += 1
        return lay_out(self._records, packer.rows, self._row_length, self._rows)

    def _draw(self, place: int) -> int:
        if self._batches < self._opening_batches:
            return self._first[self._opening_stream[place]]
        return int(self._stream[place])

    def get_state(self) -> dict:
        """All that the next batches depend on, as a dictionary fit for JSON."""
        pending = [place for place, _ in self._pending]
        return {"batches": self._batches, "cursor": self._cursor, "pending": pending, "records": len(self._records)}

    def set_state(self, state: Mapping) -> None:
        """Continues where `get_state` was called, on an iterator built with the same arguments."""
        if state["records"] != len(self._records):
            raise ValueError(f"the state is of {state['records']} records, this iterator has {len(self._records)}")
        self._batches, self._cursor = state["batches"], state["cursor"]
        self._pending = [(place, self._draw(place)) for place in state["pending"]]


def packed_batches(
    records: Sequence[Segment],
    rows: int,
    row_length: int,
    seed: int,
    first: Sequence[int] | None = None,
    opening_batches: int = 0,
) -> PackedBatches:
    """Infinite iterator of batches of `rows` rows by `row_length` tokens, with `get_state` and `set_state`.

    Records are shuffled with `seed` each epoch and packed best-fit; none is lost or repeated inside an epoch. `item` of a
    batch holds indices into `records`. The first `opening_batches` batches draw from the records `first` alone, and then the
    stream of all records starts. ValueError names a record that no row can hold.
    """
    return PackedBatches(records, rows, row_length, seed, first, opening_batches)


def _epochs(length: int, seed: int) -> grain.MapDataset:
    return grain.MapDataset.range(length).shuffle(seed).repeat()
