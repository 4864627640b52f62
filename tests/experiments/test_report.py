import html.parser
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import report, report_figures
from experiments.run_files import Span, read_run
from glm_jax.metrics import MetricsWriter

HOSTILE = '</span></pre><script>alert("x")</script>&amp;'


class Page(html.parser.HTMLParser):
    """Counts tags, checks that they close in order, and keeps the text outside scripts."""

    VOID = {"meta", "br", "hr", "img", "link", "input"}

    def __init__(self, text):
        super().__init__()
        self.stack, self.ids, self.external, self.text, self.backgrounds = [], set(), [], "", []
        self.feed(text)
        assert not self.stack

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.add(attrs.get("id"))
        if attrs.get("class") == "sampled" and "title" in attrs:
            self.backgrounds.append(attrs["style"])
        self.external += [attrs[key] for key in ("src", "href") if key in attrs]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] not in ("script", "style"):
            self.text += data


@pytest.fixture
def run(tmp_path):
    """A run directory as a short run leaves it."""
    rng = random.Random(0)
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(30):
            writer.write(step, "sft", {"loss": 3 / (step + 1), "indexer_loss": 0.1})
            writer.write(step, "control", {"loss": 0.1})
        for step in range(20):
            metrics = {"reward/glm_jax/Calculator-v0": step / 20, "reward/glm_jax/DigitChain-v0": None, "staleness/0": 3, "staleness/2": 1}
            metrics |= {"ledger/issued": 8 * step, "ledger/trained": 6 * step, "ledger/dropped/stale": step, "ledger/live": step}
            writer.write(step, "rl", {k: v for k, v in metrics.items() if v is not None} | {"ratio/mean": 1.0, "tokens_per_second": 1e3})
    events = [
        {"ph": "M", "name": "thread_name", "tid": n, "args": {"name": name}} for n, name in enumerate(["learner", "engine", "actor-0 #1"])
    ]
    for step in range(20):
        events.append({"ph": "X", "name": "learner.update", "tid": 0, "ts": step * 1e6, "dur": 6e5})
        events.append({"ph": "X", "name": "engine.decode", "tid": 1, "ts": step * 1e6 + 3e5, "dur": 6e5})
        events.append({"ph": "X", "name": "actor.step", "tid": 2, "ts": step * 1e6, "dur": 1e3})
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    (tmp_path / "trajectories").mkdir()
    with (tmp_path / "trajectories" / "rl.jsonl").open("w") as file:
        for n in range(12):
            line = {"rollout_id": n, "environment": "glm_jax/Calculator-v0", "reward": 1.0, "status": "completed", "version": n}
            line |= {"tokens": ["ask", HOSTILE, "ok"], "mask": [0, 1, 1], "logp": [0, -9.0, -rng.random()], "versions": [-1, n, n]}
            file.write(json.dumps(line) + "\n")
    summary = {
        "table": [{"environment": "Calculator", "demonstrator": 0.65, "rl": {"sampled": [0.8, 0.75, 0.85], "greedy": 0.9}}],
        "paired": {"rl - control": {"mean": 0.1, "low": 0.05, "high": 0.15}},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "config.yaml").write_text("name: <x>\n")
    (tmp_path / "environment.json").write_text("{}")
    return tmp_path


SECTIONS = {"success", "rewards", "losses", "timeline", "close-up", "staleness", "ratios", "ledger", "throughput", "trajectories", "config"}


def test_report_holds_every_part_and_needs_no_network(run):
    page = Page(report.build(run).read_text())
    assert page.ids >= SECTIONS
    assert {f"figure-{key}" for key in SECTIONS - {"success", "trajectories", "config"}} <= page.ids
    assert not page.external
    assert "Not in this run" not in page.text and "Nothing recorded" not in page.text
    assert "0.800 [0.75, 0.85]" in page.text and "0.100 [0.05, 0.15]" in page.text
    assert "both at once for 6.0 s" in " ".join(page.text.split())


def test_sampled_tokens_are_coloured_and_hostile_text_stays_text(run):
    page = Page(report.build(run).read_text())
    assert page.text.count(HOSTILE) == 6  # three first and three last trajectories
    assert page.backgrounds.count("background: hsl(0 75% 82%)") == 6  # the surprising token
    assert len(page.backgrounds) == 12


def test_a_run_with_nothing_says_what_is_missing(tmp_path):
    page = Page(report.build(tmp_path).read_text())
    for name in ("config.yaml", "metrics.jsonl", "trace.json", "summary.json", "trajectories/*.jsonl"):
        assert name in page.text
    assert page.ids >= SECTIONS


def test_broken_files_are_reported_and_the_rest_is_shown(run):
    (run / "summary.json").write_text("{")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "st')
    page = Page(report.build(run).read_text())
    assert "summary.json (not readable" in page.text and "metrics.jsonl (1 broken lines left out)" in page.text
    assert "figure-rewards" in page.ids


def test_after_a_resume_the_later_line_of_a_step_counts(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step, value in ((1, 1), (2, 2), (3, 3), (2, 20), (3, 30)):
            writer.write(step, "rl", {"x": value})
    assert read_run(tmp_path).series("x", "rl") == ([1, 2, 3], [1, 20, 30])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), min_size=1, max_size=12), st.lists(st.integers(-2, 45), min_size=1))
def test_busy_time_counts_overlapping_spans_once(parts, times):
    spans = sorted((Span("t", "n", start, start + length) for start, length in parts), key=lambda span: span.start)
    covered = np.zeros(60, bool)
    for span in spans:
        covered[int(span.start) : int(span.end)] = True
    expected = [covered[: max(0, t)].sum() for t in times]
    assert report_figures._busy_until(spans, np.asarray(times, float)).tolist() == pytest.approx(expected)


def test_a_wrong_directory_is_an_error_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["report", "/nowhere"])
    assert report.main() == 2
    assert "/nowhere" in capsys.readouterr().err


def test_the_traces_of_a_resumed_run_are_one_timeline(tmp_path):
    for name, start in (("trace.1.json", 100.0), ("trace.json", 130.0)):
        span = {"ph": "X", "name": "learner.update", "pid": 1, "tid": 1, "ts": 2e6, "dur": 1e6}
        (tmp_path / name).write_text(json.dumps({"traceEvents": [span], "otherData": {"start_time": start}}))
    assert [(span.start, span.end) for span in read_run(tmp_path).spans] == [(2.0, 3.0), (32.0, 33.0)]
