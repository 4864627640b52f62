"""A tiny GLM-5 on two CPU cores: supervised fine-tuning, then asynchronous RL on an agentic, a reasoning and a coding task."""

from glm_jax.config import (
    CheckpointConfig,
    EngineSection,
    EvaluationConfig,
    ExperimentConfig,
    ModelSection,
    RLConfig,
    RowsConfig,
    SFTConfig,
)


def config() -> ExperimentConfig:
    return ExperimentConfig(
        name="quickstart",
        model=ModelSection(preset="tiny"),
        environments=("glm_jax/Calculator-v0", "glm_jax/DigitChain-v0", "glm_jax/CodeSteps-v0"),
        rows=RowsConfig(row_length=128, microbatch_rows=16),
        sft=SFTConfig(
            steps=1100, dense_steps=650, learning_rate=3e-3, weight_decay=0.01, demonstrations=4000, fault_rate=0.4, clean_first=0.7,
            rows=16,
        ),
        rl=RLConfig(updates=100, batch_rollouts=128, group_size=8, learning_rate=4e-4, episodes=128, max_new_tokens=64),
        engine=EngineSection(slots=64, max_length=128, decode_steps=8, prefill_rows=16, prefill_chunk=32),
        evaluation=EvaluationConfig(tasks=200, split="validation"),
        checkpoint=CheckpointConfig(every=25, keep=2),
    )


def sweep_seeds() -> list[tuple[str, ...]]:
    """The three seeds of the table, on the split that no tuning has seen."""
    return [(f"seed={seed}", "evaluation.split=test") for seed in (0, 1, 2)]
