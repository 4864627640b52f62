"""Streams: nothing lost, nothing repeated, resumed exactly."""

import collections
import dataclasses
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_jax.data.pipelines import packed_batches
from glm_jax.data.trajectory import Segment

ROW = 16
batch_settings = settings(max_examples=25, deadline=None)
lengths_strategy = st.lists(st.integers(2, ROW), min_size=1, max_size=60)


def record(length):
    mask = np.ones(length, np.uint8)
    mask[0] = 0
    return Segment(np.arange(length, dtype=np.int32), mask, np.zeros(length, np.float32), np.zeros(length, np.int32))


def items(batch):
    """Record indices in a batch, one for each time that the record is placed."""
    return batch.item[(batch.item >= 0) & (batch.positions == 0)].tolist()


def assert_equal(a, b):
    for field in dataclasses.fields(a):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


@batch_settings
@given(lengths=lengths_strategy, rows=st.integers(1, 4), seed=st.integers(0, 9))
def test_epochs_lose_and_repeat_nothing(lengths, rows, seed):
    records = [record(n) for n in lengths]
    stream = packed_batches(records, rows, ROW, seed)
    seen = collections.Counter(dict.fromkeys(range(len(records)), 0))
    for batch in itertools.islice(stream, 12):
        assert batch.tokens.shape == (rows, ROW)
        placed = items(batch)
        assert sum(lengths[i] for i in placed) == (batch.item >= 0).sum() <= rows * ROW
        seen.update(placed)
        assert max(seen.values()) - min(seen.values()) <= 1
        pending = stream.get_state()["pending"]
        assert seen.total() + len(pending) == stream.get_state()["cursor"]


@batch_settings
@given(lengths=lengths_strategy, before=st.integers(0, 6), opening=st.integers(0, 4), seed=st.integers(0, 9))
def test_state_restores_exactly(lengths, before, opening, seed):
    records = [record(n) for n in lengths]
    first = list(range(0, len(records), 2))
    stream, resumed = (packed_batches(records, 2, ROW, seed, first=first, opening_batches=opening) for _ in range(2))
    for _ in range(before):
        next(stream)
    state = json.loads(json.dumps(stream.get_state()))
    resumed.set_state(state)
    for a, b in itertools.islice(zip(stream, resumed, strict=True), 5):
        assert_equal(a, b)


def test_batches_are_full_and_epochs_differ():
    rng = np.random.default_rng(0)
    records = [record(n) for n in rng.integers(2, 40, 500)]
    stream = packed_batches(records, 8, 64, seed=1)
    batches = list(itertools.islice(stream, 60))
    assert np.mean([(b.item >= 0).mean() for b in batches]) > 0.95
    order = [i for b in batches for i in items(b)]
    assert order[:100] != order[500:600]
    assert items(next(packed_batches(records, 8, 64, seed=1))) == items(batches[0])
    assert items(next(packed_batches(records, 8, 64, seed=2))) != items(batches[0])


def test_opening_batches_draw_from_the_first_records_only():
    records = [record(n) for n in [5, 9, 3, 7, 8, 6, 4, 10]]
    first = [1, 3, 4]
    stream = packed_batches(records, 2, ROW, 0, first=first, opening_batches=3)
    for _ in range(3):
        assert set(items(next(stream))) <= set(first)
    seen = collections.Counter(dict.fromkeys(range(len(records)), 0))
    for batch in itertools.islice(stream, 10):
        seen.update(items(batch))
        assert max(seen.values()) - min(seen.values()) <= 1
    assert min(seen.values()) > 1


def test_errors():
    with pytest.raises(ValueError, match="record 1 has 17 tokens"):
        packed_batches([record(3), record(17)], 1, ROW, 0)
    with pytest.raises(ValueError, match="no records"):
        packed_batches([], 1, ROW, 0)
    with pytest.raises(ValueError, match="opening_batches=2 needs `first`"):
        packed_batches([record(3)], 1, ROW, 0, opening_batches=2)
    with pytest.raises(ValueError, match="state is of 2 records"):
        packed_batches([record(3)], 1, ROW, 0).set_state({"batches": 0, "cursor": 0, "pending": [], "records": 2})


def test_data_does_not_know_environments():
    program = (
        "import pkgutil, importlib, sys, glm_jax.data as d;"
        "[importlib.import_module(f'glm_jax.data.{m.name}') for m in pkgutil.iter_modules(d.__path__)];"
        "sys.exit('glm_jax.environments' in sys.modules or 'gymnasium' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
