"""Spans of what each thread did when, in the Chrome trace format that Perfetto (ui.perfetto.dev) opens.

A thread is one track. Coroutines of one event loop overlap in time, which a track cannot show, so the tasks that are open at
once get tracks of their own: "actor-0", "actor-0 #1", "actor-0 #2", … A track is free again when its task's outermost span ends.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import heapq
import json
import math
import os
import pathlib
import threading
import time
from collections.abc import Iterator


@dataclasses.dataclass
class _Held:
    """The track that a thread, or a task in it, holds while it has open spans."""

    thread: str
    lane: int
    depth: int = 0


class Tracer:
    """Thread-safe recorder of spans, counters and instants; keeps the newest `max_events` and says how many it let go.

    `path` is where `save` writes; None keeps events in memory for whoever reads `events`.
    """

    def __init__(self, path: pathlib.Path | str | None = None, *, max_events: int = 300_000):
        self._path = pathlib.Path(path) if path is not None else None
        self._lock = threading.Lock()
        self._events = collections.deque(maxlen=max_events)
        self._recorded = 0
        self._start = time.perf_counter_ns()
        self._start_time = time.time()
        self._tracks: dict[str, int] = {}
        self._open: dict[tuple[int, object], _Held] = {}  # (thread, task) -> the track it holds
        self._free_lanes: dict[str, list[int]] = {}
        self._lanes: dict[str, int] = {}
        self._own_file = False

    @staticmethod
    def null() -> Tracer:
        """A tracer that records nothing."""
        return _NullTracer()

    @contextlib.contextmanager
    def span(self, name: str, **args: object) -> Iterator[None]:
        """Record the time spent inside. `args` appear beside the span; may be held over an await."""
        holder = (threading.get_ident(), _current_task())
        track = self._enter(threading.current_thread().name, holder)
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            end = time.perf_counter_ns()
            self._leave(holder)
            self._record(("X", name, track, start, end - start, args))

    def counter(self, name: str, value: float) -> None:
        """A value over time, drawn as a curve."""
        value = float(value)
        if math.isfinite(value):  # JSON has no word for the rest
            self._record(("C", name, 0, time.perf_counter_ns(), 0, {"value": value}))

    def instant(self, name: str, **args: object) -> None:
        """A moment on the calling thread's track."""
        with self._lock:
            track = self._track(threading.current_thread().name)
        self._record(("i", name, track, time.perf_counter_ns(), 0, args))

    def events(self) -> list[dict]:
        """Chrome trace events; ts and dur in microseconds since the tracer was made."""
        with self._lock:
            recorded, tracks = list(self._events), dict(self._tracks)
        out = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "glm_jax"}}]
        for label, track in tracks.items():
            out.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": label}})
            out.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": track, "args": {"sort_index": track}})
        for phase, name, track, start, duration, args in recorded:
            event = {"ph": phase, "name": name, "pid": 1, "tid": track, "ts": (start - self._start) / 1e3}
            if phase == "X":
                event |= {"cat": name.partition(".")[0], "dur": duration / 1e3}
            if phase == "i":
                event["s"] = "t"
            if args:
                event["args"] = args
            out.append(event)
        return out

    def save(self) -> None:
        """Write the trace, replacing the file in one move. May be called again later; without a path it does nothing.

        The trace of an earlier process in the same directory (a resumed run) is kept as NAME.1.json, NAME.2.json, …
        """
        if self._path is None:
            return
        events = self.events()
        other = {"dropped_events": self._recorded - len(self._events), "start_time": self._start_time}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._own_file and self._path.exists():
            number = 1
            while (older := self._path.with_suffix(f".{number}{self._path.suffix}")).exists():
                number += 1
            self._path.rename(older)
        self._own_file = True
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, file, default=str)
        os.replace(temporary, self._path)

    def _record(self, event: tuple) -> None:
        with self._lock:
            self._events.append(event)
            self._recorded += 1

    def _enter(self, thread: str, holder: tuple[int, object]) -> int:
        with self._lock:
            held = self._open.get(holder)
            if held is None:
                free = self._free_lanes.setdefault(thread, [])
                if free:
                    lane = heapq.heappop(free)
                else:
                    lane = self._lanes.get(thread, 0)
                    self._lanes[thread] = lane + 1
                held = self._open[holder] = _Held(thread, lane)
            held.depth += 1
            return self._track(thread if held.lane == 0 else f"{thread} #{held.lane}")

    def _leave(self, holder: tuple[int, object]) -> None:
        with self._lock:
            held = self._open[holder]
            held.depth -= 1
            if held.depth == 0:
                del self._open[holder]
                heapq.heappush(self._free_lanes[held.thread], held.lane)

    def _track(self, label: str) -> int:
        return self._tracks.setdefault(label, len(self._tracks) + 1)


class _NullTracer(Tracer):
    def __init__(self):
        super().__init__(max_events=0)

    @contextlib.contextmanager
    def span(self, name: str, **args: object) -> Iterator[None]:
        yield

    def counter(self, name: str, value: float) -> None:
        pass

    def instant(self, name: str, **args: object) -> None:
        pass


def _current_task() -> asyncio.Task | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None
