"""Every key of an experiment, as frozen dataclasses. JAX-free: a config is read and refused before an accelerator is touched.

A section refuses its own contradictions when it is built; `ExperimentConfig` refuses those between sections. Each refusal is a
`ConfigError` that names the key, the value and what to do.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal


class ConfigError(ValueError):
    """A config that cannot work, or a key or name that does not exist. The message is for the user, and is all they need."""


def require(condition: bool, key: str, value: object, remedy: str) -> None:
    """Refuse `key`=`value` unless `condition`; `remedy` says what would be right."""
    if not condition:
        raise ConfigError(f"{key}={value}: {remedy}")


def _positive(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{section}.{name}", value, "must be greater than 0")


def _not_negative(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value >= 0, f"{section}.{name}", value, "must be 0 or greater")


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """A preset of glm_jax.model, and what to change in it: model.overrides.layers=4 model.overrides.moe.experts=16."""

    preset: str = "tiny"
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "float32"  # what is computed with; the weights that the optimizer moves are float32
    remat: str = "none"  # what the backward pass computes again instead of keeping: see glm_jax.model.layer.REMAT

    @property
    def preset_overrides(self) -> dict[str, Any]:
        """The overrides as keyword arguments of get_preset: {"moe": {"experts": 16}} is moe__experts=16."""
        return _flat(self.overrides)


@dataclasses.dataclass(frozen=True)
class MeshSection:
    """How many devices share the work, and in which way; all 1 is one device and no mesh. Several processes need all their devices in it.

    Rows of a microbatch are split over data, fsdp and expert, the queries of a row over context; weights over fsdp, expert and context,
    experts over expert, heads and FFN widths over model.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    model: int = 1
    timeout_seconds: float = 1800.0  # a process that the others wait for so long is stuck, and the run fails

    def __post_init__(self):
        _positive("mesh", self, *(field.name for field in dataclasses.fields(self)))

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("data", "fsdp", "expert", "context", "model")}

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """Shape of what a model is trained on: rows of `row_length` tokens that segments are packed into, `microbatch_rows` at a time."""

    row_length: int = 256
    microbatch_rows: int = 16

    def __post_init__(self):
        _positive("rows", self, "row_length", "microbatch_rows")


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Supervised fine-tuning on the environments' demonstrations."""

    steps: int = 3000
    dense_steps: int = 200  # first steps with dense attention, in which only the indexer's own loss teaches it (DSA warm-up)
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.0
    demonstrations: int = 4000  # an environment
    fault_rate: float = 0.35  # share of episodes in which the scripted demonstrator errs
    clean_first: float = 0.5  # share of the steps that see only demonstrations without a fault
    indexer_loss: float = 1.0  # coefficient of the indexer's loss beside the language-model loss
    balance_loss: float = 0.0  # coefficient of the sequence-wise balance loss of the experts (GLM-4.5: 1e-4)
    bias_rate: float = 0.0  # what a step moves the routers' biases by, against the experts' loads (GLM-4.5: 1e-3)
    mtp_loss: float = 0.0  # coefficient of the loss of mtp_steps further tokens (GLM-4.5: 0.3, then 0.1); 0 leaves the MTP module alone
    mtp_steps: int = 0
    rows: int = 32  # packed rows a step

    def __post_init__(self):
        _positive("sft", self, "learning_rate", "demonstrations", "rows")
        _not_negative("sft", self, "steps", "dense_steps", "warmup_steps", "weight_decay", "indexer_loss")
        _not_negative("sft", self, "balance_loss", "bias_rate", "mtp_loss", "mtp_steps")
        remedy = f"sft.mtp_loss={self.mtp_loss}: both must be greater than 0, or neither"
        require((self.mtp_steps > 0) == (self.mtp_loss > 0), "sft.mtp_steps", self.mtp_steps, remedy)
        require(self.dense_steps <= self.steps, "sft.dense_steps", self.dense_steps, f"must not exceed sft.steps={self.steps}")
        require(self.warmup_steps <= self.steps, "sft.warmup_steps", self.warmup_steps, f"must not exceed sft.steps={self.steps}")
        for name in ("fault_rate", "clean_first"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"sft.{name}", value, "is a share, from 0 to 1")
        remedy = f"leaves no clean demonstration to begin with: sft.clean_first={self.clean_first}"
        require(self.fault_rate < 1 or self.clean_first == 0, "sft.fault_rate", self.fault_rate, remedy)


@dataclasses.dataclass(frozen=True)
class RLConfig:
    """Asynchronous reinforcement learning. Versions count publications; staleness is taken when the learner leases a rollout."""

    mode: Literal["async", "sync"] = "async"
    updates: int = 100
    max_staleness: int = 4
    publish_every: int = 1  # updates
    batch_rollouts: int = 192  # rollouts an update
    group_size: int = 8  # rollouts of one prompt
    learning_rate: float = 4e-4
    loss: Literal["glm5_agentic", "grpo"] = "glm5_agentic"  # see glm_jax.rl.losses
    eps_low: float = 0.2  # glm5_agentic: a token counts while 1 - eps_low < ratio < 1 + eps_high (GLM-5 report, eq. 5)
    eps_high: float = 0.28
    advantage: Literal["mean", "mean_std", "leave_one_out"] = "mean"  # see glm_jax.rl.advantages
    max_new_tokens: int = 64  # an assistant turn
    temperature: float = 1.0
    actor_threads: int = 2
    episodes: int = 192  # running at once, over all actor threads
    deadline_seconds: float = 300.0  # one wait for the environment, its place in the sandbox's queue included
    reset_optimizer: bool = False  # forget the optimizer's moments when new weights are published
    replay: Literal["none", "experts", "all"] = "none"  # replay the rollout's experts, or experts and selections, in the learner
    freeze_indexer: bool = True

    def __post_init__(self):
        _positive(
            "rl", self, "publish_every", "batch_rollouts", "learning_rate", "max_new_tokens", "temperature", "actor_threads", "episodes"
        )
        _positive("rl", self, "deadline_seconds", "eps_high")
        _not_negative("rl", self, "updates", "max_staleness")
        require(0 < self.eps_low <= 1, "rl.eps_low", self.eps_low, "the band is 1 - eps_low < ratio < 1 + eps_high: from above 0 to 1")
        require(self.group_size >= 2, "rl.group_size", self.group_size, "a group compares rollouts with each other: at least 2")
        require(
            self.batch_rollouts % self.group_size == 0,
            "rl.batch_rollouts",
            self.batch_rollouts,
            f"must be a multiple of rl.group_size={self.group_size}; an update takes whole groups",
        )
        require(
            self.episodes >= self.actor_threads,
            "rl.episodes",
            self.episodes,
            f"each of rl.actor_threads={self.actor_threads} threads needs at least one episode",
        )
        if self.mode == "sync":
            remedy = "rl.mode=sync needs rl.publish_every=1 and rl.max_staleness=0"
            require(self.publish_every == 1, "rl.publish_every", self.publish_every, remedy)
            require(self.max_staleness == 0, "rl.max_staleness", self.max_staleness, remedy)
            remedy = f"rl.mode=sync runs a whole batch at once: at least rl.batch_rollouts={self.batch_rollouts}"
            require(self.episodes >= self.batch_rollouts, "rl.episodes", self.episodes, remedy)


@dataclasses.dataclass(frozen=True)
class EngineSection:
    """Generation: `slots` cached contexts of `max_length` tokens; a dispatch decodes `decode_steps` tokens or prefills one chunk."""

    slots: int = 96
    max_length: int = 256
    decode_steps: int = 8
    prefill_rows: int = 16
    prefill_chunk: int = 64

    def __post_init__(self):
        _positive("engine", self, "slots", "max_length", "decode_steps", "prefill_rows", "prefill_chunk")
        require(self.prefill_rows <= self.slots, "engine.prefill_rows", self.prefill_rows, f"must not exceed engine.slots={self.slots}")
        require(
            self.prefill_chunk <= self.max_length,
            "engine.prefill_chunk",
            self.prefill_chunk,
            f"must not exceed engine.max_length={self.max_length}",
        )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    tasks: int = 200  # an environment
    split: Literal["train", "validation", "test"] = "validation"
    temperature: float = 1.0  # of the sampled column; the greedy column is always there

    def __post_init__(self):
        _positive("evaluation", self, "tasks", "temperature")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = 25  # RL updates between checkpoints; one is always written between phases and at the end
    keep: int = 2

    def __post_init__(self):
        _positive("checkpoint", self, "every", "keep")


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    name: str
    seed: int = 0
    model: ModelSection = ModelSection()
    mesh: MeshSection = MeshSection()
    environments: tuple[str, ...] = ()  # gymnasium ids; experiments.run checks them against glm_jax.environments
    tokenizer: str = "byte"  # "byte", or the path of a Hugging Face tokenizer.json
    rows: RowsConfig = RowsConfig()
    sft: SFTConfig = SFTConfig()
    rl: RLConfig = RLConfig()
    engine: EngineSection = EngineSection()
    evaluation: EvaluationConfig = EvaluationConfig()
    control: bool = True  # after RL, spend its wall time on more SFT from the same start, and compare
    checkpoint: CheckpointConfig = CheckpointConfig()
    output: str = "runs"

    def __post_init__(self):
        require(bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.name)), "name", self.name, "names a directory: letters, digits, . _ -")
        require(0 <= self.seed < 2**32, "seed", self.seed, "must be 0 or greater, and below 2**32")
        require(len(self.environments) > 0, "environments", "[]", "name at least one, e.g. environments=[glm_jax/Calculator-v0]")
        repeated = sorted({e for e in self.environments if self.environments.count(e) > 1})
        require(not repeated, "environments", list(self.environments), f"{', '.join(repeated)} is there more than once")
        require(
            self.engine.max_length <= self.rows.row_length,
            "engine.max_length",
            self.engine.max_length,
            f"a full context must fit in one training row: at most rows.row_length={self.rows.row_length}",
        )
        require(
            self.rl.max_new_tokens < self.engine.max_length,
            "rl.max_new_tokens",
            self.rl.max_new_tokens,
            f"a turn must leave room for its prompt: less than engine.max_length={self.engine.max_length}",
        )
        require(
            self.engine.slots <= self.rl.episodes,
            "engine.slots",
            self.engine.slots,
            f"an episode holds one slot, so slots beyond rl.episodes={self.rl.episodes} would be decoded for nobody",
        )
        split = self.mesh.data * self.mesh.fsdp
        for key, rows in (("sft.rows", self.sft.rows), ("rows.microbatch_rows", self.rows.microbatch_rows)):
            require(rows % split == 0, key, rows, f"is split over mesh.data * mesh.fsdp: a multiple of {split}")
        row_length, context = self.rows.row_length, self.mesh.context
        require(row_length % context == 0, "rows.row_length", row_length, f"is split over mesh.context: a multiple of {context}")

    def share(self, processes: int) -> ExperimentConfig:
        """What one of several processes does of an update: sft.rows, rows.microbatch_rows and rl.batch_rollouts are of all together;
        episodes, actor threads and engine slots of each."""
        if processes == 1:
            return self
        group = self.rl.group_size
        for key, whole, unit in (
            ("sft.rows", self.sft.rows, 1), ("rows.microbatch_rows", self.rows.microbatch_rows, 1),
            ("rl.batch_rollouts", self.rl.batch_rollouts, group)):
            remedy = f"is shared by {processes} processes: a multiple of {processes * unit}"
            require(whole % (processes * unit) == 0, key, whole, remedy)
        return dataclasses.replace(
            self, mesh=MeshSection(), sft=dataclasses.replace(self.sft, rows=self.sft.rows // processes),
            rows=dataclasses.replace(self.rows, microbatch_rows=self.rows.microbatch_rows // processes),
            rl=dataclasses.replace(self.rl, batch_rollouts=self.rl.batch_rollouts // processes))


def _flat(overrides: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in overrides.items():
        flat |= _flat(value, f"{prefix}{key}__") if isinstance(value, dict) else {prefix + key: value}
    return flat
