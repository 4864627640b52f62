"""A world for RLLoop that compiles in seconds: a random model that stops and calls tools often, and real environments with faults added."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import threading
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from small_model import random_model

from glm_jax import environments
from glm_jax.config import CheckpointConfig, EngineSection, ExperimentConfig, RLConfig, RowsConfig
from glm_jax.data.chat import ChatTemplate
from glm_jax.data.tokenizers import ByteTokenizer
from glm_jax.environments import EnvironmentFailure
from glm_jax.environments.base import register
from glm_jax.environments.calculator import Calculator
from glm_jax.environments.code_steps import CodeSteps
from glm_jax.environments.digit_chain import DigitChain
from glm_jax.model import IndexerConfig, MLAConfig, ModelConfig, MoEConfig
from glm_jax.rl.learner import build_rl_update
from glm_jax.rl.loop import RLLoop, Snapshot
from glm_jax.tracing import Tracer
from glm_jax.training.optimizers import adamw
from glm_jax.training.step import TrainState, init_state

TOKENIZER = ByteTokenizer()
TEMPLATE = ChatTemplate(TOKENIZER)
OPTIMIZER = adamw(3e-3)


@dataclasses.dataclass
class Trouble:
    """What goes wrong in the environments below, and when; every choice but the delay depends on the task and the action alone."""

    delay: float = 0.0  # seconds a step waits at most, at random
    failures: float = 0.0  # share of steps in which the environment breaks
    crashes: float = 0.0  # share of steps in which the verifier raises
    bug: bool = False  # reset raises what no environment should


TROUBLE = Trouble()
_random = np.random.default_rng()


class Troubled:
    """A reward for every action, so that advantages are not 0; troubles as TROUBLE says."""

    def reset(self, *, seed=None, options=None):
        if TROUBLE.bug:
            raise ValueError("a bug in an environment")
        self._seed = seed
        return super().reset(seed=seed, options=options)

    async def step_async(self, action):
        if TROUBLE.delay:
            await asyncio.sleep(_random.uniform(0, TROUBLE.delay))
        if self._share(action) < TROUBLE.failures:
            raise EnvironmentFailure("the tool broke")
        observation, reward, *rest = await super().step_async(action)
        return observation, reward + (zlib.crc32(action.encode()) % 97) / 97, *rest

    async def respond_async(self, action):
        if self._share(action + "#") < TROUBLE.crashes:
            raise ValueError("the verifier crashed")
        return await super().respond_async(action)

    def _share(self, text):
        return zlib.crc32(f"{self._seed} {text}".encode()) / 2**32


@register
class TroubledCalculator(Troubled, Calculator):
    id = "troubled/Calculator-v0"


@register
class TroubledDigitChain(Troubled, DigitChain):
    id = "troubled/DigitChain-v0"


@register
class TroubledCodeSteps(Troubled, CodeSteps):
    id = "troubled/CodeSteps-v0"


CALCULATOR, DIGIT_CHAIN, CODE_STEPS = TroubledCalculator.id, TroubledDigitChain.id, TroubledCodeSteps.id


def speaking(model):
    """`model` with a liking for digits, tool calls and ends of turns: one constant feature of every token tells the head."""
    favoured = {"0123456789": 2.5}
    bias = np.full(model.config.vocab_size, -1.0)
    for characters, value in favoured.items():
        bias[list(characters.encode())] = value
    for marker, value in {"<tool_call>": 3.5, "</tool_call>": 3.0, "<|user|>": 4.0, "<|observation|>": 4.0}.items():
        bias[TOKENIZER.special[marker]] = value
    width = model.config.hidden_size
    embedding = model.embedding.at[:, 0].set(4 * jnp.abs(model.embedding).max())
    final_norm = model.final_norm.at[0].set(1.0)
    head = model.head.at[0].set(jnp.asarray(bias / width**0.5, jnp.float32))
    return model.replace(embedding=embedding, final_norm=final_norm, head=head)


@functools.cache
def small_model(seed=0):
    config = ModelConfig(
        vocab_size=288, hidden_size=16, layers=2, dense_layers=0, intermediate_size=16, heads=2,
        mla=MLAConfig(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
        indexer=IndexerConfig(heads=2, head_dim=6, topk=6),
        moe=MoEConfig(experts=4, experts_per_token=2, shared_experts=1, intermediate_size=8), rope_theta=100.0)
    return speaking(random_model(config, seed))


def experiment(mode="async", names=(CALCULATOR, DIGIT_CHAIN), **rl) -> ExperimentConfig:
    settings = {
        "updates": 6, "max_staleness": 0 if mode == "sync" else 1, "batch_rollouts": 16, "group_size": 4, "max_new_tokens": 8,
        "actor_threads": 2, "episodes": 16, "deadline_seconds": 30.0} | rl
    return ExperimentConfig(
        name="loop", environments=names, rows=RowsConfig(row_length=64, microbatch_rows=8), rl=RLConfig(mode=mode, **settings),
        engine=EngineSection(slots=8, max_length=64, decode_steps=4, prefill_rows=4, prefill_chunk=16),
        checkpoint=CheckpointConfig(every=2))


@functools.cache
def _update(rl: RLConfig):
    return build_rl_update(rl, OPTIMIZER)


def update_of(config: ExperimentConfig):
    """One compiled update for all configs that share an objective."""
    rl = config.rl
    return _update(RLConfig(temperature=rl.temperature, replay=rl.replay))


@dataclasses.dataclass
class World:
    """A loop and everything it reported. `state` and `snapshot` are its last checkpoint, as a restart would read them."""

    config: ExperimentConfig
    restored: World | None = None
    update: object = None
    on_report: object = None

    def __post_init__(self):
        self.tracer = Tracer()
        self.stop = threading.Event()
        self.lines, self.batches, self.checkpoints = [], [], 0
        self.state: TrainState | None = None
        self.snapshot: Snapshot | None = None
        before = self.restored
        state = jax.tree.map(jnp.asarray, before.state) if before else init_state(small_model(), OPTIMIZER)
        self.loop = RLLoop(
            self.config, state, self.update or update_of(self.config), TEMPLATE, optimizer_init=OPTIMIZER.init, tracer=self.tracer,
            stop_requested=self.stop, report=self._report, checkpoint=self._checkpoint, restored=before.snapshot if before else None)

    def _report(self, updates, metrics, batch):
        self.lines.append(dict(metrics) | {"updates": updates})
        self.batches.append(batch)
        if self.on_report:
            self.on_report(updates)

    def _checkpoint(self, state, snapshot):
        self.state = jax.tree.map(np.array, state)
        self.snapshot = Snapshot(json.loads(json.dumps(snapshot.document)), snapshot.payloads)
        self.checkpoints += 1

    def run(self, stop_after: float | None = None) -> World:
        """Runs to the end, or until `stop_after` seconds."""
        timer = threading.Timer(stop_after, self.stop.set) if stop_after is not None else None
        if timer:
            timer.start()
        try:
            self.final = jax.tree.map(np.array, self.loop.run())
        finally:
            if timer:
                timer.cancel()
        return self

    def spans(self, *prefixes):
        """(start, end) in microseconds of the spans whose names begin so."""
        return [
            (event["ts"], event["ts"] + event["dur"]) for event in self.tracer.events()
            if event["ph"] == "X" and event["name"].startswith(prefixes)]


def overlaps(first, second) -> int:
    return sum(a < d and c < b for a, b in first for c, d in second)


def assert_balanced(line: dict) -> None:
    """A line of metrics, or a saved ledger with its live count."""
    if "ledger/issued" in line:
        dropped = sum(value for key, value in line.items() if key.startswith("ledger/dropped/"))
        assert line["ledger/issued"] == line["ledger/trained"] + dropped + line["ledger/live"], line
    else:
        ledger = line["ledger"]
        assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values()) + line["live"], line


def assert_same_training(first: list, second: list) -> None:
    """Two lists of batches are equal in everything but ids."""
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.advantages, other.advantages)
        assert [t.prompt_id for t in one.trajectories] == [t.prompt_id for t in other.trajectories]
        assert [t.reward for t in one.trajectories] == [t.reward for t in other.trajectories]
        for a, b in zip(one.trajectories, other.trajectories, strict=True):
            for field in ("tokens", "loss_mask", "logp", "versions"):
                np.testing.assert_array_equal(getattr(a.segments[0], field), getattr(b.segments[0], field), err_msg=field)


def assert_same_state(first: TrainState, second: TrainState) -> None:
    jax.tree.map(np.testing.assert_array_equal, first, second)


def expected_mask(trajectory) -> np.ndarray:
    """The loss mask by the rules of the conversation alone: prompt, then turns that end with a role's marker, then what is read."""
    environment = environments.make(trajectory.environment)
    observation, _ = environment.reset(seed=trajectory.task_seed, options={"split": "train"})
    prompt = TEMPLATE.prompt([("user", observation)])
    tokens = trajectory.segments[0].tokens.tolist()
    assert tokens[: len(prompt)] == prompt
    mask, speaks = [0] * len(prompt), True
    for token in tokens[len(prompt) :]:
        mask.append(int(speaks))
        if speaks:
            speaks = token not in TEMPLATE.role_ids
        else:
            speaks = token == TEMPLATE.role_id["assistant"]
    return np.array(mask, np.uint8)


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
