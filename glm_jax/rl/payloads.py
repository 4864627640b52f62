"""Finished trajectories as a few numpy arrays, for a checkpoint; see TrajectoryRing.payloads and .restore. JAX-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from glm_jax.data.trajectory import Segment, Status, Trajectory
from glm_jax.rl.ring import Header

_HEADER = tuple(field.name for field in dataclasses.fields(Header))
_SHARED = ("rollout_id", "prompt_id", "environment", "attempt", "task_seed")  # in the header and in the trajectory
_SEGMENT = tuple(field.name for field in dataclasses.fields(Segment))


def pack_payloads(payloads: Sequence[tuple[Header, Trajectory]]) -> dict[str, np.ndarray]:
    """N trajectories with S segments in all, of P tokens in all. For numpy.savez; nothing is pickled.

    header/FIELD     [N]        int64, environment str
    reward, started, finished   float64 [N];  status: str [N], a Status value
    segments         int64 [N]  segments of each trajectory
    lengths          int64 [S]  tokens of each segment
    segment/FIELD    [P, …]     the segments' arrays end to end; of experts and selections those that are there
    recorded/FIELD   bool [S]   whether the segment has the array

    Raises ValueError when a header is not its trajectory's, or when segments differ in an array's dtype or in its shape beyond tokens.
    """
    for header, trajectory in payloads:
        if wrong := [name for name in _SHARED if getattr(header, name) != getattr(trajectory, name)]:
            raise ValueError(f"rollout {trajectory.rollout_id}: its header has another {', '.join(wrong)}")
    trajectories = [trajectory for _, trajectory in payloads]
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    packed = {
        f"header/{name}": np.array([getattr(header, name) for header, _ in payloads], np.str_ if name == "environment" else np.int64)
        for name in _HEADER
    }
    for name in ("reward", "started", "finished"):
        packed[name] = np.array([getattr(trajectory, name) for trajectory in trajectories], np.float64)
    packed["status"] = np.array([trajectory.status.value for trajectory in trajectories], np.str_)
    packed["segments"] = np.array([len(trajectory.segments) for trajectory in trajectories], np.int64)
    packed["lengths"] = np.array([len(segment) for segment in segments], np.int64)
    for name in _SEGMENT:
        arrays = [getattr(segment, name) for segment in segments]
        present = [array for array in arrays if array is not None]
        if len(kinds := {(str(array.dtype), array.shape[1:]) for array in present}) > 1:
            raise ValueError(f"segments differ in {name}: {sorted(kinds)}")
        packed[f"recorded/{name}"] = np.array([array is not None for array in arrays], bool)
        packed[f"segment/{name}"] = np.concatenate(present) if present else np.zeros(0)
    return packed


def unpack_payloads(packed: dict[str, np.ndarray]) -> list[tuple[Header, Trajectory]]:
    """The payloads again, equal in every bit and dtype; their arrays own their memory."""
    pieces = {name: iter(_split(packed, name)) for name in _SEGMENT}
    payloads = []
    for i, count in enumerate(packed["segments"].tolist()):
        header = Header(**{name: packed[f"header/{name}"][i].item() for name in _HEADER})
        segments = tuple(Segment(**{name: next(pieces[name]) for name in _SEGMENT}) for _ in range(count))
        reward, started, finished = (packed[name][i].item() for name in ("reward", "started", "finished"))
        trajectory = Trajectory(
            segments=segments, reward=reward, status=Status(packed["status"][i].item()), started=started, finished=finished,
            **{name: getattr(header, name) for name in _SHARED},
        )  # fmt: skip
        payloads.append((header, trajectory))
    return payloads


def _split(packed: dict[str, np.ndarray], name: str) -> list[np.ndarray | None]:
    recorded, lengths = packed[f"recorded/{name}"], packed["lengths"]
    ends = np.cumsum(np.where(recorded, lengths, 0))
    array = packed[f"segment/{name}"]
    return [array[end - n : end].copy() if has else None for has, end, n in zip(recorded, ends, lengths, strict=True)]
