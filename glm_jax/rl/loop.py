"""The asynchronous loop: actors and engine generate while the learner trains; ring, ledger and admission bound hold them together.

Synchronous mode is the same code with max_staleness 0 and publish_every 1: the admission bound then lets exactly one batch be on the
way, so that generation waits for the update and the update for generation, and a barrier makes the engine's batches independent of
thread timing.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from cereggii import AtomicInt64

from glm_jax.config import ExperimentConfig
from glm_jax.data.chat import ChatTemplate
from glm_jax.environments.prompts import prompts
from glm_jax.parallel.distributed import ALONE, Peers, feed, on_mesh
from glm_jax.rl.actors import Actor, PromptQueue, wake_all
from glm_jax.rl.episode import EpisodeSettings
from glm_jax.rl.learner import Batch, Selector, lay_out, publishable_copy
from glm_jax.rl.ledger import Ledger
from glm_jax.rl.numbers import batch_metrics, batch_sums, update_metrics
from glm_jax.rl.payloads import pack_payloads, unpack_payloads
from glm_jax.rl.ring import Header, RoutingShape, TrajectoryRing
from glm_jax.rl.staleness import Admission
from glm_jax.rl.supervisor import Supervisor
from glm_jax.rollout import Engine, EngineConfig
from glm_jax.tracing import Tracer
from glm_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Everything a checkpoint needs beside the train state: JSON document and numpy payloads."""

    document: dict
    payloads: dict[str, np.ndarray]


class RLLoop:
    """One RL phase. `run` returns when `config.rl.updates` updates are done or `stop_requested` is set; it raises what killed a thread.

    update         as build_rl_update returns; its state is donated
    stop_requested finish the update at hand, write a checkpoint, return
    report         called on the learner's thread after each update with (updates done, metrics, batch)
    checkpoint     called on the learner's thread with (train state, Snapshot): every `config.checkpoint.every` updates and at the end
    restored       a Snapshot to go on from
    mesh           that the state lives on, or None
    peers          the processes that share the updates. Each has actors, engine, ring and ledger of its own and gives its share of every
                   batch; all train, publish and save at the same counts, see _learn. `update`, `report`, `checkpoint`: called in each
    """

    def __init__(
        self, config: ExperimentConfig, state: TrainState, update: Callable, template: ChatTemplate, *, optimizer_init: Callable,
        tracer: Tracer, stop_requested: threading.Event, report: Callable[[int, Mapping[str, float], Batch], None],
        checkpoint: Callable[[TrainState, Snapshot], None], restored: Snapshot | None = None,
        mesh: jax.sharding.Mesh | None = None, peers: Peers = ALONE,
    ):
        config = config.share(peers.count)
        self._mesh, self._peers = mesh, peers
        rl, model_config = config.rl, state.model.config
        self._patience = config.mesh.timeout_seconds
        self.config, self.state, self._update, self._optimizer_init = config, state, update, optimizer_init
        self._report, self._checkpoint, self._tracer, self._stop_requested = report, checkpoint, tracer, stop_requested
        document = restored.document if restored else {}
        self.updates, self._version = document.get("updates", 0), document.get("version", 0)
        self.ledger = Ledger.from_state(document["ledger"]) if restored else Ledger()
        # Synchronous mode generates the whole batch anew: then it is the undisturbed run's, bit for bit.
        survivors = unpack_payloads(restored.payloads) if restored and rl.mode == "async" else []
        lost = self.ledger.resume(header.rollout_id for header, _ in survivors) if restored else {}

        stream = prompts(config.environments, config.seed, first=peers.index, step=peers.count)
        if restored:
            stream.set_state(document["prompts"])
        self.prompts = PromptQueue(stream, self.ledger, rl.group_size, config.seed)
        self.admission = Admission(
            rl.max_staleness, rl.publish_every, rl.batch_rollouts, live=len(survivors), trained=document.get("trained_unpublished", 0))
        record = RoutingShape.of(model_config) if rl.replay != "none" else None
        slots = -(-max(self.admission.limit, rl.group_size) // rl.actor_threads // rl.group_size) * rl.group_size
        self.ring = TrajectoryRing(rl.actor_threads, slots + rl.group_size, config.rows.row_length, record)
        self.ring.restore(survivors)
        self.selector = Selector(self.ring, self.prompts, self.admission, rl, self._replace_dropped)
        self._reissue([header for header, _ in survivors], lost)

        # Rollouts that may run now and have not finished: synchronous mode waits for every one of them.
        self._in_turn = rl.mode == "sync"
        self._outstanding = AtomicInt64(self.admission.limit - self.admission.unpublished)
        with on_mesh(mesh):
            published = publishable_copy(state.model, config.model.dtype)
        self.engine = Engine(
            published,
            EngineConfig(**dataclasses.asdict(config.engine), record_routing=record is not None),
            version=self._version, tracer=tracer, barrier=self._outstanding.get if self._in_turn else None)
        self._ready = threading.Condition()
        self.supervisor = Supervisor()
        settings = EpisodeSettings(config.engine.max_length, rl.max_new_tokens, rl.temperature, rl.deadline_seconds)
        self.actors = [
            Actor(lane, engine=self.engine, template=template, prompts=self.prompts, admission=self.admission, settings=settings,
                  episodes=rl.batch_rollouts if self._in_turn else -(-rl.episodes // rl.actor_threads), tracer=tracer,
                  stopping=self.supervisor.stopping, finished=self._rollout_finished)
            for lane in self.ring.lanes]
        self.supervisor.on_stop(self._wake_everybody)

    def run(self) -> TrainState:
        """Blocks; the state after the last update, which the loop no longer uses."""
        self.engine.start()
        self.supervisor.start("learner", self._learn)
        for number, actor in enumerate(self.actors):
            self.supervisor.start(f"actor-{number}", actor.run)
        try:
            self.supervisor.wait(lambda: self.engine.error is not None or self._stop_requested.is_set())
            self.supervisor.stop(self.engine.error)
        except BaseException as error:  # a thread's, or a person's who interrupts for the second time
            self.supervisor.stop(error)
        # After a death the run must end soon; when asked to stop, the learner may have to finish compiling and then its update.
        alive = self.supervisor.join(seconds=5.0 if self.supervisor.error is not None else self._patience)
        self.engine.stop(seconds=0.9 if self.supervisor.error is not None else 60.0)
        if self.engine.error is not None:  # actors die of the engine's death: tell of its own, not of theirs
            raise self.engine.error
        self.supervisor.raise_error()
        if alive:
            raise RuntimeError(f"threads did not end within {self._patience:.0f} s of being asked to: {', '.join(alive)}")
        return self.state

    # -- learner thread --------------------------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Of several processes all do the same here at the same time: an update when each has its batch, the end when one has none."""
        with on_mesh(self._mesh):
            self._learn_on_mesh()
        self.supervisor.stop()

    def _learn_on_mesh(self) -> None:
        rl = self.config.rl
        if self.updates == 0:
            self._save()
        while self.updates < rl.updates:
            waiting = time.perf_counter()
            batch = self._wait_for_batch()
            inputs = self._agree(batch)
            if inputs is None:
                break
            waited = time.perf_counter() - waiting
            metrics = self._train(batch, inputs)
            with self.ledger.transaction():
                self.ledger.trained(batch.trained_ids)
                self.ring.release(batch.tickets)
                self.admission.trained(rl.batch_rollouts)
                books = self._books()
            self.updates += 1
            if self.updates % rl.publish_every == 0:
                self._publish()
            wake_all(self.actors)
            sums = self._peers.sums(f"metrics of update {self.updates}", batch_sums(batch) | {"waited": waited})
            books = self._peers.sums(f"ledgers after update {self.updates}", books)
            metrics |= batch_metrics(sums) | books | {
                "tokens_per_second": sums["tokens"] / metrics["seconds"], "seconds_waited": sums["waited"] / self._peers.count,
                "version": self._version}
            self._report(self.updates, metrics, batch)
            if self.updates % self.config.checkpoint.every == 0 and self.updates < rl.updates:
                self._save()
        self._save()

    def _wait_for_batch(self) -> Batch | None:
        with self._ready:
            while not self.supervisor.stopping.is_set():
                waits = self._in_turn and self._outstanding.get() > 0  # a group that is dropped in the meantime would be timing's choice
                batch = None if waits else self.selector.next_batch(self._version)
                if batch is not None:
                    return batch
                self._ready.wait()
        return None

    def _agree(self, batch: Batch | None) -> tuple | None:
        """The arguments of an update over all processes' batches; None, everywhere, when one of them has none."""
        rows, peers = self.config.rows, self._peers
        arrays, shared, microbatches = (
            lay_out(batch, rows.row_length, rows.microbatch_rows, self.config.rl.batch_rollouts) if batch else ({}, {}, 0))
        said = peers.gather(f"batch of update {self.updates + 1}", batch and [float(shared["loss_tokens"]), int(microbatches)])
        if None in said:
            return None
        loss_tokens, counts = zip(*said, strict=True)
        for name in ("rollout_ids", "group_ids"):  # which are a process's own
            arrays[name] = arrays[name] * peers.count + peers.index
        return arrays, {"loss_tokens": np.float32(sum(loss_tokens))}, np.int32(max(counts))

    def _train(self, batch: Batch, inputs: tuple) -> dict[str, float]:
        started = time.perf_counter()
        arrays, shared, microbatches = inputs
        with self._tracer.span("learner.update", rollouts=len(batch.trained_ids), version=self._version), self._peers.deadline("an update"):
            self.state, sums = self._update(self.state, feed(arrays, self._mesh), shared, microbatches)
            sums = {name: float(value) for name, value in jax.device_get(sums).items()}
        return update_metrics(sums) | {"seconds": time.perf_counter() - started}

    def _publish(self) -> None:
        with self._tracer.span("learner.publish", version=self._version + 1):
            self._version += 1
            self.engine.publish(publishable_copy(self.state.model, self.config.model.dtype), self._version)
            if self.config.rl.reset_optimizer:
                self.state = self.state.replace(optimizer=self._optimizer_init(self.state.model))
        freed = self.admission.trained_unpublished
        self._outstanding.increment_and_get(freed)
        self.admission.published()
        for number, value in self.ring.count().items():
            self._tracer.counter(f"ring/{number}", value)

    def _books(self) -> dict[str, float]:
        """The ledger, checked against the rollouts counted in slots: what is live is counted, never derived."""
        with self.ledger.transaction():
            live = self.ring.live_ids()
            self.ledger.check(live)
            return self.ledger.metrics(len(live))

    def _save(self) -> None:
        with self.ledger.transaction():
            payloads = self.ring.payloads()
            document = {
                "updates": self.updates, "version": self._version, "ledger": self.ledger.to_state(),
                "prompts": self.prompts.stream.get_state(), "trained_unpublished": self.admission.trained_unpublished,
                "live": len(self.ring.live_ids()),
            }
        self._checkpoint(self.state, Snapshot(document, pack_payloads(payloads)))

    # -- other threads ---------------------------------------------------------------------------------------------------------------------

    def _rollout_finished(self) -> None:
        self._outstanding.increment_and_get(-1)
        self.engine.poke()
        with self._ready:
            self._ready.notify()

    def _replace_dropped(self, count: int) -> None:
        """Others may start in their places, and in synchronous mode are waited for."""
        self._outstanding.increment_and_get(count)
        wake_all(self.actors)

    def _wake_everybody(self) -> None:
        with self._ready:
            self._ready.notify_all()
        wake_all(self.actors)

    def _reissue(self, survivors: Sequence[Header], lost: Mapping[int, int]) -> None:
        """What the survivors' groups lack goes again, then the groups of which nothing survived, then prompts that were about to.

        First things first: the survivors hold places in the admission bound that only their completed group gives back.
        """
        groups = collections.defaultdict(list)
        for header in survivors:
            groups[header.prompt_id].append(header)
        for prompt_id, headers in groups.items():
            if len(headers) < self.config.rl.group_size:
                self.prompts.again(prompt_id, headers)
        unsettled = dict.fromkeys([*lost, *self.ledger.pending_prompts()])
        for prompt_id in unsettled:
            if prompt_id not in groups:
                self.prompts.again(prompt_id)
