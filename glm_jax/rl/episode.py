"""One episode: an environment and the engine taking turns over one growing list of token ids."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np

from glm_jax.data.chat import ChatTemplate
from glm_jax.data.trajectory import Segment, Status
from glm_jax.environments import EnvironmentFailure, TextEnvironment, VerifierError
from glm_jax.rollout import Completion, Engine, SamplingParams
from glm_jax.tracing import Tracer


@dataclasses.dataclass(frozen=True)
class EpisodeSettings:
    """What bounds an episode; lengths in tokens, the deadline in seconds for each wait on the environment."""

    max_length: int
    max_new_tokens: int
    temperature: float
    deadline_seconds: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    segments: tuple[Segment, ...]
    reward: float
    status: Status


class Tape:
    """The token record of an episode while it grows: what was sampled, by which version, and what was merely read."""

    def __init__(self, prompt: list[int]):
        self.tokens, self.mask = list(prompt), [0] * len(prompt)
        self.logp, self.versions = [0.0] * len(prompt), [-1] * len(prompt)
        self._routing = []

    def sampled(self, completion: Completion) -> None:
        count = len(completion.tokens)
        self.tokens += completion.tokens.tolist()
        self.mask += [1] * count
        self.logp += completion.logp.tolist()
        self.versions += completion.versions.tolist()
        if completion.routing is not None:
            self._routing.append(completion.routing)

    def read(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.mask += [0] * len(tokens)
        self.logp += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def segment(self) -> Segment:
        return Segment(
            np.array(self.tokens, np.int32), np.array(self.mask, np.uint8), np.array(self.logp, np.float32),
            np.array(self.versions, np.int32), experts=self._recorded("experts"), selections=self._recorded("selections"))

    def _recorded(self, name: str) -> np.ndarray | None:
        """Routing of every position that was fed to the model; -1 where none was: the last sampled token never is."""
        if not self._routing:
            return None
        parts = [(routing.start, getattr(routing, name)) for routing in self._routing]
        whole = np.full((len(self.tokens), *parts[0][1].shape[1:]), -1, parts[0][1].dtype)
        for start, part in parts:
            whole[start : start + len(part)] = part
        return whole


async def run_episode(
    engine: Engine, environment: TextEnvironment, template: ChatTemplate, *, session: int, task_seed: int, sampling_seed: int,
    settings: EpisodeSettings, split: str = "train", tracer: Tracer,
) -> Outcome:
    """Runs until the environment ends the episode, the policy runs out of context or of a turn's tokens (TRUNCATED: its own doing,
    reward 0), or something breaks (the typed status says what, and nothing is trained). The session's slot is free when this ends.
    """
    def deadline():
        # Not wait_for: on Python 3.11 it loses a cancellation that comes when the action is done, and the episode would go on for ever.
        return asyncio.timeout(settings.deadline_seconds)

    tape = None
    try:
        async with deadline():
            observation, _ = await environment.reset_async(seed=task_seed, options={"split": split})
        tape = Tape(template.prompt([("user", observation)]))
        if len(tape.tokens) >= settings.max_length:
            raise ValueError(
                f"{environment.id}, seed {task_seed}: a prompt of {len(tape.tokens)} tokens leaves no room to answer in "
                f"engine.max_length={settings.max_length}")
        while True:
            room = settings.max_length - len(tape.tokens)
            params = SamplingParams(
                max_tokens=min(settings.max_new_tokens, room), stop_ids=tuple(template.role_ids), seed=sampling_seed,
                temperature=settings.temperature)
            completion = await engine.generate(session, tape.tokens, params)
            tape.sampled(completion)
            if completion.finish_reason == "cancelled":
                return Outcome((), 0.0, Status.CANCELLED)
            if completion.finish_reason == "length":
                return Outcome((tape.segment(),), 0.0, Status.TRUNCATED)
            with tracer.span("actor.step", environment=environment.id):
                action = template.action(completion.tokens.tolist())
                async with deadline():
                    observation, reward, terminated, truncated, info = await environment.step_async(action)
            if terminated or truncated:
                return Outcome((tape.segment(),), float(reward), Status[info["status"]])
            read = template.observe(tape.tokens[-1], observation)
            if len(tape.tokens) + len(read) >= settings.max_length:  # what nobody would answer is not worth a place in the record
                return Outcome((tape.segment(),), 0.0, Status.TRUNCATED)
            tape.read(read)
    except (EnvironmentFailure, TimeoutError):
        return Outcome((), 0.0, Status.ENVIRONMENT_FAILURE)
    except VerifierError:
        return Outcome((), 0.0, Status.VERIFIER_ERROR)
    finally:
        engine.release(session)
