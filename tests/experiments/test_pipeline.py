"""The whole pipeline, small: every phase, what it leaves behind, and signals and deaths in the middle of it."""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from experiments import run
from experiments.pipeline import supervised_line

ROOT = pathlib.Path(__file__).parents[2]
MODEL = {"hidden_size": 16, "layers": 1, "dense_layers": 0, "heads": 2, "moe.experts": 4, "moe.intermediate_size": 8, "indexer.topk": 6}
SMALL = [
    "environments=[glm_jax/Calculator-v0,glm_jax/DigitChain-v0]", *(f"model.overrides.{key}={value}" for key, value in MODEL.items()),
    "rows.microbatch_rows=4", "sft.steps=4", "sft.dense_steps=2", "sft.warmup_steps=1", "sft.rows=4", "sft.demonstrations=40",
    "rl.updates=4", "rl.batch_rollouts=8", "rl.group_size=4", "rl.episodes=8", "rl.max_new_tokens=8",
    "engine.slots=4", "engine.decode_steps=4", "engine.prefill_rows=4", "engine.prefill_chunk=16", "evaluation.tasks=4",
    "checkpoint.every=1"]
EVERY_LOSS = ["model.overrides.mtp.layers=1", "sft.mtp_steps=2", "sft.mtp_loss=0.3", "sft.balance_loss=1e-4", "sft.bias_rate=1e-3"]


def metrics(directory):
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_complete(directory, columns=("demonstrator", "sft", "rl", "control"), updates=4):
    """Everything that a finished run leaves is there, and every line of its metrics balances."""
    lines = [line for line in metrics(directory) if line["phase"] == "rl"]
    assert [line["step"] for line in lines] == list(range(1, updates + 1))
    for line in lines:
        dropped = sum(value for key, value in line.items() if key.startswith("ledger/dropped/"))
        assert line["ledger/issued"] == line["ledger/trained"] + dropped + line["ledger/live"]
    summary = json.loads((directory / "summary.json").read_text())
    assert [row["environment"] for row in summary["table"]] == ["glm_jax/Calculator-v0", "glm_jax/DigitChain-v0", "mean"]
    assert all(set(columns) <= set(row) for row in summary["table"]) and "rl - demonstrator" in summary["paired"]
    assert json.loads((directory / "trace.json").read_text())["traceEvents"]
    assert "<html" in (directory / "report.html").read_text()[:500].lower()
    assert any(path.name.isdigit() for path in (directory / "checkpoints").iterdir())
    assert (directory / "trajectories" / "rl.jsonl").read_text().count("\n") >= updates
    assert list((directory / "tensorboard").iterdir())


def test_a_run_is_interrupted_resumed_and_complete(tmp_path, capsys):
    def interrupt():
        while not any(line["phase"] == "rl" for base in tmp_path.glob("quickstart/*") for line in metrics(base)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert run.main(["quickstart", f"output={tmp_path}", "control=false", *SMALL, "sft.dense_steps=0", *EVERY_LOSS]) == 130
    (directory,) = tmp_path.glob("quickstart/*")
    assert not (directory / "summary.json").exists() and (directory / "report.html").exists()
    assert f"--resume {directory}" in capsys.readouterr().out.replace("\n", "")
    assert run.main(["--resume", str(directory)]) == 0
    assert_complete(directory, columns=("demonstrator", "sft", "rl"))


def test_a_line_of_supervised_metrics_has_means_where_the_update_has_sums():
    sums = {
        "nll": 6.0, "loss_tokens": 4.0, "correct_tokens": 1.0, "gradient_norm": 0.5, "indexer_kl": 3.0, "real_tokens": 6, "balance": 2.2,
        "sequences": 2, "expert_load": [[3, 1], [2, 2]], "mtp_expert_load": [[4, 0]], "mtp_nll": [4.0, 0.0], "mtp_tokens": [2.0, 0.0],
        "mtp_correct": [1.0, 0.0]}
    line = supervised_line({name: np.array(value) for name, value in sums.items()})
    assert np.isnan(line.pop("mtp_2/loss")) and np.isnan(line.pop("mtp_2/accuracy"))
    assert line == pytest.approx({
        "loss": 1.5, "accuracy": 0.25, "gradient_norm": 0.5, "indexer_kl": 0.5, "balance_loss": 1.1, "expert_violation": 0.25,
        "mtp_expert_violation": 1.0, "mtp_1/loss": 2.0, "mtp_1/accuracy": 0.5})
    plain = {name: sums[name] for name in ("nll", "loss_tokens", "correct_tokens", "gradient_norm")}
    assert supervised_line(plain) == {"loss": 1.5, "accuracy": 0.25, "gradient_norm": 0.5}


def start(*arguments, program=("-m", "experiments.run"), **environment):
    return subprocess.Popen(
        [sys.executable, *program, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "500"} | environment)


def finish(process, seconds=120):
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def wait_for_line(process, pattern):
    for line in process.stdout:
        if re.match(pattern, line):
            return
    raise AssertionError(f"the output ended without {pattern!r}: {process.stderr.read()}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", [0, 1])
def test_signals_in_every_phase_leave_what_resume_needs(tmp_path, first):
    """SIGINT and SIGTERM by turns, each a random moment after the phase began; at last it runs through."""
    arguments = ["quickstart", f"output={tmp_path}", *SMALL, "sft.steps=300", "sft.dense_steps=150", "evaluation.tasks=20", "rl.updates=12"]
    numbers, directory, rng = (signal.SIGINT, signal.SIGTERM), None, random.Random(first)
    for turn, phase in enumerate(["set-up", "sft", "evaluate sft", "rl", "evaluate rl", "control", "evaluate control"], first):
        process = start(*arguments)
        wait_for_line(process, f"{phase}(:| \\()")
        time.sleep(rng.uniform(0, 1))
        process.send_signal(numbers[turn % 2])
        status, out, err = finish(process)
        assert status in (0, (130, 143)[turn % 2]), (phase, status, out[-2000:], err[-2000:])
        (directory,) = tmp_path.glob("quickstart/*")
        assert "Traceback" not in err
        if status == 0:  # the signal came when the last evaluation was over
            break
        assert (directory / "report.html").exists()
        arguments = ["--resume", str(directory)]
    else:
        status, out, err = finish(start(*arguments))
        assert status == 0, err[-2000:]
    assert_complete(directory, updates=12)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_anything_is_there_leaves_a_directory_to_resume(tmp_path, number):
    process = start("quickstart", f"output={tmp_path}", "control=false", *SMALL)
    while not list(tmp_path.glob("quickstart/*/environment.json")):
        time.sleep(0.005)
    process.send_signal(number)
    status, _, _ = finish(process)
    assert status not in (0, 1)
    (directory,) = tmp_path.glob("quickstart/*")
    status, _, err = finish(start("--resume", str(directory)))
    assert status == 0, err[-2000:]
    assert_complete(directory, columns=("demonstrator", "sft", "rl"))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.5])
def test_a_signal_while_the_engine_compiles_ends_the_process_in_order(tmp_path, seconds):
    """A process that exits while a thread is inside XLA aborts."""
    process = start("quickstart", f"output={tmp_path}", *SMALL, "sft.steps=1", "sft.dense_steps=0", JAX_ENABLE_COMPILATION_CACHE="false")
    wait_for_line(process, "evaluate sft:")
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert status == 130, err[-2000:]


DEATHS = {
    "engine": ("""
import glm_jax.rollout.engine as engine
def dies(*args, **kwargs): fail()
engine.decode = dies
""", "in dies"),
    "actor": ("""
from glm_jax.environments.calculator import Calculator
def reset_with_a_bug(self, **kwargs): fail()
Calculator.reset = reset_with_a_bug
""", "in reset_with_a_bug"),
    "learner": ("""
import glm_jax.rl.loop as loop
def lay_out_wrongly(*args): fail()
loop.lay_out = lay_out_wrongly
""", "in lay_out_wrongly"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("thread", DEATHS)
def test_a_thread_that_dies_ends_the_process_with_its_traceback(tmp_path, thread):
    """From the end of the first update on, the named part of the loop raises."""
    patch, place = DEATHS[thread]
    program = f"""
import sys, time
from experiments import run
from glm_jax.environments import start_default_sandbox
start_default_sandbox()
from glm_jax.rl.loop import RLLoop
def fail():
    print("died", time.time(), flush=True)
    raise ZeroDivisionError("a fault on purpose")
books = RLLoop._books
def poison(self):
    exec(PATCH, globals())
    return books(self)
PATCH = {patch!r}
RLLoop._books = poison
sys.exit(run.main(sys.argv[1:]))
"""
    process = start("quickstart", f"output={tmp_path}", *SMALL, "rl.updates=1000", program=("-c", program))
    status, out, err = finish(process)
    ended = time.time()
    died = min(float(moment) for moment in re.findall(r"died ([\d.]+)", out))
    assert status == 1
    assert ended - died < 10
    assert place in err and err.rstrip().endswith("ZeroDivisionError: a fault on purpose")
