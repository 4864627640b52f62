"""One episode against an engine that says what it is told to."""

import asyncio

import numpy as np
import pytest

from glm_jax.data.chat import ChatTemplate
from glm_jax.data.tokenizers import ByteTokenizer
from glm_jax.data.trajectory import Status
from glm_jax.environments import make
from glm_jax.rl.episode import EpisodeSettings, run_episode
from glm_jax.rollout import Completion
from glm_jax.tracing import Tracer

TOKENIZER = ByteTokenizer()
TEMPLATE = ChatTemplate(TOKENIZER)


class ScriptedEngine:
    """Answers with the given turns, markup, and then no more; notes what was fed and released."""

    def __init__(self, *turns, reason="stop"):
        self.turns, self.reason, self.fed, self.released = list(turns), reason, [], []

    async def generate(self, session, tokens, params):
        self.fed.append((list(tokens), params))
        if not self.turns:
            await asyncio.Event().wait()
        ids = np.array(TOKENIZER.encode_markup(self.turns.pop(0)), np.int32)
        return Completion(ids, np.full(len(ids), -1.0, np.float32), np.full(len(ids), 3, np.int32), self.reason)

    def release(self, session):
        self.released.append(session)


def play(engine, environment, max_length=128, deadline=5.0):
    settings = EpisodeSettings(max_length, 64, 1.0, deadline)
    return asyncio.run(run_episode(
        engine, environment, TEMPLATE, session=7, task_seed=1, sampling_seed=2, settings=settings, tracer=Tracer.null()))


def calculator():
    environment = make("glm_jax/Calculator-v0")
    environment.reset(seed=1, options={"split": "train"})
    return environment, environment.answer


def test_a_tool_call_its_observation_and_the_answer():
    environment, answer = calculator()
    engine = ScriptedEngine("<tool_call>12*3</tool_call><|observation|>", f"{answer}<|user|>")
    outcome = play(engine, environment)
    assert (outcome.status, outcome.reward) == (Status.COMPLETED, 1.0)
    segment = outcome.segments[0]
    prompt = TEMPLATE.prompt([("user", environment.prompt())])
    call = TOKENIZER.encode_markup("<tool_call>12*3</tool_call><|observation|>")
    read = [*TOKENIZER.encode("36"), TEMPLATE.role_id["assistant"]]
    said = TOKENIZER.encode_markup(f"{answer}<|user|>")
    assert segment.tokens.tolist() == [*prompt, *call, *read, *said]
    assert segment.loss_mask.tolist() == [0] * len(prompt) + [1] * len(call) + [0] * len(read) + [1] * len(said)
    assert engine.fed[1][0] == [*prompt, *call, *read], "the second turn goes on from what the first one sampled"
    assert engine.released == [7]


def test_an_observation_without_room_for_an_answer_truncates():
    """It must not make the record longer than a context, which is all that a slot and a training row hold."""
    environment, _ = calculator()
    prompt = TEMPLATE.prompt([("user", environment.prompt())])
    call = "<tool_call>99999*99999*99999</tool_call><|observation|>"
    told = len(prompt) + len(TOKENIZER.encode_markup(call))
    engine = ScriptedEngine(call)
    outcome = play(engine, environment, max_length=told + 4)
    assert (outcome.status, outcome.reward) == (Status.TRUNCATED, 0.0)
    assert outcome.segments[0].tokens.size == told and engine.released == [7]


def test_a_turn_that_runs_out_of_tokens_is_the_policys_doing():
    environment, _ = calculator()
    outcome = play(ScriptedEngine("12", reason="length"), environment)
    assert (outcome.status, outcome.reward) == (Status.TRUNCATED, 0.0) and outcome.segments[0].loss_mask.sum() == 2


def test_a_prompt_that_fills_the_context_is_an_error_with_the_key():
    environment, _ = calculator()
    with pytest.raises(ValueError, match="engine.max_length=10"):
        play(ScriptedEngine(), environment, max_length=10)


def test_an_environment_that_does_not_answer_in_time_has_failed():
    environment, _ = calculator()

    async def sleeps(action):
        await asyncio.sleep(30)

    environment.step_async = sleeps
    outcome = play(ScriptedEngine("1<|user|>"), environment, deadline=0.05)
    assert outcome.status is Status.ENVIRONMENT_FAILURE and outcome.segments == ()


def test_a_cancelled_episode_ends_even_when_its_environment_has_just_answered():
    """asyncio.wait_for of Python 3.11 loses that cancellation; the episode then waits for an engine that may never answer."""
    environment, _ = calculator()

    async def main():
        task = None

        async def answers(action):
            await asyncio.sleep(0.01)
            asyncio.get_running_loop().call_soon(task.cancel)  # comes when the step is done and before anybody was told
            return "36", 0.0, False, False, {}

        environment.step_async = answers
        engine = ScriptedEngine("1<|user|>")
        settings = EpisodeSettings(128, 64, 1.0, 5.0)
        task = asyncio.create_task(run_episode(
            engine, environment, TEMPLATE, session=7, task_seed=1, sampling_seed=2, settings=settings, tracer=Tracer.null()))
        await asyncio.wait([task], timeout=5)
        assert task.cancelled() and engine.released == [7]

    asyncio.run(main())
