"""Whole runs in two processes of four devices: they stop together, resume as one process of eight, and end together when one fails."""

import json
import signal
import time

import pytest
import two_processes

MODEL = {"hidden_size": 16, "layers": 1, "dense_layers": 0, "heads": 2, "moe.experts": 4, "moe.intermediate_size": 8, "indexer.topk": 6}
ARGUMENTS = [
    "-m", "experiments.run", "quickstart", "--debug", "environments=[glm_jax/Calculator-v0,glm_jax/DigitChain-v0]",
    *(f"model.overrides.{key}={value}" for key, value in MODEL.items()), "rows.microbatch_rows=8", "sft.steps=4", "sft.dense_steps=0",
    "sft.warmup_steps=1", "sft.rows=8", "sft.demonstrations=40", "rl.batch_rollouts=16", "rl.group_size=4", "rl.episodes=8",
    "rl.max_new_tokens=8", "engine.slots=4", "engine.decode_steps=4", "engine.prefill_rows=4", "engine.prefill_chunk=16",
    "evaluation.tasks=4", "checkpoint.every=1", "control=false", "mesh.data=2", "mesh.fsdp=4"]


def lines(base, phase="rl"):
    return [
        line for path in base.glob("quickstart/*/metrics.jsonl") for line in map(json.loads, path.read_text().splitlines())
        if line["phase"] == phase]


def wait_for_updates(base, number, processes, seconds=500):
    end = time.monotonic() + seconds
    while len(lines(base)) < number:
        assert time.monotonic() < end and all(process.poll() is None for process in processes), "no update came"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_processes_stop_together_and_one_goes_on(tmp_path):
    processes = two_processes.start(*ARGUMENTS, "rl.updates=1000", f"output={tmp_path}")
    wait_for_updates(tmp_path, 3, processes)
    processes[1].send_signal(signal.SIGTERM)
    (first, output), (second, silent) = two_processes.finish(processes, 200)
    assert (first, second) == (143, 143), output + silent
    assert "stopped; go on with" in output and "rl" not in silent.replace("[Gloo]", "")
    (directory,) = tmp_path.glob("quickstart/*")
    before = lines(tmp_path)
    updates = before[-1]["step"]
    assert [line["step"] for line in before] == list(range(1, updates + 1)) and before[-1]["ledger/trained"] == 16 * updates

    (again,) = two_processes.start("-m", "experiments.run", "--resume", directory, f"rl.updates={updates + 3}", count=1, devices=8)
    ((status, output),) = two_processes.finish([again], 600)
    assert status == 0, output
    after = lines(tmp_path)
    assert [line["step"] for line in after] == list(range(1, updates + 4))
    for line in after:
        dropped = sum(value for key, value in line.items() if key.startswith("ledger/dropped/"))
        assert line["ledger/issued"] == line["ledger/trained"] + dropped + line["ledger/live"], line
        assert line["version"] == line["step"]
    assert after[-1]["ledger/trained"] == 16 * (updates + 3) and (directory / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", ["killed", "stuck", "error"])
def test_when_one_process_fails_both_end(tmp_path, way):
    faults = {"error": 'raise ZeroDivisionError("a fault on purpose")', "stuck": "time.sleep(1000)"}
    program = ["-c", FAULT.replace("FAULT", faults[way]), *ARGUMENTS[2:]] if way in faults else ARGUMENTS
    processes = two_processes.start(*program, "rl.updates=1000", "mesh.timeout_seconds=60", f"output={tmp_path}")
    try:
        wait_for_updates(tmp_path, 1, processes)
        began = time.monotonic()
        if way == "killed":
            processes[1].kill()
        status = processes[0].wait(timeout=180)
        assert status != 0 and time.monotonic() - began < 150
        assert processes[1].wait(timeout=60) != 0
    finally:
        for process in processes:
            process.kill()
    output = processes[0].stdout.read()
    expected = {
        "stuck": "waited 60 s for process 1; it is stuck or far behind", "killed": "",  # JAX itself ends the others
        "error": "process 1 failed: ZeroDivisionError: a fault on purpose"}[way]
    assert expected in output, output


FAULT = """
import sys, time
from experiments import run
from glm_jax.environments import start_default_sandbox
start_default_sandbox()
from glm_jax.rl.loop import RLLoop
publish = RLLoop._publish
def fails(self):
    publish(self)
    if self.updates == 2 and self._peers.index == 1:
        FAULT
RLLoop._publish = fails
sys.exit(run.main(sys.argv[1:]))
"""
