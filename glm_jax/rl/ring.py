"""Bounded memory between the threads that roll out and the learner that trains.

A lane belongs to one producer thread (an event loop, whatever number of episodes it runs) and to the one learner. It is a preallocated slab
of slots and two single-producer single-consumer rings of slot indices:

    ready   producer → learner   slots that hold a finished rollout
    free    learner → producer   slots to fill

Whoever holds a slot's index owns the slot: an index sits in one of the rings, or with the producer (from `acquire` to `write`), or with
the learner (from `poll` to `release`). Only the owner touches the slot's memory and its state, so episodes may finish in any order, and
since an index can be in one place only, a rollout can be neither lost nor handed over twice. A lane without a free slot is back-pressure:
`acquire` returns None and nothing is overwritten. Only the learner evicts, because it is the one that owns finished slots.

Why it takes no lock. An index ring has two counters that only grow, `tail` written by its producer and `head` written by its consumer;
each location has one writer, so there is no read-modify-write race. The producer stores the entry (and before it the whole slot) and then
publishes `tail`; the consumer reads `tail`, then the entry. With the GIL the hand-over between threads orders this. Without the GIL the
order has to come from the counters: they are `cereggii.AtomicInt64`, whose `set` is an acquire-release compare-and-set. Its `get` is a
plain load in 1.0.1, which x86 orders and ARM does not, so the other side's counter is read by `increment_and_get(0)`, an acquire-release
compare-and-set of the value with itself. Everything else is numpy memory with one writer at a time. The ring itself takes no lock, and a
thread that is stopped in it stops nobody else; the interpreter's and the allocator's locks are theirs.

What this buys is bounded memory, accountable slots and no stall. It does not claim to be faster than a queue; trajectories are too few
for that to matter.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from cereggii import AtomicInt64

from glm_jax.data.trajectory import Segment, Status, Trajectory

_STATUSES = tuple(Status)
_HEADER = np.dtype([
    ("rollout_id", np.int64), ("prompt_id", np.int64), ("group_id", np.int64), ("environment", "U64"), ("start_version", np.int64),
    ("attempt", np.int64), ("task_seed", np.int64), ("sampling_seed", np.int64),
])  # fmt: skip
_OUTCOME = np.dtype([
    ("length", np.int64), ("status", np.int8), ("reward", np.float64), ("oldest_version", np.int64), ("started", np.float64),
    ("finished", np.float64),
])  # fmt: skip


class RingError(RuntimeError):
    """The ring's protocol was broken: a slot was used by somebody who does not own it, or in the wrong state."""


class State(enum.IntEnum):
    FREE = 0
    RUNNING = 1
    READY = 2
    LEASED = 3


@dataclasses.dataclass(frozen=True)
class Header:
    """What is known of a rollout before it starts. `start_version` is the weight version at that moment: the learner's order.
    `sampling_seed` differs between the rollouts of a group."""

    rollout_id: int
    prompt_id: int
    group_id: int
    environment: str
    start_version: int
    attempt: int = 0
    task_seed: int = 0
    sampling_seed: int = 0


@dataclasses.dataclass(frozen=True)
class Ticket:
    """A finished rollout that the learner holds: enough to decide on it without copying its tokens."""

    lane: int
    slot: int
    header: Header
    status: Status
    reward: float
    oldest_version: int  # as Trajectory.oldest_version, -1 when nothing was sampled
    token_count: int


@dataclasses.dataclass(frozen=True)
class RoutingShape:
    """Which routing every segment must carry; (0, 0): none. A trajectory without tokens needs none.

    experts     MoE layers, experts per token
    selections  full layers, index_topk
    """

    experts: tuple[int, int] = (0, 0)
    selections: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, model: Any) -> RoutingShape:
        """What a model of this ModelConfig records."""
        return cls(
            (model.moe_layers, model.moe.experts_per_token) if model.moe is not None else (0, 0),
            (len(model.full_layers), model.indexer.topk) if model.indexer is not None else (0, 0))


class IndexRing:
    """Slot indices from one thread to one other thread. As long as the lane has slots, so it cannot overflow."""

    def __init__(self, capacity: int, entries: Iterable[int] = ()):
        self._entries = np.zeros(capacity, np.int64)
        first = np.fromiter(entries, np.int64)
        self._entries[: len(first)] = first
        self._capacity = capacity
        self._head, self._tail = AtomicInt64(0), AtomicInt64(len(first))

    def push(self, index: int) -> None:
        """Producer side."""
        tail = self._tail.get()
        if tail - self._head.increment_and_get(0) >= self._capacity:
            raise RingError(f"index {index} does not fit: an index was handed over twice")
        self._entries[tail % self._capacity] = index
        self._tail.set(tail + 1)

    def pop(self) -> int | None:
        """Consumer side. None when empty."""
        head = self._head.get()
        if head == self._tail.increment_and_get(0):
            return None
        index = int(self._entries[head % self._capacity])
        self._head.set(head + 1)
        return index

    def __len__(self) -> int:
        return self._tail.increment_and_get(0) - self._head.increment_and_get(0)


class Lane:
    """One producer's slab. `acquire`, `reserve`, `write` and `available` are the producer's; the learner goes through TrajectoryRing."""

    def __init__(self, slots: int, row_length: int, record: RoutingShape):
        shape = (slots, row_length)
        self._slab = {
            "tokens": np.zeros(shape, np.int32),
            "loss_mask": np.zeros(shape, np.uint8),
            "logp": np.zeros(shape, np.float32),
            "versions": np.zeros(shape, np.int32),
            "experts": np.zeros(shape + record.experts, np.int16) if all(record.experts) else None,
            "selections": np.zeros(shape + record.selections, np.int16) if all(record.selections) else None,
        }
        self._row_length = row_length
        self._states = np.zeros(slots, np.int8)
        self._headers = np.zeros(slots, _HEADER)
        self._outcomes = np.zeros(slots, _OUTCOME)
        self._free = IndexRing(slots, range(slots))
        self._ready = IndexRing(slots)

    @property
    def available(self) -> int:
        """Slots that `acquire` would give now."""
        return len(self._free)

    def acquire(self) -> int | None:
        """A slot that is the producer's from now on, or None: none is free, wait. It counts as FREE until it is reserved."""
        return self._free.pop()

    def reserve(self, slot: int, header: Header) -> None:
        """Marks the slot RUNNING: a rollout has been started that will be written into it."""
        self._expect(slot, State.FREE)
        if len(header.environment) > 64:
            raise ValueError(f"environment name {header.environment!r} is longer than 64 characters")
        self._headers[slot] = tuple(getattr(header, field) for field in _HEADER.names)
        self._states[slot] = State.RUNNING

    def write(self, slot: int, trajectory: Trajectory) -> None:
        """Copies a finished rollout into its slot, which then is the learner's. Every reserved slot is written, whatever the rollout's end:
        one that failed may have no segment and says so by its status.

        Raises ValueError, and leaves the slot RUNNING, for a trajectory that is not the reserved rollout's, that has several segments,
        more than `row_length` tokens, arrays of another dtype or shape than the slab, or routing that is missing or not asked for.
        """
        self._expect(slot, State.RUNNING)
        name = f"rollout {trajectory.rollout_id}"
        header = self._header(slot)
        for field in ("rollout_id", "prompt_id", "environment", "attempt", "task_seed"):
            if getattr(header, field) != getattr(trajectory, field):
                raise ValueError(f"{name}: {field} is {getattr(trajectory, field)!r}, its slot was reserved for {getattr(header, field)!r}")
        if len(trajectory.segments) > 1:
            raise ValueError(f"{name} has {len(trajectory.segments)} segments; a slot holds one")
        length = trajectory.token_count
        if length > self._row_length:
            raise ValueError(f"{name} has {length} tokens; a slot holds {self._row_length}: shorten the episode or raise row_length")
        if length:
            self._check(name, trajectory.segments[0])
            for field, array in self._slab.items():
                if array is not None:
                    array[slot, :length] = getattr(trajectory.segments[0], field)
        status = _STATUSES.index(trajectory.status)
        self._outcomes[slot] = (length, status, trajectory.reward, trajectory.oldest_version, trajectory.started, trajectory.finished)
        self._states[slot] = State.READY
        self._ready.push(slot)

    def _check(self, name: str, segment: Segment) -> None:
        for field, array in self._slab.items():
            value = getattr(segment, field)
            if (array is None) != (value is None):
                has, keeps = ("no", "keeps it") if value is None else ("a", "does not: see TrajectoryRing(record=…)")
                raise ValueError(f"{name} has {has} record of {field} and the ring {keeps}")
            if array is not None and (value.dtype != array.dtype or value.shape[1:] != array.shape[2:]):
                kept = f"{array.dtype}{['tokens', *array.shape[2:]]}"
                raise ValueError(f"{name}: {field} is {value.dtype}{list(value.shape)}, the slab keeps {kept}")

    def _expect(self, slot: int, *states: State) -> None:
        if self._states[slot] not in states:
            raise RingError(f"slot {slot} is {State(self._states[slot]).name}, not {' or '.join(s.name for s in states)}")

    def _header(self, slot: int) -> Header:
        return Header(*self._headers[slot].item())

    def _ticket(self, number: int, slot: int) -> Ticket:
        length, status, reward, oldest_version, _, _ = self._outcomes[slot].item()
        return Ticket(number, slot, self._header(slot), _STATUSES[status], reward, oldest_version, length)

    def _copy(self, slot: int) -> Trajectory:
        header = self._header(slot)
        length, status, reward, _, started, finished = self._outcomes[slot].item()
        # Copies, for the slot is filled again after its release, and jax.device_put may alias an aligned numpy array on CPU.
        arrays = {field: None if array is None else array[slot, :length].copy() for field, array in self._slab.items()}
        return Trajectory(
            header.rollout_id, header.prompt_id, header.environment, (Segment(**arrays),) if length else (), reward,
            _STATUSES[status], header.attempt, header.task_seed, started, finished,
        )  # fmt: skip


class TrajectoryRing:
    """All lanes, and the learner's side of them. `lanes[i]` goes to producer thread i; the methods are the learner's, save where said.

    `record` says which routing is kept with each token (None: none). Memory is lanes × slots_per_lane × row_length tokens, taken at once.
    """

    def __init__(self, lanes: int, slots_per_lane: int, row_length: int, record: RoutingShape | None = None):
        if min(lanes, slots_per_lane, row_length) < 1:
            raise ValueError(f"a ring needs lanes, slots and a row length: got {lanes}, {slots_per_lane}, {row_length}")
        record = record or RoutingShape()
        if all(record.selections) and row_length > 2**15:
            raise ValueError(f"selections are int16 positions in the row: row_length {row_length} is over {2**15}")
        self.lanes = [Lane(slots_per_lane, row_length, record) for _ in range(lanes)]
        self._held: dict[tuple[int, int], Ticket] = {}

    def poll(self) -> int:
        """Takes over every slot that is on a ready ring. Returns how many."""
        before = len(self._held)
        for number, lane in enumerate(self.lanes):
            while (slot := lane._ready.pop()) is not None:
                self._held[number, slot] = lane._ticket(number, slot)
        return len(self._held) - before

    def ready(self) -> list[Ticket]:
        """Rollouts held and not leased, oldest start version first, ties by rollout id."""
        return self._order(State.READY)

    def lease(self, tickets: Sequence[Ticket]) -> list[Trajectory]:
        """Copies of the rollouts, in the order of the tickets; their slots stay taken until `release`."""
        for ticket in tickets:
            self._own(ticket, State.READY)
            self.lanes[ticket.lane]._states[ticket.slot] = State.LEASED
        return [self.lanes[ticket.lane]._copy(ticket.slot) for ticket in tickets]

    def release(self, tickets: Sequence[Ticket]) -> None:
        """Gives the slots back to their producers: after training, or, straight from READY, to drop a rollout."""
        for ticket in tickets:
            lane = self._own(ticket, State.READY, State.LEASED)
            del self._held[ticket.lane, ticket.slot]
            lane._states[ticket.slot] = State.FREE
            lane._free.push(ticket.slot)

    def count(self) -> dict[str, int]:
        """{"free", "running", "ready", "leased"}: slots by state, from any thread. Each is counted once, in a state it had meanwhile."""
        states = np.concatenate([lane._states for lane in self.lanes])
        return {state.name.lower(): int(np.sum(states == state)) for state in State}

    def live_ids(self) -> list[int]:
        """Rollout ids in slots that are not FREE, from any thread; for `Ledger.check`, inside `Ledger.transaction`."""
        return [int(i) for lane in self.lanes for i in lane._headers["rollout_id"][lane._states != State.FREE]]

    def payloads(self) -> list[tuple[Header, Trajectory]]:
        """Copies of everything finished and not yet released, for the checkpoint: LEASED and READY, oldest first."""
        self.poll()
        tickets = self._order(State.READY, State.LEASED)
        return [(ticket.header, self.lanes[ticket.lane]._copy(ticket.slot)) for ticket in tickets]

    def restore(self, payloads: Sequence[tuple[Header, Trajectory]]) -> None:
        """Puts a checkpoint's payloads back as READY, spread over the lanes. Before any producer starts: it acts for them."""
        for header, trajectory in payloads:
            lane = max(self.lanes, key=lambda lane: lane.available)
            slot = lane.acquire()
            if slot is None:
                slots = sum(self.count().values())
                raise ValueError(f"{len(payloads)} saved trajectories do not fit into {slots} slots: give the ring more")
            lane.reserve(slot, header)
            lane.write(slot, trajectory)
        self.poll()

    def _order(self, *states: State) -> list[Ticket]:
        held = [ticket for ticket in self._held.values() if self.lanes[ticket.lane]._states[ticket.slot] in states]
        return sorted(held, key=lambda ticket: (ticket.header.start_version, ticket.header.rollout_id))

    def _own(self, ticket: Ticket, *states: State) -> Lane:
        if self._held.get((ticket.lane, ticket.slot)) is not ticket:
            raise RingError(f"rollout {ticket.header.rollout_id} is not held: its slot {ticket.slot} of lane {ticket.lane} was released")
        self.lanes[ticket.lane]._expect(ticket.slot, *states)
        return self.lanes[ticket.lane]
