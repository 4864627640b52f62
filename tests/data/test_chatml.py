"""ChatML on token ids: the same promises as GLM's template, and the text of a folder's own Jinja template."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from glm_jax.data.chat import ChatTemplate
from glm_jax.data.chatml import ChatMLTemplate, load_chat_template
from glm_jax.data.tokenizers import MARKERS, ByteTokenizer, HuggingFaceTokenizer

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>")
JINJA = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def definition(markers):
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(markers))
    return json.loads(tokenizer.to_str())


TOKENIZER = HuggingFaceTokenizer(definition(CHATML))
TEMPLATE = ChatMLTemplate(TOKENIZER)
SPECIAL = TOKENIZER.special

contents = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(CHATML)), max_size=4).map("".join)
actions = st.lists(st.one_of(st.text(max_size=8), st.just("<think>")), max_size=4).map("".join)
others = st.lists(st.tuples(st.sampled_from(["system", "user"]), contents), max_size=3)
exchanges = st.lists(st.tuples(actions, st.sampled_from(["user", "observation"]), contents), min_size=1, max_size=4)


def folder_with(path, template, markers=CHATML):
    (path / "tokenizer.json").write_text(json.dumps(definition(markers)))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    return path


@given(messages=others)
def test_text_of_others_forges_no_turn(messages):
    ids = TEMPLATE.prompt(messages)
    start, end = SPECIAL["<|im_start|>"], SPECIAL["<|im_end|>"]
    assert [i for i in ids if i in SPECIAL.values()] == [start, end] * len(messages) + [start]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages) + "<|im_start|>assistant\n"
    assert TOKENIZER.decode(ids) == text


@given(opening=others, exchanges=exchanges, closed=st.booleans())
def test_chatml_token_in_token_out(opening, exchanges, closed):
    """prompt(k+1) = prompt(k) + sampled(k) + observe(k), whether or not the policy sampled the end of its turn."""
    messages = list(opening)
    ids = TEMPLATE.prompt(messages)
    for action, role, answer in exchanges:
        sampled = [*TOKENIZER.encode_markup(action, ["<think>"]), *[SPECIAL["<|im_end|>"]] * closed]
        assert TEMPLATE.action(sampled) == action
        messages += [("assistant", action), (role, answer)]
        ids = ids + sampled + TEMPLATE.observe((ids + sampled)[-1], answer, role)
        assert ids == TEMPLATE.prompt(messages)


@given(opening=others, exchanges=exchanges)
def test_chatml_demonstration_masks_what_the_policy_says(opening, exchanges):
    messages, tokens, mask = list(opening), TEMPLATE.prompt(opening), []
    mask = [0] * len(tokens)
    for i, (action, role, answer) in enumerate(exchanges):
        sampled = [*TOKENIZER.encode_markup(action, ["<think>"]), SPECIAL["<|im_end|>"]]
        tokens, mask, messages = tokens + sampled, mask + [1] * len(sampled), [*messages, ("assistant", action)]
        if i < len(exchanges) - 1:
            answered = TEMPLATE.observe(tokens[-1], answer, role)
            tokens, mask, messages = tokens + answered, mask + [0] * len(answered), [*messages, (role, answer)]
    got_tokens, got_mask = TEMPLATE.demonstration(messages)
    assert got_tokens.dtype == np.int32 and got_mask.dtype == np.uint8
    assert got_tokens.tolist() == tokens and got_mask.tolist() == mask


def test_chatml_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="unknown role 'tool'"):
        TEMPLATE.prompt([("tool", "")])
    for messages in ([], [("user", "a")]):
        with pytest.raises(ValueError, match="ends with the assistant's turn"):
            TEMPLATE.demonstration(messages)
    with pytest.raises(ValueError, match="no special token '<|im_start|>'"):
        ChatMLTemplate(ByteTokenizer())


def test_a_folder_brings_its_default_system_turn(tmp_path):
    template = load_chat_template(folder_with(tmp_path, JINJA))
    assert isinstance(template, ChatMLTemplate) and template.system == "Be kind"
    assert template.prompt([("user", "a")]) == TEMPLATE.prompt([("system", "Be kind"), ("user", "a")])
    assert template.prompt([("system", "b"), ("user", "a")]) == TEMPLATE.prompt([("system", "b"), ("user", "a")])
    tokens, mask = template.demonstration([("user", "a"), ("assistant", "b")])
    assert TOKENIZER.decode(tokens[mask == 1]) == "b<|im_end|>"

    (tmp_path / "chat_template.jinja").write_text(JINJA.replace("Be kind", "Be short"))  # goes before the one in tokenizer_config.json
    assert load_chat_template(tmp_path).system == "Be short"


def test_a_folder_without_a_template_or_with_glms_markers(tmp_path):
    assert load_chat_template(folder_with(tmp_path, None)).system is None
    assert isinstance(load_chat_template(folder_with(tmp_path, None, MARKERS)), ChatTemplate)


@pytest.mark.parametrize("change", [
    ("'\n' + message", "': ' + message"), ("if loop.first and", "if"), (JINJA, "{{ messages[0]['role'] }}")])
def test_a_folder_of_another_template_is_refused(tmp_path, change):
    template = JINJA.replace(*change)
    assert template != JINJA
    with pytest.raises(ValueError, match="not plain ChatML"):
        load_chat_template(folder_with(tmp_path, template))
