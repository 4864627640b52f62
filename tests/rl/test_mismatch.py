"""Before the first update the importance ratio is 1: trajectories of the engine, scored by the trainer, real preset, float32."""

import asyncio
import dataclasses

import numpy as np
import pytest
from loop_world import TEMPLATE, speaking
from small_model import random_model

from glm_jax import environments
from glm_jax.data.packing import pack_segments
from glm_jax.data.trajectory import Segment
from glm_jax.model import get_preset
from glm_jax.rl.episode import EpisodeSettings, run_episode
from glm_jax.rl.mismatch import _seen_earlier, measure_mismatch
from glm_jax.rollout import Engine, EngineConfig
from glm_jax.tracing import Tracer

NAMES = ("glm_jax/Calculator-v0", "glm_jax/DigitChain-v0", "glm_jax/CodeSteps-v0")
ROLLOUTS, ROW, ROWS = 240, 128, 120


async def play(engine, settings):
    places = asyncio.Semaphore(64)

    async def one(number):
        async with places:
            environment = environments.make(NAMES[number % len(NAMES)])
            return await run_episode(
                engine, environment, TEMPLATE, session=number, task_seed=number // len(NAMES), sampling_seed=number, settings=settings,
                tracer=Tracer.null())

    return await asyncio.gather(*(one(number) for number in range(ROLLOUTS)))


def sample(model):
    """Rollouts of the three environments by the model's engine, packed as the learner packs them."""
    config = EngineConfig(slots=32, max_length=ROW, decode_steps=4, prefill_rows=8, prefill_chunk=32, record_routing=True)
    with Engine(model, config) as engine:
        outcomes = asyncio.run(play(engine, EpisodeSettings(ROW, 48, 1.0, 30.0)))
    segments = [outcome.segments[0] for outcome in outcomes]
    turns = [int((np.diff(segment.loss_mask.astype(int)) == 1).sum()) for segment in segments]
    assert max(turns) >= 2, "no rollout has a second turn"
    return pack_segments(segments, ROW, ROWS)


def deviations(found):
    """|ratio − 1| without and with replay, and whether a choice flipped before, of the trained tokens."""
    return (np.abs(ratio - 1)[found.trained] for ratio in (found.ratio, found.ratio_replayed)), found.flipped[found.trained]


@pytest.fixture(scope="module")
def model():
    return speaking(random_model(get_preset("tiny")))


@pytest.fixture(scope="module")
def rows(model):
    return sample(model)


def test_the_importance_ratio_is_one(model, rows):
    found = measure_mismatch(model, rows)
    (off, off_replayed), flipped = deviations(found)
    assert off.size > 2000
    assert off_replayed.max() < 1e-4
    assert np.quantile(off, 0.99) < 1e-5
    assert flipped[off > 1e-5].all(), "a token is off, and no flip explains it"
    assert found.places["selections"] > found.places["experts"] > off.size


def test_flips_are_counted_and_explain_what_they_change(model, rows):
    """As if the engine had chosen other experts in some places: replay follows it there, and only what comes after is off."""
    changed = (rows.experts[..., 0] >= 0) & (np.random.default_rng(0).random(rows.experts.shape[:3]) < 0.01)
    others = np.where(changed[..., None], (rows.experts.max(axis=-1, keepdims=True) + [1, 2]) % 8, rows.experts).astype(np.int16)
    changed &= (np.sort(others) != np.sort(rows.experts)).any(axis=-1)
    found = measure_mismatch(model, dataclasses.replace(rows, experts=others))
    (off, off_replayed), flipped = deviations(found)
    assert found.flips == {"experts": changed.sum(), "selections": 0} and changed.sum() > 100
    assert off.max() < 1e-4, "without replay the trainer is not led astray"
    assert (off_replayed > 1e-3).any() and flipped[off_replayed > 1e-5].all() and not flipped.all()


def test_a_flip_counts_for_the_later_tokens_of_its_segment_only():
    rng = np.random.default_rng(0)
    segments = [
        Segment(np.zeros(n, np.int32), np.zeros(n, np.uint8), np.zeros(n, np.float32), np.full(n, -1, np.int32))
        for n in rng.integers(1, 9, 12)]
    rows = pack_segments(segments, 16, 8)
    flip = rng.random((8, 16)) < 0.15
    expected = np.zeros_like(flip)
    for row in range(8):
        for token in range(16):
            segment = rows.segment_ids[row, token]
            expected[row, token] = segment > 0 and any(flip[row, t] and rows.segment_ids[row, t] == segment for t in range(token))
    np.testing.assert_array_equal(_seen_earlier(flip, rows), expected)


def test_rows_without_a_record_are_refused(model):
    segment = Segment(np.zeros(3, np.int32), np.zeros(3, np.uint8), np.zeros(3, np.float32), np.full(3, -1, np.int32))
    with pytest.raises(ValueError, match="record_routing"):
        measure_mismatch(model, pack_segments([segment], 8, 1))
