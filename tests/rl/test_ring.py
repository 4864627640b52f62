"""The ring against a model of it, against threads, and against misuse."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from glm_jax.data.trajectory import Segment, Status, Trajectory
from glm_jax.rl.ring import Header, RingError, RoutingShape, TrajectoryRing

ROW = 12


def make_header(rollout_id: int, start_version: int = 0) -> Header:
    prompt_id = rollout_id // 4
    return Header(rollout_id, prompt_id, prompt_id + 1, "glm_jax/Calculator-v0", start_version, rollout_id % 3, prompt_id * 7)


def make_trajectory(rollout_id: int, length: int, status=Status.COMPLETED, routing: RoutingShape | None = None, version=0) -> Trajectory:
    """Every array is a function of the id, so that a torn or mixed record is seen."""
    t = np.arange(length)
    segment = Segment(
        tokens=(rollout_id * 31 + t).astype(np.int32),
        loss_mask=((rollout_id + t) % 2).astype(np.uint8),
        logp=(-(rollout_id % 1000) - t / 16).astype(np.float32),
        versions=np.full(length, version, np.int32),
        experts=None if routing is None else np.full((length, *routing.experts), rollout_id % 100, np.int16),
        selections=None if routing is None else np.full((length, *routing.selections), rollout_id % 1000, np.int16),
    )
    header = make_header(rollout_id)
    return Trajectory(
        rollout_id, header.prompt_id, header.environment, (segment,) if length else (), rollout_id / 3, status,
        header.attempt, header.task_seed, started=1.5, finished=float(rollout_id),
    )  # fmt: skip


def assert_same(a: Trajectory, b: Trajectory) -> None:
    for field in ("rollout_id", "prompt_id", "environment", "reward", "status", "attempt", "task_seed", "started", "finished"):
        assert getattr(a, field) == getattr(b, field), field
    assert len(a.segments) == len(b.segments)
    for x, y in zip(a.segments, b.segments, strict=True):
        for field in ("tokens", "loss_mask", "logp", "versions", "experts", "selections"):
            left, right = getattr(x, field), getattr(y, field)
            assert (left is None) == (right is None), field
            if left is not None:
                assert left.dtype == right.dtype
                np.testing.assert_array_equal(left, right)


class RingMachine(RuleBasedStateMachine):
    """Whatever the order of the two sides' operations, the ring is: sets of slots by owner, and what was written is what is read."""

    LANES, SLOTS = 2, 3

    def __init__(self):
        super().__init__()
        self.ring = TrajectoryRing(self.LANES, self.SLOTS, ROW)
        self.next_id = 0
        self.acquired, self.running, self.written, self.held, self.leased = [], {}, {}, {}, {}  # the last four: rollout id -> what is known

    def taken(self, lane: int) -> int:
        everything = [*self.running.values(), *self.written.values(), *self.held.values(), *self.leased.values()]
        return sum(entry[0] == lane for entry in everything) + sum(entry[0] == lane for entry in self.acquired)

    @rule(lane=st.integers(0, LANES - 1))
    def acquire(self, lane):
        assert self.ring.lanes[lane].available == self.SLOTS - self.taken(lane)
        slot = self.ring.lanes[lane].acquire()
        assert (slot is None) == (self.taken(lane) == self.SLOTS)
        if slot is not None:
            self.acquired.append((lane, slot))

    @precondition(lambda self: self.acquired)
    @rule(version=st.integers(0, 3), data=st.data())
    def reserve(self, version, data):
        lane, slot = self.acquired.pop(data.draw(st.integers(0, len(self.acquired) - 1)))
        self.ring.lanes[lane].reserve(slot, make_header(self.next_id, version))
        self.running[self.next_id] = (lane, slot, version)
        self.next_id += 1

    @precondition(lambda self: self.running)
    @rule(length=st.integers(0, ROW), status=st.sampled_from(Status), data=st.data())
    def write(self, length, status, data):
        rollout_id = data.draw(st.sampled_from(sorted(self.running)))
        lane, slot, version = self.running.pop(rollout_id)
        trajectory = make_trajectory(rollout_id, length, status, version=version)
        self.ring.lanes[lane].write(slot, trajectory)
        self.written[rollout_id] = (lane, version, trajectory)

    @rule()
    def poll(self):
        assert self.ring.poll() == len(self.written)
        self.held |= self.written
        self.written = {}

    @precondition(lambda self: self.held)
    @rule(n=st.integers(1, 3))
    def lease_the_oldest(self, n):
        tickets = self.ring.ready()[:n]
        for ticket, trajectory in zip(tickets, self.ring.lease(tickets), strict=True):
            lane, version, written = self.held.pop(trajectory.rollout_id)
            assert_same(trajectory, written)
            for field in ("status", "oldest_version", "token_count"):
                assert getattr(ticket, field) == getattr(written, field), field
            self.leased[trajectory.rollout_id] = (lane, version, written, ticket)

    @precondition(lambda self: self.leased or self.held)
    @rule(data=st.data())
    def release_or_evict(self, data):
        tickets = {ticket.header.rollout_id: ticket for ticket in self.ring.ready()} | {i: entry[3] for i, entry in self.leased.items()}
        rollout_id = data.draw(st.sampled_from(sorted(tickets)))
        self.ring.release([tickets[rollout_id]])
        self.held.pop(rollout_id, None)
        self.leased.pop(rollout_id, None)
        with pytest.raises(RingError, match="released"):
            self.ring.release([tickets[rollout_id]])

    @invariant()
    def slots_are_accounted_for(self):
        running, ready, leased = len(self.running), len(self.written) + len(self.held), len(self.leased)
        free = self.LANES * self.SLOTS - running - ready - leased
        assert self.ring.count() == {"free": free, "running": running, "ready": ready, "leased": leased}
        assert sorted(self.ring.live_ids()) == sorted([*self.running, *self.written, *self.held, *self.leased])

    @invariant()
    def the_oldest_comes_first(self):
        expected = sorted((entry[1], rollout_id) for rollout_id, entry in self.held.items())
        assert [(t.header.start_version, t.header.rollout_id) for t in self.ring.ready()] == expected


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def run_threads(records: int, lanes: int, slots: int, deadline_s: float) -> None:
    """Producers and the learner at full speed; each record proves itself by its content."""
    ring = TrajectoryRing(lanes, slots, ROW)
    per_lane = records // lanes
    ending = threading.Event()
    failures = []

    def produce(lane, first):
        try:
            for rollout_id in range(first, first + per_lane):
                while (slot := lane.acquire()) is None:
                    if ending.is_set():
                        return
                    time.sleep(0)
                lane.reserve(slot, make_header(rollout_id))
                lane.write(slot, make_trajectory(rollout_id, 1 + rollout_id % ROW))
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=produce, args=(lane, i * per_lane)) for i, lane in enumerate(ring.lanes)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # with a GIL: interrupt everywhere, not only where a thread waits
    for thread in threads:
        thread.start()
    seen = np.zeros(per_lane * lanes, np.int32)
    ramp, done, deadline = np.arange(ROW), 0, time.monotonic() + deadline_s
    try:
        while done < len(seen):
            assert not failures and time.monotonic() < deadline, (done, failures)
            if not ring.poll():
                time.sleep(0)
                continue
            tickets = ring.ready()
            for trajectory in ring.lease(tickets):
                i, segment = trajectory.rollout_id, trajectory.segments[0]
                n = len(segment)
                assert n == 1 + i % ROW
                assert (segment.tokens == i * 31 + ramp[:n]).all()
                assert (segment.logp == -(i % 1000) - ramp[:n] / 16).all()
                assert trajectory.reward == i / 3 and trajectory.finished == i
                seen[i] += 1
            ring.release(tickets)
            done += len(tickets)
    finally:
        sys.setswitchinterval(interval)
        ending.set()
        for thread in threads:
            thread.join()
    assert (seen == 1).all()
    assert ring.count() == {"free": lanes * slots, "running": 0, "ready": 0, "leased": 0}
    assert ring.poll() == 0 and ring.live_ids() == []


def test_threads_lose_duplicate_and_tear_nothing():
    run_threads(records=100_000, lanes=4, slots=7, deadline_s=120)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_million_records():
    run_threads(records=1_000_000, lanes=4, slots=7, deadline_s=1200)


def test_threads_through_a_single_slot():
    run_threads(records=2_000, lanes=2, slots=1, deadline_s=60)


class Interrupted:
    """A counter at whose publication the other thread runs at once: the worst moment, without waiting for it."""

    def __init__(self, counter, other_thread):
        self.get, self.increment_and_get, self._set, self._other_thread = counter.get, counter.increment_and_get, counter.set, other_thread

    def set(self, value):
        self._set(value)
        self._other_thread()


def test_what_is_published_is_complete_at_that_very_moment():
    ring = TrajectoryRing(1, 2, ROW)
    lane = ring.lanes[0]
    leased, refilled = [], []

    def learner():
        assert ring.poll() == 1
        tickets = ring.ready()
        leased.extend(zip(tickets, ring.lease(tickets), strict=True))

    def producer():
        lane.reserve(slot := lane.acquire(), make_header(1000 + len(refilled)))
        refilled.append(slot)

    lane._ready._tail = Interrupted(lane._ready._tail, learner)
    lane._free._tail = Interrupted(lane._free._tail, producer)
    slots = [lane.acquire(), lane.acquire()]
    for rollout_id, slot in enumerate(slots):
        lane.reserve(slot, make_header(rollout_id))
    for rollout_id in (1, 0):  # not in the order of the slots
        lane.write(slots[rollout_id], make_trajectory(rollout_id, ROW))
        assert_same(leased[-1][1], make_trajectory(rollout_id, ROW))
    ring.release([ticket for ticket, _ in leased])
    assert refilled == [slots[1], slots[0]]
    assert ring.live_ids() == [1001, 1000]


def test_counters_wrap_around_the_slots():
    ring = TrajectoryRing(1, 3, ROW)
    lane = ring.lanes[0]
    for rollout_id in range(50):
        lane.reserve(slot := lane.acquire(), make_header(rollout_id))
        lane.write(slot, make_trajectory(rollout_id, 5))
        assert ring.poll() == 1
        tickets = ring.ready()
        (trajectory,) = ring.lease(tickets)
        assert_same(trajectory, make_trajectory(rollout_id, 5))
        ring.release(tickets)
    assert lane.available == 3


def test_a_full_ring_is_back_pressure_and_loses_nothing():
    ring = TrajectoryRing(1, 2, ROW)
    lane = ring.lanes[0]
    for rollout_id in (0, 1):
        lane.reserve(slot := lane.acquire(), make_header(rollout_id))
        lane.write(slot, make_trajectory(rollout_id, 3))
    assert lane.available == 0 and lane.acquire() is None
    ring.poll()
    assert lane.acquire() is None, "a slot is free when it is released, not when it is seen"
    ring.release(ring.ready()[:1])
    assert lane.acquire() is not None
    assert [t.header.rollout_id for t in ring.ready()] == [1]


def test_leased_arrays_are_copies():
    ring = TrajectoryRing(1, 1, ROW)
    lane = ring.lanes[0]
    lane.reserve(slot := lane.acquire(), make_header(1))
    lane.write(slot, make_trajectory(1, 4))
    ring.poll()
    tickets = ring.ready()
    (trajectory,) = ring.lease(tickets)
    ring.release(tickets)
    lane.reserve(slot := lane.acquire(), make_header(2))
    lane.write(slot, make_trajectory(2, 4))
    assert_same(trajectory, make_trajectory(1, 4))


def test_payloads_survive_a_restart():
    routing = RoutingShape(experts=(2, 3), selections=(1, 4))
    ring = TrajectoryRing(2, 4, ROW, routing)
    for rollout_id in range(6):
        lane = ring.lanes[rollout_id % 2]
        lane.reserve(slot := lane.acquire(), make_header(rollout_id, start_version=5 - rollout_id))
        if rollout_id != 3:  # still running: not a payload
            lane.write(slot, make_trajectory(rollout_id, rollout_id * 2, routing=routing))
    ring.poll()
    ring.lease(ring.ready()[:2])
    payloads = ring.payloads()
    assert [header.rollout_id for header, _ in payloads] == [5, 4, 2, 1, 0]

    restored = TrajectoryRing(3, 2, ROW, routing)
    restored.restore(payloads)
    assert restored.count() == {"free": 1, "running": 0, "ready": 5, "leased": 0}
    tickets = restored.ready()
    assert [ticket.header for ticket in tickets] == [header for header, _ in payloads]
    for trajectory in restored.lease(tickets):
        assert_same(trajectory, make_trajectory(trajectory.rollout_id, trajectory.rollout_id * 2, routing=routing))

    with pytest.raises(ValueError, match="5 saved trajectories do not fit into 4 slots"):
        TrajectoryRing(2, 2, ROW, routing).restore(payloads)


def replaced(trajectory: Trajectory, **changes) -> Trajectory:
    return Trajectory(**{**vars(trajectory), **changes})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: replaced(t, rollout_id=2), "rollout_id is 2, its slot was reserved for 1"),
        (lambda t: replaced(t, attempt=9), "attempt is 9"),
        (lambda t: replaced(t, segments=t.segments * 2), "has 2 segments"),
        (lambda t: make_trajectory(1, ROW + 1), f"{ROW + 1} tokens; a slot holds {ROW}"),
        (lambda t: replaced(t, segments=(Segment(**{**vars(t.segments[0]), "tokens": np.zeros(4, np.int64)}),)), "tokens is int64"),
        (lambda t: make_trajectory(1, 4, routing=RoutingShape((2, 3), (1, 4))), "has a record of experts and the ring does not"),
    ],
)
def test_unfit_trajectories_are_refused_and_the_slot_stays_running(change, message):
    ring = TrajectoryRing(1, 1, ROW)
    lane = ring.lanes[0]
    lane.reserve(slot := lane.acquire(), make_header(1))
    good = make_trajectory(1, 4)
    with pytest.raises(ValueError, match=message):
        lane.write(slot, change(good))
    assert ring.poll() == 0 and ring.count()["running"] == 1
    lane.write(slot, good)
    assert ring.poll() == 1


def test_routing_is_required_once_asked_for():
    routing = RoutingShape(experts=(2, 3), selections=(1, 4))
    lane = TrajectoryRing(1, 2, ROW, routing).lanes[0]
    lane.reserve(slot := lane.acquire(), make_header(1))
    with pytest.raises(ValueError, match="no record of experts"):
        lane.write(slot, make_trajectory(1, 4))
    with pytest.raises(ValueError, match="experts is int16"):
        lane.write(slot, make_trajectory(1, 4, routing=RoutingShape((2, 2), (1, 4))))
    lane.write(slot, make_trajectory(1, 0, Status.ENVIRONMENT_FAILURE))


def test_slots_used_out_of_turn_are_refused():
    ring = TrajectoryRing(1, 2, ROW)
    lane = ring.lanes[0]
    slot = lane.acquire()
    with pytest.raises(RingError, match="FREE, not RUNNING"):
        lane.write(slot, make_trajectory(1, 4))
    lane.reserve(slot, make_header(1))
    with pytest.raises(RingError, match="RUNNING, not FREE"):
        lane.reserve(slot, make_header(2))
    lane.write(slot, make_trajectory(1, 4))
    with pytest.raises(RingError, match="READY, not RUNNING"):
        lane.write(slot, make_trajectory(1, 4))
    ring.poll()
    tickets = ring.ready()
    ring.lease(tickets)
    with pytest.raises(RingError, match="LEASED, not READY"):
        ring.lease(tickets)


def test_refuses_rings_that_cannot_work():
    with pytest.raises(ValueError, match="needs lanes"):
        TrajectoryRing(1, 0, ROW)
    with pytest.raises(ValueError, match="int16"):
        TrajectoryRing(1, 1, 2**15 + 1, RoutingShape(selections=(1, 1)))


def test_ring_and_ledger_bring_in_no_jax():
    imports = "import sys, glm_jax.rl.staleness, glm_jax.rl.groups; from glm_jax.rl import TrajectoryRing, Ledger"
    code = f"{imports}; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
