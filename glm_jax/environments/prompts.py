"""The stream of prompts, over Grain: mixed from several environments, deterministic, and resumed exactly. Grain brings in JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import grain

from glm_jax.environments.seeds import draw_seed, generator

_STREAM_LENGTH = 2**40  # "infinite", with room for Grain to mix several in one index


@dataclasses.dataclass(frozen=True)
class PromptSpec:
    """One task instance: `environment` reset with `seed` in the train split. The id is its index in the stream."""

    prompt_id: int
    environment: str
    seed: int


class Prompts(Iterator[PromptSpec]):
    """Infinite stream of prompts, also by index: `prompts[i].prompt_id == i`. Of `step` processes, each draws every step-th from its
    `first` on."""

    def __init__(
        self, environment_ids: Sequence[str], seed: int, mix: Mapping[str, float] | None = None, first: int = 0, step: int = 1
    ):
        mix = dict.fromkeys(environment_ids, 1.0) if mix is None else mix
        if not environment_ids or set(mix) != set(environment_ids) or min(mix.values()) <= 0:
            raise ValueError(f"mix {dict(mix)} must give a positive weight to each of the environments {list(environment_ids)}")
        total = sum(mix.values())
        self._stream = grain.MapDataset.mix(
            [_instances(name, seed) for name in environment_ids], weights=[mix[name] / total for name in environment_ids]
        )
        self._cursor, self._step = first, step

    def __getitem__(self, index: int) -> PromptSpec:
        name, task_seed = self._stream[index]
        return PromptSpec(index, name, task_seed)

    def __next__(self) -> PromptSpec:
        prompt = self[self._cursor]
        self._cursor += self._step
        return prompt

    def get_state(self) -> dict:
        return {"cursor": self._cursor}

    def set_state(self, state: Mapping) -> None:
        self._cursor = state["cursor"]


def prompts(
    environment_ids: Sequence[str], seed: int, mix: Mapping[str, float] | None = None, first: int = 0, step: int = 1
) -> Prompts:
    """Infinite, deterministic stream of train prompts; `mix` gives each environment's weight (default: equal)."""
    return Prompts(environment_ids, seed, mix, first, step)


def _instances(environment: str, seed: int) -> grain.MapDataset:
    return grain.MapDataset.range(_STREAM_LENGTH).map(lambda i: (environment, draw_seed(generator(seed, f"prompt {environment}", i))))
