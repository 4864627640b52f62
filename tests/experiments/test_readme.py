"""The code in the README runs as it stands there."""

import pathlib
import re

import numpy as np

from glm_jax.environments import make

BLOCKS = re.findall(r"```python\n(.*?)```", (pathlib.Path(__file__).parents[2] / "README.md").read_text(), re.DOTALL)


def test_the_config():
    (source,) = [block for block in BLOCKS if "def config()" in block]
    names = {}
    exec(source, names)
    config = names["config"]()
    assert (config.name, config.rl.max_staleness, config.rl.loss) == ("stale", 8, "grpo")
    assert names["sweep_staleness"]()[0] == ("rl.max_staleness=1",)


def test_the_model(tmp_path):
    (source,) = [block for block in BLOCKS if "load_pretrained" in block]
    golden = pathlib.Path(__file__).parents[1] / "golden" / "glm5"
    source = source.replace('"GLM-5-copy"', repr(str(tmp_path / "copy"))).replace('"GLM-5"', repr(str(golden)))
    names = {}
    exec(source, names)
    assert names["out"].logits.shape == (1, 3, 128) and names["model"].embedding.sharding.num_devices == 8
    assert (tmp_path / "copy" / "config.json").exists()


def test_the_environment():
    (source,) = [block for block in BLOCKS if "TextEnvironment" in block]
    exec(source, {})
    environment, rng = make("my/Reverse-v0"), np.random.default_rng(0)
    for seed in range(20):
        environment.reset(seed=seed)
        demonstration = environment.demonstrate(rng, fault_rate=0.5)
        assert environment.step(demonstration.messages[-1][1])[1] == float(demonstration.success)
