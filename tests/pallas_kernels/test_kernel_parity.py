"""Every implementation of an operation gives the values and the gradients of its reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dense_attention.api import dense_attention
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.lightning_indexer.api import index_scores, index_scores_at, index_topk
from pallas_kernels.sparse_mla.api import sparse_mla
from pallas_kernels.topk_select.api import select_topk

TOLERANCE = 1e-5  # of the largest value of the reference: float32 sums in another order


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def assert_close(found, wanted):
    """Within TOLERANCE of the largest finite value; infinities in the same places."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        np.testing.assert_allclose(a[finite], b[finite], rtol=0, atol=TOLERANCE * max(np.abs(b[finite]).max(initial=0), 1e-30))


@functools.cache
def value_and_pullback(operation, implementation, **static):
    """(arguments, cotangents, others) -> values, gradients of the arguments; one compilation for each set of shapes."""

    @jax.jit
    def run(arguments, cotangents, others):
        values, pullback = jax.vjp(lambda *a: operation(*a, **others, **static, implementation=implementation), *arguments)
        finite = lambda value, cotangent: jnp.where(jnp.isfinite(value), cotangent, 0)
        return values, pullback(jax.tree.map(finite, values, cotangents))

    return run


def assert_parity(operation, arguments, cotangents, others, **static):
    wanted = value_and_pullback(operation, "reference", **static)(arguments, cotangents, others)
    assert_close(value_and_pullback(operation, "xla", **static)(arguments, cotangents, others), wanted)


def layout(*, batch=2, queries=5, keys=5, offset=0, segments=None):
    """Positions and segments: queries at `offset` of the keys, one segment by default."""
    broadcast = lambda row: jnp.broadcast_to(jnp.asarray(row, jnp.int32), (batch, len(row)))
    segments = segments or ([1] * queries, [1] * keys)
    return {
        "query_positions": broadcast(np.arange(queries) + offset), "key_positions": broadcast(np.arange(keys)),
        "query_segments": broadcast(segments[0]), "key_segments": broadcast(segments[1])}


SQUARE = [0, 1, 1, 2, 2], [2, 2, 2, 0, 0], [1, 2, 1, 2, 1]
LAYOUTS = {
    "causal": (3, layout()),
    **{f"segments {rows}": (3, layout(segments=(rows, rows))) for rows in SQUARE},
    "no visible key": (3, layout(segments=([1] * 5, [2] * 5))),
    "one query of a cache": (3, layout(queries=1, keys=7, offset=4)),
    "one head": (1, layout(queries=3, keys=6, offset=2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_index_scores(name):
    heads, others = LAYOUTS[name]
    (batch, queries), keys = others["query_positions"].shape, others["key_positions"].shape[1]
    rng = np.random.default_rng(0)
    arguments = normal(rng, batch, queries, heads, 4), normal(rng, batch, keys, 4), normal(rng, batch, queries, heads)
    assert_parity(index_scores, arguments, normal(rng, batch, queries, keys), others)


def test_index_scores_clip_negative_products():
    """Without the relu of eq. 1 a key that points away from the query would count."""
    q, w = jnp.ones((1, 1, 1, 2)), jnp.full((1, 1, 1), 3.0)
    k = jnp.asarray([[[-1.0, -1.0], [1.0, 1.0]]])
    for implementation in ("reference", "xla"):
        scores = index_scores(q, k, w, **layout(batch=1, queries=1, keys=2, offset=1), implementation=implementation)
        np.testing.assert_array_equal(scores, [[[0.0, 6.0]]])


def test_index_topk_of_a_plateau_is_the_lowest_positions():
    """Keys that every head points away from score 0 with either sign of the weight: relu makes exact ties common."""
    q, k, others = jnp.ones((1, 1, 1, 2)), -jnp.ones((1, 6, 2)), layout(batch=1, queries=1, keys=6, offset=4)
    for implementation in ("reference", "xla"):
        for sign in (1.0, -1.0):
            selection = index_topk(q, k, jnp.full((1, 1, 1), sign), k=3, **others, implementation=implementation)
            np.testing.assert_array_equal(selection, [[[0, 1, 2]]])


@functools.cache
def compiled_select(k, implementation):
    return jax.jit(lambda scores: select_topk(scores, k, implementation=implementation))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([-np.inf, -1.5, -1e-30, -0.0, 0.0, 1e-30, 1.0, 2.5]), min_size=12, max_size=12), st.sampled_from([1, 3, 6, 9]))
def test_select_topk_is_brute_force(values, k):
    """Twelve scores as two queries of six keys; k up to and above the number of keys."""
    scores = np.asarray(values, np.float32).reshape(1, 2, 6)
    wanted = []
    for row in scores[0]:
        best = sorted(range(6), key=lambda s: (-row[s], s))[: min(k, 6)]
        kept = sorted(s for s in best if row[s] > -np.inf)
        wanted.append(kept + [-1] * (min(k, 6) - len(kept)))
    for implementation in ("reference", "xla"):
        found = compiled_select(k, implementation)(scores)
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found, [wanted])


def test_index_scores_at_parity():
    rng = np.random.default_rng(1)
    arguments = normal(rng, 2, 5, 3, 4), normal(rng, 2, 9, 4), normal(rng, 2, 5, 3)
    places = jnp.asarray(rng.integers(-1, 9, (2, 5, 4)), jnp.int32)
    assert_parity(index_scores_at, arguments, normal(rng, 2, 5, 4), {"places_BxTxK": places})


SELECTIONS = {
    "full": (2, 6, [[0, 2, 5], [1, 2, 3], [3, 4, 5]]),
    "padded": (2, 6, [[0, -1, -1], [0, 1, -1], [-1, -1, -1]]),
    "one query of a cache": (2, 6, [[0, 3, 5]]),
    "fewer keys than the selection is wide": (2, 2, [[0, -1, -1], [0, 1, -1], [1, -1, -1]]),
    "one head": (1, 6, [[0, 2, 5], [-1, -1, -1], [3, 4, 5]]),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_sparse_mla(name):
    heads, keys, rows = SELECTIONS[name]
    selection = jnp.broadcast_to(jnp.asarray(rows, jnp.int32), (2, len(rows), 3)).at[1, 0].set(jnp.asarray([1, -1, -1]))
    rng = np.random.default_rng(0)
    q_latent, q_rope = normal(rng, 2, len(rows), heads, 4), normal(rng, 2, len(rows), heads, 2)
    arguments = q_latent, q_rope, 3 * normal(rng, 2, keys, 4), normal(rng, 2, keys, 2)
    cotangents = normal(rng, 2, len(rows), heads, 4), normal(rng, 2, len(rows), heads)
    assert_parity(sparse_mla, arguments, cotangents, {"selection_BxTxK": selection}, scale=0.7)
    out, lse = sparse_mla(*arguments, selection, scale=0.7)
    no_key = np.asarray((selection < 0).all(axis=-1))
    np.testing.assert_array_equal(np.asarray(out)[no_key], 0)
    np.testing.assert_array_equal(np.isinf(lse), np.broadcast_to(no_key[..., None], lse.shape))


@pytest.mark.parametrize("sizes", [[3, 0, 5, 4], [0, 0, 0, 12], [12, 0, 0, 0], [1, 9, 1, 1], [2, 1, 0, 3], [0, 0, 0, 0]])
def test_grouped_matmul(sizes):
    rng = np.random.default_rng(0)
    arguments = normal(rng, 12, 3), normal(rng, 4, 3, 5)
    assert_parity(grouped_matmul, arguments, normal(rng, 12, 5), {"group_sizes_E": jnp.asarray(sizes, jnp.int32)})


@pytest.mark.parametrize("sizes", [[4, 0, 8, 4], [0, 4, 0, 12], [16, 0, 0, 0], [4, 4, 0, 3], [8, 0, 0, 0]])
def test_grouped_matmul_aligned(sizes):
    """Only the rows of the groups are compared: those past the last one are unspecified."""
    rng = np.random.default_rng(0)
    x, w, cotangent = normal(rng, 16, 3), normal(rng, 4, 3, 5), normal(rng, 16, 5).at[sum(sizes):].set(0)
    run = lambda implementation: value_and_pullback(grouped_matmul, implementation, alignment=4)(
        (x, w), cotangent, {"group_sizes_E": jnp.asarray(sizes, jnp.int32)})
    (found, found_gradients), (wanted, wanted_gradients) = run("xla"), run("reference")
    assert_close((found[: sum(sizes)], found_gradients), (wanted[: sum(sizes)], wanted_gradients))


def test_grouped_matmul_refuses_unaligned_rows():
    with pytest.raises(ValueError, match="6 rows are not a multiple of alignment=4"):
        grouped_matmul(jnp.ones((6, 2)), jnp.ones((1, 2, 2)), jnp.asarray([6]), alignment=4)


def test_unknown_implementation_names_those_there_are():
    q, k, w, positions = jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 2)), jnp.ones((1, 1, 1)), layout(batch=1, queries=1, keys=1)
    calls = {
        "lightning_indexer": lambda name: index_scores(q, k, w, **positions, implementation=name),
        "topk_select": lambda name: select_topk(w, 1, implementation=name),
        "sparse_mla": lambda name: sparse_mla(q, q, k, k, jnp.zeros((1, 1, 1), jnp.int32), scale=1.0, implementation=name),
        "grouped_matmul": lambda name: grouped_matmul(k[0], k, jnp.asarray([1]), implementation=name),
    }
    for operation, call in calls.items():
        with pytest.raises(ValueError, match=f"{operation}: no implementation 'cuda'; available: auto, reference, xla"):
            call("cuda")


@pytest.mark.parametrize("queries, keys, offset, segments, same_row", [
    (1, 6, 5, None, False), (5, 5, 0, SQUARE[:1] * 2, True), (5, 9, 4, None, False),
    (130, 130, 0, ([1] * 50 + [0] * 3 + [2] * 77,) * 2, True),  # spans
    (600, 600, 0, ([0] * 40 + [1] * 560,) * 2, False),  # chunks
    (2100, 2100, 0, ([1] * 2090 + [0] * 10,) * 2, True),  # both, and neither divides the length
])
def test_dense_attention_parity(queries, keys, offset, segments, same_row):
    rng, heads = np.random.default_rng(queries), (2, 3) if queries < 2000 else (1, 1)
    batch = 2 if queries < 2000 else 1
    q, k, v = normal(rng, batch, queries, *heads, 4), normal(rng, batch, keys, heads[0], 4), normal(rng, batch, keys, heads[0], 5)
    others = layout(batch=batch, queries=queries, keys=keys, offset=offset, segments=segments)
    assert_parity(dense_attention, (q, k, v), normal(rng, batch, queries, *heads, 5), others, scale=0.3, same_row=same_row)


def test_a_query_that_sees_no_key_gets_zero_and_no_gradient():
    rng = np.random.default_rng(0)
    q, k, v = normal(rng, 1, 4, 1, 2, 3), normal(rng, 1, 4, 1, 3), normal(rng, 1, 4, 1, 3)
    others = layout(batch=1, queries=4, keys=4, segments=([0, 1, 1, 0],) * 2)
    for implementation in ("reference", "xla"):
        out, gradients = value_and_pullback(dense_attention, implementation, scale=1.0)((q, k, v), jnp.ones((1, 4, 1, 2, 3)), others)
        assert (out[0, [0, 3]] == 0).all() and (out[0, 1] != 0).any()
        assert all(np.isfinite(g).all() for g in gradients) and (gradients[0][0, [0, 3]] == 0).all()


def test_dense_attention_over_a_selection_is_sparse_mla():
    """As absorbed MLA: one key, the latent and the rotary part, whose value is the latent."""
    rng = np.random.default_rng(3)
    q_latent, q_rope, latent, rope = normal(rng, 2, 9, 3, 6), normal(rng, 2, 9, 3, 4), normal(rng, 2, 9, 6), normal(rng, 2, 9, 4)
    selection = select_topk(jnp.where(jnp.tri(9, dtype=bool), normal(rng, 2, 9, 9), -jnp.inf), 4)
    key, q = jnp.concatenate([latent, rope], -1)[:, :, None], jnp.concatenate([q_latent, q_rope], -1)[:, :, None]
    for implementation in ("reference", "xla"):
        out = dense_attention(q, key, latent[:, :, None], scale=0.4, **layout(queries=9, keys=9), selection_BxTxK=selection,
                              same_row=True, implementation=implementation)
        assert_close(out[:, :, 0], sparse_mla(q_latent, q_rope, latent, rope, selection, scale=0.4)[0])


def test_dense_attention_in_bfloat16():
    rng = np.random.default_rng(4)
    arguments = [normal(rng, *shape) for shape in ((1, 7, 1, 2, 8), (1, 7, 1, 8), (1, 7, 1, 8))]
    others = layout(batch=1, queries=7, keys=7)
    exact = dense_attention(*arguments, scale=0.3, **others)
    out = dense_attention(*(a.astype(jnp.bfloat16) for a in arguments), scale=0.3, **others)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), exact, rtol=2**-6, atol=2**-6 * np.abs(exact).max())


def test_spans_of_a_long_row_select_what_the_whole_row_does():
    """700 queries in four parts, none of which divides a segment, with padding inside."""
    rng = np.random.default_rng(6)
    q, k, w = normal(rng, 2, 700, 2, 4), normal(rng, 2, 700, 4), normal(rng, 2, 700, 2)
    where = layout(queries=700, keys=700, segments=([1] * 300 + [0] * 50 + [2] * 350,) * 2)
    spans = index_topk(q, k, w, k=200, same_row=True, **where)
    assert spans.shape == (2, 700, 200)
    np.testing.assert_array_equal(spans, index_topk(q, k, w, k=200, implementation="reference", **where))
