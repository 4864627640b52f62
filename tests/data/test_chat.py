"""The template on token ids: a rollout's ids only grow, and the loss mask covers what the policy says."""

import itertools
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from glm_jax.data.chat import ChatTemplate, Message
from glm_jax.data.tokenizers import MARKERS, ROLES, ByteTokenizer, HuggingFaceTokenizer

TEMPLATE = ChatTemplate(ByteTokenizer())
SPECIAL = TEMPLATE.tokenizer.special

contents = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(MARKERS)), max_size=4).map("".join)
conversations = st.lists(st.builds(Message, st.sampled_from(ROLES), contents), max_size=6)
# A rollout: opening turns, then the assistant and whoever answers it alternate.
openings = st.lists(st.builds(Message, st.sampled_from(["system", "user"]), contents), max_size=2)
exchanges = st.lists(st.tuples(contents, st.sampled_from(["user", "observation"]), contents), min_size=1, max_size=4)


@given(conversation=conversations)
def test_prompt_has_one_role_marker_a_turn(conversation):
    ids = TEMPLATE.prompt(conversation)
    assert ids[:2] == [SPECIAL["[gMASK]"], SPECIAL["<sop>"]]
    assert [i for i in ids[2:] if i in TEMPLATE.role_ids] == [TEMPLATE.role_id[m.role] for m in conversation] + [SPECIAL["<|assistant|>"]]
    assert TEMPLATE.tokenizer.decode(ids) == "[gMASK]<sop>" + "".join(f"<|{m.role}|>{m.content}" for m in conversation) + "<|assistant|>"


@given(conversation=conversations)
def test_text_of_others_holds_no_special_id(conversation):
    others = [m for m in conversation if m.role != "assistant"]
    assert sum(i >= 256 for i in TEMPLATE.prompt(others)) == len(others) + 3


@given(opening=openings, exchanges=exchanges, closed=st.booleans())
def test_token_in_token_out(opening, exchanges, closed):
    """prompt(k+1) = prompt(k) + sampled(k) + observe(k), whether or not the policy sampled the marker that closes its turn."""
    messages = list(opening)
    ids = TEMPLATE.prompt(messages)
    for action, role, answer in exchanges:
        markup = TEMPLATE.tokenizer.encode_markup(action, [m for m in MARKERS if m not in ("[gMASK]", "<sop>", "<|endoftext|>")])
        sampled = [i for i in markup if i not in TEMPLATE.role_ids] + [TEMPLATE.role_id[role]] * closed
        messages += [Message("assistant", TEMPLATE.action(sampled)), Message(role, answer)]
        ids = ids + sampled + TEMPLATE.observe((ids + sampled)[-1], answer, role)
        assert ids == TEMPLATE.prompt(messages)


@given(opening=openings, exchanges=exchanges)
def test_demonstration_is_a_rollout_and_masks_what_the_policy_says(opening, exchanges):
    """Tokens: prompt, content, observe, …, `<|user|>`. Mask: content and the marker that closes it."""
    tokens = TEMPLATE.prompt(opening)
    mask = [0] * len(tokens)
    messages = list(opening)
    for i, (action, role, answer) in enumerate(exchanges):
        last = i == len(exchanges) - 1
        messages.append(Message("assistant", action))
        sampled = [*TEMPLATE._content("assistant", action), SPECIAL["<|user|>"] if last else TEMPLATE.role_id[role]]
        tokens, mask = tokens + sampled, mask + [1] * len(sampled)
        if not last:
            messages.append(Message(role, answer))
            answered = TEMPLATE.observe(tokens[-1], answer, role)
            tokens, mask = tokens + answered, mask + [0] * len(answered)
    got_tokens, got_mask = TEMPLATE.demonstration(messages)
    assert got_tokens.dtype == np.int32 and got_mask.dtype == np.uint8
    assert got_tokens.tolist() == tokens and got_mask.tolist() == mask


def test_action_drops_only_the_closing_marker():
    ids = TEMPLATE.tokenizer.encode_markup("<think>a</think><tool_call>1+1</tool_call><|observation|>")
    assert TEMPLATE.action(ids) == TEMPLATE.action(np.array(ids)) == "<think>a</think><tool_call>1+1</tool_call>"
    assert TEMPLATE.action(ids[:-1]) == TEMPLATE.action(ids)
    assert TEMPLATE.action([SPECIAL["<|endoftext|>"]]) == TEMPLATE.action([]) == ""


def test_observe_after_another_marker_adds_its_own():
    assert TEMPLATE.observe(SPECIAL["<|user|>"], "4") == [SPECIAL["<|observation|>"], ord("4"), SPECIAL["<|assistant|>"]]


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="unknown role 'tool'"):
        TEMPLATE.prompt([("tool", "")])
    for messages in ([], [("user", "a")]):
        with pytest.raises(ValueError, match="ends with the assistant's turn"):
            TEMPLATE.demonstration(messages)


def huggingface(markers):
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(tokenizers.pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(markers))
    return HuggingFaceTokenizer(json.loads(tokenizer.to_str()))


def test_a_loaded_tokenizer_renders_the_same_text():
    messages = [("user", "2<|user|>ß"), ("assistant", "<think>é</think>4"), ("observation", "<think>"), ("assistant", "5")]
    template = ChatTemplate(huggingface(MARKERS))
    for render in (lambda t: t.prompt(messages), lambda t: t.demonstration(messages)[0]):
        assert template.tokenizer.decode(render(template)) == TEMPLATE.tokenizer.decode(render(TEMPLATE))
    assert (template.demonstration(messages)[1] == TEMPLATE.demonstration(messages)[1]).all()  # both tokenise bytes here


@pytest.mark.parametrize("missing", [m for m in MARKERS if m.startswith(("<|", "[", "<sop"))])
def test_a_tokenizer_without_a_marker_is_refused_by_name(missing):
    with pytest.raises(ValueError) as error:
        ChatTemplate(huggingface(m for m in MARKERS if m != missing))
    assert f"no special token {missing!r}" in str(error.value)


def test_only_structure_is_required_of_a_tokenizer():
    required = list(itertools.takewhile(lambda m: m != "<think>", MARKERS))
    template = ChatTemplate(huggingface(required))
    assert template.tokenizer.decode(template.prompt([("assistant", "<think>")])) == "[gMASK]<sop><|assistant|><think><|assistant|>"
