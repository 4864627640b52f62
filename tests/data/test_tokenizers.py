"""Round trips, and the promise that text never forges a special id."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from glm_jax.data.tokenizers import MARKERS, ByteTokenizer, HuggingFaceTokenizer, load_tokenizer

# Text with markers, broken markers and any Unicode.
texts = st.lists(st.one_of(st.text(), st.sampled_from(MARKERS), st.sampled_from(["<", "|>", "<|", "<|us", "er|>"]))).map("".join)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """A byte-level BPE file as GLM ships it: <think> and its like are added tokens, but not flagged special."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["what the <|user|> would <think> of the tool call"] * 20, trainer)
    tokenizer.add_special_tokens([m for m in MARKERS if m.startswith(("<|", "[", "<sop"))])
    tokenizer.add_tokens([m for m in MARKERS if m not in tokenizer.get_added_tokens_decoder()])
    tokenizer.enable_truncation(4)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module", params=["bytes", "huggingface"])
def tokenizer(request, tokenizer_file):
    return ByteTokenizer() if request.param == "bytes" else load_tokenizer(tokenizer_file)


@given(text=texts)
def test_text_round_trips_and_is_never_special(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.special.values())
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@given(
    pieces=st.lists(
        st.one_of(st.sampled_from(MARKERS), st.text(alphabet=st.characters(exclude_characters="<>[]", exclude_categories=["Cs"])))
    )
)
def test_markup_yields_exactly_the_markers(tokenizer, pieces):
    ids = tokenizer.encode_markup("".join(pieces))
    assert tokenizer.decode(ids) == "".join(pieces)
    special = set(tokenizer.special.values())
    assert [i for i in ids if i in special] == [tokenizer.special[p] for p in pieces if p in MARKERS]


def test_markup_of_some_markers_leaves_the_others_text(tokenizer):
    ids = tokenizer.encode_markup("<think>a<|user|>", markers=["<think>"])
    assert ids == [tokenizer.special["<think>"], *tokenizer.encode("a<|user|>")]
    assert tokenizer.encode_markup("<think>", markers=[]) == tokenizer.encode("<think>")


@given(text=texts)
def test_text_is_encoded_as_if_there_were_no_added_tokens(tokenizer_file, text):
    definition = json.loads(tokenizer_file.read_text())
    bare = tokenizers.Tokenizer.from_str(json.dumps({**definition, "added_tokens": [], "truncation": None}))
    assert load_tokenizer(tokenizer_file).encode(text) == bare.encode(text).ids


def test_byte_ids_are_as_documented():
    tokenizer = ByteTokenizer()
    assert tokenizer.special == {marker: 256 + i for i, marker in enumerate(MARKERS)}
    assert len(MARKERS) == 13 and tokenizer.vocab_size == 288
    assert tokenizer.pad_id == tokenizer.special["<|endoftext|>"] == 256
    assert sorted(tokenizer.role_ids) == sorted(
        tokenizer.special[f"<|{r}|>"] for r in ("system", "user", "assistant", "observation", "endoftext")
    )
    assert tokenizer.decode([0xC3, 258, 287]) == "\ufffd<sop>\ufffd"  # half a letter, a marker, an id of the padded vocabulary


def test_a_lone_surrogate_does_not_crash(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_marker_that_the_model_itself_lists_is_cut():
    """With ignore_merges, a BPE model yields any word of its vocabulary whole, added token or not."""
    vocab = {"<": 0, "t": 1, ">": 2, "<t>": 3}
    definition = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], ignore_merges=True)).to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer = HuggingFaceTokenizer({**definition, "added_tokens": [{"id": 3, "content": "<t>", **flags}]})
    assert tokenizer._encode_text("<t>") == [3]  # what must not get out
    assert tokenizer.encode("<t>") == [0, 1, 2]
    assert tokenizer.encode_markup("<t>") == [3]


def test_a_tokenizer_that_cannot_spell_a_marker_refuses():
    definition = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel({"t": 0, "<t>": 1}, unk_token="<t>")).to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = HuggingFaceTokenizer({**definition, "added_tokens": [{"id": 1, "content": "<t>", **flags}]})
    with pytest.raises(ValueError, match="cannot spell"):
        tokenizer.encode("x")


def test_load_from_directory_and_missing_file(tokenizer_file, tmp_path):
    assert load_tokenizer(tokenizer_file.parent).special == load_tokenizer(tokenizer_file).special
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
