"""Where numbers go: one JSON line and TensorBoard scalars a step. Sums and counts are added up until they are written."""

from __future__ import annotations

import json
import math
import pathlib
import threading
import time
from collections.abc import Mapping
from typing import Self


class Mean:
    """A weighted mean kept as sum and count, so that means of parts add up to the mean of the whole. Thread-safe."""

    def __init__(self):
        self._lock = threading.Lock()
        self._total = 0.0
        self._count = 0.0

    def add(self, total: float, count: float = 1.0) -> None:
        """Add a sum over `count` items; a single value is `add(value)`."""
        with self._lock:
            self._total += float(total)
            self._count += float(count)

    @property
    def count(self) -> float:
        return self._count

    @property
    def value(self) -> float:
        """The mean; not-a-number when nothing was added."""
        with self._lock:
            return self._total / self._count if self._count else math.nan


class Counts:
    """Named sums. `add` adds element by element; `take` returns them and starts again from nothing. Thread-safe."""

    def __init__(self):
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}

    def add(self, sums: Mapping[str, float] | None = None, **more: float) -> None:
        """Values may be numbers or 0-d arrays; an array on a device is waited for here."""
        values = {key: _number(value) for key, value in {**(sums or {}), **more}.items()}
        with self._lock:
            for key, value in values.items():
                self._sums[key] = self._sums.get(key, 0) + value

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._sums)

    def take(self) -> dict[str, float]:
        with self._lock:
            sums, self._sums = self._sums, {}
        return sums


def ratio(total: float, count: float) -> float:
    """total / count at the moment of printing; not-a-number when the count is 0."""
    return float(total) / float(count) if count else math.nan


class MetricsWriter:
    """Appends to run_directory/metrics.jsonl and to TensorBoard events under run_directory/tensorboard. Thread-safe.

    A line is {"time": seconds since the epoch, "phase": …, "step": …, **metrics}; a value that is not finite is null in it.
    Every line is flushed, so that a killed run keeps what it wrote.
    """

    def __init__(self, run_directory: pathlib.Path | str, *, tensorboard: bool = True):
        run_directory = pathlib.Path(run_directory)
        run_directory.mkdir(parents=True, exist_ok=True)
        path = run_directory / "metrics.jsonl"
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8")
        if torn:  # a killed run may have left half a line; keep it from swallowing the next one
            self._file.write("\n")
        self._board = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(run_directory / "tensorboard"))

    def write(self, step: int, phase: str, metrics: Mapping[str, object]) -> None:
        """Numbers (or 0-d arrays) become values; strings and booleans go to the file only."""
        values = {key: value if isinstance(value, (str, bool)) else _number(value) for key, value in metrics.items()}
        now = time.time()
        line = {"time": now, "phase": phase, "step": int(step)}
        clash = line.keys() & values.keys()
        if clash:
            raise ValueError(f"metrics must not be named {', '.join(sorted(clash))}: the line has those already")
        line |= {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()}
        with self._lock:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
            if self._board is not None:
                for key, value in values.items():
                    if not isinstance(value, (str, bool)):
                        self._board.add_scalar(f"{phase}/{key}", value, int(step), walltime=now)

    def close(self) -> None:
        with self._lock:
            self._file.close()
            if self._board is not None:
                self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _number(value: object) -> int | float:
    """A Python number from a number, a NumPy scalar or a 0-d array of any library. Raises: TypeError or ValueError otherwise."""
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, (bool, int)) else float(value)
