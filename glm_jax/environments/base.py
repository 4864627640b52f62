"""The text environment: a gymnasium environment whose observations are user messages and whose actions are assistant turns.

Instances are split by their content, not by their seed: whatever two spellings or two seeds say the same task lie in the same split, so
train, validation and test share no task.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import difflib
import hashlib
import string
from typing import Any, ClassVar

import gymnasium
import numpy as np

from glm_jax.data.trajectory import Status

SPLITS = ("train", "validation", "test")


class EnvironmentFailure(RuntimeError):
    """A tool, sandbox or worker broke. The rollout has no reward: what happened is not the policy's doing."""


class VerifierError(RuntimeError):
    """The reward could not be computed; `__cause__` holds the exception."""


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One scripted episode: messages as (role, content), roles user | assistant | observation, assistant content with its markers as text.

    `fault` names what was done wrong on purpose ("shortcut": an answer without the work, "slip": one mistake in the work), None when
    nothing was; `success` says whether the verifier rewards it.
    """

    messages: list[tuple[str, str]]
    success: bool
    fault: str | None


class TextSpace(gymnasium.spaces.Text):
    """Any string of at most `max_length` characters, the empty one included: a policy writes whatever it likes. Samples are printable."""

    def __init__(self, max_length: int):
        super().__init__(max_length, min_length=0, charset=string.printable)

    def contains(self, x) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


def split_of(content: str) -> str:
    """Split of an instance: blake2b(content) % 100 below 80 is train, 80-89 validation, 90-99 test."""
    bucket = int.from_bytes(hashlib.blake2b(content.encode()).digest(), "big") % 100
    return "train" if bucket < 80 else "validation" if bucket < 90 else "test"


class TextEnvironment(gymnasium.Env, abc.ABC):
    """Base of every task. A subclass draws an instance, words it, judges a turn and writes demonstrations; this class does the rest.

    After `reset`, `step` takes one assistant turn. The last step's info carries "status", the name of a `Status`: COMPLETED when the
    environment ended the episode, TRUNCATED when `max_turns` turns did not suffice. A step before reset or after the end raises
    `gymnasium.error.ResetNeeded`. A broken worker raises `EnvironmentFailure`, a crashed verifier `VerifierError`; both end the episode.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    id: str
    category: str  # reasoning | coding | agentic
    max_turns = 1

    def __init__(self):
        self.observation_space = TextSpace(512)
        self.action_space = TextSpace(4096)
        self.turn: int | None = None  # None: no episode is running

    @abc.abstractmethod
    def draw(self, rng: np.random.Generator) -> None:
        """Draws an instance into this object's attributes, from `rng` alone."""

    @abc.abstractmethod
    def content_key(self) -> str:
        """Canonical content of the instance: equal for instances that are the same task."""

    @abc.abstractmethod
    def prompt(self) -> str:
        """The instance as a user message."""

    @abc.abstractmethod
    def respond(self, action: str) -> tuple[str, float, bool]:
        """Judges one turn: (observation, reward, whether the episode is over)."""

    async def respond_async(self, action: str) -> tuple[str, float, bool]:
        """As `respond`; overridden where judging waits for something."""
        return self.respond(action)

    @abc.abstractmethod
    def write(self, fault: str | None, rng: np.random.Generator) -> list[tuple[str, str]]:
        """Messages of a demonstration after the user's: a correct one, or one with the given fault, which must fail."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Starts the instance that (environment id, split, seed) determine; options={"split": "train" | "validation" | "test"}.

        Without a seed one is drawn from the environment's own generator.
        """
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"split"}:
            raise ValueError(f"{self.id}: unknown reset options {sorted(unknown)}; the only one is 'split'")
        split = options.get("split", "train")
        if split not in SPLITS:
            raise ValueError(f"{self.id}: unknown split {split!r}; choose one of {', '.join(SPLITS)}")
        seed = int(self.np_random.integers(2**31)) if seed is None else int(seed)
        rng = np.random.default_rng([*self.id.encode(), SPLITS.index(split), seed])
        self.draw(rng)
        while split_of(self.content_key()) != split:
            self.draw(rng)
        self.turn = 0
        return self.prompt(), {"split": split, "seed": seed}

    async def reset_async(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """As `reset`, for callers on an event loop."""
        return self.reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Plays one assistant turn: (observation, reward, terminated, truncated, info)."""
        with self._judging():
            outcome = self.respond(action)
        return self._advance(*outcome)

    async def step_async(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """As `step`, without blocking the event loop."""
        with self._judging():
            outcome = await self.respond_async(action)
        return self._advance(*outcome)

    def demonstrate(self, rng: np.random.Generator, fault_rate: float = 0.0, shortcut_share: float = 0.75) -> Demonstration:
        """A scripted episode of the current instance; with probability `fault_rate` it fails, by a shortcut or else by a slip."""
        fault = None
        if rng.random() < fault_rate:
            fault = "shortcut" if rng.random() < shortcut_share else "slip"
        return Demonstration([("user", self.prompt()), *self.write(fault, rng)], fault is None, fault)

    @contextlib.contextmanager
    def _judging(self):
        if self.turn is None:
            raise gymnasium.error.ResetNeeded(f"{self.id}: step() needs a running episode; call reset() first")
        try:
            yield
        except EnvironmentFailure:
            self.turn = None
            raise
        except Exception as error:
            self.turn = None
            raise VerifierError(f"{self.id}: the verifier raised {type(error).__name__}: {error}") from error

    def _advance(self, observation: str, reward: float, terminated: bool) -> tuple[str, float, bool, bool, dict]:
        self.turn += 1
        truncated = not terminated and self.turn >= self.max_turns
        info = {}
        if terminated or truncated:
            info["status"] = (Status.COMPLETED if terminated else Status.TRUNCATED).name
            self.turn = None
        return observation, float(reward), terminated, truncated, info


def after_thinking(action: str) -> str:
    """What a turn says once its thinking is over: the stripped text after the last "</think>", all of it when there is none."""
    return action.rpartition("</think>")[2].strip()


_REGISTRY: dict[str, type[TextEnvironment]] = {}


def register(environment: type[TextEnvironment]) -> type[TextEnvironment]:
    """Class decorator: makes the environment available to `make` and to `gymnasium.make` under its `id`."""
    _REGISTRY[environment.id] = environment
    # The class keeps the order of calls itself, and gymnasium's checker knows only its own exact spaces.
    gymnasium.register(environment.id, entry_point=environment, order_enforce=False, disable_env_checker=True)
    return environment


def registered() -> list[str]:
    """Ids of all environments, sorted."""
    return sorted(_REGISTRY)


def make(id: str, **kwargs) -> TextEnvironment:
    """A new environment of the given id, e.g. "glm_jax/Calculator-v0"; keyword arguments go to its constructor."""
    if id not in _REGISTRY:
        near = difflib.get_close_matches(id, _REGISTRY, n=1, cutoff=0.0)
        raise ValueError(f"unknown environment {id!r}; did you mean {near[0]!r}? Registered: {', '.join(registered())}")
    return _REGISTRY[id](**kwargs)
