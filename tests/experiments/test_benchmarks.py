"""The benchmarks on small shapes: what they print, and the figures that do not hang on a machine's speed."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import measure, prefill, torch_side, train_step
from glm_jax.model import get_preset

SMALL = ["--preset", "tiny", "--torch", "no", "--json"]


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_train_step_prints_its_keys_and_compiles_nothing_after_warm_up(capsys):
    assert train_step.main([*SMALL, "--batch", "2", "--length", "32", "--rounds", "2", "--steps", "1"]) == 0
    result = last_line(capsys)
    assert result["setting"]["preset"] == "tiny" and result["setting"]["batch"] == 2 and result["setting"]["dtype"] == "float32"
    assert result["tokens_per_second"] == pytest.approx(64 / result["seconds"])
    assert result["compilations"]["warm_up"] >= 1 and result["compilations"]["timed"] == 0
    assert abs(result["loss"] - np.log(288)) < 1.5
    assert result["temporary_bytes"] > 0 and result["peak_rss_bytes"] > 0
    assert result["torch"] == {"unavailable": "not asked for"} and "ratio" not in result


def test_prefill_prints_its_keys_by_length(capsys):
    assert prefill.main([*SMALL, "--lengths", "32,64,128", "--repeats", "1"]) == 0
    result = last_line(capsys)
    for key in ("seconds", "peak_bytes", "sparse_mla_seconds"):
        assert list(result[key]) == ["32", "64", "128"] and all(value > 0 for value in result[key].values())
    assert all(isinstance(result[key], float) for key in ("exponent", "total_exponent", "memory_exponent"))
    assert result["compilations"]["timed"] == 0
    assert result["peak_bytes"]["32"] < result["peak_bytes"]["128"]


def test_prefill_refuses_a_model_without_an_indexer(capsys):
    assert prefill.main(["--preset", "smollm2-135m", "--torch", "no"]) == 1
    assert "no indexer" in capsys.readouterr().err


@pytest.mark.parametrize(("preset", "batch", "length"), [("bench-20m", 8, 512), ("bench-20m", 1, 2048), ("bench-20m", 4, 512)])
def test_experts_multiply_little_more_than_the_routed_tokens_need(preset, batch, length):
    """Counted from the program's shapes, forward and backward: a mask over all experts would be at 4."""
    assert 1 <= train_step.expert_flops(get_preset(preset), batch, length)["ratio"] <= 1.3


def test_products_are_counted_through_loops_branches_and_gradients():
    a, b = jnp.ones((3, 4)), jnp.ones((4, 5))
    count = lambda f, *arguments: measure.dot_flops(jax.make_jaxpr(f)(*arguments).jaxpr)
    one = 2 * 3 * 4 * 5
    assert count(jnp.matmul, a, b) == one
    assert count(jax.jit(jax.checkpoint(jnp.matmul)), a, b) == one
    assert count(jax.grad(lambda a, b: (a @ b).sum(), argnums=(0, 1)), a, b) == 3 * one
    assert count(lambda a, b: jax.lax.map(lambda row: row @ b, a), a, b) == one
    assert count(lambda a, b: jax.lax.cond(a.sum() > 0, lambda: a @ b, lambda: jnp.zeros((3, 5))), a, b) == one
    assert count(lambda a, b: jnp.einsum("xij,xjk->xik", jnp.stack([a, a]), jnp.stack([b, b])), a, b) == 2 * one

    def told(a, b):
        with jax.named_scope("expected_trips_7"):
            return jax.lax.fori_loop(0, a.sum().astype(int), lambda _, c: c @ b @ b.T, a)

    assert count(told, a, b) == 7 * 2 * one
    with pytest.raises(measure.BenchmarkError, match="while"):
        count(lambda a, b: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ b @ b.T, a), a, b)
    with pytest.raises(measure.BenchmarkError, match="ragged"):
        count(lambda a, b: jax.lax.ragged_dot(a, b[None], jnp.array([3])), a, b)


def test_compilations_are_counted():
    function = jax.jit(lambda x: x * 3 + 1)
    with measure.count_compilations() as compiled:
        function(np.ones(7))
        first = len(compiled)
        function(np.zeros(7))
        assert first >= 1 and len(compiled) == first
        function(np.ones(8))
        assert len(compiled) > first


def test_exponent_is_the_slope_of_the_logarithms():
    assert measure.exponent({length: 3e-6 * length**1.5 for length in (10, 20, 70)}) == pytest.approx(1.5)
    assert measure.exponent({1: 100, 10: 1, 100: 10, 1000: 100}, smallest=10) == pytest.approx(1)
    assert measure.exponent({8: 1.0}) is None


FAKE_WORKER = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    do = request.pop("do")
    if do == "load":
        setting, answer = request, {"parameters": 1}
    elif do == "step":
        seconds = {"eager": 4.0, "sdpa": 2.0}[setting["attention"]] + (setting["experts"] == "grouped_mm")
        answer = {"seconds": [seconds] * request["steps"], "cpu_seconds": [1.0] * request["steps"], "losses": [5.5] * request["steps"]}
    elif do == "prefill":
        answer = {"seconds": float(request["length"]) / (2 if setting["attention"] == "sdpa" else 1)}
    else:
        answer = {"error": "told to fail"} if do == "train" and FAIL else {"threads": 2}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def fake_torch(monkeypatch, tmp_path):
    """A worker that answers in torch's place, at once; the function makes it fail."""
    script = tmp_path / "worker.py"
    write = lambda fail: script.write_text(f"FAIL = {fail}\n{FAKE_WORKER}")
    write(False)
    monkeypatch.setattr(torch_side, "environment", lambda: sys.executable)
    monkeypatch.setattr(torch_side, "WORKER", script)
    return lambda: write(True)


SMALL_STEP = ["--preset", "tiny", "--json", "--batch", "1", "--length", "16", "--rounds", "3", "--steps", "1"]


def test_the_fastest_of_the_other_side_is_compared_with(fake_torch, capsys):
    assert train_step.main(SMALL_STEP) == 0
    result = last_line(capsys)
    assert (result["torch"]["attention"], result["torch"]["experts"], result["torch"]["loss"]) == ("sdpa", "eager", 5.5)
    assert result["torch_tokens_per_second"] == 16 / 2.0
    assert len(result["ratios"]) == 3 and result["ratio"] == sorted(result["ratios"])[1] > 0

    assert prefill.main(["--preset", "tiny", "--json", "--lengths", "16,32", "--torch-lengths", "32", "--repeats", "1"]) == 0
    torch = last_line(capsys)["torch"]
    assert torch["seconds"] == {"eager": {"32": 32.0}, "sdpa": {"32": 16.0}}
    assert list(torch["ratio"]) == ["32"] and torch["ratio"]["32"] > 1


def test_a_comparison_that_fails_is_told_or_refused(fake_torch, capsys):
    """auto goes on without it and says why; yes does not."""
    fake_torch()
    assert train_step.main([*SMALL_STEP, "--torch", "auto"]) == 0
    result = last_line(capsys)
    assert "told to fail" in result["torch"]["unavailable"] and result["tokens_per_second"] > 0 and "ratio" not in result
    assert train_step.main([*SMALL_STEP, "--torch", "yes"]) == 1
    assert "told to fail" in capsys.readouterr().err


def test_an_environment_that_cannot_be_made_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("GLM_JAX_TORCH_VENV", str(tmp_path / "venv"))
    monkeypatch.setattr(torch_side, "REQUIREMENTS", (str(tmp_path / "nothing-here.whl"),))
    with pytest.raises(measure.BenchmarkError, match="nothing-here.whl"):
        torch_side.environment()
    assert not (tmp_path / "venv").exists()
