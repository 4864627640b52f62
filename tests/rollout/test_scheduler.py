"""The bookkeeping against a device made of lists: whatever is submitted, cancelled and released, the cache holds every id but the last."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_jax.rollout import EngineConfig, PrefixError, SamplingParams
from glm_jax.rollout.scheduler import Request, Scheduler

STOP = 1


class ListDevice:
    """What programs.prefill and programs.decode do, with a list of fed ids per slot and random samples."""

    def __init__(self, config, random):
        self.config, self.random = config, random
        self.fed = [[] for _ in range(config.slots)]
        self.token, self.remaining = [0] * config.slots, [0] * config.slots
        self.active = np.zeros(config.slots, bool)

    def _sample(self, slot):
        self.token[slot] = self.random.randint(1, 4)
        self.remaining[slot] -= 1
        self.active[slot] = self.remaining[slot] > 0 and self.token[slot] != STOP
        return self.token[slot]

    def prefill(self, rows):
        result = np.zeros((3, len(rows)), np.int32)
        for i, row in enumerate(rows):
            slot = row["slot"]
            if slot == self.config.slots:
                continue
            assert row["count"] > 0 and row["start"] <= len(self.fed[slot])
            self.fed[slot] = self.fed[slot][: row["start"]] + row["tokens"][: row["count"]].tolist()
            self.active[slot] = False
            if row["sample"]:
                self.remaining[slot] = row["budget"]
                result[0, i] = self._sample(slot)
            result[2, i] = self.active[slot]
        return result

    def decode(self, enabled):
        self.active &= enabled
        tokens = np.full((self.config.decode_steps, self.config.slots), -1, np.int32)
        for step in range(self.config.decode_steps):
            for slot in np.flatnonzero(self.active):
                self.fed[slot].append(self.token[slot])
                tokens[step, slot] = self._sample(slot)
        return np.concatenate([tokens, np.zeros_like(tokens), self.active[None]])


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_every_id_but_the_last_is_cached(random, in_session_order):
    config = EngineConfig(slots=3, max_length=14, decode_steps=2, prefill_rows=2, prefill_chunk=3)
    scheduler, device = Scheduler(config, in_session_order), ListDevice(config, random)
    ids = {}  # session -> full ids as its caller knows them
    waiting = {}  # session -> request
    sessions = 0

    def settle(ended):
        for request, completion in ended:
            assert waiting.pop(request.session) is request
            slot = scheduler._slot_of[request.session]
            ids[request.session] = request.tokens.tolist() + completion.tokens.tolist()
            assert device.fed[slot] == ids[request.session][:-1]
            assert scheduler.cached[slot] == len(device.fed[slot])
            assert (completion.finish_reason == "stop") == (completion.tokens[-1] == STOP)
            full = len(completion.tokens) == request.params.max_tokens or len(ids[request.session]) == config.max_length
            assert completion.finish_reason == "stop" or full

    for _ in range(60):
        move = random.random()
        idle = [session for session in ids if session not in waiting]
        if move < 0.3:
            if not idle or random.random() < 0.5:
                session, sessions = sessions, sessions + 1
                ids[session] = []
            else:
                session = random.choice(idle)
            tokens = np.array(ids[session] + [random.randint(5, 9) for _ in range(random.randint(1, 4))], np.int32)
            request = Request(session, tokens, SamplingParams(max_tokens=random.randint(1, 6), stop_ids=(STOP,)))
            completion = scheduler.submit(request)
            assert (completion is not None) == (len(tokens) >= config.max_length)
            if completion is None:
                waiting[session] = request
        elif move < 0.35 and waiting:
            scheduler.cancel(waiting.pop(random.choice(sorted(waiting))))
        elif move < 0.45 and ids:
            session = random.choice(sorted(ids))
            assert scheduler.release(session) is waiting.pop(session, None)
            del ids[session]
        else:
            scheduler.admit()
            if scheduler.prefilling:
                rows, slots = scheduler.next_prefill()
                settle(scheduler.prefilled(rows, slots, device.prefill(rows), None, 0))
            settle(scheduler.decoded(device.decode(scheduler.active), None, 0))
        assert scheduler.held == len(waiting)

    for _ in range(200):
        scheduler.admit()
        while scheduler.prefilling:
            rows, slots = scheduler.next_prefill()
            settle(scheduler.prefilled(rows, slots, device.prefill(rows), None, 0))
        settle(scheduler.decoded(device.decode(scheduler.active), None, 0))
        for session in [s for s in ids if s not in waiting]:
            scheduler.release(session)
            del ids[session]
    assert not waiting and scheduler.held == scheduler.queued == 0


def request(session, tokens):
    return Request(session, np.array(tokens, np.int32), SamplingParams(max_tokens=2))


def test_a_busy_session_and_a_wrong_prefix_are_refused_and_change_nothing():
    config = EngineConfig(slots=1, max_length=8, decode_steps=1, prefill_rows=1, prefill_chunk=8)
    scheduler = Scheduler(config)
    assert scheduler.submit(request(0, [5, 6])) is None
    with pytest.raises(ValueError, match="session 0 already has a request"):
        scheduler.submit(request(0, [5, 6, 7]))
    scheduler.admit()
    rows, slots = scheduler.next_prefill()
    assert scheduler.prefilled(rows, slots, np.array([[9], [0], [1]], np.int32), None, 0) == []
    (done, completion),  = scheduler.decoded(np.array([[8], [0], [0]], np.int32), None, 0)
    assert done.session == 0 and completion.tokens.tolist() == [9, 8] and completion.finish_reason == "length"
    with pytest.raises(PrefixError, match="token 4 at position 2, but the cache was fed 9"):
        scheduler.submit(request(0, [5, 6, 4, 8, 1]))
    with pytest.raises(PrefixError, match="3 are cached"):
        scheduler.submit(request(0, [5, 6, 9]))
    assert scheduler.held == 0
    assert scheduler.submit(request(0, [5, 6, 9, 8, 1])) is None


def test_a_cancellation_that_crosses_the_answer_rolls_back_too():
    scheduler = Scheduler(EngineConfig(slots=1, max_length=8, decode_steps=1, prefill_rows=1, prefill_chunk=8))
    ended = request(0, [5, 6])
    scheduler.submit(ended)
    scheduler.admit()
    rows, slots = scheduler.next_prefill()
    scheduler.prefilled(rows, slots, np.array([[9], [0], [1]], np.int32), None, 0)
    assert len(scheduler.decoded(np.array([[8], [0], [0]], np.int32), None, 0)) == 1
    scheduler.cancel(ended)
    assert scheduler.submit(request(0, [5, 7])) is None
    scheduler.cancel(ended)  # of an earlier request: the one that is there stays
    assert scheduler.held == scheduler.prefilling == 1


@pytest.mark.parametrize("in_session_order, expected", [(False, [7, 3, 5]), (True, [3, 5, 7])])
def test_sessions_wait_in_order_of_arrival_or_of_number(in_session_order, expected):
    scheduler = Scheduler(EngineConfig(slots=1, max_length=8, decode_steps=1, prefill_rows=1, prefill_chunk=4), in_session_order)
    for session in (7, 3, 5):
        scheduler.submit(request(session, [1]))
    served = []
    for _ in range(3):
        scheduler.admit()
        served.append(scheduler._running[0].session)
        scheduler.release(served[-1])
    assert served == expected


def test_contradictory_shapes_are_refused():
    with pytest.raises(ValueError, match="prefill_rows=4 exceeds slots=2"):
        EngineConfig(slots=2, max_length=8, prefill_rows=4, prefill_chunk=8)
    with pytest.raises(ValueError, match="decode_steps must be at least 1"):
        EngineConfig(slots=2, max_length=8, decode_steps=0)
    with pytest.raises(ValueError, match="at most 8 stop ids"):
        SamplingParams(max_tokens=1, stop_ids=tuple(range(9)))
