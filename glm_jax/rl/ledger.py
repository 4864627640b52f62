"""Where every rollout went. At any moment, and across crashes: issued = trained + dropped (by reason) + live.

The ledger knows which ids are open. Which are live is counted by the caller, from the ring's slots and the running episodes, and `check`
compares the two, so that a rollout that vanished or turned up twice is an error with its id and not a number that quietly fits.

Guarded by one re-entrant lock: it is asked a few times a rollout, far from any hot path. `transaction()` is that lock, for the pairs that
must be seen together: issue with the slot's reservation, close with the slot's release, and count with check.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import threading
from collections.abc import Iterable, Sequence

_SHOWN_IDS = 10


class LedgerError(RuntimeError):
    """The books do not balance, or an id was issued or closed twice."""


class IdRanges:
    """A set of ids that grows, kept as sorted disjoint half-open ranges: ids close nearly in order, so a long run stays a few ranges."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()):
        self._starts, self._ends = [], []
        for start, end in ranges:
            self._starts.append(start)
            self._ends.append(end)

    def __contains__(self, number: int) -> bool:
        after = bisect.bisect_right(self._starts, number)
        return after > 0 and number < self._ends[after - 1]

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def add(self, number: int) -> None:
        """`number` must not be in the set."""
        after = bisect.bisect_right(self._starts, number)
        joins_left = after > 0 and self._ends[after - 1] == number
        joins_right = after < len(self._starts) and self._starts[after] == number + 1
        if joins_left and joins_right:
            self._ends[after - 1] = self._ends.pop(after)
            del self._starts[after]
        elif joins_left:
            self._ends[after - 1] = number + 1
        elif joins_right:
            self._starts[after] = number
        else:
            self._starts.insert(after, number)
            self._ends.insert(after, number + 1)

    def to_state(self) -> list[list[int]]:
        return [[start, end] for start, end in zip(self._starts, self._ends, strict=True)]


@dataclasses.dataclass
class _Prompt:
    issues: int = 0  # calls of issue so far
    requeues: int = 0  # times requeue said yes
    open: int = 0  # rollouts of it that are open
    trained: bool = False  # a rollout of it was trained


class Ledger:
    """Every rollout id is issued once and closed once, by `trained` or by `dropped`; a second time is a LedgerError that changes nothing.

    A prompt is remembered until it is settled: when its open rollouts are closed and one of them was trained, it settles by itself; when
    all of them were dropped it is pending, and the caller says `requeue` (at most `max_requeues` times a prompt, then it is given up) or
    `give_up`.
    """

    def __init__(self, max_requeues: int = 3):
        self.max_requeues = max_requeues
        self._lock = threading.RLock()
        self._issued = 0
        self._trained = 0
        self._dropped = collections.Counter()
        self._given_up = 0
        self._next_id = 0
        self._open: dict[int, int] = {}  # rollout id -> prompt id
        self._closed = IdRanges()
        self._prompts: dict[int, _Prompt] = {}

    def transaction(self) -> threading.RLock:
        """`with ledger.transaction():` nobody else issues, closes or checks meanwhile."""
        return self._lock

    def new_ids(self, count: int) -> list[int]:
        """`count` rollout ids that nobody else gets and no earlier run of this ledger had."""
        with self._lock:
            self._next_id += count
            return list(range(self._next_id - count, self._next_id))

    def issue(self, prompt_id: int, rollout_ids: Iterable[int]) -> int:
        """Opens rollouts of a prompt. Returns the attempt: how often the prompt had been issued before."""
        ids = [int(i) for i in rollout_ids]
        with self._lock:
            if again := sorted({i for i in ids if i in self._open or i in self._closed or ids.count(i) > 1}):
                raise LedgerError(f"issued before: {_some(again)}")
            prompt = self._prompts.setdefault(int(prompt_id), _Prompt())
            self._open.update(dict.fromkeys(ids, int(prompt_id)))
            self._issued += len(ids)
            self._next_id = max([self._next_id, *(i + 1 for i in ids)])
            prompt.open += len(ids)
            prompt.issues += 1
            return prompt.issues - 1

    def trained(self, rollout_ids: Iterable[int]) -> None:
        """Closes rollouts that an update has used. Name each once, however often its group repeats it."""
        with self._lock:
            self._trained += self._close(rollout_ids, trained=True)

    def dropped(self, rollout_ids: Iterable[int], reason: str) -> None:
        """Closes rollouts that no update will use. `reason` is one word of the metrics: "stale", "environment_failure", "reissued", …"""
        with self._lock:
            self._dropped[reason] += self._close(rollout_ids, trained=False)

    def _close(self, rollout_ids: Iterable[int], trained: bool) -> int:
        ids = [int(i) for i in rollout_ids]
        if wrong := sorted({i for i in ids if i not in self._open or ids.count(i) > 1}):
            closed = [i for i in wrong if i in self._closed or i in self._open]
            raise LedgerError(f"closed twice: {_some(closed)}" if closed else f"closed but never issued: {_some(wrong)}")
        for i in ids:
            self._closed.add(i)
            prompt_id = self._open.pop(i)
            prompt = self._prompts[prompt_id]
            prompt.open -= 1
            prompt.trained |= trained
            if prompt.trained and not prompt.open:
                del self._prompts[prompt_id]
        return len(ids)

    def requeue(self, prompt_id: int) -> bool:
        """May this pending prompt be issued again? False, and the prompt is given up, after `max_requeues` times."""
        with self._lock:
            prompt = self._pending(prompt_id)
            if prompt.requeues >= self.max_requeues:
                self.give_up(prompt_id)
                return False
            prompt.requeues += 1
            return True

    def requeues(self, prompt_id: int) -> int:
        """How often `requeue` has allowed this prompt, which must not be settled. Restarts do not count."""
        with self._lock:
            return self._prompts[prompt_id].requeues

    def give_up(self, prompt_id: int) -> None:
        """Settles a pending prompt that will not be issued again."""
        with self._lock:
            self._pending(prompt_id)
            del self._prompts[prompt_id]
            self._given_up += 1

    def _pending(self, prompt_id: int) -> _Prompt:
        prompt = self._prompts.get(prompt_id)
        if prompt is None or prompt.open:
            raise LedgerError(f"prompt {prompt_id} " + (f"has {prompt.open} open rollouts" if prompt else "is settled or was never issued"))
        return prompt

    def pending_prompts(self) -> list[int]:
        """Prompts all of whose rollouts were dropped, neither issued again nor given up; after a crash: issue them again."""
        with self._lock:
            return sorted(prompt_id for prompt_id, prompt in self._prompts.items() if not prompt.open)

    def open_ids(self) -> set[int]:
        with self._lock:
            return set(self._open)

    def resume(self, surviving_ids: Iterable[int]) -> dict[int, int]:
        """After a restart: drops as "reissued" every open rollout that did not survive in the checkpoint's payloads.

        Returns how many each prompt lost. Those are to be issued again under new ids, beside the prompt's survivors when it has any.
        """
        with self._lock:
            surviving = {int(i) for i in surviving_ids}
            if strangers := sorted(surviving - self._open.keys()):
                raise LedgerError(f"in the checkpoint's payloads but not open in its ledger: {_some(strangers)}")
            running = sorted(self._open.keys() - surviving)
            lost = collections.Counter(self._open[i] for i in running)
            if running:
                self.dropped(running, "reissued")
            return dict(lost)

    def check(self, live_ids: Iterable[int]) -> None:
        """Raises LedgerError unless issued = trained + dropped + live and the live ids, each counted once, are exactly the open ones.

        live_ids: counted by the caller, from slots that are not FREE and from running episodes that have no slot.
        """
        live = [int(i) for i in live_ids]
        with self._lock:
            dropped = sum(self._dropped.values())
            faults = {
                "open but not live (lost)": self._open.keys() - set(live),
                "live but not open": set(live) - self._open.keys(),
                "live more than once": {i for i, n in collections.Counter(live).items() if n > 1},
            }
            if self._issued == self._trained + dropped + len(live) and not any(faults.values()):
                return
            found = "; ".join(f"{what}: {_some(sorted(ids))}" for what, ids in faults.items() if ids)
            raise LedgerError(f"issued {self._issued} against trained {self._trained} + dropped {dropped} + live {len(live)}; {found}")

    def metrics(self, live: int) -> dict[str, int]:
        """Running totals. `live` is the caller's own count, as in `check`, so that a reader of the metrics can add them up."""
        with self._lock:
            return {
                "ledger/issued": self._issued,
                "ledger/trained": self._trained,
                "ledger/live": live,
                "ledger/prompts_given_up": self._given_up,
                **{f"ledger/dropped/{reason}": number for reason, number in sorted(self._dropped.items())},
            }

    def to_state(self) -> dict:
        """For JSON: counters, next id, open ids, prompts not settled, closed ids as ranges."""
        with self._lock:
            return {
                "max_requeues": self.max_requeues,
                "issued": self._issued,
                "trained": self._trained,
                "dropped": dict(self._dropped),
                "given_up": self._given_up,
                "next_id": self._next_id,
                "open": [[i, prompt_id] for i, prompt_id in self._open.items()],
                "closed": self._closed.to_state(),
                "prompts": [[prompt_id, *dataclasses.astuple(prompt)] for prompt_id, prompt in self._prompts.items()],
            }

    @classmethod
    def from_state(cls, state: dict) -> Ledger:
        """Raises LedgerError when the state itself does not balance."""
        ledger = cls(state["max_requeues"])
        ledger._issued, ledger._trained, ledger._given_up = state["issued"], state["trained"], state["given_up"]
        ledger._dropped.update(state["dropped"])
        ledger._next_id = state["next_id"]
        ledger._open = {i: prompt_id for i, prompt_id in state["open"]}
        ledger._closed = IdRanges(state["closed"])
        ledger._prompts = {prompt_id: _Prompt(*rest) for prompt_id, *rest in state["prompts"]}
        ledger.check(ledger._open)
        dropped = sum(ledger._dropped.values())
        if len(ledger._closed) != ledger._trained + dropped:
            raise LedgerError(f"{len(ledger._closed)} closed ids against {ledger._trained} trained + {dropped} dropped")
        return ledger


def merge_states(states: Sequence[dict]) -> tuple[dict, list[dict[int, int]]]:
    """One state with the books of several ledgers, each with ids of its own, and for each ledger the new numbers of its open rollouts.

    Closed ids are numbered from 0 and open ones from there; their prompts must differ between the ledgers.
    """
    closed = sum(state["trained"] + sum(state["dropped"].values()) for state in states)
    dropped, numbers, still_open = collections.Counter(), [], []
    for state in states:
        dropped.update(state["dropped"])
        numbers.append({old: closed + len(still_open) + i for i, (old, _) in enumerate(state["open"])})
        still_open += [[numbers[-1][old], prompt_id] for old, prompt_id in state["open"]]
    total = lambda name: sum(state[name] for state in states)
    merged = {
        "max_requeues": max((state["max_requeues"] for state in states), default=Ledger().max_requeues),
        "issued": total("issued"), "trained": total("trained"), "dropped": dict(dropped), "given_up": total("given_up"),
        "next_id": closed + len(still_open), "open": still_open, "closed": [[0, closed]] if closed else [],
        "prompts": [prompt for state in states for prompt in state["prompts"]]}
    return merged, numbers


def _some(ids: list[int]) -> str:
    return str(ids) if len(ids) <= _SHOWN_IDS else f"{ids[:_SHOWN_IDS]} and {len(ids) - _SHOWN_IDS} more"
