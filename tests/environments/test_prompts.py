"""The stream of prompts: mixed, by index, resumed exactly."""

import collections
import itertools

import pytest

from glm_jax.environments.prompts import PromptSpec, prompts


def test_prompts_are_a_mixed_stream_by_index():
    stream = prompts(["a", "b"], seed=5, mix={"a": 3, "b": 1})
    drawn = list(itertools.islice(stream, 400))
    assert collections.Counter(p.environment for p in drawn) == {"a": 300, "b": 100}
    assert [p.prompt_id for p in drawn] == list(range(400))
    assert len({p.seed for p in drawn}) == 400 and all(type(p.seed) is int and 0 <= p.seed < 2**31 for p in drawn)

    again = prompts(["a", "b"], seed=5, mix={"a": 3, "b": 1})
    assert again[123] == drawn[123] and isinstance(again[0], PromptSpec)
    again.set_state({"cursor": 100})
    assert next(again) == drawn[100]
    assert stream.get_state() == {"cursor": 400} and next(stream) == again[400]
    assert again[10**9].prompt_id == 10**9
    assert [p.seed for p in itertools.islice(prompts(["a", "b"], seed=6), 9)] != [p.seed for p in drawn[:9]]


def test_prompts_refuse_a_wrong_mix():
    for ids, mix in ((["a"], {"a": 1, "b": 1}), (["a", "b"], {"a": 1}), (["a"], {"a": 0}), ([], None)):
        with pytest.raises(ValueError, match="positive weight"):
            prompts(ids, 0, mix)
