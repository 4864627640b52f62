"""What the quickstart promises of its own sizes."""

import numpy as np

from experiments import config as configs
from glm_jax.environments.demonstrations import demonstration_source
from glm_jax.model import Transformer


def test_sequences_are_at_least_four_times_as_long_as_a_selection():
    config = configs.load("quickstart", [])
    demonstrations = demonstration_source(("glm_jax/CodeSteps-v0",), 500, seed=0, fault_rate=0.0, verify=0.0)
    shortest = min(len(record) for record in demonstrations.records)
    assert shortest >= 4 * configs.model_config(config).indexer.topk


def test_the_demonstrator_errs_in_at_least_three_of_ten_episodes():
    config = configs.load("quickstart", [])
    demonstrations = demonstration_source(config.environments, 3000, seed=0, fault_rate=config.sft.fault_rate, verify=0.0)
    assert np.all(np.array(list(demonstrations.success_share.values())) < 0.7)


def test_nothing_of_the_architecture_is_left_out():
    model = configs.model_config(configs.load("quickstart", []))
    paths = {declared.path for declared in Transformer.declare(model)}
    attention = {f"{kind}/attention/{part}" for kind in ("dense_layers", "moe_layers") for part in ("kv_down", "q_up")}
    assert paths >= attention | {"indexer/q_up", "dense_layers/ffn/gate", "moe_layers/moe/router_bias", "moe_layers/moe/shared_gate"}
    assert 0 < model.dense_layers < model.layers and model.moe.experts > model.moe.experts_per_token > 1
