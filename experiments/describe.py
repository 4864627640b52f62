"""What a config would build, in a few lines: --dry-run."""

from __future__ import annotations

from experiments import config as configs
from glm_jax.config import ExperimentConfig


def describe(config: ExperimentConfig) -> None:
    """Prints what a run would build, without allocating a model."""
    model_config = configs.model_config(config)
    rows, sft, rl = config.rows, config.sft, config.rl
    print(f"model        {config.model.preset}: {model_config.parameter_count():,} parameters, vocabulary {model_config.vocab_size}")
    if config.mesh.devices > 1:
        sizes = ", ".join(f"{name}={size}" for name, size in config.mesh.sizes.items() if size > 1)
        print(f"mesh         {sizes}: {config.mesh.devices} devices")
    print(f"environments {', '.join(config.environments)}")
    print(f"sft          {sft.steps} steps of {sft.rows} x {rows.row_length} tokens ({sft.dense_steps} with dense attention), "
          f"{sft.demonstrations} demonstrations an environment, {sft.fault_rate:.0%} of them faulty")
    limit = (rl.max_staleness + 1) * rl.publish_every * rl.batch_rollouts
    print(f"rl           {rl.mode}: {rl.updates} updates of {rl.batch_rollouts} rollouts in groups of {rl.group_size}; "
          f"at most {limit} rollouts unpublished, staleness at most {rl.max_staleness}")
    cache = config.engine.slots * config.engine.max_length * model_config.cache_width * 4
    print(f"engine       {config.engine.slots} slots of {config.engine.max_length} tokens: {cache / 2**20:.1f} MiB of cache")
    print(f"evaluation   {config.evaluation.tasks} {config.evaluation.split} tasks an environment; control: {config.control}")
