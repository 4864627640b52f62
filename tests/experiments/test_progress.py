import io
import time

import rich.console

from experiments.progress import Progress, duration

METRICS = {
    "loss": 0.25,
    "reward/glm_jax/Calculator-v0": 0.5,
    "staleness/0": 1,
    "staleness/2": 1,
    "version": 7,
    "ledger/issued": 10,
    "ledger/trained": 6,
    "ledger/dropped/stale": 1,
    "ledger/live": 3,
}


def show(terminal):
    out = io.StringIO()
    console = rich.console.Console(file=out, force_terminal=terminal, width=200)
    with Progress(console=console, line_every=0.0) as progress:
        progress.phase("rl", 10)
        for step in range(1, 4):
            progress.update(step, METRICS)
        progress.log("[evaluation] saved")
        if terminal:
            time.sleep(0.6)  # the view is drawn four times a second
    return out.getvalue()


def test_without_a_terminal_every_line_is_plain():
    text = show(terminal=False)
    assert "\x1b" not in text and "[evaluation] saved" in text
    line = next(line for line in text.splitlines() if line.startswith("rl 3/10"))
    for part in ("loss 0.25", "reward/Calculator-v0 0.5", "version 7", "staleness 1.00 (max 2)", "left "):
        assert part in line
    assert "10 issued = 6 trained + 1 dropped + 3 live" in line


def test_on_a_terminal_the_view_is_live():
    text = show(terminal=True)
    assert "3/10" in text and "Calculator-v0" in text


def test_lines_are_rare_without_a_terminal():
    out = io.StringIO()
    with Progress(console=rich.console.Console(file=out), line_every=60) as progress:
        progress.phase("sft", 100)
        for step in range(100):
            progress.update(step, {"loss": 1.0})
    assert len(out.getvalue().splitlines()) <= 3


def test_durations():
    assert [duration(s) for s in (5, 65, 3700)] == ["5s", "1m05s", "1h01m"]
