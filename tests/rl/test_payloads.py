"""Trajectories to arrays and back."""

import dataclasses
import io
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from glm_jax.data.trajectory import Segment, Status, Trajectory
from glm_jax.rl.payloads import pack_payloads, unpack_payloads
from glm_jax.rl.ring import Header

DTYPES = {"tokens": np.int32, "loss_mask": np.uint8, "logp": np.float32, "versions": np.int32}
numbers = st.integers(-(2**62), 2**62)


@st.composite
def payload_lists(draw):
    tails = {"experts": (draw(st.integers(1, 3)), 2), "selections": (1, draw(st.integers(1, 4)))}

    def segment():
        length = draw(st.integers(0, 4))
        arrays = {name: draw(hnp.arrays(dtype, length)) for name, dtype in DTYPES.items()}
        for name, tail in tails.items():
            if draw(st.booleans()):
                arrays[name] = draw(hnp.arrays(np.int16, (length, *tail)))
        return Segment(**arrays)

    payloads = []
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.text("azé/-", max_size=6))
        header = Header(draw(numbers), draw(numbers), draw(numbers), name, draw(numbers), draw(numbers), draw(numbers))
        segments = tuple(segment() for _ in range(draw(st.integers(0, 3))))
        reward, started, finished = (draw(st.floats()) for _ in range(3))
        payloads.append((header, Trajectory(
            header.rollout_id, header.prompt_id, name, segments, reward, draw(st.sampled_from(Status)), header.attempt, header.task_seed,
            started, finished)))  # fmt: skip
    return payloads


def bits(value):
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if dataclasses.is_dataclass(value):
        return [bits(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple | list):
        return [bits(v) for v in value]
    return type(value), repr(value)


@settings(deadline=None, max_examples=150)
@given(payload_lists())
def test_round_trip_through_npz_is_exact(payloads):
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **pack_payloads(payloads))
    file.seek(0)
    with np.load(file, allow_pickle=False) as archive:
        restored = unpack_payloads(dict(archive))
    assert bits(restored) == bits(payloads)
    for _, trajectory in restored:
        for segment in trajectory.segments:
            assert all(array is None or (array.base is None and array.flags.writeable) for array in vars(segment).values())


def make(length, dtype=np.int16, environment="e"):
    arrays = {name: np.zeros(length, dtype) for name, dtype in DTYPES.items()}
    segment = Segment(**arrays, experts=np.zeros((length, 1, 1), dtype))
    return Header(1, 2, 3, environment, 0), Trajectory(1, 2, "e", (segment,), 0.0, Status.COMPLETED)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="rollout 1: its header has another environment"):
        pack_payloads([make(2, environment="f")])
    with pytest.raises(ValueError, match="segments differ in experts"):
        pack_payloads([make(2), make(3, np.int8)])


def test_imports_no_jax():
    program = "import sys, glm_jax.rl.payloads; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
