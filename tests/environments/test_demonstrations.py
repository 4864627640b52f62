"""Demonstrations: reproduced by their seed, and borne out by their environments."""

import collections
import subprocess
import sys

import gymnasium
import numpy as np
import pytest

from glm_jax.data.chat import ChatTemplate
from glm_jax.data.pipelines import packed_batches
from glm_jax.data.tokenizers import ByteTokenizer
from glm_jax.environments import SPLITS, registered
from glm_jax.environments.demonstrations import DemonstrationError, demonstration_source

Demonstration = collections.namedtuple("Demonstration", "messages success fault")


class Echo(gymnasium.Env):
    """Wants a number of its seed and split, said once and then again; a fault says another. `lie` breaks the demonstrator."""

    lie = ""

    observation_space = action_space = gymnasium.spaces.Text(20)

    def __init__(self, word):
        self.word = word

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = f"{self.word} {options['split']} {seed}"
        self.turns = 0
        return self.number, {}

    def step(self, action):
        self.turns += 1
        return ("again", 0.0, False, False, {}) if self.turns == 1 else ("", float(action == self.number), True, False, {})

    def demonstrate(self, rng, fault_rate):
        fault = rng.random() < fault_rate
        turns = [("assistant", "hm"), ("observation", "once more" if self.lie == "observation" else "again")]
        turns += [("assistant", "?" if fault else self.number)]
        if self.lie == "short":
            turns = turns[:1]
        if self.lie == "long":
            turns += [("observation", ""), ("assistant", "")]
        success = fault if self.lie == "claim" else not fault
        return Demonstration([("user", self.number), *turns], success, "slip" if fault else None)


@pytest.fixture(scope="module")
def echo_ids():
    ids = ["glm_jax_test/EchoA-v0", "glm_jax_test/EchoB-v0"]
    for name, word in zip(ids, "AB", strict=True):
        gymnasium.register(name, entry_point=Echo, kwargs={"word": word}, order_enforce=False, disable_env_checker=True)
    yield ids
    for name in ids:
        del gymnasium.registry[name]


def test_demonstrations(echo_ids):
    template = ChatTemplate(ByteTokenizer())
    source = demonstration_source(echo_ids, 400, seed=3, split="validation", fault_rate=0.25)
    assert collections.Counter(source.environments) == dict.fromkeys(echo_ids, 200)
    texts = [template.tokenizer.decode(r.tokens) for r in source.records]
    assert len(set(texts)) == 400 and all(" validation " in t for t in texts)
    assert source.successful == [i for i, t in enumerate(texts) if "<|assistant|>?" not in t]
    assert all(0.6 < share < 0.9 for share in source.success_share.values()) and list(source.success_share) == echo_ids
    assert np.mean(list(source.success_share.values())) == len(source.successful) / 400
    for r in source.records:
        assert not r.logp.any() and not r.versions.any() and r.loss_mask[-1] == 1

    again = demonstration_source(echo_ids, 400, seed=3, split="validation", fault_rate=0.25)
    assert [r.tokens.tolist() for r in again.records] == [r.tokens.tolist() for r in source.records]
    other = demonstration_source(echo_ids, 4, seed=4, split="validation")
    assert other.success.all() and [r.tokens.tolist() for r in other.records] != [r.tokens.tolist() for r in source.records[:4]]


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        ("claim", "claims success, the verifier gives 0.0"),
        ("claim", "claims failure, the verifier gives 1.0"),
        ("observation", "is played as .*'again'"),
        ("short", "and does not end"),
        ("long", "is played as"),
    ],
)
def test_a_demonstration_that_is_not_borne_out_is_an_error(echo_ids, monkeypatch, lie, says):
    monkeypatch.setattr(Echo, "lie", lie)
    with pytest.raises(DemonstrationError, match=f"EchoA-v0, seed [0-9]+ of split train: .*{says}"):
        demonstration_source(echo_ids, 1, seed=0, fault_rate=float("success" in says))
    assert len(demonstration_source(echo_ids, 1, seed=0, verify=0.0).records) == 1


@pytest.mark.parametrize(("verify", "replayed"), [(0.0, []), (1.0, range(40)), (0.25, [0, 1, 8, 9, 16, 17, 24, 25, 32, 33])])
def test_the_share_that_is_replayed(echo_ids, verify, replayed):
    source, plain = (demonstration_source(echo_ids, 40, seed=0, fault_rate=0.5, verify=v) for v in (verify, 0.0))
    assert np.flatnonzero(source.verified).tolist() == list(replayed)
    assert [r.tokens.tolist() for r in source.records] == [r.tokens.tolist() for r in plain.records]


def test_verify_is_a_share(echo_ids):
    with pytest.raises(ValueError, match="verify=2"):
        demonstration_source(echo_ids, 1, seed=0, verify=2)


@pytest.mark.parametrize("split", SPLITS)
def test_demonstrations_of_the_packages_environments(split):
    source = demonstration_source(registered(), 120, seed=0, split=split, fault_rate=0.5, verify=1.0)
    assert source.verified.all() and set(source.success_share) == set(registered())
    assert all(0 < share < 1 for share in source.success_share.values())
    assert next(packed_batches(source.records, 4, 1024, 0)).tokens.shape == (4, 1024)


def test_imports_no_jax():
    program = "import sys, glm_jax.environments.demonstrations; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
