"""Every registered environment keeps the same promises."""

import asyncio
import random
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from glm_jax.data.trajectory import Status
from glm_jax.environments import SPLITS, EnvironmentFailure, TextEnvironment, VerifierError, make, registered, split_of

INSTANCES = 50
pytestmark = pytest.mark.parametrize("id", registered())


def play(environment, demonstration):
    """Plays the demonstration's assistant turns; checks what is observed between them; returns the last step."""
    messages = demonstration.messages
    assert messages[0] == ("user", environment.prompt())
    outcome = None
    for (role, content), following in zip(messages[1:], [*messages[2:], None], strict=True):
        if role != "assistant":
            assert role == "observation"
            continue
        assert outcome is None or not outcome[2]
        assert environment.action_space.contains(content)
        outcome = environment.step(content)
        observation, reward, terminated, truncated, info = outcome
        assert environment.observation_space.contains(observation)
        if following is None:
            assert terminated and not truncated and Status[info["status"]] is Status.COMPLETED
        else:
            assert (following, reward, terminated, truncated, info) == (("observation", observation), 0.0, False, False, {})
    return outcome


def test_seeds_reproduce_and_splits_hold(id):
    first, second = make(id), make(id)
    for split in SPLITS:
        prompts = set()
        for seed in range(INSTANCES):
            observation, info = first.reset(seed=seed, options={"split": split})
            assert second.reset(seed=seed, options={"split": split})[0] == observation == first.prompt()
            assert first.content_key() == second.content_key()
            assert first.observation_space.contains(observation)
            assert split_of(first.content_key()) == split == info["split"]
            assert len(observation) <= 48 and "\n" not in observation
            prompts.add(observation)
        assert len(prompts) > 0.9 * INSTANCES


def test_demonstrations_earn_what_they_say(id):
    environment = make(id)
    rng = np.random.default_rng(0)
    for fault_rate, share in ((0.0, 0.75), (1.0, 1.0), (1.0, 0.0)):
        for seed in range(INSTANCES):
            environment.reset(seed=seed)
            demonstration = environment.demonstrate(rng, fault_rate, share)
            assert demonstration.fault == (None if fault_rate == 0 else "shortcut" if share else "slip")
            assert demonstration.success == (fault_rate == 0)
            assert play(environment, demonstration)[1] == (1.0 if fault_rate == 0 else 0.0)


def test_fault_shares(id):
    environment = make(id)
    rng = np.random.default_rng(0)
    faults = []
    for seed in range(2000):
        environment.reset(seed=seed)
        faults.append(environment.demonstrate(rng, 0.4).fault)
    assert faults.count(None) / 2000 == pytest.approx(0.6, abs=0.04)
    assert faults.count("shortcut") / 2000 == pytest.approx(0.3, abs=0.04)
    assert faults.count("slip") / 2000 == pytest.approx(0.1, abs=0.03)


def test_random_actions_fail(id):
    environment = make(id)
    environment.action_space.seed(0)
    for seed in range(INSTANCES):
        environment.reset(seed=seed)
        for action in (environment.action_space.sample(), "", "\ud800\x00<think>"):
            environment.reset(seed=seed)
            terminated = truncated = False
            while not (terminated or truncated):
                _, reward, terminated, truncated, info = environment.step(action)
                assert reward == 0.0
            assert Status[info["status"]].trainable


def test_order_of_calls(id):
    environment = make(id)
    with pytest.raises(gymnasium.error.ResetNeeded):
        environment.step("")
    environment.reset(seed=0)
    play(environment, environment.demonstrate(np.random.default_rng(0)))
    with pytest.raises(gymnasium.error.ResetNeeded):
        environment.step("")
    with pytest.raises(gymnasium.error.ResetNeeded):
        asyncio.run(environment.step_async(""))
    with pytest.raises(ValueError, match="unknown split"):
        environment.reset(seed=0, options={"split": "valid"})
    with pytest.raises(ValueError, match="unknown reset options"):
        environment.reset(seed=0, options={"spilt": "train"})


def test_async_equals_sync(id):
    async def episode(environment, seed):
        opening = await environment.reset_async(seed=seed, options={"split": "validation"})
        demonstration = environment.demonstrate(np.random.default_rng(seed), 0.5)
        return [opening, *[await environment.step_async(c) for r, c in demonstration.messages if r == "assistant"]]

    async def together():
        return await asyncio.gather(*[episode(make(id), seed) for seed in range(INSTANCES)])

    environment = make(id)
    for seed, outcome in enumerate(asyncio.run(together())):
        opening = environment.reset(seed=seed, options={"split": "validation"})
        demonstration = environment.demonstrate(np.random.default_rng(seed), 0.5)
        assert outcome == [opening, *[environment.step(c) for r, c in demonstration.messages if r == "assistant"]]


def test_ten_thousand_distinct_seeds(id):
    environment = make(id)
    contents = set()
    for seed in range(12_000):
        environment.reset(seed=seed)
        contents.add(environment.content_key())
    assert len(contents) >= 10_000


def test_ten_thousand_instances_in_every_split(id):
    environment = make(id)
    rng = np.random.default_rng(0)
    contents = {split: set() for split in SPLITS}
    for _ in range(250_000):
        environment.draw(rng)
        content = environment.content_key()
        contents[split_of(content)].add(content)
        if min(map(len, contents.values())) >= 10_000:
            return
    pytest.fail(f"distinct contents: { {split: len(found) for split, found in contents.items()} }")


@pytest.mark.filterwarnings("ignore")
def test_gymnasium_makes_and_checks_it(id):
    environment = gymnasium.make(id)
    assert isinstance(environment, TextEnvironment) and environment.spec.id == id
    check_env(environment, skip_render_check=True)


def test_failures_are_typed_and_end_the_episode(id, monkeypatch):
    environment = make(id)
    for raised, expected in ((EnvironmentFailure("down"), EnvironmentFailure), (KeyError("bug"), VerifierError)):

        def respond(action, raised=raised):
            raise raised

        monkeypatch.setattr(environment, "respond", respond)
        environment.reset(seed=0)
        with pytest.raises(expected):
            environment.step("")
        with pytest.raises(gymnasium.error.ResetNeeded):
            environment.step("")


def test_unknown_id_names_the_nearest(id):
    with pytest.raises(ValueError, match=f"did you mean '{id}'"):
        make(id.replace("-v0", "-v1"))


def test_imports_no_jax(id):
    program = f"import sys; from glm_jax.environments import make; make({id!r}).reset(seed=0); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_draws_do_not_depend_on_global_state(id):
    environment = make(id)
    random.seed(1)
    np.random.seed(1)
    first = environment.reset(seed=3)
    random.seed(2)
    np.random.seed(2)
    assert environment.reset(seed=3) == first
