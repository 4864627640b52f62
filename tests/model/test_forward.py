"""The forward pass: its equations, and what must not matter to it (padding, packing, later tokens)."""

import dataclasses

import glm_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import VOCAB, random_model, small_config

from glm_jax.model import Replay, init_model
from glm_jax.model.transformer import default_positions

TOLERANCE = 2e-5


def as_lists(selection):
    """Lists of selected places of each query of one row, -1 dropped."""
    return [[int(s) for s in row if s >= 0] for row in np.asarray(selection)]


def assert_logits(found, wanted, tolerance=TOLERANCE):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


def assert_oracle(model, out, tokens, segments):
    """Logits, selections and experts of every row against the equations."""
    for row in range(len(tokens)):
        wanted = glm_oracle.forward(model, tokens[row], segments[row])
        assert_logits(out.logits[row], wanted.logits)
        assert {layer: as_lists(s[row]) for layer, s in out.selections.items()} == wanted.selections
        assert sorted(out.routing) == sorted(wanted.routing)
        for layer, experts in wanted.routing.items():
            np.testing.assert_array_equal(out.routing[layer][row], experts)


def test_equations(model, tokens, plain):
    assert_oracle(model, plain, tokens, np.ones_like(tokens))
    assert plain.logits.dtype == plain.hidden.dtype == jnp.float32
    widths = {s.shape for s in plain.selections.values()}
    assert widths == {(*tokens.shape, model.config.indexer.topk)}


def test_equations_with_segments_and_padding(model, tokens, forward):
    """Padding attends to nothing: attention adds exactly 0 to it, and never NaN."""
    segments = np.array([[1] * 5 + [2] * 4 + [0] * 3, [0] * 12])
    out = forward(model, tokens, segments)
    assert_oracle(model, out, tokens, segments)
    assert (np.concatenate([s[1] for s in out.selections.values()]) == -1).all()


def test_equations_with_a_router_bias_that_decides(model, tokens, forward):
    """The bias picks expert 4 for every token; its gate stays the sigmoid's."""
    moe = model.moe_layers.moe
    biased = model.replace(moe_layers=model.moe_layers.replace(moe=moe.replace(router_bias=moe.router_bias.at[:, 4].add(7))))
    out = forward(biased, tokens, np.ones_like(tokens))
    assert_oracle(biased, out, tokens, np.ones_like(tokens))
    assert all((experts[..., 0] == 4).all() for experts in out.routing.values())


def test_exact_ties_select_the_lowest_positions(model, tokens, forward):
    """Head weights of 0 make every score a tie."""
    tied = jax.tree_util.tree_map_with_path(lambda path, leaf: 0 * leaf if "head_weights" in str(path[-1]) else leaf, model)
    out = forward(tied, tokens, np.ones_like(tokens))
    for selection in out.selections.values():
        assert as_lists(selection[0]) == [list(range(min(t + 1, 4))) for t in range(tokens.shape[1])]


@pytest.mark.parametrize("at", [0, 5, 11])
def test_a_later_token_changes_no_bit_before_it(model, tokens, forward, plain, at):
    changed = tokens.copy()
    changed[0, at:] = (changed[0, at:] + 1) % VOCAB
    out = forward(model, changed, np.ones_like(tokens))
    np.testing.assert_array_equal(out.logits[0, :at], plain.logits[0, :at])
    np.testing.assert_array_equal(out.logits[1], plain.logits[1])
    assert (np.abs(out.logits[0, at] - plain.logits[0, at]) > 1e-3).any()


def test_padding_before_after_and_inside_changes_nothing(model, tokens, forward, plain):
    for mask in ([0, 0, 0] + [1] * 9, [1] * 9 + [0, 0, 0], [1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0]):
        mask = np.tile(np.array(mask), (2, 1))
        padded = np.full_like(tokens, 7)
        padded[mask == 1] = tokens[:, :9].reshape(-1)
        out = forward(model, padded, mask)
        assert_logits(out.logits[mask == 1], np.asarray(plain.logits)[:, :9].reshape(-1, VOCAB))
        assert np.isfinite(out.logits).all()


def test_an_attention_mask_is_a_single_segment(model, tokens):
    """Both arguments trace to one and the same program."""
    program = lambda name: str(jax.make_jaxpr(lambda mask: model(tokens, **{name: mask}).logits)(tokens))
    assert program("attention_mask") == program("segment_ids")


def test_packing_changes_nothing(model, tokens, forward, plain):
    """The two rows' first tokens in one row, in both orders: no segment sees another, and positions begin anew."""
    packed = np.stack([np.concatenate([tokens[0, :7], tokens[1, :5]]), np.concatenate([tokens[1, :5], tokens[0, :7]])])
    out = forward(model, packed, np.array([[1] * 7 + [2] * 5, [3] * 5 + [1] * 7]))
    for row, first, second in ((0, 7, 0), (1, 0, 5)):
        a, b = (slice(0, 7), slice(7, 12)) if row == 0 else (slice(5, 12), slice(0, 5))
        assert_logits(out.logits[row, a], plain.logits[0, :7])
        assert_logits(out.logits[row, b], plain.logits[1, :5])
        for layer, selection in out.selections.items():
            shifted = [[s + second for s in places] for places in as_lists(plain.selections[layer][0, :7])]
            assert as_lists(selection[row, a]) == shifted
            shifted = [[s + first for s in places] for places in as_lists(plain.selections[layer][1, :5])]
            assert as_lists(selection[row, b]) == shifted


def test_default_positions_count_earlier_real_tokens_of_the_segment():
    segments = np.array([[0, 1, 1, 0, 1, 2, 2, 0, 2], [1, 1, 2, 3, 3, 3, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1]])
    brute = np.array([[int(np.sum(row[:t] == row[t])) for t in range(len(row))] for row in segments])
    found = np.asarray(default_positions(jnp.asarray(segments)))
    np.testing.assert_array_equal(found[segments > 0], brute[segments > 0])


def test_selecting_more_keys_than_there_are_is_dense_attention(model, tokens, forward):
    """The gradients' tests hold dense_attention itself against the same oracle."""
    segments = np.array([[1] * 8 + [2] * 4, [1] * 10 + [0] * 2])
    wide = model.replace(config=small_config(topk=30))
    out = forward(wide, tokens, segments)
    assert_oracle(wide, out, tokens, segments)
    assert {s.shape for s in out.selections.values()} == {(*tokens.shape, tokens.shape[1])}
    for row in range(2):
        wanted = [[s for s in range(t + 1) if segments[row, s] == segments[row, t] > 0] for t in range(tokens.shape[1])]
        assert all(as_lists(selection[row]) == wanted for selection in out.selections.values())


def test_bfloat16_model_keeps_float32_where_it_matters(tokens):
    model = jax.eval_shape(lambda: init_model(small_config(), jax.random.key(0), jnp.bfloat16))
    types = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(model)}
    assert {path for path, dtype in types.items() if dtype != jnp.bfloat16} == {".moe_layers.moe.router_bias"}
    assert types[".moe_layers.moe.router_bias"] == jnp.float32
    out = jax.eval_shape(lambda model: model(tokens, indexer_loss=True, cache=model.init_cache(2, 16)), model)
    assert (out.logits.dtype, out.hidden.dtype, out.indexer_loss.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)


def test_wrong_arguments_are_refused(model, tokens):
    ones, cache = np.ones_like(tokens), model.init_cache(2, 16)
    experts, selections = np.zeros((2, 2, 12, 2), np.int32), np.zeros((3, 2, 12, 4), np.int32)
    refused = [
        ("tokens must be", (tokens[0],), {}),
        ("segment_ids go with neither", (tokens,), {"segment_ids": ones, "attention_mask": ones}),
        ("segment_ids go with neither", (tokens,), {"segment_ids": ones, "cache": cache}),
        ("positions go without a cache", (tokens,), {"positions": ones, "cache": cache}),
        ("attention_mask has shape", (tokens,), {"attention_mask": ones[:, 1:]}),
        ("cache is for 2 sequences", (tokens[:1],), {"cache": cache}),
        ("replay.experts has shape", (tokens,), {"replay": Replay(experts=experts.transpose(1, 2, 0, 3))}),
        ("replay.selections has shape", (tokens,), {"replay": Replay(selections=selections[1:])}),
        ("no selection to replay", (tokens,), {"replay": Replay(selections=selections), "dense_attention": True}),
    ]
    for message, arguments, keywords in refused:
        with pytest.raises(ValueError, match=message):
            model(*arguments, **keywords)


def test_models_without_optional_parts():
    """No dense layers, only dense layers, no shared expert: built and run without one."""
    config = small_config()
    for changed in (
        dataclasses.replace(config, dense_layers=0), dataclasses.replace(config, dense_layers=3),
        dataclasses.replace(config, moe=dataclasses.replace(config.moe, shared_experts=0)),
    ):
        model = random_model(changed)
        out = jax.eval_shape(lambda model: model(np.ones((1, 3), np.int32), return_selections=True), model)
        assert sorted(out.routing) == list(range(changed.dense_layers, 3))
        assert sorted(out.selections) == [0, 1, 2]
