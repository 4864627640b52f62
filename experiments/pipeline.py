"""What a run does: supervised fine-tuning, reinforcement learning, a control, each evaluated on the same unseen tasks, and a report."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np
import optax

from experiments import config as configs
from experiments.progress import Progress
from experiments.summary import summarise
from glm_jax.config import ExperimentConfig
from glm_jax.data.chat import ChatTemplate
from glm_jax.data.pipelines import packed_batches
from glm_jax.environments.demonstrations import Demonstrations, demonstration_source
from glm_jax.metrics import MetricsWriter, ratio
from glm_jax.model import Transformer, init_model
from glm_jax.parallel.distributed import ALONE, Peers, feed, own_rows
from glm_jax.rl import hosts
from glm_jax.rl.evaluation import Interrupted, demonstrator_success, evaluate, evaluation_tasks
from glm_jax.rl.learner import Batch, build_rl_update
from glm_jax.rl.loop import RLLoop, Snapshot
from glm_jax.rl.numbers import sample_record
from glm_jax.tracing import Tracer
from glm_jax.training.balancing import load_violation
from glm_jax.training.checkpoints import Checkpoints
from glm_jax.training.objectives import supervised_loss
from glm_jax.training.optimizers import adamw
from glm_jax.training.step import TrainState, build_update, init_state, supervised_inputs

PHASES = ("sft", "evaluate_sft", "rl", "evaluate_rl", "control", "evaluate_control", "done")
REPORT_EVERY = 20  # supervised steps between metrics lines: each line waits for the device
SAMPLES_PER_REPORT = 2  # trajectories kept for the report, an update


class Pipeline:
    """The phases in order. `document` and the two train states are all that a checkpoint needs; what is done is not done again."""

    def __init__(
        self, config: ExperimentConfig, directory: pathlib.Path, progress: Progress, metrics: MetricsWriter | None, saved: Checkpoints,
        tracer: Tracer, stop: threading.Event, mesh: jax.sharding.Mesh | None = None, peers: Peers = ALONE,
    ):
        self.config, self.directory, self.progress, self.metrics = config, directory, progress, metrics
        self.saved, self.tracer, self.stop, self.mesh, self.peers = saved, tracer, stop, mesh, peers
        self.tokenizer = configs.tokenizer(config)
        self.template = ChatTemplate(self.tokenizer)
        sft, rl = config.sft, config.rl
        untrained = () if sft.mtp_steps else ("mtp",)
        self.sft_optimizer = adamw(
            sft.learning_rate, warmup_steps=sft.warmup_steps, weight_decay=sft.weight_decay, frozen=("router_bias", *untrained))
        self.rl_optimizer = adamw(rl.learning_rate, frozen=("router_bias", "mtp", *(("indexer",) if rl.freeze_indexer else ())))
        self._computing = {"remat": config.model.remat, "dtype": config.model.dtype}
        objective = functools.partial(
            supervised_loss, indexer_coefficient=sft.indexer_loss, balance_coefficient=sft.balance_loss, mtp_coefficient=sft.mtp_loss,
            mtp_steps=sft.mtp_steps, count_experts=sft.balance_loss > 0 or sft.bias_rate > 0, **self._computing)
        self.sft_updates = {
            dense: build_update(functools.partial(objective, dense_attention=dense), self.sft_optimizer, sft.bias_rate)
            for dense in (True, False)}
        self.document: dict = {"phase": PHASES[0], "saves": 0, "sft_steps": 0, "control_steps": 0, "results": {}}
        self.payloads: dict[str, np.ndarray] = {}
        self.sft_state: TrainState
        self.rl_state: TrainState

    def run(self, resume: bool) -> None:
        self._initialise(resume)
        for phase in PHASES[PHASES.index(self.document["phase"]) : -1]:
            if not (phase.endswith("control") and not self.config.control):
                self.document["phase"] = phase
                with self.tracer.span(f"phase.{phase}"):
                    getattr(self, f"_{phase}")()
        self.document["phase"] = PHASES[-1]
        self.save()
        self._summarise()

    def save(self) -> None:
        self.document["saves"] += 1
        self.saved.save(self.document["saves"], {"sft": self.sft_state, "rl": self.rl_state}, self.document, self.payloads)

    # -- set-up --------------------------------------------------------------------------------------------------------------------------

    def _initialise(self, resume: bool) -> None:
        config = self.config
        self.progress.phase("set-up")
        model_config = configs.model_config(config)
        # Compiled for one call: optimising dozens of random generators takes longer than running them.
        init = jax.jit(init_model, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
        model = init(model_config, jax.random.key(config.seed))
        self.sft_state = self._state(model, self.sft_optimizer)
        self.rl_state = self._state(model, self.rl_optimizer)
        if resume and (latest := self.saved.latest()) is not None:
            arrays, self.document, self.payloads = self.saved.restore(latest, {"sft": self.sft_state, "rl": self.rl_state})
            self.sft_state, self.rl_state = arrays["sft"], arrays["rl"]
            self.progress.log(f"resuming {self.document['phase']} from checkpoint {latest}")
            updates = self.document.get("rl", {}).get("updates", 0)
            if PHASES.index(self.document["phase"]) > PHASES.index("rl") and updates != config.rl.updates:
                self.progress.log(f"rl.updates={config.rl.updates} changes nothing: RL ended after {updates} updates; start a new run")
        elif resume:
            self.progress.log("no checkpoint to resume from: starting from the beginning")
        self._check_stop()
        self.demonstrations: Demonstrations = demonstration_source(
            config.environments, config.sft.demonstrations * len(config.environments), config.seed, fault_rate=config.sft.fault_rate,
            template=self.template)
        shares = ", ".join(f"{name} {share:.2f}" for name, share in self.demonstrations.success_share.items())
        self.progress.log(f"model {config.model.preset}: {model_config.parameter_count():,} parameters")
        self.progress.log(f"demonstrations that succeed: {shares}")
        evaluation = config.evaluation
        self.tasks = evaluation_tasks(config.environments, evaluation.split, evaluation.tasks)
        self.document["results"]["demonstrator"] = {
            "sampled": demonstrator_success(self.tasks, evaluation.split, config.sft.fault_rate, config.seed).tolist()}

    def _state(self, model: Transformer, optimizer: optax.GradientTransformation) -> TrainState:
        """On a mesh in one program, so that its scalars are on every device too."""
        return init_state(model, optimizer) if self.mesh is None else jax.jit(init_state, static_argnums=1)(model, optimizer)

    def _check_stop(self) -> None:
        if self.peers.any("stop", self.stop.is_set()):
            raise Interrupted("asked to stop")

    def _write(self, step: int, phase: str, metrics: Mapping[str, float]) -> None:
        if self.metrics is not None:
            self.metrics.write(step, phase, metrics)

    # -- supervised phases -----------------------------------------------------------------------------------------------------------------

    def _sft(self) -> None:
        self.progress.phase("sft", self.config.sft.steps)
        self._supervise("sft", lambda step, _: step < self.config.sft.steps)
        self.save()

    def _control(self) -> None:
        """RL's wall time on more fine-tuning with the same demonstrations, from where fine-tuning stopped."""
        seconds = self.document["rl_seconds"]
        self.progress.phase(f"control ({seconds:.0f} s of more sft)")
        spent = self.document.get("control_seconds", 0.0)
        self._supervise("control", lambda _, elapsed: spent + elapsed < seconds, spent)
        self.save()

    def _supervise(self, phase: str, more: Callable[[int, float], bool], spent: float = 0.0) -> None:
        """Steps while `more(steps of this phase, seconds of this call)`; the batches go on where the last call stopped."""
        config, key = self.config.sft, f"{phase}_steps"
        batches = packed_batches(
            self.demonstrations.records, config.rows, self.config.rows.row_length, self.config.seed,
            first=self.demonstrations.successful, opening_batches=int(config.clean_first * config.steps))
        if "batches" in self.document:
            batches.set_state(self.document["batches"])
        began = marked = time.perf_counter()
        counted = self.document[key]
        while self._go_on(phase, more(self.document[key], time.perf_counter() - began)):
            dense = phase == "sft" and self.document[key] < config.dense_steps
            arrays, shared, microbatches = supervised_inputs(next(batches), config.mtp_steps)
            arrays = {name: own_rows(array, self.peers, axis=1) for name, array in arrays.items()}
            with self.tracer.span("sft.update"), self.peers.deadline("a supervised update"):
                self.sft_state, sums = self.sft_updates[dense](self.sft_state, feed(arrays, self.mesh), shared, microbatches)
                self.document[key] += 1
                if self.document[key] % REPORT_EVERY == 0:
                    sums = jax.device_get(sums)
            if self.document[key] % REPORT_EVERY == 0:
                elapsed, steps = time.perf_counter() - marked, self.document[key] - counted
                marked, counted = time.perf_counter(), self.document[key]
                line = supervised_line(sums) | {
                    "tokens_per_second": steps * config.rows * self.config.rows.row_length / elapsed,
                    "dense_attention": float(dense)}
                self._write(self.document[key], phase, line)
                self.progress.update(self.document[key], line)
        self.document["batches"] = batches.get_state()
        if phase == "control":
            self.document["control_seconds"] = spent + time.perf_counter() - began
        self._check_stop()

    def _go_on(self, phase: str, more: bool) -> bool:
        """Whether another step follows: process 0's clock decides, and any process's wish to stop."""
        said = self.peers.gather(f"step of {phase}", [more, self.stop.is_set()])
        return said[0][0] and not any(stopping for _, stopping in said)

    # -- reinforcement learning ----------------------------------------------------------------------------------------------------------

    def _rl(self) -> None:
        config = self.config
        restored = None
        if "rl" in self.document:
            restored = hosts.share(hosts.unpack(self.payloads), self.peers.index, self.peers.count)
            self.payloads = hosts.own(self.payloads, self.peers.index, self.peers.count)
        else:
            self.rl_state = self._state(self.sft_state.model, self.rl_optimizer)
            self.document["rl_seconds"] = 0.0
        self.progress.phase("rl", config.rl.updates)
        before, began = self.document["rl_seconds"], time.perf_counter()

        def checkpoint(state: TrainState, snapshot: Snapshot) -> None:
            self.rl_state, self.payloads = state, hosts.pack(snapshot, self.peers.index)
            self.document["rl"] = {name: snapshot.document[name] for name in ("updates", "version")}
            self.document["rl_seconds"] = before + time.perf_counter() - began
            self.save()

        samples = self.directory / "trajectories" / "rl.jsonl"
        samples.parent.mkdir(exist_ok=True)
        with open(samples if self.peers.first else os.devnull, "a") as file:

            def report(updates: int, metrics: Mapping[str, float], batch: Batch) -> None:
                self._write(updates, "rl", metrics)
                self.progress.update(updates, metrics)
                for trajectory in batch.trajectories[:: -(-len(batch.trajectories) // SAMPLES_PER_REPORT)]:
                    file.write(json.dumps(sample_record(trajectory, self.tokenizer.decode)) + "\n")

            loop = RLLoop(
                config, self.rl_state, build_rl_update(config.rl, self.rl_optimizer, **self._computing), self.template,
                optimizer_init=jax.jit(self.rl_optimizer.init) if self.mesh else self.rl_optimizer.init, tracer=self.tracer,
                stop_requested=self.stop, report=report, checkpoint=checkpoint, restored=restored, mesh=self.mesh, peers=self.peers)
            self.rl_state = loop.run()
        self._check_stop()
        self.payloads = {}

    # -- evaluation ------------------------------------------------------------------------------------------------------------------------

    def _evaluate_sft(self) -> None:
        self._evaluate("sft", self.sft_state)

    def _evaluate_rl(self) -> None:
        self._evaluate("rl", self.rl_state)

    def _evaluate_control(self) -> None:
        self._evaluate("control", self.sft_state)

    def _evaluate(self, column: str, state: TrainState) -> None:
        self.progress.phase(f"evaluate {column}", 2)
        results = self.document["results"].setdefault(column, {})
        for number, (kind, temperature) in enumerate((("sampled", self.config.evaluation.temperature), ("greedy", 0.0)), 1):
            rewards = self._rewards(column, state.model, temperature)
            results[kind] = rewards.tolist()
            line = {f"success/{name}/{kind}": float(np.mean(rewards[self._of(name)])) for name in self.config.environments}
            self._write(number, f"evaluation_{column}", line)
            self.progress.update(number, {key.removesuffix(f"/{kind}"): value for key, value in line.items()})
        self.save()

    def _rewards(self, column: str, model: Transformer, temperature: float) -> np.ndarray:
        """Every process's share of the tasks, together. Interrupted when one of them was."""
        index, count = self.peers.index, self.peers.count
        try:
            own = evaluate(
                model, self.config, self.template, self.tasks, temperature=temperature, tracer=self.tracer, stop_requested=self.stop,
                first=index, step=count).tolist()
        except Interrupted:
            own = None
        shares = self.peers.gather(f"rewards of {column}", own)
        if None in shares:
            raise Interrupted("asked to stop during an evaluation")
        rewards = np.zeros(len(self.tasks))
        for first, share in enumerate(shares):
            rewards[first::count] = share
        return rewards

    def _of(self, environment: str) -> list[int]:
        return [i for i, task in enumerate(self.tasks) if task.environment == environment]

    def _summarise(self) -> None:
        results = {name: {kind: np.array(values) for kind, values in kinds.items()} for name, kinds in self.document["results"].items()}
        if not self.peers.first:
            return
        summary = summarise(results, [task.environment for task in self.tasks], self.config)
        (self.directory / "summary.json").write_text(json.dumps(summary.document, indent=2) + "\n")
        self.progress.log(summary.text)


def supervised_line(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
    """What is written of an update's sums; see supervised_loss."""
    line = {
        "loss": ratio(sums["nll"], sums["loss_tokens"]), "accuracy": ratio(sums["correct_tokens"], sums["loss_tokens"]),
        "gradient_norm": float(sums["gradient_norm"])}
    if "indexer_kl" in sums:
        line["indexer_kl"] = ratio(sums["indexer_kl"], sums["real_tokens"])
    if "balance" in sums:
        line["balance_loss"] = ratio(sums["balance"], sums["sequences"])
    for name in ("expert_load", "mtp_expert_load"):
        if name in sums:
            line[f"{name.removesuffix('_load')}_violation"] = load_violation(sums[name])
    for k, tokens in enumerate(sums.get("mtp_tokens", ()), 1):
        line |= {f"mtp_{k}/loss": ratio(sums["mtp_nll"][k - 1], tokens), f"mtp_{k}/accuracy": ratio(sums["mtp_correct"][k - 1], tokens)}
    return line
