import json
import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_jax.metrics import Counts, Mean, MetricsWriter, ratio


def read(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_lines_hold_time_phase_step_and_plain_numbers(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, "rl", {"loss": np.float32(0.5), "ledger/issued": np.int64(7), "mode": "async", "bad": float("nan"), "ok": True})
        (line,) = read(tmp_path)  # before close: every line is flushed
    assert line.pop("time") > 1e9
    assert line == {"phase": "rl", "step": 3, "loss": 0.5, "ledger/issued": 7, "mode": "async", "bad": None, "ok": True}
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_threads_do_not_mix_lines(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        threads = [threading.Thread(target=lambda n=n: [writer.write(s, f"p{n}", {"x": s}) for s in range(50)]) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = read(tmp_path)
    assert sorted((line["phase"], line["step"]) for line in lines) == [(f"p{n}", s) for n in range(4) for s in range(50)]


def test_a_torn_line_does_not_swallow_the_next(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(2, "rl", {})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[1] == '{"st' and json.loads(lines[2])["step"] == 2


def test_reserved_names_and_arrays_are_refused(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(ValueError, match="step"):
            writer.write(1, "rl", {"step": 2})
        with pytest.raises(ValueError):
            writer.write(1, "rl", {"x": np.zeros(3)})


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 100)), min_size=1))
def test_mean_of_parts_is_the_mean_of_the_whole(parts):
    mean = Mean()
    for value, count in parts:
        mean.add(value * count, count)
    assert mean.value == pytest.approx(np.average([v for v, _ in parts], weights=[c for _, c in parts]), rel=1e-9, abs=1e-6)


def test_counts_add_up_until_taken():
    counts = Counts()
    counts.add({"a": 1, "b": np.float32(0.5)})
    counts.add(a=2)
    assert counts.snapshot() == {"a": 3, "b": 0.5} == counts.take()
    assert counts.take() == {}
    assert math.isnan(Mean().value) and math.isnan(ratio(1, 0)) and ratio(1, 4) == 0.25
