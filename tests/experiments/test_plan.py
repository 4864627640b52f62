"""Plans from the command line: a small one, mistakes, and the large models on the slices that they are meant for."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SMALL = "smollm2-135m,layers=1,dense_layers=1,hidden_size=128,intermediate_size=256,vocab_size=256,heads=2,gqa__kv_heads=2"
COMPILES = 600  # s, on two cores
GIB = 2**30


def plan(*arguments, seconds=240):
    """(exit status, stdout, stderr) in a process of its own: libtpu stays out of the tests'."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments.plan", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=seconds,
        env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return done.returncode, done.stdout, done.stderr


def as_json(*arguments, **keywords):
    status, out, errors = plan(*arguments, "--json", **keywords)
    assert status == 0, errors
    return json.loads(out)


def test_a_small_model_is_planned_with_its_state_split_over_every_chip():
    found = as_json(SMALL, "--topology", "v5e:2x2", "--global-batch", 8, "--sequence", 256)
    memory = found["memory"]
    assert found["mesh"] == {"fsdp": 4} and found["why"] and found["devices"] == 4
    # One layer: queries, keys, values and output 128 x 128 each, three matrices of the MLP, the embedding, three norms.
    weights = 4 * 128 * 128 + 3 * 128 * 256 + 256 * 128 + 3 * 128
    assert found["shardings"]["parameters"]["bytes"] == 4 * weights
    assert all(kind["spread"] > 0.99 for kind in found["shardings"].values()), found["shardings"]
    for name in ("parameters", "first_moments", "second_moments"):
        assert memory[name] == pytest.approx(4 * weights / 4, rel=0.01)
    assert memory["output_not_aliased"] < 2**16  # donated: the updated state has the shardings of the old one
    assert memory["used"] == pytest.approx(sum(
        size for name, size in memory.items() if name not in ("used", "available", "gradients_in_temporaries")))
    assert 0 < memory["used"] < memory["available"] < 16 * GIB
    # Three products forward and backward, one more where the backward pass computes a layer again; attention above the diagonal too.
    assert 1 < 4 * found["flops"] / found["model_flops"] < 3
    assert found["step_seconds"] == max(found["roofline_seconds"].values()) == found["roofline_seconds"][found["bound"]]
    assert found["utilisation"] == pytest.approx(found["model_flops"] / (4 * 197e12 * found["step_seconds"]))
    assert found["collective_bytes"]["all-gather"] > 0 and not found["uncounted"] and found["compile_seconds"] > 0


MISTAKES = {
    "preset": (["glm-9", "--topology", "v5p:2x2x1"], "no model preset 'glm-9'"),
    "field": (["tiny,width=3", "--topology", "v5p:2x2x1"], "no field 'width'"),
    "text": (["tiny,layers=abc", "--topology", "v5p:2x2x1"], "preset 'tiny,layers=abc':"),
    "part": (["glm-5.2,mla=3", "--topology", "v5p:2x2x1"], "preset 'glm-5.2,mla=3':"),
    "no value": (["tiny,layers", "--topology", "v5p:2x2x1"], "'layers' is not FIELD=VALUE"),
    "layers": (["smollm2-135m,layers=2", "--topology", "v5p:2x2x1"], "dense_layers=30 exceeds layers=2"),
    "kind": (["tiny", "--topology", "v9:2x2"], "no topology 'v9:2x2'"),
    "shape": (["tiny", "--topology", "v5p:3x3x3"], "topology 'v5p:3x3x3' cannot be described"),
    "chips": (["tiny", "--topology", "v5p:2x2x1", "--mesh", "fsdp=3"], "3 devices, the topology of 4"),
    "rows": (["tiny", "--topology", "v5p:2x2x1", "--mesh", "fsdp=4", "--global-batch", "6"], "does not divide the global batch of 6"),
    "axis": (["tiny", "--topology", "v5p:2x2x1", "--mesh", "rows=4"], "'rows=4' is not an axis and its size"),
}
MADE = """
import contextlib, io, json, sys
from experiments.plan import main
for arguments in json.load(sys.stdin):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = main(arguments)
    print(json.dumps([status, errors.getvalue()]))
"""


@pytest.fixture(scope="module")
def mistakes():
    done = subprocess.run(
        [sys.executable, "-c", MADE], input=json.dumps([arguments for arguments, _ in MISTAKES.values()]), cwd=ROOT, capture_output=True,
        text=True, timeout=120, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return dict(zip(MISTAKES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_line(mistakes, name):
    status, errors = mistakes[name]
    assert status == 2 and MISTAKES[name][1] in errors and errors.count("\n") == 1, errors


def test_what_does_not_fit_says_by_how_much_and_names_the_largest_class():
    status, out, errors = plan(f"{SMALL},vocab_size={2**28}", "--topology", "v5e:2x2", "--global-batch", 8, "--sequence", 256)
    assert status == 1 and not out, errors
    assert "too much; the largest class is" in errors and errors.count("\n") == 1, errors


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("preset", "stage", "topology", "rows", "sequence"), [
    ("glm-5.2", "pretrain", "v5p:8x16x16", 256, 131072),
    ("glm-5.2", "rl", "v5p:8x16x16", 256, 131072),
    ("glm-4.5-air", "pretrain", "v5p:4x4x4", 64, 8192),
    ("glm-4.7-flash", "pretrain", "v6e:4x4", 16, 8192),
])
def test_training_fits_and_its_state_is_split_over_every_chip(preset, stage, topology, rows, sequence):
    found = as_json(preset, "--topology", topology, "--stage", stage, "--global-batch", rows, "--sequence", sequence, seconds=1700)
    assert found["memory"]["used"] <= found["memory"]["available"]
    for name in ("parameters", "gradients", "first_moments", "second_moments"):
        assert found["shardings"][name]["spread"] > 0.95, found["shardings"]
    assert found["memory"]["output_not_aliased"] < GIB / 64
    assert found["compile_seconds"] < COMPILES


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_decoding_fits():
    found = as_json("glm-5.2", "--topology", "v5p:8x16x16", "--stage", "decode", "--global-batch", 64, "--sequence", 131072, seconds=1700)
    memory = found["memory"]
    assert memory["used"] <= memory["available"]
    # Latents and rotary keys of 78 layers, index keys of the full ones at least, of 64 sessions.
    assert found["shardings"]["cache"]["bytes"] > 64 * 131072 * 78 * (512 + 64) * 2
    assert memory["output_not_aliased"] < GIB / 4 and found["compile_seconds"] < COMPILES
