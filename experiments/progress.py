"""What a run shows while it goes: a live table on a terminal, one plain line every few seconds elsewhere."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping
from typing import Self

import rich.console
import rich.live
import rich.table
import rich.text

REWARD, STALENESS, LEDGER, DROPPED = "reward/", "staleness/", "ledger/", "ledger/dropped/"


class Progress:
    """Thread-safe. Use as a context manager; `phase` begins a part of the run, `update` reports a step of it, `log` prints a line.

    `update` takes the metrics that go to metrics.jsonl and shows the ones it knows: loss, reward/ENV, success/ENV, staleness/N,
    version, ledger/…, tokens_per_second, seconds.
    """

    def __init__(self, *, console: rich.console.Console | None = None, line_every: float = 5.0):
        self._console = console or rich.console.Console(file=sys.stdout)
        self._terminal = self._console.is_terminal
        self._line_every = line_every
        self._lock = threading.RLock()
        self._live = None
        self._done: list[str] = []
        self._phase, self._total, self._step = "", 0, 0
        self._began = self._first_step_time = self._last_line = time.monotonic()
        self._first_step = 0
        self._metrics: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._terminal:
            self._live = rich.live.Live(get_renderable=self._table, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *exception) -> None:
        with self._lock:
            self._finish_phase()
            if self._live is not None:
                self._live.stop()
                self._live = None

    def phase(self, name: str, total: int = 0) -> None:
        """Begin a phase of `total` steps (0: unknown)."""
        with self._lock:
            self._finish_phase()
            self._phase, self._total, self._step, self._metrics = name, total, 0, {}
            self._began = self._first_step_time = time.monotonic()
            self._first_step = 0
            self._last_line = 0.0
            if not self._terminal:
                self._print(f"{name}: {total} steps" if total else f"{name}: started")

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """`step` steps of this phase are done."""
        with self._lock:
            now = time.monotonic()
            if self._step == 0:  # the first step holds the compilation, and a resumed run starts late: leave both out of the rate
                self._first_step, self._first_step_time = step, now
            self._step = step
            self._metrics |= metrics or {}
            if not self._terminal and now - self._last_line >= self._line_every:
                self._last_line = now
                self._print(f"{self._phase} {self._counter()} {' '.join(f'{name} {text}' for name, text in self._cells())}")

    def log(self, text: str) -> None:
        """Print a line above the live view."""
        with self._lock:
            self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _finish_phase(self) -> None:
        if not self._phase:
            return
        line = f"{self._phase}: {self._step} steps in {duration(time.monotonic() - self._began)}"
        self._done.append(line)
        if not self._terminal:
            self._print(line)
        self._phase = ""

    def _counter(self) -> str:
        return f"{self._step}/{self._total}" if self._total else str(self._step)

    def _cells(self) -> list[tuple[str, str]]:
        """(name, text) pairs of what is known now."""
        metrics, cells = self._metrics, []
        for name in ("loss", "tokens_per_second"):
            if name in metrics:
                cells.append((name.replace("tokens_per_second", "tokens/s"), number(metrics[name])))
        for prefix in (REWARD, "success/"):
            for key in sorted(k for k in metrics if k.startswith(prefix)):
                cells.append((short(key), number(metrics[key])))
        if "version" in metrics:
            cells.append(("version", number(metrics["version"])))
        stale = {int(k.removeprefix(STALENESS)): v for k, v in metrics.items() if k.startswith(STALENESS) and k[len(STALENESS) :].isdigit()}
        if sum(stale.values()):
            mean = sum(n * count for n, count in stale.items()) / sum(stale.values())
            cells.append(("staleness", f"{mean:.2f} (max {max(n for n, count in stale.items() if count)})"))
        if LEDGER + "issued" in metrics:
            dropped = sum(v for k, v in metrics.items() if k.startswith(DROPPED))
            issued, trained, live = (metrics.get(LEDGER + k, 0) for k in ("issued", "trained", "live"))
            cells.append(("ledger", f"{issued:.0f} issued = {trained:.0f} trained + {dropped:.0f} dropped + {live:.0f} live"))
        if (left := self._seconds_left()) is not None:
            cells.append(("left", duration(left)))
        return cells

    def _seconds_left(self) -> float | None:
        steps = self._step - self._first_step
        if not self._total or steps <= 0:
            return None
        return (self._total - self._step) * (time.monotonic() - self._first_step_time) / steps

    def _table(self) -> rich.table.Table:
        with self._lock:
            table = rich.table.Table.grid(padding=(0, 2))
            for line in self._done:
                table.add_row(rich.text.Text("done", style="green"), rich.text.Text(line))
            if self._phase:
                elapsed = duration(time.monotonic() - self._began)
                filled = round(30 * min(1.0, self._step / self._total)) if self._total else 0
                bar = "━" * filled + "─" * (30 - filled)
                table.add_row(rich.text.Text(self._phase, style="bold"), rich.text.Text(f"{bar} {self._counter()}  {elapsed}"))
                for name, text in self._cells():
                    table.add_row(rich.text.Text(name, style="dim"), rich.text.Text(text))
            return table


def short(key: str) -> str:
    """reward/glm_jax/Calculator-v0 -> reward/Calculator-v0"""
    kind, _, environment = key.partition("/")
    return f"{kind}/{environment.rsplit('/', 1)[-1]}"


def number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"
