"""The ledger against a model of it, and against every way to unbalance it."""

import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from glm_jax.rl.ledger import IdRanges, Ledger, LedgerError


@given(st.lists(st.integers(0, 60), unique=True))
def test_id_ranges_are_a_set(numbers):
    ranges = IdRanges()
    for n, number in enumerate(numbers):
        ranges.add(number)
        assert len(ranges) == n + 1
    assert [i for i in range(-1, 62) if i in ranges] == sorted(numbers)
    again = IdRanges(json.loads(json.dumps(ranges.to_state())))
    assert again.to_state() == ranges.to_state()
    gaps = sum(b > a + 1 for a, b in zip(sorted(numbers), sorted(numbers)[1:], strict=False))
    assert len(ranges.to_state()) == (gaps + 1 if numbers else 0), "neighbours share a range"


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.ledger = Ledger(max_requeues=2)
        self.open, self.closed, self.trained, self.dropped = {}, set(), 0, {}
        self.issues, self.requeues, self.any_trained = {}, {}, set()  # of prompts not settled
        self.given_up = 0

    def settle(self, prompts):
        for prompt in prompts:
            if prompt in self.any_trained and prompt not in self.open.values():
                self.forget(prompt)

    def forget(self, prompt):
        self.any_trained.discard(prompt)
        self.issues.pop(prompt)
        self.requeues.pop(prompt, None)

    def pending(self):
        return sorted(self.issues.keys() - set(self.open.values()))

    @rule(prompt=st.integers(0, 3), count=st.integers(1, 4))
    def issue(self, prompt, count):
        ids = self.ledger.new_ids(count)
        assert not (self.open.keys() | self.closed) & set(ids)
        assert self.ledger.issue(prompt, ids) == self.issues.get(prompt, 0)
        self.issues[prompt] = self.issues.get(prompt, 0) + 1
        self.open |= dict.fromkeys(ids, prompt)

    @precondition(lambda self: self.open)
    @rule(reason=st.sampled_from([None, "stale", "environment_failure"]), data=st.data())
    def close(self, reason, data):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.open)), unique=True, min_size=1))
        if reason is None:
            self.ledger.trained(ids)
            self.trained += len(ids)
            self.any_trained |= {self.open[i] for i in ids}
        else:
            self.ledger.dropped(ids, reason)
            self.dropped[reason] = self.dropped.get(reason, 0) + len(ids)
        prompts = {self.open.pop(i) for i in ids}
        self.closed |= set(ids)
        self.settle(prompts)

    @precondition(lambda self: self.pending())
    @rule(data=st.data(), answer=st.booleans())
    def answer_for_a_pending_prompt(self, data, answer):
        prompt = data.draw(st.sampled_from(self.pending()))
        allowed = self.requeues.get(prompt, 0) < 2
        if answer:
            assert self.ledger.requeue(prompt) == allowed
        else:
            self.ledger.give_up(prompt)
        if answer and allowed:
            self.requeues[prompt] = self.requeues.get(prompt, 0) + 1
        else:
            self.forget(prompt)
            self.given_up += 1

    @rule()
    def restart(self):
        self.ledger = Ledger.from_state(json.loads(json.dumps(self.ledger.to_state())))

    @rule(data=st.data())
    def crash(self, data):
        survivors = set(data.draw(st.lists(st.sampled_from(sorted(self.open)), unique=True))) if self.open else set()
        self.restart()
        lost = [i for i in self.open if i not in survivors]
        expected = {}
        for i in lost:
            prompt = self.open.pop(i)
            expected[prompt] = expected.get(prompt, 0) + 1
        assert self.ledger.resume(survivors) == expected
        self.closed |= set(lost)
        if lost:
            self.dropped["reissued"] = self.dropped.get("reissued", 0) + len(lost)
        self.settle(expected)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def closing_or_issuing_again_is_an_error_that_changes_nothing(self, data):
        old = data.draw(st.sampled_from(sorted(self.closed)))
        state = self.ledger.to_state()
        for method, arguments in {"trained": ([old],), "dropped": ([*self.open, old], "stale"), "issue": (9, [old])}.items():
            with pytest.raises(LedgerError, match=f"\\[{old}\\]"):
                getattr(self.ledger, method)(*arguments)
        assert self.ledger.to_state() == state

    @invariant()
    def balance(self):
        self.ledger.check(self.open)
        assert self.ledger.open_ids() == set(self.open)
        assert self.ledger.pending_prompts() == self.pending()
        metrics = self.ledger.metrics(live=len(self.open))
        drops = {key.removeprefix("ledger/dropped/"): n for key, n in metrics.items() if key.startswith("ledger/dropped/")}
        assert drops == self.dropped
        assert metrics["ledger/trained"] == self.trained and metrics["ledger/prompts_given_up"] == self.given_up
        assert metrics["ledger/issued"] == metrics["ledger/trained"] + sum(drops.values()) + metrics["ledger/live"]


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_check_names_what_is_wrong():
    ledger = Ledger()
    ledger.issue(0, range(3))
    ledger.trained([1])
    ledger.check([2, 0])
    with pytest.raises(LedgerError, match=r"issued 3 against trained 1 \+ dropped 0 \+ live 1; open but not live \(lost\): \[2\]"):
        ledger.check([0])
    with pytest.raises(LedgerError, match=r"live but not open: \[1\]"):
        ledger.check([0, 1, 2])
    with pytest.raises(LedgerError, match=r"live more than once: \[2\]"):
        ledger.check([0, 2, 2])
    with pytest.raises(LedgerError, match=r"lost\): \[0\]; live but not open: \[7\]"):
        ledger.check([2, 7])  # the count alone would fit


def test_long_lists_of_ids_are_cut():
    ledger = Ledger()
    ledger.issue(0, range(100))
    with pytest.raises(LedgerError, match="and 90 more"):
        ledger.check([])


def test_ids_named_twice_in_one_call():
    ledger = Ledger()
    with pytest.raises(LedgerError, match="issued before"):
        ledger.issue(0, [1, 1])
    ledger.issue(0, [1])
    with pytest.raises(LedgerError, match="closed twice"):
        ledger.trained([1, 1])
    with pytest.raises(LedgerError, match="never issued"):
        ledger.trained([5])
    ledger.check([1])


def test_a_state_that_does_not_balance_is_refused():
    ledger = Ledger()
    ledger.issue(0, range(4))
    ledger.trained([0, 1])
    state = ledger.to_state()
    for damage in ({"issued": 5}, {"trained": 1}, {"open": [[2, 0]]}, {"closed": [[0, 1]]}):
        with pytest.raises(LedgerError):
            Ledger.from_state({**state, **damage})
    with pytest.raises(LedgerError, match="not open in its ledger"):
        Ledger.from_state(state).resume([1])


def test_state_stays_small_in_a_long_run():
    ledger = Ledger()
    for prompt in range(5_000):
        ids = ledger.new_ids(4)
        ledger.issue(prompt, ids)
        ledger.trained(ids[::-1])
    assert len(json.dumps(ledger.to_state())) < 300


def test_every_moment_balances_inside_a_transaction():
    """Producers issue and start, a learner closes and ends; a fourth thread counts meanwhile."""
    ledger, live, stop = Ledger(), {}, threading.Event()
    failures = []

    def guarded(work):
        def run():
            try:
                work()
            except BaseException as failure:
                failures.append(failure)
            finally:
                stop.set() if failures else None

        return run

    def produce():
        for prompt in range(300):
            with ledger.transaction():
                ids = ledger.new_ids(2)
                ledger.issue(prompt, ids)
                live.update(dict.fromkeys(ids))

    def learn():
        while not stop.is_set() or live:
            with ledger.transaction():
                for i in list(live)[:3]:
                    ledger.trained([i])
                    del live[i]

    def count():
        while not stop.is_set():
            with ledger.transaction():
                ledger.check(list(live))

    producers = [threading.Thread(target=guarded(produce)) for _ in range(2)]
    others = [threading.Thread(target=guarded(work)) for work in (learn, count)]
    for thread in producers + others:
        thread.start()
    for thread in producers:
        thread.join()
    stop.set()
    for thread in others:
        thread.join()
    assert not failures
    ledger.check([])
    assert ledger.metrics(live=0)["ledger/trained"] == 1200
