"""Success of a model on fixed tasks, through the engine and the episodes that training uses."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import threading
from collections.abc import Sequence

import numpy as np

from glm_jax import environments
from glm_jax.config import ConfigError, ExperimentConfig
from glm_jax.data.chat import ChatTemplate
from glm_jax.environments.seeds import generator
from glm_jax.model import Transformer
from glm_jax.rl.episode import EpisodeSettings, run_episode
from glm_jax.rl.learner import publishable_copy
from glm_jax.rollout import Engine, EngineConfig
from glm_jax.tracing import Tracer


class Interrupted(RuntimeError):
    """The run was asked to stop while it was evaluating."""


@dataclasses.dataclass(frozen=True)
class Task:
    environment: str
    seed: int


def evaluation_tasks(environment_ids: Sequence[str], split: str, count: int) -> list[Task]:
    """`count` tasks an environment with distinct contents, the same for every model and run. ConfigError when it has not so many."""
    tasks = []
    for name in environment_ids:
        environment, seen, seed = environments.make(name), set(), 0
        while len(seen) < count:
            if seed > 100 * count + 1000:
                raise ConfigError(f"evaluation.tasks={count}: {name} has hardly more than {len(seen)} tasks in its {split} split")
            environment.reset(seed=seed, options={"split": split})
            if environment.content_key() not in seen:
                seen.add(environment.content_key())
                tasks.append(Task(name, seed))
            seed += 1
        environment.close()
    return tasks


def demonstrator_success(tasks: Sequence[Task], split: str, fault_rate: float, seed: int) -> np.ndarray:
    """float [N]: whether the scripted demonstrator, with its faults, solves each task."""
    opened = {task.environment: environments.make(task.environment) for task in tasks}
    success = []
    for i, task in enumerate(tasks):
        environment = opened[task.environment]
        environment.reset(seed=task.seed, options={"split": split})
        success.append(float(environment.demonstrate(generator(seed, "demonstrator", i), fault_rate).success))
    for environment in opened.values():
        environment.close()
    return np.array(success)


def evaluate(
    model: Transformer, config: ExperimentConfig, template: ChatTemplate, tasks: Sequence[Task], *, temperature: float, tracer: Tracer,
    stop_requested: threading.Event, first: int = 0, step: int = 1,
) -> np.ndarray:
    """Rewards float [N], one episode for every `step`-th task from `first` on; 0 where the policy was cut off. An episode that broke for
    other reasons has a second try.

    Raises Interrupted when `stop_requested` is set meanwhile, and whatever kills an episode or the engine.
    """
    settings = EpisodeSettings(config.engine.max_length, config.rl.max_new_tokens, temperature, config.rl.deadline_seconds)
    engine_config = EngineConfig(**dataclasses.asdict(config.engine))
    numbered = list(enumerate(tasks))[first::step]
    with Engine(publishable_copy(model, config.model.dtype), engine_config, tracer=tracer) as engine:
        return asyncio.run(_run_all(engine, template, numbered, config, settings, tracer, stop_requested))


async def _run_all(engine, template, numbered, config, settings, tracer, stop_requested) -> np.ndarray:
    places = asyncio.Semaphore(2 * config.engine.slots)
    pools = collections.defaultdict(list)

    async def one(index: int, task: Task) -> float:
        async with places:
            for attempt in range(2):
                environment = pools[task.environment].pop() if pools[task.environment] else environments.make(task.environment)
                outcome = await run_episode(
                    engine, environment, template, session=2 * index + attempt, task_seed=task.seed, sampling_seed=index,
                    settings=settings, split=config.evaluation.split, tracer=tracer)
                if outcome.status.trainable:
                    pools[task.environment].append(environment)
                    return outcome.reward
                environment.close()
            raise RuntimeError(f"evaluation of {task.environment}, seed {task.seed}: {outcome.status.value}, twice")

    async def watch() -> None:
        while not stop_requested.is_set():
            await asyncio.sleep(0.2)
        raise Interrupted("asked to stop during an evaluation")

    watcher = asyncio.create_task(watch())
    work = asyncio.gather(*(one(i, task) for i, task in numbered))
    await asyncio.wait([watcher, work], return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        watcher.cancel()
        return np.array(work.result(), np.float64)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return watcher.result()
