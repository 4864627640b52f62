"""Every segment is placed exactly once, whole, and every field follows it."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_jax.data.packing import pack, pack_segments
from glm_jax.data.trajectory import Segment

ROW = 24
lengths_strategy = st.lists(st.integers(1, ROW), max_size=40)


def random_segment(rng, length, experts=True, selections=True):
    mask = rng.integers(0, 2, length).astype(np.uint8)
    mask[0] = 0
    return Segment(
        tokens=rng.integers(0, 288, length).astype(np.int32),
        loss_mask=mask,
        logp=rng.normal(size=length).astype(np.float32),
        versions=np.where(mask, rng.integers(0, 9, length), -1).astype(np.int32),
        experts=rng.integers(0, 8, (length, 2, 3)).astype(np.int16) if experts else None,
        selections=rng.integers(-1, length, (length, 2, 4)).astype(np.int16) if selections else None,
    )


def plain_best_fit_decreasing(lengths, row_length):
    """The algorithm as textbooks put it, quadratic."""
    rows, room = [], []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [r for r in range(len(rows)) if room[r] >= lengths[item]]
        if fits:
            row = min(fits, key=lambda r: (room[r], r))
        else:
            row = len(rows)
            rows.append([])
            room.append(row_length)
        rows[row].append(item)
        room[row] -= lengths[item]
    return rows


@given(lengths=lengths_strategy)
def test_pack_is_best_fit_decreasing(lengths):
    rows = pack(lengths, ROW)
    assert rows == plain_best_fit_decreasing(lengths, ROW)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= ROW for row in rows)


@given(lengths=lengths_strategy, spare=st.integers(0, 2), seed=st.integers(0, 99), data=st.data())
def test_every_segment_lies_whole_in_one_row(lengths, spare, seed, data):
    rng = np.random.default_rng(seed)
    segments = [random_segment(rng, n) for n in lengths]
    rows = max(1, len(pack(lengths, ROW)) + spare)
    batch = pack_segments(segments, ROW, rows)

    for field, dtype in {
        "tokens": np.int32,
        "segment_ids": np.int32,
        "positions": np.int32,
        "loss_mask": np.float32,
        "behaviour_logp": np.float32,
        "versions": np.int32,
        "item": np.int32,
    }.items():
        assert getattr(batch, field).shape == (rows, ROW) and getattr(batch, field).dtype == dtype, field

    for i, segment in enumerate(segments):
        row, at = np.nonzero(batch.item == i)
        assert len(row) == len(segment) and (row == row[0]).all() and (np.diff(at) == 1).all()
        place = (row[0], slice(at[0], at[0] + len(segment)))
        np.testing.assert_array_equal(batch.tokens[place], segment.tokens)
        np.testing.assert_array_equal(batch.positions[place], np.arange(len(segment)))
        np.testing.assert_array_equal(batch.loss_mask[place], segment.loss_mask)
        np.testing.assert_array_equal(batch.behaviour_logp[place], segment.logp)
        np.testing.assert_array_equal(batch.versions[place], segment.versions)
        np.testing.assert_array_equal(batch.experts[place], segment.experts)
        moved = np.where(segment.selections >= 0, segment.selections + at[0], -1)
        np.testing.assert_array_equal(batch.selections[place], moved)
        assert len(np.unique(batch.segment_ids[place])) == 1

    padding = batch.item < 0
    assert (batch.segment_ids == 0).sum() == padding.sum() == rows * ROW - sum(lengths)
    for field, fill in {
        "tokens": 0,
        "segment_ids": 0,
        "positions": 0,
        "loss_mask": 0,
        "behaviour_logp": 0,
        "versions": -1,
        "experts": -1,
        "selections": -1,
    }.items():
        value = getattr(batch, field)
        assert value is None or (value[padding] == fill).all(), field
    for ids in batch.segment_ids:  # 1, 2, … from the left, then padding
        used = ids[ids > 0]
        assert (ids[: len(used)] > 0).all() and set(used) == set(range(1, len(set(used)) + 1)) and (np.diff(used) >= 0).all()


def test_replay_records_need_every_segment():
    rng = np.random.default_rng(0)
    batch = pack_segments([random_segment(rng, 5), random_segment(rng, 6, experts=False, selections=False)], ROW, 1)
    assert batch.experts is None and batch.selections is None
    assert pack_segments([random_segment(rng, 5), random_segment(rng, 6, selections=False)], ROW, 1).experts.dtype == np.int16
    assert pack_segments([], ROW, 2).experts is None


def test_selections_of_a_long_row_do_not_overflow():
    rng = np.random.default_rng(0)
    segment = random_segment(rng, 20_000)
    assert pack_segments([segment], 32_767, 1).selections.dtype == np.int16
    batch = pack_segments([segment, segment], 40_000, 1)
    assert batch.selections.dtype == np.int32 and batch.selections.max() == int(segment.selections.max()) + 20_000


def test_errors_name_the_segment():
    rng = np.random.default_rng(0)
    fits, long = random_segment(rng, ROW), random_segment(rng, ROW + 1)
    with pytest.raises(ValueError, match=f"segment 1 has {ROW + 1} tokens"):
        pack_segments([fits, long], ROW, 2)
    with pytest.raises(ValueError, match="segment 1 has 0 tokens"):
        pack([3, 0], ROW)
    with pytest.raises(ValueError, match=f"2 segments of {2 * ROW} tokens need 2 rows of {ROW}, but the batch has 1"):
        pack_segments([fits, fits], ROW, 1)
    long.loss_mask[0] = 1
    with pytest.raises(ValueError, match="segment 1 has loss mask 1 on its first token"):
        pack_segments([fits, long], 2 * ROW, 2)


def test_no_jax_is_imported():
    code = "import sys, glm_jax.data.packing, glm_jax.data.chat; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
