"""Producer threads: each runs an event loop of episodes and owns one lane of the ring."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from glm_jax import environments
from glm_jax.data.chat import ChatTemplate
from glm_jax.data.trajectory import Status, Trajectory
from glm_jax.environments.prompts import Prompts, PromptSpec
from glm_jax.environments.seeds import generator
from glm_jax.rl.episode import EpisodeSettings, run_episode
from glm_jax.rl.ledger import Ledger
from glm_jax.rl.ring import Header, Lane
from glm_jax.rl.staleness import Admission
from glm_jax.rollout import Engine
from glm_jax.tracing import Tracer


class PromptQueue:
    """What to issue next: prompts that go again first, then the stream. One lock makes drawing a prompt and issuing its ids one step."""

    def __init__(self, stream: Prompts, ledger: Ledger, group_size: int, seed: int):
        self.stream, self.ledger, self.group_size, self.seed = stream, ledger, group_size, seed
        self._again: collections.deque[tuple[PromptSpec, list[int], int | None]] = collections.deque()

    def again(self, prompt_id: int, survivors: Sequence[Header] = ()) -> None:
        """Issues a prompt once more: a whole group, or what the group of `survivors` lacks."""
        with self.ledger.transaction():
            kept = {header.sampling_seed for header in survivors}
            seeds = [seed for seed in self._seeds(prompt_id, self.ledger.requeues(prompt_id)) if seed not in kept]
            self._again.append((self.stream[prompt_id], seeds, survivors[0].group_id if survivors else None))

    def next_size(self) -> int:
        """Rollouts that the next `take` would issue."""
        with self.ledger.transaction():
            return len(self._again[0][1]) if self._again else self.group_size

    def take(self, start_version: int) -> list[Header]:
        """Rollouts of one prompt under new ids, which are open in the ledger from now on. Inside a transaction."""
        if self._again:
            spec, seeds, group_id = self._again.popleft()
        else:
            spec = next(self.stream)
            seeds, group_id = self._seeds(spec.prompt_id, 0), None
        ids = self.ledger.new_ids(len(seeds))
        attempt = self.ledger.issue(spec.prompt_id, ids)
        group_id = ids[0] if group_id is None else group_id
        return [
            Header(rollout_id, spec.prompt_id, group_id, spec.environment, start_version, attempt, spec.seed, seed)
            for rollout_id, seed in zip(ids, seeds, strict=True)]

    def _seeds(self, prompt_id: int, requeues: int) -> list[int]:
        """Sampling seeds of a group. They do not depend on ids, so that a group that a restart issues again samples the same."""
        return generator(self.seed, f"sampling {requeues}", prompt_id).integers(2**63, size=self.group_size).tolist()


class Actor:
    """One producer thread. `run` is its body: it starts whole groups while the lane has slots, the admission bound has room and fewer than
    `episodes` of its own are running, and writes every rollout it started, whatever its end, into its slot.
    """

    def __init__(
        self, lane: Lane, *, engine: Engine, template: ChatTemplate, prompts: PromptQueue, admission: Admission, settings: EpisodeSettings,
        episodes: int, tracer: Tracer, stopping: threading.Event, finished: Callable[[], None],
    ):
        self.lane, self.engine, self.template, self.prompts, self.admission = lane, engine, template, prompts, admission
        self.settings, self.episodes, self.tracer = settings, episodes, tracer
        self.stopping, self.finished = stopping, finished
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._pools: dict[str, list] = collections.defaultdict(list)

    def run(self) -> None:
        asyncio.run(self._main())

    def wake(self) -> None:
        """From any thread: look again whether a group may start, or whether to stop."""
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody to wake
                loop.call_soon_threadsafe(self._wake.set)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        running: set[asyncio.Task] = set()
        try:
            while not self.stopping.is_set():
                self._wake.clear()
                for task in [task for task in running if task.done()]:
                    running.discard(task)
                    task.result()  # a bug in an episode ends the run, here
                while group := self._start_group(len(running)):
                    for slot, header in group:
                        task = asyncio.create_task(self._rollout(slot, header))
                        running.add(task)
                        task.add_done_callback(lambda _: self._wake.set())
                await self._wake.wait()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for environment in itertools.chain(*self._pools.values()):
                environment.close()

    def _start_group(self, running: int) -> list[tuple[int, Header]]:
        """Reserves slots for a group if everything allows it; issue and reservation are one step for whoever counts."""
        with self.prompts.ledger.transaction():
            size = self.prompts.next_size()
            if self.stopping.is_set() or running + size > max(self.episodes, size) or self.lane.available < size:
                return []
            if not self.admission.try_admit(size):
                return []
            group = []
            for header in self.prompts.take(self.engine.version):
                slot = self.lane.acquire()
                self.lane.reserve(slot, header)
                group.append((slot, header))
            return group

    async def _rollout(self, slot: int, header: Header) -> None:
        started = time.time()
        pool = self._pools[header.environment]
        environment = pool.pop() if pool else environments.make(header.environment)
        outcome = await run_episode(
            self.engine, environment, self.template, session=header.rollout_id, task_seed=header.task_seed,
            sampling_seed=header.sampling_seed, settings=self.settings, tracer=self.tracer)
        if outcome.status in (Status.COMPLETED, Status.TRUNCATED):
            pool.append(environment)  # one that failed is not used again
        else:
            environment.close()
        self.lane.write(slot, Trajectory(
            header.rollout_id, header.prompt_id, header.environment, outcome.segments, outcome.reward, outcome.status, header.attempt,
            header.task_seed, started, time.time()))
        self.finished()


def wake_all(actors: Iterable[Actor]) -> None:
    for actor in actors:
        actor.wake()
