"""The engine against the full forward pass, with a one-layer fake and with the real model."""

import asyncio
import contextlib
import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import fake_model

from glm_jax.model import Replay, get_preset, init_model
from glm_jax.rollout import Engine, EngineConfig, EngineError, PrefixError, SamplingParams

LENGTH = 40
CONFIG = EngineConfig(slots=3, max_length=LENGTH, decode_steps=3, prefill_rows=2, prefill_chunk=5)
VOCAB = 32  # prompts stay inside the smaller vocabulary
MODELS = {"fake": fake_model, "tiny": lambda seed: jax.jit(init_model, static_argnums=0)(get_preset("tiny"), jax.random.key(seed))}


@pytest.fixture(scope="module", params=sorted(MODELS))
def build(request):
    return MODELS[request.param]


@pytest.fixture(scope="module")
def model(build):
    return build(0)


@jax.jit
def _forward(model, ids, mask, replay):
    return model(ids, attention_mask=mask, replay=replay).logits[0]


def logits_of(model, ids, replay=None):
    """float32 [n, V]: row t predicts token t + 1; padded to one shape."""
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(_forward(model, padded, (np.arange(LENGTH) < len(ids)).astype(np.int32)[None], replay))[: len(ids)]


def teacher_forced(model, prompt, completion, temperature, replay=None):
    logits = logits_of(model, [*prompt, *completion.tokens], replay)[len(prompt) - 1 : -1]
    logp = jax.nn.log_softmax(logits / (temperature or 1.0))
    return np.take_along_axis(np.asarray(logp), completion.tokens[:, None], axis=1)[:, 0]


def prompts(count, seed=0, longest=12):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, timeout=120))


async def gather(engine, requests):
    """All at once: {session: (tokens, params)} -> completions; sessions are released."""

    async def one(session, tokens, params):
        try:
            return await engine.generate(session, tokens, params)
        finally:
            engine.release(session)

    return await asyncio.gather(*(one(session, *request) for session, request in requests.items()))


class Hooks:
    """A tracer that calls hook(count of spans of that name) when one starts, on the engine's thread."""

    def __init__(self, **hooks):
        self.hooks, self.counts, self.spans = hooks, {}, []

    def span(self, name, **args):
        self.spans.append((name, args))
        count = self.counts[name] = self.counts.get(name, 0) + 1
        hook = self.hooks.get(name.partition(".")[2])
        if hook is not None:
            hook(count)
        return contextlib.nullcontext()


def test_greedy_tokens_are_the_argmax_of_the_full_forward_pass(model):
    texts = prompts(7)
    with Engine(model, CONFIG) as engine:
        completions = run(gather(engine, {i: (text, SamplingParams(max_tokens=9, temperature=0.0)) for i, text in enumerate(texts)}))
        stats = engine.stats()
    for text, completion in zip(texts, completions, strict=True):
        logits = logits_of(model, text + completion.tokens.tolist())[len(text) - 1 : -1]
        assert completion.tokens.tolist() == logits.argmax(axis=-1).tolist()
        assert completion.finish_reason == "length" and len(completion.tokens) == 9
        np.testing.assert_allclose(completion.logp, teacher_forced(model, text, completion, 0.0), atol=1e-5)
    assert stats["tokens_prefilled"] == sum(map(len, texts)) and stats["tokens_decoded"] == 63 and stats["requests"] == 7
    assert stats["held"] == 0 and stats["busy_seconds"] > 0 and stats["compilations"] <= 2


def test_logprobs_are_those_of_the_tempered_distribution(model):
    texts = prompts(6, seed=1)
    temperatures = [0.5, 1.0, 1.7] * 2
    requests = {i: (texts[i], SamplingParams(max_tokens=8, seed=i, temperature=temperatures[i])) for i in range(6)}
    with Engine(model, CONFIG) as engine:
        completions = run(gather(engine, requests))
    for text, temperature, completion in zip(texts, temperatures, completions, strict=True):
        np.testing.assert_allclose(completion.logp, teacher_forced(model, text, completion, temperature), atol=1e-5)


def test_a_seed_reproduces_a_request_in_any_company(model):
    text, params = prompts(1, seed=2)[0], SamplingParams(max_tokens=12, seed=2**40 + 5)
    with Engine(model, CONFIG) as engine:
        (alone,) = run(gather(engine, {0: (text, params)}))
        crowd = {i: (other, SamplingParams(max_tokens=10, seed=i)) for i, other in enumerate(prompts(5, seed=3), 1)}
        *_, together = run(gather(engine, {**crowd, 9: (text, params)}))
        (other_seed,) = run(gather(engine, {10: (text, SamplingParams(max_tokens=12, seed=5))}))
    assert alone.tokens.tolist() == together.tokens.tolist() != other_seed.tokens.tolist()


def test_a_session_of_turns_equals_one_request_on_the_concatenation(model):
    params = SamplingParams(max_tokens=5, seed=3)

    async def turns(engine):
        ids, completions = prompts(1, seed=4)[0], []
        for turn in range(3):
            before = engine.stats()["tokens_prefilled"]
            completion = await engine.generate(0, ids, params)
            fed = engine.stats()["tokens_prefilled"] - before
            assert fed == (len(ids) if turn == 0 else 1 + 4)  # the last sample, and the observation
            completions.append((ids, completion))
            ids = ids + completion.tokens.tolist() + [7, 8, 9, 10]
        return completions

    with Engine(model, CONFIG) as engine:
        async def both():
            results = await turns(engine)
            fresh = await gather(engine, {i: (ids, params) for i, (ids, _) in enumerate(results, 1)})
            return results, fresh

        results, fresh = run(both())
    for (ids, completion), single in zip(results, fresh, strict=True):
        assert completion.tokens.tolist() == single.tokens.tolist()
        np.testing.assert_allclose(completion.logp, single.logp, atol=1e-5)
        np.testing.assert_allclose(completion.logp, teacher_forced(model, ids, completion, 1.0), atol=1e-5)


def test_a_token_carries_the_version_that_sampled_it(build, model):
    text, params = prompts(1, seed=5)[0], SamplingParams(max_tokens=10, seed=1)
    tracer = Hooks(decode=lambda count: engine.publish(build(1), 4) if count == 2 else None)
    with Engine(model, CONFIG, version=3, tracer=tracer) as engine:
        (completion,) = run(gather(engine, {0: (text, params)}))
        assert engine.version == 4
        with pytest.raises(ValueError, match="version 4 does not follow 4"):
            engine.publish(model, 4)
    # One token by prefill, two dispatches of three under the old weights, the rest under the new ones.
    assert completion.versions.tolist() == [3] * 7 + [4] * 3
    np.testing.assert_allclose(completion.logp[:7], teacher_forced(model, text, completion, 1.0)[:7], atol=1e-5)
    assert np.abs(completion.logp[7:] - teacher_forced(model, text, completion, 1.0)[7:]).max() > 1e-3
    assert [args["version"] for name, args in tracer.spans if name == "engine.decode"] == [3, 3, 4]
    assert [args["tokens"] for name, args in tracer.spans if name == "engine.prefill"][0] == min(len(text), CONFIG.prefill_chunk)


def test_stop_ids_and_the_context_end_a_request(model):
    text = prompts(1, seed=6)[0]
    with Engine(model, CONFIG) as engine:
        (free,) = run(gather(engine, {0: (text, SamplingParams(max_tokens=12, seed=1))}))
        stop = int(free.tokens[7])
        first = free.tokens.tolist().index(stop)
        full = [3] * LENGTH
        stopped, too_long, exact, last, one = run(gather(engine, {
            1: (text, SamplingParams(max_tokens=12, seed=1, stop_ids=(2**20, stop))),
            2: ([*full, 3], SamplingParams(max_tokens=5)),
            3: (full, SamplingParams(max_tokens=5)),
            4: (full[:-1], SamplingParams(max_tokens=5)),
            5: (full[:-4], SamplingParams(max_tokens=50)),
        }))
    assert stopped.finish_reason == "stop" and stopped.tokens.tolist() == free.tokens.tolist()[: first + 1]
    assert [len(c.tokens) for c in (too_long, exact, last, one)] == [0, 0, 1, 4]
    assert {c.finish_reason for c in (too_long, exact, last, one)} == {"length"}


def test_a_wrong_prefix_is_its_callers_error_only(model):
    text = prompts(1, seed=7)[0]
    params = SamplingParams(max_tokens=6, seed=1)

    async def scenario():
        first = await engine.generate(0, text, params)
        ids = text + first.tokens.tolist()
        wrong = [*ids[:-2], (ids[-2] + 1) % VOCAB, ids[-1], 5]
        other = asyncio.create_task(engine.generate(1, text, params))
        with pytest.raises(PrefixError, match=f"position {len(ids) - 2}"):
            await engine.generate(0, wrong, params)
        with pytest.raises(PrefixError, match="cached already"):
            await engine.generate(0, text, params)
        busy = asyncio.create_task(engine.generate(2, text, params))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="already has a request"):
            await engine.generate(2, text, params)
        assert (await other).tokens.tolist() == (await busy).tokens.tolist() == first.tokens.tolist()
        return ids, await engine.generate(0, [*ids, 5], params)

    with Engine(model, CONFIG) as engine:
        ids, second = run(scenario())
    np.testing.assert_allclose(second.logp, teacher_forced(model, [*ids, 5], second, 1.0), atol=1e-5)


def test_cancelling_the_task_frees_the_slot_and_rolls_the_session_back(model):
    text = prompts(1, seed=8)[0]
    running = threading.Event()
    slow = Hooks(decode=lambda count: (running.set() if count == 3 else None, time.sleep(0.01)))

    async def scenario():
        tasks = [asyncio.create_task(engine.generate(i, text, SamplingParams(max_tokens=25, seed=1))) for i in range(4)]  # the last waits
        await asyncio.to_thread(running.wait)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        again = await engine.generate(0, text, SamplingParams(max_tokens=4, seed=1))
        assert engine.stats()["held"] == 0
        released = asyncio.create_task(engine.generate(4, text, SamplingParams(max_tokens=2, seed=1)))
        waiting = asyncio.create_task(engine.generate(5, text, SamplingParams(max_tokens=2, seed=1)))
        await asyncio.sleep(0.02)
        engine.release(5)
        engine.release(0)
        return again, await released, await waiting

    with Engine(model, CONFIG, tracer=slow) as engine:
        again, released, waiting = run(scenario())
    np.testing.assert_allclose(again.logp, teacher_forced(model, text, again, 1.0), atol=1e-5)
    assert released.tokens.tolist() == again.tokens[:2].tolist()
    assert waiting.finish_reason == "cancelled" and len(waiting.tokens) == 0


def test_a_dead_thread_raises_everywhere(model):
    def hook(count):
        if count == 2:
            raise FloatingPointError("boom")

    async def scenario():
        requests = (engine.generate(i, [1, 2, 3], SamplingParams(max_tokens=20)) for i in range(5))
        errors = await asyncio.gather(*requests, return_exceptions=True)
        with pytest.raises(EngineError, match="boom"):
            await engine.generate(9, [1], SamplingParams(max_tokens=1))
        return errors

    engine = Engine(model, CONFIG, tracer=Hooks(decode=hook)).start()
    errors = run(scenario())
    assert all(isinstance(error, EngineError) and "FloatingPointError: boom" in str(error) for error in errors)
    assert all(error.__cause__ is engine.error and error.__cause__.__traceback__ is not None for error in errors)
    engine.release(0)
    engine.stop()


def test_stop_is_prompt_and_cancels(model):
    async def scenario():
        tasks = [asyncio.create_task(engine.generate(i, [1, 2, 3], SamplingParams(max_tokens=30))) for i in range(5)]
        await asyncio.sleep(0.05)
        started = time.monotonic()
        await asyncio.to_thread(engine.stop)
        assert time.monotonic() - started < 1.0
        completions = await asyncio.gather(*tasks)
        with pytest.raises(EngineError, match="was stopped"):
            await engine.generate(9, [1], SamplingParams(max_tokens=1))
        return completions

    engine = Engine(model, CONFIG, tracer=Hooks(decode=lambda count: time.sleep(0.05)))
    with pytest.raises(EngineError, match="not started"):
        run(engine.generate(9, [1], SamplingParams(max_tokens=1)))
    engine.start()
    assert {completion.finish_reason for completion in run(scenario())} == {"cancelled"}
    idle = Engine(model, CONFIG).start()
    idle.stop()
    assert idle.error is None and not idle._thread.is_alive()


def test_more_sessions_than_slots_over_several_loops(model):
    texts = prompts(16, seed=9)
    results = {}

    async def episode(session):
        ids = texts[session]
        for _ in range(2):
            completion = await engine.generate(session, ids, SamplingParams(max_tokens=4, seed=session))
            results[session] = (ids, completion)
            ids = ids + completion.tokens.tolist() + [7]
        engine.release(session)

    async def episodes(sessions):
        await asyncio.gather(*map(episode, sessions))

    with Engine(model, CONFIG) as engine:
        threads = [threading.Thread(target=lambda first=first: run(episodes(range(first, 16, 2)))) for first in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for ids, completion in results.values():
        np.testing.assert_allclose(completion.logp, teacher_forced(model, ids, completion, 1.0), atol=1e-5)
    assert len(results) == 16


def lockstep(model, noise):
    """Eight episodes of unequal length on two event loops; `noise` seeds the delays between their calls."""
    texts, turns = prompts(8, seed=10), [1, 3, 2, 1, 2, 3, 1, 2]
    live, lock, results, rng = [8], threading.Lock(), {}, random.Random(noise)

    async def episode(session):
        ids = texts[session]
        for turn in range(turns[session]):
            await asyncio.sleep(rng.random() * 0.02)
            completion = await engine.generate(session, ids, SamplingParams(max_tokens=3 + session, seed=session))
            results[session, turn] = completion
            ids = ids + completion.tokens.tolist() + [7]
        engine.release(session)
        with lock:
            live[0] -= 1
        engine.poke()

    async def episodes(sessions):
        await asyncio.gather(*map(episode, sessions))

    with Engine(model, CONFIG, tracer=Hooks(), barrier=lambda: live[0]) as engine:
        threads = [threading.Thread(target=lambda first=first: run(episodes(range(first, 8, 2)))) for first in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results, engine._span.__self__.spans


def test_a_barrier_makes_every_bit_independent_of_timing(model):
    (first, spans), (second, other_spans) = lockstep(model, noise=1), lockstep(model, noise=2)
    assert first.keys() == second.keys() and len(first) == 15
    for key, completion in first.items():
        assert completion.tokens.tobytes() == second[key].tokens.tobytes()
        assert completion.logp.tobytes() == second[key].logp.tobytes()
    assert spans == other_spans


def test_routing_covers_the_fed_positions_and_replays(model):
    config = EngineConfig(slots=2, max_length=LENGTH, decode_steps=3, prefill_rows=2, prefill_chunk=5, record_routing=True)
    params = SamplingParams(max_tokens=6, seed=1)
    text = prompts(1, seed=11)[0]

    async def scenario():
        first, _ = await asyncio.gather(engine.generate(0, text, params), engine.generate(1, [4, 4], params))
        ids = text + first.tokens.tolist() + [7, 8, 9]
        return first, ids, await engine.generate(0, ids, params)

    with Engine(model, config) as engine:
        first, ids, second = run(scenario())
        assert engine.stats()["compilations"] <= 2
    full = ids + second.tokens.tolist()
    fed = len(text) + len(first.tokens) - 1
    assert (first.routing.start, second.routing.start) == (0, fed)
    assert len(first.routing.experts) == len(first.routing.selections) == fed
    assert second.routing.start + len(second.routing.experts) == len(full) - 1
    experts = np.concatenate([first.routing.experts, second.routing.experts])
    selections = np.concatenate([first.routing.selections, second.routing.selections])
    assert experts.dtype == np.int16 and selections.dtype == np.int16
    assert (selections.max(axis=2) <= np.arange(len(full) - 1)[:, None]).all()

    out = jax.jit(lambda model, ids: model(ids, return_selections=True))(model, jnp.array([full], jnp.int32))
    np.testing.assert_array_equal(experts, np.stack(list(out.routing.values()))[:, 0, :-1].swapaxes(0, 1))
    recorded, wanted = selections, np.stack(list(out.selections.values()))[:, 0, :-1].swapaxes(0, 1)
    for row, expected in zip(recorded.reshape(-1, recorded.shape[2]), wanted.reshape(-1, wanted.shape[2]), strict=True):
        assert row[row >= 0].tolist() == expected[expected >= 0].tolist()

    def padded(part):  # [n, layers, …] -> [layers, 1, LENGTH, …]
        whole = np.full((LENGTH, *part.shape[1:]), -1, np.int32)
        whole[: len(part)] = part
        return whole.swapaxes(0, 1)[:, None]

    replay = Replay(experts=padded(experts), selections=padded(selections))
    np.testing.assert_allclose(second.logp, teacher_forced(model, ids, second, 1.0, replay), atol=1e-5)


def test_the_thread_enters_the_mesh(build):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    model = jax.device_put(build(0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    with Engine(model, CONFIG, mesh=mesh) as engine:
        (meshed,) = run(gather(engine, {0: ([1, 2, 3], SamplingParams(max_tokens=6))}))
    with Engine(build(0), CONFIG) as engine:
        (plain,) = run(gather(engine, {0: ([1, 2, 3], SamplingParams(max_tokens=6))}))
    assert meshed.tokens.tolist() == plain.tokens.tolist()


def test_the_programs_compile_once_whatever_comes(build):
    model = jax.device_put(build(0), jax.devices()[0])
    config = EngineConfig(slots=4, max_length=LENGTH, decode_steps=2, prefill_rows=2, prefill_chunk=7)  # shapes of no other test
    with Engine(model, config) as engine:
        for count in (1, 4, 6):
            texts = prompts(count, seed=count)
            run(gather(engine, {i: (texts[i], SamplingParams(max_tokens=1 + i, seed=i, stop_ids=(1,) * i)) for i in range(count)}))
            engine.publish(jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(model), engine.version + 1)
        run(gather(engine, {0: ([1, 2], SamplingParams(max_tokens=4))}))
        assert engine.stats()["compilations"] == 2
