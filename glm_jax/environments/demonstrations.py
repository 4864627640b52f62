"""Token records of scripted conversations, for supervised fine-tuning. Some are replayed to see that they are what they claim to be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import gymnasium
import numpy as np

from glm_jax.data.chat import ChatTemplate
from glm_jax.data.tokenizers import ByteTokenizer
from glm_jax.data.trajectory import Segment
from glm_jax.environments.base import Demonstration
from glm_jax.environments.seeds import draw_seed, generator


class DemonstrationError(RuntimeError):
    """A demonstration that its environment does not bear out: the one or the other is wrong, and training on it would teach a mistake."""


@dataclasses.dataclass(frozen=True)
class Demonstrations:
    """N recorded conversations.

    records       the token records; log-probs and versions are 0, there was no policy
    environments  environment id of each record
    success       bool [N], whether the demonstrator says that the environment's verifier accepts the record
    verified      bool [N], whether the record was replayed and the verifier agreed
    """

    records: list[Segment]
    environments: list[str]
    success: np.ndarray
    verified: np.ndarray

    @property
    def successful(self) -> list[int]:
        """Indices of the successes."""
        return np.flatnonzero(self.success).tolist()

    @property
    def success_share(self) -> dict[str, float]:
        """Share of successes, by environment."""
        of = np.array(self.environments)
        return {name: float(self.success[of == name].mean()) for name in dict.fromkeys(self.environments)}


def demonstration_source(
    environment_ids: Sequence[str],
    count: int,
    seed: int,
    split: str = "train",
    fault_rate: float = 0.0,
    template: ChatTemplate | None = None,
    verify: float = 0.02,
) -> Demonstrations:
    """`count` demonstrations in all, the environments taking turns. Built once, up front.

    environment_ids: gymnasium's. fault_rate: chance that a demonstration is made to fail. template: default, that of the byte tokenizer.
    verify: share that is replayed through the environment's `step`, evenly spaced, from the first one of each environment; 0 for none.
    DemonstrationError when a replay ends in another way than the demonstration says.
    """
    if not 0 <= verify <= 1:
        raise ValueError(f"verify={verify} is a share, from 0 to 1")
    template = template or ChatTemplate(ByteTokenizer())
    opened = [gymnasium.make(name).unwrapped for name in environment_ids]
    records, names, success, verified = [], [], [], []
    try:
        for i in range(count):
            name, environment = environment_ids[i % len(opened)], opened[i % len(opened)]
            rng = generator(seed, f"demonstration {name}", i)
            task = {"seed": draw_seed(rng), "options": {"split": split}}
            environment.reset(**task)
            demonstration = environment.demonstrate(rng, fault_rate)
            turn = i // len(opened)
            verified.append(math.ceil((turn + 1) * verify) > math.ceil(turn * verify))
            if verified[-1]:
                _replay(environment, task, demonstration, name)
            tokens, mask = template.demonstration(demonstration.messages)
            records.append(Segment(tokens, mask, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)))
            names.append(name)
            success.append(bool(demonstration.success))
    finally:
        for environment in opened:
            environment.close()
    return Demonstrations(records, names, np.array(success, bool), np.array(verified, bool))


def _replay(environment: gymnasium.Env, task: dict, demonstration: Demonstration, name: str) -> None:
    """Plays the assistant's turns; what the environment says between them and at the end must be what the demonstration says."""
    observation, _ = environment.reset(**task)
    said = [("user", observation)]
    reward, over = 0.0, False
    for role, content in demonstration.messages:
        if role != "assistant":
            continue
        if over:
            break  # the lengths differ now
        said.append((role, content))
        observation, gained, terminated, truncated, _ = environment.step(content)
        reward, over = reward + gained, terminated or truncated
        if not over:
            said.append(("observation", observation))
    claimed = [tuple(message) for message in demonstration.messages]
    where = f"{name}, seed {task['seed']} of split {task['options']['split']}: the demonstration"
    if said != claimed or not over:
        raise DemonstrationError(f"{where} {claimed} is played as {said}{'' if over else ', and does not end'}")
    if (reward == 1.0) != demonstration.success:
        claim = "success" if demonstration.success else "failure"
        raise DemonstrationError(f"{where} {claimed} claims {claim}, the verifier gives {reward}")
