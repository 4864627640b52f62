import dataclasses
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import config as configs
from glm_jax.config import ConfigError, ExperimentConfig, RLConfig


@pytest.fixture
def base() -> ExperimentConfig:
    return ExperimentConfig(name="base", environments=("glm_jax/Calculator-v0",))


@pytest.mark.parametrize("name", configs.list_configs())
def test_named_configs_build_save_and_reload(name, tmp_path):
    runs = [(), *(run for sweep in configs.sweeps(name).values() for run in sweep)]
    for overrides in runs:
        for debug in (False, True):
            config = configs.load(name, overrides, debug=debug)
            configs.save(config, tmp_path / "config.yaml")
            assert configs.reload(tmp_path / "config.yaml") == config


def test_overrides_are_read_by_type(base):
    changed = configs.override(
        base,
        ["seed=3", "sft.learning_rate=1e-4", "control=false", "tokenizer=/a/b.json", "environments=[a,b]", "model.overrides.moe.experts=4"],
    )
    assert (changed.seed, changed.sft.learning_rate, changed.control, changed.tokenizer) == (3, 1e-4, False, "/a/b.json")
    assert changed.environments == ("a", "b")
    assert changed.model.preset_overrides == {"moe__experts": 4}
    assert configs.override(base, ["seed=1", "seed=2"]).seed == 2
    assert base.seed == 0


@settings(deadline=None, max_examples=50)
@given(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**31),
            "sft.learning_rate": st.floats(1e-9, 1e9),
            "rl.max_staleness": st.integers(0, 100),
            "rl.replay": st.sampled_from(["none", "experts", "all"]),
            "evaluation.split": st.sampled_from(["train", "validation", "test"]),
            "control": st.booleans(),
        }
    )
)
def test_every_override_survives_saving(tmp_path_factory, values):
    config = configs.override(ExperimentConfig(name="x", environments=("e",)), [f"{key}={value}" for key, value in values.items()])
    for key, value in values.items():
        node = config
        for part in key.split("."):
            node = getattr(node, part)
        assert node == value
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    configs.save(config, path)
    assert configs.reload(path) == config


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rl.updats=1", "rl.updates"),
        ("max_staleness=1", "rl.max_staleness"),
        ("sft.learning_rates=1", "sft.learning_rate"),
        ("engin.slots=1", "engine"),
        ("seed.x=1", "seed"),
        ("rl=1", "rl.updates"),
        ("rl.updates", "rl.updates=10"),
        ("sft.steps=many", "sft.steps"),
        ("sft.steps=2.5", "sft.steps"),
        ("sft.steps=null", "sft.steps"),
        ("rl.mode=synch", "async"),
        ("environments=one", "environments"),
        ("environments=[]", "environments"),
        ("name=a/b", "name"),
    ],
)
def test_refused_overrides_name_the_key(base, text, named):
    with pytest.raises(ConfigError) as error:
        configs.override(base, [text])
    assert named in str(error.value).replace(text, "", 1) or named in text
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rl.mode=sync"], "rl.max_staleness=4"),
        (["rl.mode=sync", "rl.max_staleness=0", "rl.publish_every=2"], "rl.publish_every=2"),
        (["rl.mode=sync", "rl.max_staleness=0", "rl.episodes=96"], "rl.episodes=96"),
        (["rl.batch_rollouts=100", "rl.group_size=8"], "rl.batch_rollouts=100"),
        (["rl.group_size=1"], "rl.group_size=1"),
        (["rl.eps_low=1.5"], "rl.eps_low=1.5"),
        (["rl.temperature=0"], "rl.temperature=0"),
        (["rl.episodes=1"], "rl.episodes=1"),
        (["engine.max_length=1000"], "engine.max_length=1000"),
        (["engine.slots=1000"], "engine.slots=1000"),
        (["engine.prefill_rows=90", "engine.slots=10"], "engine.prefill_rows=90"),
        (["rl.max_new_tokens=256"], "rl.max_new_tokens=256"),
        (["sft.fault_rate=2"], "sft.fault_rate=2"),
        (["sft.dense_steps=10", "sft.warmup_steps=1", "sft.steps=5"], "sft.dense_steps=10"),
        (["sft.bias_rate=-1"], "sft.bias_rate=-1"),
        (["sft.mtp_steps=3"], "sft.mtp_steps=3"),
        (["sft.mtp_loss=0.3"], "sft.mtp_steps=0"),
        (["environments=[a,a]"], "environments="),
        (["checkpoint.every=0"], "checkpoint.every=0"),
    ],
)
def test_contradictions_are_refused_with_key_and_value(base, overrides, key):
    with pytest.raises(ConfigError, match="^" + key.replace(".", r"\.")):
        configs.override(base, overrides)


def test_sync_mode_is_accepted_when_it_is_consistent(base):
    assert configs.override(base, ["rl.mode=sync", "rl.max_staleness=0"]).rl.mode == "sync"


def test_unknown_config_names_the_nearest():
    with pytest.raises(ConfigError, match="quickstart"):
        configs.load("quikstart")


def test_a_saved_config_of_other_code_is_refused_by_key(base, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(configs.to_yaml(base).replace("max_staleness", "max_stale"))
    with pytest.raises(ConfigError, match=r"rl\.max_stale'.*rl\.max_staleness"):
        configs.reload(path)
    with pytest.raises(ConfigError, match="does not exist"):
        configs.reload(tmp_path / "none.yaml")


def test_unregistered_environment_names_the_nearest(base):
    configs.check_environments(base)
    with pytest.raises(ConfigError, match="did you mean glm_jax/Calculator-v0"):
        configs.check_environments(dataclasses.replace(base, environments=("glm_jax/Calculater-v0",)))


def test_replay_needs_what_it_replays(base):
    @dataclasses.dataclass
    class Dense:
        moe_layers: int = 0
        indexer: object = None

    config = configs.override(base, ["rl.replay=experts"])
    with pytest.raises(ConfigError, match=r"rl\.replay=experts"):
        configs.check_model(config, Dense())
    configs.check_model(config, Dense(moe_layers=1))
    with pytest.raises(ConfigError, match="no indexer"):
        configs.check_model(configs.override(base, ["rl.replay=all"]), Dense(moe_layers=1))


@pytest.mark.parametrize(
    ("key", "value", "lacks"), [("balance_loss", 1e-4, "experts"), ("bias_rate", 1e-3, "experts"), ("mtp_steps", 2, "MTP")])
def test_losses_need_the_part_that_they_train(base, key, value, lacks):
    @dataclasses.dataclass
    class Dense:
        moe_layers: int = 0
        indexer: object = None
        mtp: object = None

    config = dataclasses.replace(base, sft=dataclasses.replace(base.sft, **{key: value}, mtp_loss=0.3 if key == "mtp_steps" else 0))
    with pytest.raises(ConfigError, match=rf"^sft\.{key}={value}: .*has no {lacks}"):
        configs.check_model(config, Dense())
    configs.check_model(config, Dense(moe_layers=1, mtp=object()))


def test_a_preset_without_mtp_gets_it_by_an_override(base):
    assert configs.model_config(base).mtp is None
    changes = ["model.overrides.mtp.share_selection=true", "sft.mtp_loss=0.3", "sft.mtp_steps=3"]
    assert configs.model_config(configs.override(base, changes)).mtp.share_selection


def test_model_overrides_reach_the_preset(base):
    assert configs.model_config(configs.override(base, ["model.overrides.moe.experts=4"])).moe.experts == 4
    with pytest.raises(ConfigError, match="^model: "):
        configs.model_config(configs.override(base, ["model.overrides.moe.expert=4"]))
    with pytest.raises(ConfigError, match="no model preset"):
        configs.model_config(configs.override(base, ["model.preset=huge"]))


def test_names_in_the_config_are_those_of_the_library():
    from glm_jax.rl import advantages, losses

    hints = typing.get_type_hints(RLConfig)
    assert set(typing.get_args(hints["loss"])) == set(losses._LOSSES)
    assert set(typing.get_args(hints["advantage"])) == set(advantages.KINDS)
