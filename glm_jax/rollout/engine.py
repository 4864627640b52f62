"""The engine: one thread that owns dispatch, sessions over a slot cache, continuous batching, weights swapped between two dispatches."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import jax
import numpy as np

from glm_jax.rollout.programs import decode, init_state, prefill
from glm_jax.rollout.sampling import SamplingParams
from glm_jax.rollout.scheduler import Completion, EngineConfig, Request, Scheduler


class EngineError(RuntimeError):
    """The engine does not run (any more). Its thread's exception, with traceback, is the cause, where there was one."""


@dataclasses.dataclass(frozen=True)
class _Reply:
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future


class Engine:
    """Generates for many sessions at once.

    A session owns a slot of the cache from its first generate to release; sessions beyond the slots wait. Each round of the thread
    feeds as many chunks as prompts were waiting (prefill dispatches of `prefill_rows`, oldest request first), then decodes
    `decode_steps` tokens for every running request, so neither starves the other.

    model    immutable pytree (see glm_jax.model); publish copies, never arrays that are donated elsewhere
    version  of `model`
    tracer   glm_jax.tracing.Tracer or None; spans engine.prefill and engine.decode with rows, tokens, version
    barrier  returns the number of live episodes. When given, a round starts only when the engine holds that many requests, and they
             are served by session number: batch composition, and with it every bit, does not depend on thread timing. Raise the count
             before the first request of a batch of episodes; when an episode ends: release its session, lower the count, poke().
             It is called on the engine's thread and must not block.
    mesh     entered by the engine's thread, or None
    """

    def __init__(
        self,
        model,
        config: EngineConfig,
        version: int = 0,
        tracer=None,
        barrier: Callable[[], int] | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ):
        self.config = config
        self.error: BaseException | None = None  # what killed the thread
        self._published = (_commit(model), version)  # replaced as a whole; a dispatch reads it once
        self._span = tracer.span if tracer is not None else lambda name, **args: contextlib.nullcontext()
        self._barrier = barrier
        self._mesh = mesh
        self._scheduler = Scheduler(config, in_session_order=barrier is not None)
        self._state = None  # device state, donated from dispatch to dispatch: the thread's alone
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._wake = threading.Condition()  # guards the four below
        self._inbox: list[tuple[Callable, object]] = []
        self._outstanding: set[Request] = set()  # unanswered; who takes a request out of it answers it
        self._stopping = False
        self._poked = False
        self._counts = collections.Counter()
        self._compiled_before = prefill._cache_size() + decode._cache_size()

    # -- callers' side, any thread ---------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the weights that the next dispatch uses."""
        return self._published[1]

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self, seconds: float = 0.9) -> None:
        """Ends the thread between two dispatches; unanswered requests end "cancelled". Waits at most `seconds`: it may be compiling.

        An interpreter that exits while the thread is inside XLA can abort, so give time where an orderly exit matters.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=seconds)
        self._answer_all(lambda: Completion.empty("cancelled"))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc) -> None:
        self.stop(seconds=60.0)

    async def generate(self, session: int, tokens: Sequence[int] | np.ndarray, params: SamplingParams) -> Completion:
        """Samples from the session's full ids so far; only what its cache lacks is fed. Callable from any event loop.

        The ids of the next turn must begin with what was fed: the previous ids and samples, but for the last sample, which was not fed yet.
        Cached keys and values of older weights are kept when weights are published: a token's version says which weights sampled it, not
        which ones encoded its context.
        With max_length ids or more the request ends at once with "length" and no tokens.
        Cancelling the awaiting task cancels the request; the session then stands as before it and may be given the same ids again.

        Raises PrefixError when the ids do not continue the cache and ValueError when the session's previous request is unanswered
        (both leave everyone else alone), EngineError when the engine's thread died, was stopped or was never started.
        """
        tokens = np.array(tokens, np.int32)
        if tokens.ndim != 1 or not tokens.size:
            raise ValueError(f"session {session}: tokens must be a sequence of one or more ids, got shape {tokens.shape}")
        loop = asyncio.get_running_loop()
        request = Request(session, tokens, params, _Reply(loop, loop.create_future()))
        with self._wake:
            self._check_running()
            self._outstanding.add(request)
            self._post(self._submit, request)
        try:
            return await request.reply.future
        except asyncio.CancelledError:
            with self._wake:
                self._outstanding.discard(request)
                self._post(self._scheduler.cancel, request)
            raise

    def release(self, session: int) -> None:
        """Frees the session's slot. A request it still has ends "cancelled"; an unknown session is no error."""
        with self._wake:
            self._post(self._release, session)

    def publish(self, model, version: int) -> None:
        """Hands over new weights, used from the next dispatch on, while requests go on. The version must grow."""
        with self._wake:
            if version <= self.version:
                raise ValueError(f"published version {version} does not follow {self.version}")
            self._published = (_commit(model), version)

    def poke(self) -> None:
        """Makes the thread ask the barrier again: an episode ended without another request."""
        with self._wake:
            self._poked = True
            self._wake.notify()

    def stats(self) -> dict[str, float]:
        """Sums and counts since the start.

        tokens_prefilled fed by prefill; tokens_decoded sampled, a turn's first ones included; slot_steps that decode had room for;
        compilations of the two programs in this process since the engine was built (two when nothing is wrong; none when an engine
        of the same shapes ran before).
        """
        names = ("tokens_prefilled", "tokens_decoded", "slot_steps", "dispatches", "prefill_dispatches", "requests", "busy_seconds")
        compilations = prefill._cache_size() + decode._cache_size() - self._compiled_before
        scheduler = self._scheduler
        return {name: self._counts[name] for name in names} | {
            "compilations": compilations,
            "held": scheduler.held,
            "queued": scheduler.queued,
            "version": self.version,
        }

    def _check_running(self) -> None:
        if self.error is not None:
            raise self._dead()
        if self._stopping:
            raise EngineError("the engine was stopped")
        if not self._thread.is_alive():
            raise EngineError("the engine was not started: call start()")

    def _dead(self) -> EngineError:
        error = EngineError(f"the engine's thread died: {type(self.error).__name__}: {self.error}")
        error.__cause__ = self.error
        return error

    def _post(self, handle: Callable, argument) -> None:
        self._inbox.append((handle, argument))
        self._wake.notify()

    # -- the thread's side ---------------------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            with contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh):
                self._state = _commit(init_state(self._published[0], slots=self.config.slots, max_length=self.config.max_length))
                self._run()
            self._answer_all(lambda: Completion.empty("cancelled"))
        except BaseException as error:  # whatever it is, it must reach every caller
            with self._wake:
                self.error = error
            self._answer_all(self._dead)
        finally:
            self._state = None

    def _run(self) -> None:
        worked = False
        while True:
            with self._wake:
                if not worked:
                    self._wake.wait_for(lambda: self._inbox or self._poked or self._stopping)
                self._poked = False
            # Asked before the messages are taken: whoever lowered it had released its session before, so that release is among them.
            live = self._barrier() if self._barrier is not None else None
            with self._wake:
                if self._stopping:
                    return
                messages, self._inbox = self._inbox, []
            for handle, argument in messages:
                handle(argument)
            worked = live in (None, self._scheduler.held) and self._round()

    def _submit(self, request: Request) -> None:
        try:
            completion = self._scheduler.submit(request)
        except ValueError as error:  # the caller's mistake and nobody else's
            self._answer([(request, error)])
        else:
            if completion is not None:
                self._answer([(request, completion)])

    def _release(self, session: int) -> None:
        request = self._scheduler.release(session)
        if request is not None:
            self._answer([(request, Completion.empty("cancelled"))])

    def _round(self) -> bool:
        """One chunk for as many prompts as wait now, then one decode; False when there was nothing to do."""
        scheduler = self._scheduler
        scheduler.admit()
        prefills = -(-scheduler.prefilling // self.config.prefill_rows)
        for _ in range(prefills):
            if self._stopping or not scheduler.prefilling:
                break
            self._prefill()
        decoding = not self._stopping and bool(scheduler.active.any())
        if decoding:
            self._decode()
        return prefills > 0 or decoding

    def _prefill(self) -> None:
        started = time.perf_counter()
        config, (model, version) = self.config, self._published
        rows, slots = self._scheduler.next_prefill()
        fed = int(rows["count"].sum())
        with self._span("engine.prefill", rows=len(slots), tokens=fed, version=version):
            packed = rows.view(np.int32).reshape(config.prefill_rows, -1)
            self._state, *outputs = prefill(model, self._state, packed, chunk=config.prefill_chunk, record_routing=config.record_routing)
            result, routing = jax.device_get(outputs)
        ended = self._scheduler.prefilled(rows, slots, result, routing, version)
        self._counts.update(tokens_prefilled=fed, tokens_decoded=int(rows["sample"].sum()), prefill_dispatches=1)
        self._end_dispatch(started, ended)

    def _decode(self) -> None:
        started = time.perf_counter()
        config, (model, version) = self.config, self._published
        active = self._scheduler.active
        with self._span("engine.decode", rows=int(active.sum()), tokens=int(active.sum()) * config.decode_steps, version=version):
            self._state, *outputs = decode(model, self._state, active, steps=config.decode_steps, record_routing=config.record_routing)
            result, routing = jax.device_get(outputs)
        sampled = int(np.count_nonzero(result[: config.decode_steps] >= 0))
        ended = self._scheduler.decoded(result, routing, version)
        self._counts.update(tokens_decoded=sampled, slot_steps=config.decode_steps * config.slots)
        self._end_dispatch(started, ended)

    def _end_dispatch(self, started: float, ended: list[tuple[Request, Completion]]) -> None:
        self._counts.update(dispatches=1, requests=len(ended), busy_seconds=time.perf_counter() - started)
        self._answer(ended)

    def _answer(self, answers: Iterable[tuple[Request, Completion | Exception]]) -> None:
        """Wakes the callers, one call per event loop. A request that somebody else answered is passed over."""
        by_loop = collections.defaultdict(list)
        with self._wake:
            for request, answer in answers:
                if request in self._outstanding:
                    self._outstanding.remove(request)
                    by_loop[request.reply.loop].append((request.reply.future, answer))
        for loop, settled in by_loop.items():
            try:
                loop.call_soon_threadsafe(_settle, settled)
            except RuntimeError:
                if not loop.is_closed():  # a closed loop has nobody left to wake
                    raise

    def _answer_all(self, answer: Callable[[], Completion | Exception]) -> None:
        with self._wake:
            requests = list(self._outstanding)
        self._answer([(request, answer()) for request in requests])


def _commit(tree):
    """The same arrays, bound to where they are: jit compiles anew for arrays that were not and later are. Copies nothing."""
    return jax.device_put(tree, jax.tree.map(lambda leaf: leaf.sharding, tree))


def _settle(settled: list[tuple[asyncio.Future, Completion | Exception]]) -> None:
    for future, answer in settled:
        if future.done():  # cancelled by its caller
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
