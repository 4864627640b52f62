"""What plans count, against hand formulas on programs compiled for TPU; and the meshes that they choose and refuse."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

from glm_jax.model import get_preset
from glm_jax.parallel.planning import CHIPS, PlanError, Topology, check_mesh, choose_mesh, parse_mesh

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def counted():
    done = subprocess.run(
        [sys.executable, pathlib.Path(__file__).with_name("counted_programs.py")], cwd=ROOT, capture_output=True, text=True, timeout=240,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


PRODUCT = 2 * 64 * 256 * 256  # x [64, 256] times w [256, 256]


def test_a_scan_counts_by_its_trips(counted):
    found = counted["scanned"]
    assert found["flops"] == 7 * PRODUCT and not found["sent"] and not found["unknown"]


def test_a_loop_of_unknown_length_counts_as_its_scope_says_or_once_and_is_listed(counted):
    assert counted["expected"]["flops"] == 9 * PRODUCT and not counted["expected"]["unknown"]
    assert counted["until_data_says"]["flops"] == PRODUCT and len(counted["until_data_says"]["unknown"]) == 1


def test_branches_count_by_their_share(counted):
    assert counted["either"]["flops"] == (2 * 2 + 6 * 1) * PRODUCT


def test_elementwise_work_reads_and_writes_once(counted):
    assert counted["doubled"]["hbm_bytes"] == 2 * 4 * 4096 * 65536 and counted["doubled"]["flops"] == 0


def test_rows_written_where_they_are_count_alone(counted):
    """The array is copied once, before the loop, as it is not donated; a trip reads and writes its rows."""
    copied, rows = 2 * 4 * 65536 * 512, 7 * 4 * 8 * 512
    assert copied + rows < counted["scattered"]["hbm_bytes"] < copied + 10 * rows


def test_split_layers_are_gathered_twice_and_their_gradients_scattered(counted):
    found, layer = counted["gathered"], 4096 * 4096 * 2
    rows = 4096 // 4
    # Forward, forward again, and two products of the backward pass.
    assert found["flops"] == 5 * 4 * 2 * rows * 4096 * 4096
    assert found["sent"]["all-gather"] == 5 * 2 * 3 / 4 * layer
    assert found["sent"]["reduce-scatter"] == 5 * 3 / 4 * layer
    assert found["sent"]["all-reduce"] == 2 * 3 / 4 * 4  # the loss
    # At the least, every layer's weights are written where they are gathered, and read for each product.
    assert 5 * 3 * layer < found["hbm_bytes"] < 5 * 12 * layer


def slice_of(name):
    """A slice without libtpu's devices, for the arithmetic of meshes."""
    kind, shape = name.split(":")
    chips = math.prod(map(int, shape.split("x")))
    return Topology(name, CHIPS[kind], range(chips))


@pytest.mark.parametrize(("preset", "name", "rows", "sequence", "stage"), [
    ("glm-5.2", "v5p:8x16x16", 256, 131072, "pretrain"),
    ("glm-5.2", "v5p:8x16x16", 256, 131072, "rl"),
    ("glm-5.2", "v5p:8x16x16", 64, 131072, "decode"),
    ("glm-4.5-air", "v5p:4x4x4", 64, 8192, "pretrain"),
    ("glm-4.7-flash", "v6e:4x4", 16, 8192, "pretrain"),
    ("smollm2-135m", "v6e:2x2", 4, 2048, "pretrain"),
])
def test_a_chosen_mesh_passes_the_checks_and_gives_reasons(preset, name, rows, sequence, stage):
    config, slice_ = get_preset(preset), slice_of(name)
    choice = choose_mesh(config, slice_, rows, sequence, stage)
    check_mesh(choice.axes, len(slice_.devices), config, rows, sequence, stage)
    assert choice.why


def test_context_takes_the_devices_that_rows_do_not():
    choice = choose_mesh(get_preset("glm-5.2"), slice_of("v5p:8x16x16"), 256, 131072, "pretrain")
    assert choice.axes["context"] == 8 and choice.axes["model"] == 1
    assert choice.axes["data"] * choice.axes["fsdp"] * choice.axes["expert"] == 256 and choice.axes["expert"] > 1
    assert choose_mesh(get_preset("glm-4.5-air"), slice_of("v5p:4x4x4"), 64, 8192, "pretrain").axes["context"] == 1


@pytest.mark.parametrize(("text", "message"), [
    ("fsdp=2", "2 devices, the topology of 4"),
    ("fsdp=4", "does not divide the global batch of 6"),
    ("expert=2,context=2,fsdp=1", "context=2 does not divide the sequence of 7"),
    ("rows=4", "not an axis"),
    ("fsdp=2,fsdp=2", "each once"),
    ("model=4", "heads"),
])
def test_refused_meshes_say_what_does_not_fit(text, message):
    config = get_preset("glm-4.5-air", gqa__kv_heads=2)
    with pytest.raises(PlanError, match=message):
        check_mesh(parse_mesh(text), 4, config, 6, 7, "pretrain")
