"""Which session owns which slot, and what is fed next. Pure NumPy bookkeeping, driven by the engine's thread only.

A request's ids are its prompt followed by its samples. A sampled token is fed at the next step, so during and after a request
the cache holds every id but the last: `cached == len(ids) - 1`. The next turn prefills that last token and what was appended to it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from glm_jax.rollout.programs import prefill_row_dtype
from glm_jax.rollout.sampling import SamplingParams


class PrefixError(ValueError):
    """The tokens given for a session do not continue what its cache holds."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Shapes of the engine's two programs.

    slots           sessions with a cache at the same time; further ones wait
    max_length      tokens of a session, prompt and samples together
    decode_steps    tokens sampled per slot and dispatch
    prefill_rows    prompts fed per prefill dispatch
    prefill_chunk   tokens of each prompt fed per prefill dispatch
    record_routing  return experts and selections of the fed positions
    """

    slots: int
    max_length: int
    decode_steps: int = 8
    prefill_rows: int = 4
    prefill_chunk: int = 64
    record_routing: bool = False

    def __post_init__(self):
        for name in ("slots", "max_length", "decode_steps", "prefill_rows", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"EngineConfig.{name} must be at least 1, got {getattr(self, name)}")
        for name, bound in (("prefill_rows", "slots"), ("prefill_chunk", "max_length")):
            if getattr(self, name) > getattr(self, bound):
                raise ValueError(f"EngineConfig.{name}={getattr(self, name)} exceeds {bound}={getattr(self, bound)}")
        if self.record_routing and self.max_length > np.iinfo(np.int16).max + 1:
            raise ValueError(f"EngineConfig.max_length={self.max_length} with record_routing: selections are recorded as int16 positions")


@dataclasses.dataclass(frozen=True)
class Routing:
    """What the model used at the m positions from `start` on, those that one request fed: its prompt beyond the cached prefix, and its
    samples but the last.

    experts     int16 [m, MoE layers, experts per token], or None when the model has none
    selections  int16 [m, layers, k] key positions, ascending, -1 last, or None
    """

    start: int
    experts: np.ndarray | None
    selections: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Completion:
    """What one request sampled, n tokens. A cancelled one has none.

    tokens int32 [n], the stop id included; logp float32 [n]; versions int32 [n], of the weights that sampled the token;
    finish_reason "stop" | "length" (max_tokens or the context is full) | "cancelled" (the session was released or the engine stopped).
    """

    tokens: np.ndarray
    logp: np.ndarray
    versions: np.ndarray
    finish_reason: str
    routing: Routing | None = None

    @classmethod
    def empty(cls, finish_reason: str) -> Completion:
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), finish_reason)


@dataclasses.dataclass(eq=False)
class Request:
    """One call of generate. `reply` is the engine's business; `start` is the session's cached length when it got its slot."""

    session: int
    tokens: np.ndarray  # int32 [n], full ids so far
    params: SamplingParams
    reply: Any = None
    order: int = 0
    start: int = 0


class Scheduler:
    """Slots, queue and host records.

    Requests are served oldest first: by session number when `in_session_order` (then arrival times change nothing), else by arrival.
    """

    def __init__(self, config: EngineConfig, in_session_order: bool = False):
        slots, length = config.slots, config.max_length
        self.config = config
        self.ids = np.zeros((slots, length), np.int32)
        self.logp = np.zeros((slots, length), np.float32)
        self.versions = np.zeros((slots, length), np.int32)
        self.experts: np.ndarray | None = None  # [S, max_length, MoE layers, K], once the first result shows its shape
        self.selections: np.ndarray | None = None  # [S, max_length, layers, k]
        self.cached = np.zeros(slots, np.int64)  # ids fed
        self.active = np.zeros(slots, bool)  # decoding
        self._slot_of: dict[int, int] = {}
        self._requests: dict[int, Request] = {}  # by session, queued ones included
        self._queue: dict[int, Request] = {}  # by session, without a slot
        self._running: dict[int, Request] = {}  # by slot; not active: prompt tokens are left to feed
        self._row_dtype = prefill_row_dtype(config.prefill_chunk)
        self._arrivals = None if in_session_order else itertools.count()

    @property
    def held(self) -> int:
        """Requests queued or running."""
        return len(self._requests)

    @property
    def prefilling(self) -> int:
        """Requests with a slot and prompt tokens left to feed."""
        return len(self._running) - int(np.count_nonzero(self.active))

    @property
    def queued(self) -> int:
        return len(self._queue)

    def submit(self, request: Request) -> Completion | None:
        """Takes a request on; returns its completion when there is nothing to do for it.

        Raises PrefixError, or ValueError when the session already has a request; the scheduler is then unchanged.
        """
        session, tokens = request.session, request.tokens
        if session in self._requests:
            raise ValueError(f"session {session} already has a request; await it before the next turn")
        slot = self._slot_of.get(session)
        if slot is not None:
            self._check_prefix(session, tokens, self.ids[slot, : self.cached[slot]])
        if len(tokens) >= self.config.max_length:
            return Completion.empty("length")
        request.order = session if self._arrivals is None else next(self._arrivals)
        self._requests[session] = request
        if slot is None:
            self._queue[session] = request
        else:
            self._place(request, slot)
        return None

    @staticmethod
    def _check_prefix(session: int, tokens: np.ndarray, cached: np.ndarray) -> None:
        shared = min(len(tokens), len(cached))
        different = np.flatnonzero(tokens[:shared] != cached[:shared])
        if different.size:
            at = different[0]
            raise PrefixError(
                f"session {session}: token {tokens[at]} at position {at}, but the cache was fed {cached[at]}; start a new session"
            )
        if len(tokens) <= len(cached):
            raise PrefixError(
                f"session {session}: {len(tokens)} tokens given, but {len(cached)} are cached already; give all ids so far and more"
            )

    def _place(self, request: Request, slot: int) -> None:
        request.start = int(self.cached[slot])
        self.ids[slot, : len(request.tokens)] = request.tokens
        self._running[slot] = request

    def admit(self) -> None:
        """Gives free slots, lowest first, to the oldest queued sessions."""
        if not self._queue:
            return
        free = sorted(set(range(self.config.slots)) - set(self._slot_of.values()))
        for request, slot in zip(sorted(self._queue.values(), key=lambda r: r.order), free, strict=False):
            del self._queue[request.session]
            self._slot_of[request.session] = slot
            self.cached[slot] = 0
            self._place(request, slot)

    def cancel(self, request: Request) -> None:
        """Forgets a request, even one that just ended with its answer unread, and rolls its session back to where it stood before."""
        session = request.session
        if self._requests.get(session, request) is not request:
            return  # refused because of the one that is there
        self._requests.pop(session, None)
        self._queue.pop(session, None)
        slot = self._slot_of.get(session)
        if slot is not None:
            self._running.pop(slot, None)
            self.active[slot] = False
            self.cached[slot] = min(self.cached[slot], request.start)

    def release(self, session: int) -> Request | None:
        """Frees the session's slot; returns the request it still had, if any. An unknown session is nothing to release."""
        request = self._requests.get(session)
        if request is not None:
            self.cancel(request)
        self._slot_of.pop(session, None)
        return request

    def next_prefill(self) -> tuple[np.ndarray, list[int]]:
        """The oldest prompts' next chunks: rows of `prefill_row_dtype` [prefill_rows], and the slots of the rows in use."""
        config = self.config
        rows = np.zeros(config.prefill_rows, self._row_dtype)
        rows["slot"] = config.slots
        rows["stop_ids"] = -1
        waiting = (slot for slot in self._running if not self.active[slot])
        slots = sorted(waiting, key=lambda slot: self._running[slot].order)[: config.prefill_rows]
        for row, slot in zip(rows, slots, strict=False):
            request, start = self._running[slot], int(self.cached[slot])
            params, length = request.params, len(request.tokens)
            count = min(config.prefill_chunk, length - start)
            row["slot"], row["start"], row["count"] = slot, start, count
            row["sample"] = start + count == length
            row["budget"] = min(params.max_tokens, config.max_length - length)
            row["seed"] = (params.seed >> 32) & 0xFFFFFFFF, params.seed & 0xFFFFFFFF
            row["temperature"] = params.temperature
            row["stop_ids"][: len(params.stop_ids)] = params.stop_ids
            row["tokens"][:count] = request.tokens[start : start + count]
        return rows, slots

    def prefilled(self, rows: np.ndarray, slots: list[int], result: np.ndarray, routing, version: int) -> list[tuple[Request, Completion]]:
        """Records a prefill dispatch (result int32 [3, R] of `programs.prefill`); returns the requests that ended with it."""
        rows = rows[: len(slots)]
        slot_n, count_n = np.asarray(slots), rows["count"]
        if self.config.record_routing:
            row, offset = np.nonzero(np.arange(self.config.prefill_chunk) < count_n[:, None])
            experts, selections = (None if part is None else part[:, row, offset].swapaxes(0, 1) for part in routing)
            self._record_routing(slot_n[row], rows["start"][row] + offset, experts, selections)
        self.cached[slot_n] += count_n
        sampled = np.flatnonzero(rows["sample"])
        slot_n, position_n = slot_n[sampled], self.cached[slot_n[sampled]]
        token, logp, active = result[0], result[1].view(np.float32), result[2]
        self._record_samples(slot_n, position_n, token[sampled], logp[sampled], version)
        self.active[slot_n] = active[sampled] == 1
        return [self._finish(slot) for slot in slot_n[~self.active[slot_n]]]

    def decoded(self, result: np.ndarray, routing, version: int) -> list[tuple[Request, Completion]]:
        """Records a decode dispatch (result int32 [2 N + 1, S] of `programs.decode`); returns the requests that ended with it."""
        steps = self.config.decode_steps
        token_NxS, logp_NxS, active_S = result[:steps], result[steps : 2 * steps].view(np.float32), result[-1] == 1
        step, slot = np.nonzero(token_NxS >= 0)
        fed = self.cached[slot] + step  # a slot's valid steps are its first ones
        if self.config.record_routing:
            experts, selections = (None if part is None else part[step, :, slot, 0] for part in routing)
            self._record_routing(slot, fed, experts, selections)
        self._record_samples(slot, fed + 1, token_NxS[step, slot], logp_NxS[step, slot], version)
        self.cached += np.bincount(slot, minlength=self.config.slots)
        ended = np.flatnonzero(self.active & ~active_S)
        self.active &= active_S
        return [self._finish(slot) for slot in ended]

    def _record_samples(self, slot, position, token, logp, version: int) -> None:
        self.ids[slot, position] = token
        self.logp[slot, position] = logp
        self.versions[slot, position] = version

    def _record_routing(self, slot, position, experts, selections) -> None:
        shape = (self.config.slots, self.config.max_length)
        if experts is not None:
            if self.experts is None:
                self.experts = np.zeros(shape + experts.shape[1:], np.int16)
            self.experts[slot, position] = experts
        if selections is not None:
            if self.selections is None:
                self.selections = np.zeros(shape + selections.shape[1:], np.int16)
            self.selections[slot, position] = selections

    def _finish(self, slot: int) -> tuple[Request, Completion]:
        request, cached = self._running.pop(slot), self.cached[slot]
        del self._requests[request.session]
        sampled, fed = slice(len(request.tokens), cached + 1), slice(request.start, cached)
        routing = None
        if self.config.record_routing:
            experts, selections = (None if part is None else part[slot, fed].copy() for part in (self.experts, self.selections))
            routing = Routing(request.start, experts, selections)
        tokens = self.ids[slot, sampled].copy()
        reason = "stop" if tokens[-1] in request.params.stop_ids else "length"
        return request, Completion(tokens, self.logp[slot, sampled].copy(), self.versions[slot, sampled].copy(), reason, routing)
