"""The figures of report.html, each from a RunFiles; None where the run has nothing to show."""

from __future__ import annotations

import collections

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from experiments.run_files import RunFiles, Span

POINTS = 1500  # of a curve
BINS = 600  # of a timeline row
BARS = 3000  # of the close-up
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
SPAN_COLOURS = {
    "engine.prefill": "#93c5fd",
    "engine.decode": "#2563eb",
    "actor.step": "#059669",
    "learner.update": "#d97706",
    "learner.publish": "#dc2626",
}


def rewards(run: RunFiles) -> go.Figure | None:
    """Mean reward of an environment's rollouts by update: points, their moving mean, and evaluations as diamonds."""
    figure = _figure("update", "mean reward")
    keys = run.keys("reward/", "rl")
    for number, key in enumerate(keys):
        colour, label = COLOURS[number % len(COLOURS)], key.removeprefix("reward/")
        steps, values = _thin(*run.series(key, "rl"))
        points = {"color": colour, "size": 4, "opacity": 0.3}
        figure.add_scatter(x=steps, y=values, mode="markers", marker=points, legendgroup=key, showlegend=False, hoverinfo="skip")
        figure.add_scatter(x=steps, y=_smooth(values), mode="lines", name=label, line={"color": colour, "width": 2}, legendgroup=key)
        for evaluated in (f"success/{label}", key):
            steps, values = run.series(evaluated, "evaluation")
            if len(steps) > 1:
                marker = {"color": colour, "symbol": "diamond", "size": 9}
                figure.add_scatter(x=steps, y=values, mode="markers", name=f"{label} evaluated", marker=marker, legendgroup=key)
                break
    return figure if keys else None


def losses(run: RunFiles) -> go.Figure | None:
    """Losses of supervised fine-tuning, and of the control that goes on with it."""
    figure = _figure("step", "loss")
    found = False
    for phase, dash in (("sft", "solid"), ("control", "dot")):
        for number, key in enumerate(key for key in run.keys("", phase) if "loss" in key):
            steps, values = _thin(*run.series(key, phase))
            colour = COLOURS[number % len(COLOURS)]
            figure.add_scatter(x=steps, y=_smooth(values), mode="lines", name=f"{phase} {key}", line={"color": colour, "dash": dash})
            found = True
    figure.update_yaxes(type="log")
    return figure if found else None


def staleness(run: RunFiles) -> go.Figure | None:
    """How many versions behind the trained rollouts were, over the whole of RL."""
    counts = collections.Counter()
    for line in run.phase("rl"):
        for key, value in line.items():
            suffix = key.removeprefix("staleness/")
            if suffix != key and suffix.isdigit():
                counts[int(suffix)] += value or 0
    if not sum(counts.values()):
        return None
    figure = _figure("weight versions behind at lease", "rollouts")
    stale = list(range(max(counts) + 1))
    figure.add_bar(x=stale, y=[counts[n] for n in stale], marker_color=COLOURS[0])
    figure.update_xaxes(dtick=max(1, len(stale) // 20))
    return figure


def small_multiples(run: RunFiles, prefixes: tuple[str, ...], phase: str = "rl") -> go.Figure | None:
    """One small plot for every metric that starts with one of the prefixes."""
    keys = [key for prefix in prefixes for key in run.keys(prefix, phase)]
    if not keys:
        return None
    columns = min(3, len(keys))
    rows = -(-len(keys) // columns)
    figure = make_subplots(rows, columns, subplot_titles=keys, vertical_spacing=min(0.12, 0.4 / rows))
    for number, key in enumerate(keys):
        steps, values = _thin(*run.series(key, phase))
        line = {"color": COLOURS[number % len(COLOURS)]}
        figure.add_scatter(x=steps, y=values, mode="lines", line=line, row=number // columns + 1, col=number % columns + 1)
    figure.update_layout(**_layout(height=60 + 190 * rows), showlegend=False)
    figure.update_annotations(font_size=12)
    return figure


def ledger(run: RunFiles) -> go.Figure | None:
    """Where the issued rollouts are: trained, dropped by reason, live; their sum is what was issued."""
    keys = [key for key in run.keys("ledger/", "rl") if key != "ledger/issued"]
    if not keys:
        return None
    figure = _figure("update", "rollouts")
    for number, key in enumerate(keys):
        steps, values = _thin(*run.series(key, "rl"))
        line = {"width": 0.5, "color": COLOURS[number % len(COLOURS)]}
        figure.add_scatter(x=steps, y=values, mode="lines", stackgroup="rollouts", name=key.removeprefix("ledger/"), line=line)
    steps, values = _thin(*run.series("ledger/issued", "rl"))
    if steps:
        figure.add_scatter(x=steps, y=values, mode="lines", name="issued", line={"color": "#111827", "dash": "dash"})
    return figure


def timeline(run: RunFiles) -> go.Figure | None:
    """The whole trace: by thread and kind of span, the share of each moment that it was busy."""
    if not run.spans:
        return None
    begin, end = min(s.start for s in run.spans), max(s.end for s in run.spans)
    rows = _rows(run.spans)
    width = max(end - begin, 1e-6) / BINS
    edges = begin + width * np.arange(BINS + 1)
    busy = np.stack([np.diff(_busy_until(rows[row], edges)) / width for row in rows])
    figure = go.Figure(
        go.Heatmap(
            x=np.round(edges[:-1] - begin, 3),
            y=[f"{thread} · {name}" for thread, name in rows],
            z=np.round(busy, 3),
            zmin=0,
            zmax=1,
            colorscale=[[0, "#f3f4f6"], [1, "#1d4ed8"]],
            colorbar={"title": "busy", "thickness": 12},
            hovertemplate="%{y}<br>%{x:.1f} s: %{z:.0%} busy<extra></extra>",
        )
    )
    figure.update_layout(**_layout(height=120 + 26 * len(rows)), xaxis_title="seconds")
    figure.update_yaxes(autorange="reversed")
    return figure


def close_up(run: RunFiles) -> go.Figure | None:
    """Some seconds in the middle of RL, span by span: four updates of the learner and what ran beside them."""
    updates = [span for span in run.spans if span.name == "learner.update"]
    if not updates:
        return None
    middle = len(updates) // 2
    begin, end = updates[max(0, middle - 2)].start, updates[min(len(updates) - 1, middle + 1)].end
    spans = [span for span in run.spans if span.start < end and span.end > begin][:BARS]
    figure = _figure("seconds", "")
    by_name = collections.defaultdict(list)
    for span in spans:
        by_name[span.name].append(span)
    for number, (name, members) in enumerate(sorted(by_name.items())):
        figure.add_bar(
            orientation="h",
            name=name,
            y=[span.thread for span in members],
            base=[round(max(span.start, begin) - begin, 5) for span in members],
            x=[round(min(span.end, end) - max(span.start, begin), 5) for span in members],
            marker={"color": SPAN_COLOURS.get(name, COLOURS[number % len(COLOURS)]), "opacity": 0.75, "line": {"width": 0}},
            hovertemplate=name + " %{x:.4f} s from %{base:.3f} s<extra></extra>",
        )
    figure.update_layout(barmode="overlay", height=160 + 36 * len({span.thread for span in spans}))
    figure.update_yaxes(categoryorder="array", categoryarray=sorted({span.thread for span in spans}, reverse=True))
    return figure


def overlap(spans: list[Span]) -> dict[str, float] | None:
    """Seconds in which the learner updates, in which the engine works, and both, between the first and the last update."""
    updates = [span for span in spans if span.name == "learner.update"]
    engine = [span for span in spans if span.name in ("engine.prefill", "engine.decode")]
    if not updates or not engine:
        return None
    begin, end = updates[0].start, max(span.end for span in updates)
    window = np.array([begin, end])
    either = sorted(updates + engine, key=lambda span: span.start)
    learner_busy, engine_busy, some_busy = (float(np.diff(_busy_until(part, window))[0]) for part in (updates, engine, either))
    return {"window": end - begin, "learner": learner_busy, "engine": engine_busy, "both": learner_busy + engine_busy - some_busy}


def _rows(spans: list[Span]) -> dict[tuple[str, str], list[Span]]:
    rows = collections.defaultdict(list)
    for span in spans:
        rows[span.thread, span.name].append(span)
    return dict(sorted(rows.items()))


def _busy_until(spans: list[Span], times: np.ndarray) -> np.ndarray:
    """For each time, the seconds before it that at least one of the spans (sorted by start) covers."""
    starts, ends = [], []
    for span in spans:
        if ends and span.start <= ends[-1]:
            ends[-1] = max(ends[-1], span.end)
        else:
            starts.append(span.start)
            ends.append(span.end)
    starts, ends = np.asarray(starts), np.asarray(ends)
    before = np.concatenate([[0.0], np.cumsum(ends - starts)])
    begun = np.searchsorted(starts, times, side="right")
    inside = np.where(begun > 0, np.clip(ends[begun - 1] - times, 0, None), 0.0)  # part of the last begun span that lies ahead
    return before[begun] - inside


def _thin(steps: list, values: list) -> tuple[list, list]:
    stride = max(1, -(-len(steps) // POINTS))
    return steps[::stride], values[::stride]


def _smooth(values: list[float]) -> list[float]:
    """Centred moving mean over a twentieth of the curve."""
    values = np.asarray(values, float)
    half = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return ((sums[high] - sums[low]) / (high - low)).round(6).tolist()


def _layout(**more: object) -> dict[str, object]:
    return {"template": "plotly_white", "height": 340, "margin": {"l": 60, "r": 20, "t": 30, "b": 50}, **more}


def _figure(x: str, y: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(**_layout(), xaxis_title=x, yaxis_title=y)
    return figure
