"""Several processes' RL in one checkpoint: each gets its own back, and another number of processes gets books that balance."""

import json

import numpy as np
import pytest

from glm_jax.data.trajectory import Segment, Status, Trajectory
from glm_jax.rl.hosts import own, pack, share, unpack
from glm_jax.rl.ledger import Ledger
from glm_jax.rl.loop import Snapshot
from glm_jax.rl.payloads import pack_payloads, unpack_payloads
from glm_jax.rl.ring import Header


def snapshot(process):
    """Of six rollouts of three prompts two are trained, one is dropped, two are finished and one runs."""
    ledger = Ledger()
    for prompt_id in (process, process + 2, process + 4):
        ledger.issue(prompt_id, ledger.new_ids(2))
    ledger.trained([0, 1])
    ledger.dropped([2], "stale" if process else "deadline")
    payloads = []
    for rollout_id in (4, 5):
        header = Header(rollout_id, process + 4, 4, "e", 3, 0, 10 + process, rollout_id)
        segment = Segment(np.full(3, process, np.int32), np.ones(3, np.uint8), np.zeros(3, np.float32), np.zeros(3, np.int32))
        payloads.append((header, Trajectory(rollout_id, process + 4, "e", (segment,), 1.0, Status.COMPLETED, 0, 10 + process, 0.0, 1.0)))
    document = {
        "updates": 3, "version": 3, "ledger": ledger.to_state(), "prompts": {"cursor": 6 + process}, "trained_unpublished": 2, "live": 3}
    return Snapshot(document, pack_payloads(payloads))


@pytest.fixture
def snapshots():
    packed = pack(snapshot(0), 0) | pack(snapshot(1), 1)
    return unpack(packed)


def test_as_many_processes_get_their_own_back(snapshots):
    for process in range(2):
        own, saved = share(snapshots, process, 2), snapshot(process)
        assert own.document == json.loads(json.dumps(saved.document)) and own.payloads.keys() == saved.payloads.keys()
        for name, array in saved.payloads.items():
            np.testing.assert_array_equal(own.payloads[name], array)


def test_what_has_not_gone_on_is_saved_again_once():
    packed = {f"{process}/{name}": np.zeros(process) for process in range(5) for name in ("a", "document")}
    shares = [own(packed, index, 2) for index in range(2)]
    assert not shares[0].keys() & shares[1].keys() and shares[0] | shares[1] == packed
    assert set(shares[1]) == {"1/a", "1/document", "3/a", "3/document"} and own(packed, 0, 1) == packed


def test_one_process_takes_over_all_ledgers_and_every_finished_rollout(snapshots):
    whole = share(snapshots, 0, 1)
    ledger = Ledger.from_state(json.loads(json.dumps(whole.document["ledger"])))  # which checks that it balances
    survivors = unpack_payloads(whole.payloads)
    assert [int(trajectory.segments[0].tokens[0]) for _, trajectory in survivors] == [0, 0, 1, 1]
    ids = [header.rollout_id for header, _ in survivors]
    assert len(set(ids)) == 4 and set(ids) < ledger.open_ids()
    assert [header.group_id for header, _ in survivors] == [ids[0], ids[0], ids[2], ids[2]]
    assert ledger.resume(ids) == {2: 1, 3: 1} and ledger.pending_prompts() == [2, 3]
    ledger.check(ids)
    assert ledger.metrics(4) == {
        "ledger/issued": 12, "ledger/trained": 4, "ledger/live": 4, "ledger/prompts_given_up": 0, "ledger/dropped/deadline": 1,
        "ledger/dropped/stale": 1, "ledger/dropped/reissued": 2}
    assert min(ledger.new_ids(2)) > max(ids) and whole.document["prompts"] == {"cursor": 7}
    assert whole.document["trained_unpublished"] == 4 and whole.document["updates"] == 3


def test_another_number_of_processes_begins_the_open_rollouts_anew(snapshots):
    shares = [share(snapshots, index, 4) for index in range(4)]
    ledgers = [Ledger.from_state(each.document["ledger"]) for each in shares]
    assert all(unpack_payloads(each.payloads) == [] for each in shares)
    assert set(ledgers[0].resume([])) == {2, 3, 4, 5} and not any(ledger.open_ids() for ledger in ledgers)
    total = [ledger.metrics(0) for ledger in ledgers]
    assert sum(each["ledger/issued"] for each in total) == 12 and total[0]["ledger/dropped/reissued"] == 6
    assert [each.document["prompts"]["cursor"] for each in shares] == [7, 8, 9, 10]
    assert [each.document["trained_unpublished"] for each in shares] == [1, 1, 1, 1]
