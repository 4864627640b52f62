"""What holds for every model of the line: properties of random small configurations of every family.

A configuration costs compilations, so a test draws one and hypothesis draws layouts, chunkings and changes for its compiled programs.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_configs import FAMILIES, random_config
from small_model import random_model

from glm_jax.model import Replay, init_model, load_pretrained
from glm_jax.model.moe import route

SOURCES, LENGTH = 2, 10  # token sequences, and how long they are
ROWS, WIDTH = 3, 14  # of the batches in which they are laid out
CHUNK = 4
TOLERANCE = 1e-5
DRAWN = [("gqa", 0), ("gqa", 1), ("dense", 0), ("mla", 1), ("dsa", 1), ("dsa_shared", 0), ("dsa_shared", 1), ("dsa_groups", 0)]

# Compiled without optimisation: each program runs some dozens of times.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
quick = settings(max_examples=8, deadline=None, derandomize=True, database=None)
# Each of these compiles: no shrinking. What is nested is drawn for a fixed number of times.
fresh = settings(max_examples=3, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.nested_given])


class World:
    """A random model, its token sequences, their outputs, and the compiled programs."""

    def __init__(self, family, seed):
        self.config = config = random_config(family, seed)
        self.model = random_model(config, seed)
        self.tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (SOURCES, LENGTH), np.int32)
        keep = config.indexer is not None
        self.forward = compiled(lambda model, tokens, segments: model(tokens, segment_ids=segments, return_selections=keep))
        self.step = compiled(
            lambda model, cache, tokens, mask: model(tokens, cache=cache, attention_mask=mask, return_selections=keep))
        self.plain = jax.tree.map(np.asarray, self.forward(self.model, self.tokens, np.ones_like(self.tokens)))
        self.scale = np.abs(self.plain.logits).max()

    def wide(self, tokens, segments, model=None):
        """The outputs for a batch [ROWS, WIDTH]."""
        return jax.tree.map(np.asarray, self.forward(model or self.model, np.asarray(tokens, np.int32), np.asarray(segments, np.int32)))

    def assert_plain(self, out, row, places, source):
        """The tokens at `places` of a row are the first ones of a source: their logits, experts and selected keys are the source's."""
        n = len(places)
        np.testing.assert_allclose(out.logits[row, places], self.plain.logits[source, :n], rtol=0, atol=TOLERANCE * self.scale)
        for layer, experts in out.routing.items():
            np.testing.assert_array_equal(experts[row, places], self.plain.routing[layer][source, :n])
        for layer, selection in (out.selections or {}).items():
            wanted = self.plain.selections[layer][source, :n]
            places = np.asarray(places)
            np.testing.assert_array_equal(selection[row, places], np.where(wanted >= 0, places[wanted.clip(0, n - 1)], -1))


@st.composite
def layouts(draw):
    """Of one row: its real places, cut into segments of at most LENGTH tokens, each (places, source, id); padding may stand anywhere."""
    real = [place for place, is_real in enumerate(draw(st.lists(st.booleans(), min_size=WIDTH, max_size=WIDTH))) if is_real]
    kind = draw(st.sampled_from(["left", "right", "inside", "full"]))
    if kind == "left":
        real = list(range(WIDTH - len(real), WIDTH))
    elif kind == "right":
        real = list(range(len(real)))
    elif kind == "full":
        real = list(range(WIDTH))
    segments, ids = [], draw(st.permutations(range(1, WIDTH + 1)))
    while real:
        length = min(draw(st.integers(1, LENGTH)), len(real))
        segments.append((real[:length], draw(st.integers(0, SOURCES - 1)), ids[len(segments)]))
        real = real[length:]
    return segments


def check_layouts(world):
    """Left padding, right padding, padding inside and packing change nothing for the real tokens; shapes differ from the sources' own."""

    @quick
    @given(rows=st.lists(layouts(), min_size=ROWS, max_size=ROWS), rubbish=st.integers(0, 19))
    def check(rows, rubbish):
        tokens, segments = np.full((ROWS, WIDTH), rubbish), np.zeros((ROWS, WIDTH), int)
        for row, parts in enumerate(rows):
            for places, source, number in parts:
                tokens[row, places], segments[row, places] = world.tokens[source, : len(places)], number
        out = world.wide(tokens, segments)
        assert np.isfinite(out.logits).all()
        for row, parts in enumerate(rows):
            for places, source, _ in parts:
                world.assert_plain(out, row, places, source)
        for selection in (out.selections or {}).values():
            assert (selection[segments == 0] == -1).all()

    check()


def check_causality(world):
    """A change of later tokens, and of other rows, leaves every bit of the logits before them."""

    @quick
    @given(at=st.integers(1, WIDTH), seed=st.integers(0, 2**31))
    def check(at, seed):
        rng = np.random.default_rng(seed)
        draw = lambda: rng.integers(0, world.config.vocab_size, (ROWS, WIDTH))
        tokens, other = draw(), draw()
        other[0, :at] = tokens[0, :at]
        segments = 1 + np.cumsum(rng.random((ROWS, WIDTH)) < 0.15, axis=1)
        one, two = world.wide(tokens, segments), world.wide(other, segments)
        np.testing.assert_array_equal(one.logits[0, :at], two.logits[0, :at])

    check()


def check_cache(world):
    """Prefill in any chunks and decoding one by one, rows at different paces, on a cache full of rubbish, give the whole rows."""

    @quick
    @given(paces=st.lists(st.lists(st.integers(0, CHUNK), min_size=1, max_size=4), min_size=SOURCES, max_size=SOURCES))
    def check(paces):
        cache = jax.tree.map(lambda leaf: jnp.full_like(leaf, 5), world.model.init_cache(SOURCES, LENGTH + 2))
        cache = cache.replace(lengths=jnp.zeros(SOURCES, jnp.int32))
        done, call = np.zeros(SOURCES, int), 0
        while (done < LENGTH).any():
            # A pace is the number of tokens a call; one of only zeros would never arrive.
            counts = [min(pace[call % len(pace)] if any(pace) else 1, LENGTH - start) for pace, start in zip(paces, done, strict=True)]
            chunk, mask = np.full((SOURCES, CHUNK), 3, np.int32), np.zeros((SOURCES, CHUNK), np.int32)
            for row, count in enumerate(counts):
                chunk[row, :count], mask[row, :count] = world.tokens[row, done[row] : done[row] + count], 1
            out = jax.tree.map(np.asarray, world.step(world.model, cache, chunk, mask))
            assert np.isfinite(out.logits).all()
            for row, count in enumerate(counts):
                now = slice(done[row], done[row] + count)
                np.testing.assert_allclose(
                    out.logits[row, :count], world.plain.logits[row, now], rtol=0, atol=TOLERANCE * world.scale)
                for layer, experts in out.routing.items():
                    np.testing.assert_array_equal(experts[row, :count], world.plain.routing[layer][row, now])
                for layer, selection in (out.selections or {}).items():
                    np.testing.assert_array_equal(selection[row, :count], world.plain.selections[layer][row, now])
            done, call, cache = done + counts, call + 1, out.cache
            np.testing.assert_array_equal(cache.lengths, done)

    check()


def check_tokens_that_see_no_key(world):
    """Attention adds exactly 0 to padding: its outputs do not change by a bit when the projection out of the heads does."""
    rng = np.random.default_rng(0)
    tokens, segments = rng.integers(0, world.config.vocab_size, (ROWS, WIDTH)), rng.integers(0, 2, (ROWS, WIDTH))
    segments[0] = 0
    without = jax.tree_util.tree_map_with_path(lambda path, leaf: 0 * leaf if path[-1].name == "out" else leaf, world.model)
    one, two = world.wide(tokens, segments), world.wide(tokens, segments, without)
    assert np.isfinite(one.hidden).all() and np.isfinite(one.logits).all()
    np.testing.assert_array_equal(one.hidden[segments == 0], two.hidden[segments == 0])
    assert (one.hidden[segments == 1] != two.hidden[segments == 1]).any()


def check_ties(world):
    """Scores that are all one: the lowest experts (of the lowest groups) and the earliest keys are picked."""
    tied = jax.tree_util.tree_map_with_path(
        lambda path, leaf: 0 * leaf if path[-1].name in ("router", "router_bias", "head_weights") else leaf, world.model)
    out = world.wide(np.ones((ROWS, WIDTH)), np.ones((ROWS, WIDTH)), tied)
    for experts in out.routing.values():
        assert (experts == np.arange(world.config.moe.experts_per_token)).all()
    for selection in (out.selections or {}).values():
        k = selection.shape[-1]
        np.testing.assert_array_equal(selection[0], [[*range(min(t + 1, k)), *[-1] * (k - t - 1)] for t in range(WIDTH)])


def check_routing(world):
    """The bias decides who is chosen, and nothing else: gates are the sigmoid's. Experts against a choice written out one by one."""
    if world.config.moe is None:
        return
    rng, shape = np.random.default_rng(1), (world.config.hidden_size, world.config.moe.experts)
    # A coarse grid of scores and biases, full of exact ties.
    x, router, bias = rng.integers(-2, 3, (40, shape[0])) / 4, np.zeros(shape), rng.integers(6, 9, shape[1]) / 8
    router[0] = rng.integers(-1, 2, shape[1])
    assert_routing(world.config, *(np.asarray(a, np.float32) for a in (x, router, bias)))
    # Biases as large and as close to each other as real ones (GLM-5.2's): bfloat16 would tell few of them apart.
    x, router, bias = rng.normal(size=x.shape), 0.01 * rng.normal(size=shape), rng.uniform(6.8, 7.06, shape[1])
    assert_routing(world.config, jnp.asarray(x, jnp.bfloat16), jnp.asarray(router, jnp.bfloat16), np.asarray(bias, np.float32))


def assert_routing(config, x, router, bias):
    moe, (experts, gates, scores) = config.moe, jax.tree.map(np.asarray, route(config, x, router, bias, None))
    assert scores.dtype == gates.dtype == np.float32
    x, router = np.asarray(x, np.float64), np.asarray(router, np.float64)
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-(x @ router))), rtol=1e-6)
    for n in range(len(x)):
        choice = scores[n] + bias
        by_group = choice.reshape(moe.groups, -1)
        best = sorted(range(moe.groups), key=lambda g: (-np.sort(by_group[g])[::-1][:2].sum(dtype=np.float32), g))[: moe.topk_groups]
        allowed = [e for e in range(moe.experts) if e // by_group.shape[1] in best]
        wanted = sorted(allowed, key=lambda e: (-choice[e], e))[: moe.experts_per_token]
        assert list(experts[n]) == wanted
        gate = scores[n, wanted] / (scores[n, wanted].sum() if moe.norm_topk_prob else 1) * moe.routed_scaling_factor
        np.testing.assert_allclose(gates[n], gate, rtol=1e-6)


def check_forward_and_cache(family, seed):
    world = World(family, seed)
    for check in (check_layouts, check_causality, check_tokens_that_see_no_key, check_ties, check_routing, check_cache):
        check(world)


@pytest.mark.parametrize("family, seed", DRAWN)
def test_forward_and_cache(family, seed):
    check_forward_and_cache(family, seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
@fresh
@given(seed=st.integers(2, 2**31))
def test_forward_and_cache_of_fresh_configurations(family, seed):
    check_forward_and_cache(family, seed)


def objective(config, remat):
    """(model, tokens, segments, replay) -> a scalar of the real tokens' logits and the indexers' losses, the choices made, the pullback."""
    keep = config.indexer is not None

    def loss(model, tokens, segments, replay):
        out = model(tokens, segment_ids=segments, replay=replay, indexer_loss=keep, return_selections=keep, remat=remat)
        stacked = lambda found: jnp.stack([found[layer] for layer in sorted(found)]) if found else None
        value = jnp.sum(jnp.cos(out.logits) * (segments > 0)[..., None]) + (jnp.sum(out.indexer_loss) if keep else 0)
        return value, Replay(stacked(out.routing), stacked(out.selections))

    def forward(model, tokens, segments, replay):
        value, pull, choices = jax.vjp(lambda model: loss(model, tokens, segments, replay), model, has_aux=True)
        return value, choices, pull

    return forward


def assert_gradients(found, wanted, tolerance):
    """Within tolerance of each leaf's largest entry; a leaf whose gradient is 0 but for rounding has none to speak of."""
    noise = 1e-8 * max(np.abs(leaf).max(initial=0) for leaf in jax.tree.leaves(wanted))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        bound = tolerance * np.abs(b).max(initial=0) + noise
        np.testing.assert_allclose(a, b, rtol=0, atol=bound, err_msg=jax.tree_util.keystr(path))


def check_gradients(family, seed):
    """Rematerialisation changes no gradient, with two microbatches' backward passes outstanding; replay; padding."""
    config = random_config(family, seed)
    model, rng = random_model(config, seed), np.random.default_rng(seed)
    # Token 0 occurs in padding alone; row 2 of each batch is nothing else.
    segments = np.array([[1] * 6 + [2] * 4, [0] * 2 + [1] * 6 + [0] * 2, [0] * 10], np.int32)
    batches = [rng.integers(1, config.vocab_size, segments.shape, np.int32) * (segments > 0) for _ in range(2)]
    shapes = jax.eval_shape(objective(config, "none"), model, batches[0], segments, Replay())[1]
    nothing = jax.tree.map(lambda choice: np.full(choice.shape, -1, choice.dtype), shapes)
    programs = {remat: compiled(objective(config, remat)) for remat in ("none", "layer")}
    backward = compiled(lambda pull: pull(1.0)[0])  # one program for each of the two

    def forward(remat, model, tokens, replay=nothing):
        value, choices, pull = programs[remat](model, tokens, segments, replay)
        return value, jax.tree.map(np.asarray, choices), pull

    plain = [forward("none", model, tokens) for tokens in batches]
    wanted = [backward(pull) for _, _, pull in plain]
    for order in ((0, 1), (1, 0)):
        outstanding = [forward("layer", model, tokens) for tokens in batches]
        for at in order:
            value, choices, pull = outstanding[at]
            assert_gradients(backward(pull), wanted[at], 1e-6)
            np.testing.assert_allclose(value, plain[at][0], rtol=1e-6)
            jax.tree.map(np.testing.assert_array_equal, choices, plain[at][1])

    gradients = wanted[0]
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf).all(), path
        if path[-1].name == "router_bias":
            assert (leaf == 0).all()
    if not config.tied_embeddings:
        assert (gradients.embedding[0] == 0).all()

    # What one forward chose, replayed in another model: chosen again; experts keep their gates' gradients.
    other, choices = random_model(config, seed + 1), plain[0][1]
    _, again, pull = forward("none", other, batches[0], choices)
    real = segments > 0
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, real], b[:, real]), again, choices)
    own = forward("none", other, batches[0])[1]
    differ = [(a[:, real] != b[:, real]).any() for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(choices), strict=True)]
    assert any(differ) or not differ
    # A gate alone, normalised, is 1 and has no gradient.
    if config.moe is not None and (config.moe.experts_per_token > 1 or not config.moe.norm_topk_prob):
        router = np.abs(backward(pull).moe_layers.moe.router).max(axis=1)
        used = np.stack([np.isin(np.arange(config.moe.experts), layer[real]) for layer in choices.experts])
        np.testing.assert_array_equal(router > 0, used)
    replayed, _, _ = forward("none", model, batches[0], choices)
    np.testing.assert_allclose(replayed, plain[0][0], rtol=1e-6)


@pytest.mark.parametrize("family, seed", [("gqa", 1), ("mla", 3), ("dsa", 1), ("dsa_shared", 0), ("dsa_groups", 2)])
def test_gradients(family, seed):
    check_gradients(family, seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
@fresh
@given(seed=st.integers(3, 2**31))
def test_gradients_of_fresh_configurations(family, seed):
    check_gradients(family, seed)


def check_selecting_everything(family, seed):
    """An indexer that may pick every key, no indexer at all, and dense attention over an indexer: one result, one gradient.

    The first attends in the absorbed form, the second in the expanded one.
    """
    config = random_config(family, seed)
    model, rng = random_model(config, seed), np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (3, LENGTH), np.int32)
    segments = np.array([[1] * LENGTH, [0, 0] + [1] * 5 + [2] * 3, [0] * LENGTH], np.int32)
    everything = model.replace(config=dataclasses.replace(config, indexer=dataclasses.replace(config.indexer, topk=LENGTH + seed % 3)))
    without = model.replace(config=dataclasses.replace(config, indexer=None), indexer=None)

    def loss(model, **keywords):
        out = model(tokens, segment_ids=segments, **keywords)
        return jnp.sum(jnp.cos(out.logits) * (segments > 0)[..., None]), out

    gradient = compiled(jax.grad(loss, has_aux=True))
    found, out = gradient(everything)
    wanted, expanded = gradient(without)
    dense = compiled(functools.partial(loss, dense_attention=True))(model)[1]
    real, scale = segments > 0, np.abs(expanded.logits).max()
    np.testing.assert_allclose(out.logits[real], expanded.logits[real], rtol=0, atol=TOLERANCE * scale)
    np.testing.assert_allclose(dense.logits[real], expanded.logits[real], rtol=0, atol=TOLERANCE * scale)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(found.indexer))
    assert_gradients(found.replace(indexer=None, config=without.config), wanted, 1e-5)


@pytest.mark.parametrize("family, seed", [("dsa", 0), ("dsa_shared", 2), ("dsa_groups", 1)])
def test_selecting_everything_is_dense_attention(family, seed):
    check_selecting_everything(family, seed)


@pytest.mark.parametrize("name", ["deepseek_v3_2", "glm4_5", "glm4_7_flash", "glm5"])
def test_router_biases_stay_float32(name):
    """Drawn, loaded or cast in bfloat16: the biases are float32 and lose no bit, and nothing else is float32."""
    folder = pathlib.Path(__file__).parent.parent / "golden" / name
    exact, loaded = load_pretrained(folder), load_pretrained(folder, dtype=jnp.bfloat16)
    drawn = jax.eval_shape(lambda: init_model(exact.config, jax.random.key(0), jnp.bfloat16))
    for model in (loaded, drawn, exact.astype(jnp.bfloat16)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(model):
            assert leaf.dtype == (jnp.float32 if path[-1].name == "router_bias" else jnp.bfloat16), path
    bias = loaded.moe_layers.moe.router_bias
    for model in (loaded, exact.astype(jnp.bfloat16)):
        np.testing.assert_array_equal(model.moe_layers.moe.router_bias, exact.moe_layers.moe.router_bias)
    assert (np.asarray(bias) != np.asarray(bias.astype(jnp.bfloat16), np.float32)).any()
