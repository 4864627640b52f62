"""The snapshots of several processes' RL in one checkpoint, and what each of as many or of another number of processes goes on from."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from glm_jax.rl.ledger import merge_states
from glm_jax.rl.loop import Snapshot
from glm_jax.rl.payloads import pack_payloads, unpack_payloads

_DOCUMENT = "document"


def pack(snapshot: Snapshot, process: int) -> dict[str, np.ndarray]:
    """The snapshot as arrays named PROCESS/NAME, the JSON document among them as bytes."""
    document = np.frombuffer(json.dumps(snapshot.document).encode(), np.uint8)
    return {f"{process}/{name}": array for name, array in (snapshot.payloads | {_DOCUMENT: document}).items()}


def unpack(packed: dict[str, np.ndarray]) -> list[Snapshot]:
    """The snapshots of all processes, in their order."""
    by_process: dict[int, dict[str, np.ndarray]] = collections.defaultdict(dict)
    for name, array in packed.items():
        process, _, rest = name.partition("/")
        by_process[int(process)][rest] = array
    return [
        Snapshot(json.loads(payloads.pop(_DOCUMENT).tobytes()), payloads) for _, payloads in sorted(by_process.items())]


def own(packed: dict[str, np.ndarray], index: int, count: int) -> dict[str, np.ndarray]:
    """What process `index` of `count` saves again of a checkpoint whose run has not gone on: every snapshot once."""
    return {name: array for name, array in packed.items() if int(name.partition("/")[0]) % count == index}


def share(snapshots: Sequence[Snapshot], index: int, count: int) -> Snapshot:
    """What process `index` of `count` goes on from: its own snapshot where as many were saved.

    Otherwise process 0 takes over all ledgers as one, and the others begin theirs empty. One process keeps every finished rollout; of
    several none does, for no share of theirs need be whole: all open rollouts are dropped as "reissued", and process 0 starts their prompts
    again. New prompts begin where the furthest process was, so that a few prompts of the slower ones are passed over.
    """
    if len(snapshots) == count:
        return snapshots[index]
    documents = [snapshot.document for snapshot in snapshots]
    ledger, renumbered = merge_states([document["ledger"] for document in documents] if index == 0 else [])
    survivors = []
    if count == 1:
        for snapshot, numbers in zip(snapshots, renumbered, strict=True):
            survivors += _renumber(unpack_payloads(snapshot.payloads), numbers)
    document = documents[0] | {
        "ledger": ledger, "prompts": {"cursor": max(d["prompts"]["cursor"] for d in documents) + index},
        "trained_unpublished": sum(d["trained_unpublished"] for d in documents) // count, "live": len(ledger["open"])}
    return Snapshot(document, pack_payloads(survivors))


def _renumber(payloads, numbers: dict[int, int]):
    """Headers and trajectories under their new rollout ids; a group is named after its first survivor."""
    groups: dict[int, int] = {}
    for header, trajectory in payloads:
        rollout_id = numbers[header.rollout_id]
        group_id = groups.setdefault(header.group_id, rollout_id)
        yield (
            dataclasses.replace(header, rollout_id=rollout_id, group_id=group_id), dataclasses.replace(trajectory, rollout_id=rollout_id))
