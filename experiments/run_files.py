"""Reading a run directory, whatever of it exists: a run may have been stopped at any moment."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence

SAMPLES = 3  # trajectories kept from the start and from the end of an environment's part of the file


@dataclasses.dataclass(frozen=True)
class Span:
    """One span of the trace; seconds since its start."""

    thread: str
    name: str
    start: float
    end: float


@dataclasses.dataclass
class RunFiles:
    """What was found. `missing` says, for the reader, which files are not there or could not be read."""

    directory: pathlib.Path
    config: str = ""
    environment: str = ""
    lines: list[dict] = dataclasses.field(default_factory=list)  # of metrics.jsonl; after a resume the later line of a step counts
    spans: list[Span] = dataclasses.field(default_factory=list)
    summary: dict = dataclasses.field(default_factory=dict)
    samples: dict[str, list[dict]] = dataclasses.field(default_factory=dict)  # file stem/environment -> trajectories
    missing: list[str] = dataclasses.field(default_factory=list)

    def phase(self, *names: str) -> list[dict]:
        return [line for line in self.lines if line.get("phase") in names]

    def series(self, key: str, *phases: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, where it is a number."""
        points = [(line["step"], line[key]) for line in self.phase(*phases) if is_number(line.get(key))]
        return [step for step, _ in points], [value for _, value in points]

    def keys(self, prefix: str, *phases: str) -> list[str]:
        """Names of the numeric metrics that start with `prefix`, in order."""
        return sorted({key for line in self.phase(*phases) for key, value in line.items() if key.startswith(prefix) and is_number(value)})


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_run(directory: pathlib.Path | str) -> RunFiles:
    """Raises: FileNotFoundError when the directory itself is not there."""
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory")
    run = RunFiles(directory)
    for name, attribute in (("config.yaml", "config"), ("environment.json", "environment")):
        path = directory / name
        if path.exists():
            setattr(run, attribute, path.read_text(encoding="utf-8"))
        else:
            run.missing.append(name)
    by_step = {}
    for line in _json_lines(run, directory / "metrics.jsonl"):
        if is_number(line.get("step")):
            by_step[line.get("phase"), line["step"]] = by_step.pop((line.get("phase"), line["step"]), {}) | line
    run.lines = sorted(by_step.values(), key=lambda line: line["step"])
    earlier = sorted(directory.glob("trace.*.json"), key=lambda path: (len(path.name), path.name))  # what a resumed run left of each start
    run.spans = _spans([_json(run, path) or {} for path in (*earlier, directory / "trace.json")])
    run.summary = _json(run, directory / "summary.json") or {}
    paths = sorted((directory / "trajectories").glob("*.jsonl"))
    if not paths:
        run.missing.append("trajectories/*.jsonl")
    for path in paths:
        run.samples |= _samples(path.stem, _json_lines(run, path))
    return run


def _json(run: RunFiles, path: pathlib.Path) -> dict | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        run.missing.append(path.name)
    except ValueError as error:
        run.missing.append(f"{path.name} (not readable: {error})")
    else:
        if isinstance(value, dict):
            return value
        run.missing.append(f"{path.name} (not a JSON object)")
    return None


def _json_lines(run: RunFiles, path: pathlib.Path) -> Iterator[dict]:
    """Every whole line; a killed run may leave half of one."""
    if not path.exists():
        run.missing.append(path.name)
        return
    broken = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                value = json.loads(text)
            except ValueError:
                broken += bool(text.strip())
                continue
            if isinstance(value, dict):
                yield value
    if broken:
        run.missing.append(f"{path.name} ({broken} broken lines left out)")


def _spans(traces: Sequence[dict]) -> list[Span]:
    """Complete events of a run's starts, one after the other in real time."""
    began = [_mapping(trace.get("otherData")).get("start_time") for trace in traces]
    first = min((time for time in began if is_number(time)), default=0.0)
    spans = [
        dataclasses.replace(span, start=span.start + offset, end=span.end + offset)
        for trace, time in zip(traces, began, strict=True)
        for offset in [time - first if is_number(time) else 0.0]
        for span in _one_start(trace)]
    return sorted(spans, key=lambda span: span.start)


def _mapping(value: object) -> dict:
    return value if isinstance(value, dict) else {}


def _one_start(trace: dict) -> list[Span]:
    """Complete events, the tracks of one thread's tasks ("actor-0 #3") counted as that thread."""
    events = [event for event in trace.get("traceEvents", []) if isinstance(event, dict)]
    threads = {e.get("tid"): e.get("args", {}).get("name", "") for e in events if e.get("ph") == "M" and e.get("name") == "thread_name"}
    spans = []
    for event in events:
        if event.get("ph") == "X" and is_number(event.get("ts")) and is_number(event.get("dur")):
            thread = threads.get(event.get("tid")) or f"thread {event.get('tid')}"
            start = event["ts"] / 1e6
            spans.append(Span(thread.partition(" #")[0], str(event.get("name")), start, start + event["dur"] / 1e6))
    return spans


def _samples(stem: str, trajectories: Iterator[dict]) -> dict[str, list[dict]]:
    first: dict[str, list[dict]] = collections.defaultdict(list)
    last: dict[str, collections.deque[dict]] = collections.defaultdict(lambda: collections.deque(maxlen=SAMPLES))
    for trajectory in trajectories:
        environment = str(trajectory.get("environment", "?"))
        if len(first[environment]) < SAMPLES:
            first[environment].append(trajectory)
        else:
            last[environment].append(trajectory)
    return {f"{stem}: {environment}": [*first[environment], *last[environment]] for environment in sorted(first)}
