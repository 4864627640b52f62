"""The whole loop over real environments: asynchronous and in turn, stopped and resumed, with failures and with deaths."""

import collections
import threading
import time
import traceback

import jax
import loop_world
import numpy as np
import pytest
from loop_world import (
    CALCULATOR,
    CODE_STEPS,
    DIGIT_CHAIN,
    Trouble,
    World,
    assert_balanced,
    assert_same_state,
    assert_same_training,
    expected_mask,
    experiment,
    overlaps,
    update_of,
    wait_until,
)

import glm_jax.rollout.engine
from glm_jax.rl.learner import NoProgress
from glm_jax.rollout import EngineError


@pytest.fixture(autouse=True)
def trouble(monkeypatch):
    """Today's troubles; call it to have some."""
    monkeypatch.setattr(loop_world, "TROUBLE", Trouble())

    def cause(**troubles):
        monkeypatch.setattr(loop_world, "TROUBLE", Trouble(**troubles))

    return cause


@pytest.fixture(scope="module")
def undisturbed():
    return World(experiment("sync")).run()


# -- asynchronous --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asynchronous():
    """A run with all three environments, watched while it runs: admitted and live rollouts at every sampled moment."""
    config = experiment(updates=12, max_staleness=2, publish_every=2, batch_rollouts=12, names=(CALCULATOR, DIGIT_CHAIN, CODE_STEPS))
    world, moments, ended = World(config), [], threading.Event()

    def watch():
        loop = world.loop
        while not ended.is_set():
            with loop.ledger.transaction():
                live = loop.ring.live_ids()
                loop.ledger.check(live)
                moments.append((loop.admission.unpublished, len(live)))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    world.run()
    ended.set()
    watcher.join()
    return world, moments


def test_learner_and_engine_are_busy_at_once(asynchronous):
    world, _ = asynchronous
    assert overlaps(world.spans("learner.update"), world.spans("engine.")) > 0
    names = {event["name"] for event in world.tracer.events()}
    assert {"engine.prefill", "engine.decode", "actor.step", "learner.update", "learner.publish"} <= names


def test_staleness_and_admission_stay_within_their_bounds(asynchronous):
    world, moments = asynchronous
    staleness = np.concatenate([batch.staleness for batch in world.batches])
    assert staleness.min() >= 0 and staleness.max() <= world.config.rl.max_staleness
    assert staleness.max() > 0, "nothing was ever stale: the run was not asynchronous"
    limit = 3 * 2 * 12
    assert world.loop.admission.limit == limit
    assert max(admitted for admitted, _ in moments) <= limit
    assert all(live <= limit for _, live in moments)
    assert len(moments) > 10


def test_records_of_trajectories(asynchronous):
    """Versions never fall within one, what the policy did not write is never trained, several turns and all environments occur."""
    world, _ = asynchronous
    turns, names = collections.Counter(), set()
    for trajectory in (t for batch in world.batches for t in batch.trajectories):
        segment = trajectory.segments[0]
        np.testing.assert_array_equal(segment.loss_mask, expected_mask(trajectory))
        sampled = segment.loss_mask == 1
        assert (np.diff(segment.versions[sampled]) >= 0).all()
        assert (segment.versions[~sampled] == -1).all() and (segment.logp[~sampled] == 0).all() and (segment.logp[sampled] < 0).all()
        turns[int((np.diff(segment.loss_mask.astype(int)) == 1).sum())] += 1
        names.add(trajectory.environment)
    assert names == set(world.config.environments)
    assert turns[1] and turns[2] + turns[3]


def test_every_line_and_every_saved_ledger_balances(asynchronous):
    world, _ = asynchronous
    for line in world.lines:
        assert_balanced(line)
    assert_balanced(world.snapshot.document)
    assert [line["updates"] for line in world.lines] == list(range(1, 13))
    assert world.lines[-1]["version"] == 6
    assert world.lines[-1]["ledger/trained"] == sum(len(batch.trained_ids) for batch in world.batches)


@pytest.mark.slow  # compiles another engine and update; test_mismatch has the same ratio without the loop
def test_before_the_first_update_the_importance_ratio_is_one():
    """With recorded routing replayed; the records survive ring, packing and a restart."""
    config = experiment(updates=60, replay="all")
    world = World(config)
    world.on_report = lambda updates: world.stop.set()
    world.run()
    first = world.lines[0]
    assert first["version"] == 1 and abs(first["ratio/max"] - 1) < 1e-4 and first["mismatch/logp_max"] < 1e-4
    assert first["mismatch/experts"] <= 0.01 and first["mismatch/selections"] <= 0.01
    resumed = World(config, restored=world).run()
    assert len(world.lines) + len(resumed.lines) == 60 and resumed.lines and "mismatch/experts" in resumed.lines[0]


# -- in turn -------------------------------------------------------------------------------------------------------------------------------


def test_synchronous_mode_is_strictly_in_turn(undisturbed):
    updates = undisturbed.spans("learner.update")
    assert len(updates) == 6 and not overlaps(updates, undisturbed.spans("engine."))
    assert all((batch.staleness == 0).all() for batch in undisturbed.batches)


@pytest.mark.parametrize("threads", [2, 3])
def test_two_synchronous_runs_are_equal_bit_for_bit(undisturbed, trouble, threads):
    trouble(delay=0.01)
    noisy = World(experiment("sync", actor_threads=threads)).run()
    assert_same_training(undisturbed.batches, noisy.batches)
    assert_same_state(undisturbed.final, noisy.final)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(initial=0), undisturbed.final.model, loop_world.small_model())
    assert max(jax.tree.leaves(moved)) > 1e-3, "nothing was learnt: equality says nothing"


def test_synchronous_runs_with_failures_are_equal_too(trouble):
    trouble(failures=0.15, crashes=0.05)
    quiet = World(experiment("sync")).run()
    trouble(failures=0.15, crashes=0.05, delay=0.01)
    noisy = World(experiment("sync")).run()
    assert quiet.lines[-1]["ledger/dropped/environment_failure"] > 0
    assert not overlaps(noisy.spans("learner.update"), noisy.spans("engine."))
    assert_same_training(quiet.batches, noisy.batches)
    assert_same_state(quiet.final, noisy.final)


# -- stopped and resumed -------------------------------------------------------------------------------------------------------------------


def run_with_stops(config, stops, trouble, **troubles):
    """Worlds of one run that is stopped after each of `stops` seconds and at last runs through."""
    trouble(delay=0.004, **troubles)
    worlds, world = [], None
    for seconds in [*stops, None]:
        world = World(config, restored=world).run(stop_after=seconds)
        worlds.append(world)
        assert world.snapshot.document["updates"] == world.loop.updates
    return worlds


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_stopped_again_and_again_trains_every_id_once(trouble, seed):
    config = experiment(updates=10, max_staleness=2)
    stops = np.random.default_rng(seed).uniform(0, 0.15, 5)
    worlds = run_with_stops(config, [*stops, 0.0, 0.0], trouble, failures=0.05)
    assert len({world.loop.updates for world in worlds}) > 1
    trained = [rollout_id for world in worlds for batch in world.batches for rollout_id in batch.trained_ids]
    assert len(trained) == len(set(trained))
    assert [line["updates"] for world in worlds for line in world.lines] == list(range(1, 11))
    for world in worlds:
        assert_balanced(world.snapshot.document)
        for line in world.lines:
            assert_balanced(line)
        assert all((batch.staleness <= 2).all() for batch in world.batches)
        for batch in world.batches:  # a group that lost some has others in their places, not the same ones twice
            groups = collections.defaultdict(list)
            for trajectory, group_id in zip(batch.trajectories, batch.group_ids.tolist(), strict=True):
                groups[group_id].append(trajectory)
            assert all(len(group) == 4 and len({t.prompt_id for t in group}) == 1 for group in groups.values())
    assert worlds[-1].snapshot.document["ledger"]["trained"] == len(trained)
    assert any("reissued" in world.snapshot.document["ledger"]["dropped"] for world in worlds)


def test_what_finished_before_a_stop_is_trained_after_it(trouble):
    """Survivors keep their ids, and their group is completed with other samples than theirs."""
    trouble(delay=0.004)
    config = experiment(updates=6, max_staleness=2)
    for _ in range(20):  # when the stop comes some must have finished and some not: timing's choice
        stopped = World(config)
        stopped.on_report = lambda updates, stop=stopped.stop: stop.set() if updates == 2 else None
        stopped.run()
        resumed = World(config, restored=stopped).run()
        survivors = set(stopped.snapshot.payloads["header/rollout_id"].tolist())
        trained = {rollout_id for batch in resumed.batches for rollout_id in batch.trained_ids}
        groups = collections.Counter(stopped.snapshot.payloads["header/group_id"].tolist())
        if survivors & trained and min(groups.values()) < 4:
            break
    else:
        pytest.fail("never in twenty runs did part of a group survive")
    for batch in resumed.batches:
        long = [t for t in batch.trajectories if t.sampled_count > 3]
        assert len({(t.prompt_id, t.segments[0].logp.tobytes(), t.segments[0].tokens.tobytes()) for t in long}) == len(long)


def test_a_crash_goes_back_to_the_last_checkpoint(trouble):
    """Not a stop but a death: what was trained after the checkpoint never happened, and the ledger knows nothing of it."""

    def die(updates):
        if updates == 5:
            raise RuntimeError("power cut")

    world = World(experiment(updates=8), on_report=die)
    with pytest.raises(RuntimeError, match="power cut"):
        world.run()
    assert world.snapshot.document["updates"] == 4
    resumed = World(experiment(updates=8), restored=world).run()
    assert [line["updates"] for line in resumed.lines] == [5, 6, 7, 8]
    before = [rollout_id for batch in world.batches[:4] for rollout_id in batch.trained_ids]
    after = [rollout_id for batch in resumed.batches for rollout_id in batch.trained_ids]
    assert len(set(before + after)) == len(before + after) == resumed.snapshot.document["ledger"]["trained"]


@pytest.mark.parametrize("seed", range(2))
def test_a_synchronous_run_does_not_notice_stops(undisturbed, trouble, seed):
    stops = np.random.default_rng(seed).uniform(0, 0.12, 4)
    worlds = run_with_stops(experiment("sync"), [*stops, 0.0], trouble)
    assert_same_training(undisturbed.batches, [batch for world in worlds for batch in world.batches])
    assert_same_state(undisturbed.final, worlds[-1].final)


# -- failures ------------------------------------------------------------------------------------------------------------------------------


def test_environment_failures_are_never_rewards(trouble):
    trouble(failures=0.2, crashes=0.1)
    world = World(experiment(updates=10)).run()
    dropped = {key.rpartition("/")[2]: value for key, value in world.lines[-1].items() if key.startswith("ledger/dropped/")}
    assert dropped["environment_failure"] > 0 and dropped["verifier_error"] > 0
    padded = 0
    for line, batch in zip(world.lines, world.batches, strict=True):
        assert_balanced(line)
        assert all(trajectory.status.trainable for trajectory in batch.trajectories)
        assert len(batch.trajectories) == 16 and 8 <= len(batch.trained_ids) <= 16
        copies = collections.Counter((group, t.rollout_id) for group, t in zip(batch.group_ids.tolist(), batch.trajectories, strict=True))
        per_group = collections.defaultdict(list)
        for (group, _), count in copies.items():
            per_group[group].append(count)
        for counts in per_group.values():
            assert sum(counts) == 4 and 2 * len(counts) > 4 and max(counts) - min(counts) <= 1
            padded += max(counts) > 1
        assert {t.rollout_id for t in batch.trajectories} == set(batch.trained_ids)
    assert padded > 0, "no group was padded"
    if dropped.get("group"):  # a group that was dropped whole: its prompt is issued again
        assert any(t.attempt > 0 for batch in world.batches for t in batch.trajectories) or world.lines[-1]["ledger/prompts_given_up"]


def test_a_world_in_which_nothing_works_ends_the_run(trouble):
    trouble(failures=1.0)
    with pytest.raises(NoProgress, match="environment_failure"):
        World(experiment()).run()


# -- deaths --------------------------------------------------------------------------------------------------------------------------------


def poisoned(*args, **kwargs):
    raise FloatingPointError("a fault in the model")


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(
    ("thread", "error", "place"),
    [("engine", FloatingPointError, "poisoned"), ("actor", ValueError, "reset"), ("learner", ZeroDivisionError, "failing_update")])
def test_a_thread_that_dies_ends_the_run_with_its_own_traceback(trouble, monkeypatch, mode, thread, error, place):
    died = []
    config = experiment(mode, updates=1000, deadline_seconds=60.0)

    def failing_update(state, *batch):
        if int(state.step) == 2:
            died.append(time.monotonic())
            raise ZeroDivisionError
        return update_of(config)(state, *batch)

    def kill(updates):
        if updates == 2 and thread != "learner":
            died.append(time.monotonic())
            if thread == "engine":
                monkeypatch.setattr(glm_jax.rollout.engine, "decode", poisoned)
            else:
                trouble(bug=True)

    world = World(config, update=failing_update if thread == "learner" else None, on_report=kill)
    with pytest.raises(error) as caught:
        world.run()
    assert time.monotonic() - died[0] < 10
    assert not isinstance(caught.value, EngineError)
    assert place in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    wait_until(lambda: not any(t.name == "learner" or t.name.startswith("actor-") or t.name == "engine" for t in threading.enumerate()))
    assert_balanced(world.snapshot.document)
