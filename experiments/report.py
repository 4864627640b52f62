"""python -m experiments.report RUN: report.html of a run directory, from its files only, in one page that needs no network."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Iterator

import jinja2
import plotly.graph_objects as go
import plotly.offline

from experiments import report_figures as figures
from experiments.run_files import RunFiles, is_number, read_run

TEMPLATE = pathlib.Path(__file__).with_name("report.html.j2")
WORST_LOGP = -4.0  # nats; a sampled token at or below this gets the strongest colour
MAX_TOKENS = 4000  # of a sample trajectory that are shown


def build(directory: pathlib.Path | str) -> pathlib.Path:
    """Write report.html into the run directory and return its path. Raises: FileNotFoundError when there is no such directory."""
    run = read_run(directory)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=f"{run.directory.resolve().parent.name}/{run.directory.resolve().name}",
        plotly=plotly.offline.get_plotlyjs(),
        run=run,
        table=summary_table(run.summary),
        paired=[(name, interval(value)) for name, value in _mapping(run.summary.get("paired")).items()],
        sections=list(sections(run)),
        overlap=figures.overlap(run.spans),
        samples={title: [sample(t) for t in trajectories] for title, trajectories in run.samples.items()},
    )
    path = run.directory / "report.html"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(page, encoding="utf-8", errors="replace")  # a lone surrogate has no UTF-8 form
    os.replace(temporary, path)
    return path


def sections(run: RunFiles) -> Iterator[dict[str, str]]:
    """The figures in order: title, what one sees, and the figure's HTML ("" where the run has nothing to show)."""
    parts = (
        ("rewards", "Reward by environment", "Mean reward of each update's rollouts; the line is a moving mean.", figures.rewards(run)),
        ("losses", "Supervised fine-tuning", "Loss by step; dotted: the control.", figures.losses(run)),
        ("timeline", "Timeline", "Share of time each thread was busy, by kind of work, over the whole run.", figures.timeline(run)),
        ("close-up", "Timeline, close up", "Four updates in the middle of RL, span by span.", figures.close_up(run)),
        ("staleness", "Staleness", "Weight versions between sampling and training.", figures.staleness(run)),
        (
            "ratios",
            "Importance ratio and band",
            "Current policy against behaviour policy on trained tokens.",
            figures.small_multiples(run, ("ratio/", "band/", "loss", "entropy", "gradient")),
        ),
        ("ledger", "Ledger", "Every issued rollout is trained, dropped for a reason, or live.", figures.ledger(run)),
        ("throughput", "Throughput", "By update.", figures.small_multiples(run, ("tokens_per_second", "seconds", "engine/", "learner/"))),
    )
    for key, title, text, figure in parts:
        yield {"key": key, "title": title, "text": text, "figure": html(figure, key)}


def html(figure: go.Figure | None, key: str) -> str:
    if figure is None:
        return ""
    options = {"displaylogo": False, "responsive": True}
    return figure.to_html(full_html=False, include_plotlyjs=False, div_id=f"figure-{key}", config=options)


def summary_table(summary: dict) -> dict[str, list]:
    """Columns and rows of text of summary.json's "table".

    A cell is a number, [mean, low, high], or {"mean", "low", "high"}; a mapping of such cells ({"sampled": …, "greedy": …}) becomes
    one column each.
    """
    rows = [row for row in summary.get("table") or [] if isinstance(row, dict)]
    flat = [dict(_cells(row)) for row in rows]
    columns = list(dict.fromkeys(column for row in flat for column in row))
    return {"columns": columns, "rows": [[row.get(column, "–") for column in columns] for row in flat]}


def _cells(row: dict) -> Iterator[tuple[str, str]]:
    for column, value in row.items():
        if isinstance(value, dict) and "mean" not in value:
            for kind, cell in value.items():
                yield f"{column} {kind}", interval(cell)
        else:
            yield column, interval(value)


def interval(value: object) -> str:
    """0.812 [0.76, 0.85]"""
    if isinstance(value, dict):
        mean, low, high = (value.get(key) for key in ("mean", "low", "high"))
    elif isinstance(value, (list, tuple)) and len(value) == 3:
        mean, low, high = value
    else:
        mean, low, high = value, None, None
    if not is_number(mean):
        return "–" if mean is None else str(mean)
    text = f"{mean:.3f}" if isinstance(mean, float) else str(mean)
    return f"{text} [{low:.2f}, {high:.2f}]" if is_number(low) and is_number(high) else text


def sample(trajectory: dict) -> dict[str, object]:
    """A trajectory for the page: one piece a token, with its colour and what to say when pointed at."""
    tokens = _list(trajectory.get("tokens"))
    columns = [_list(trajectory.get(key)) for key in ("mask", "logp", "versions")]
    pieces = []
    for position, text in enumerate(tokens[:MAX_TOKENS]):
        mask, logp, version = (column[position] if position < len(column) else None for column in columns)
        pieces.append({"text": str(text), "colour": colour(logp) if mask else None, "title": _title(logp, version)})
    versions = [v for v in columns[2] if is_number(v) and v >= 0]
    return {
        "rollout_id": trajectory.get("rollout_id", "?"),
        "reward": trajectory.get("reward", "?"),
        "status": trajectory.get("status", "?"),
        "versions": f"{min(versions)}–{max(versions)}" if versions else trajectory.get("version", "?"),
        "pieces": pieces,
        "hidden": max(0, len(tokens) - MAX_TOKENS),
    }


def colour(logp: object) -> str:
    """From green (log-probability 0) over yellow to red (WORST_LOGP and less)."""
    share = min(1.0, max(0.0, logp / WORST_LOGP)) if is_number(logp) else 0.0
    return f"hsl({round(130 * (1 - share))} 75% 82%)"


def _title(logp: object, version: object) -> str:
    return f"log-probability {logp:.3f}, version {version}" if is_number(logp) else f"sampled, version {version}"


def _list(value: object) -> list:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> dict:
    return value if isinstance(value, dict) else {}


def main() -> int:
    parse = argparse.ArgumentParser(prog="python -m experiments.report", description=__doc__)
    parse.add_argument("run", help="a run directory, runs/NAME/TIME")
    try:
        print(build(parse.parse_args().run))
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
