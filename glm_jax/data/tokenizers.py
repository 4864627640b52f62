"""Tokenizers: bytes with GLM's markers, and any Hugging Face `tokenizer.json`. JAX-free.

Both keep one promise: `encode` never yields a special id, whatever the text spells, so that text from users, tools and
environments cannot forge a turn. Only `encode_markup`, for trusted text, turns markers into their ids.
"""

from __future__ import annotations

import abc
import itertools
import json
import pathlib
import re
from collections.abc import Collection, Iterable

END_OF_TEXT = "<|endoftext|>"
ROLES = ("system", "user", "assistant", "observation")
MARKERS = (
    END_OF_TEXT,
    "[gMASK]",
    "<sop>",
    *(f"<|{role}|>" for role in ROLES),
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


class Tokenizer(abc.ABC):
    """Text to token ids and back.

    special     {marker: id} of every special token
    vocab_size  number of ids, the size of a model's embedding table
    """

    special: dict[str, int]
    vocab_size: int

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of untrusted text: no id is a special one, even where the text spells a marker."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids: markers as they are spelled, invalid UTF-8 and ids without a token as U+FFFD or nothing."""

    def encode_markup(self, text: str, markers: Collection[str] | None = None) -> list[int]:
        """Ids of trusted text: each of `markers` (default: all special tokens) becomes its id, the rest is encoded as text."""
        markers = self.special if markers is None else markers
        if not markers:
            return self.encode(text)
        ids = []
        for i, piece in enumerate(re.split(f"({_any_of(markers)})", text)):
            if i % 2:  # re.split puts the separators at the odd places
                ids.append(self.special_id(piece))
            elif piece:
                ids.extend(self.encode(piece))
        return ids

    def special_id(self, marker: str) -> int:
        """Id of a marker; ValueError names it when the tokenizer lacks it."""
        if marker not in self.special:
            raise ValueError(f"the tokenizer has no special token {marker!r}; it has {', '.join(self.special) or 'none'}")
        return self.special[marker]

    @property
    def pad_id(self) -> int:
        return self.special_id(END_OF_TEXT)

    @property
    def role_ids(self) -> tuple[int, ...]:
        """Ids that end a turn: the roles' markers and the end of text."""
        return (*(self.special_id(f"<|{role}|>") for role in ROLES), self.pad_id)


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are bytes of UTF-8, then come `MARKERS` in their order; the vocabulary is padded to 288."""

    vocab_size = 288

    def __init__(self):
        self.special = {marker: 256 + i for i, marker in enumerate(MARKERS)}
        self._bytes = [bytes([i]) for i in range(256)] + [marker.encode() for marker in MARKERS]

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))  # a lone surrogate has no UTF-8 form and becomes "?"

    def decode(self, ids: Iterable[int]) -> str:
        invalid = b"\xff"  # a padding id of the vocabulary reads as an invalid byte
        return b"".join(self._bytes[i] if 0 <= i < len(self._bytes) else invalid for i in ids).decode("utf-8", errors="replace")


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, with all its special tokens closed to untrusted text.

    `special` holds the added tokens flagged special and those shaped like a tag: GLM's files flag `<think>` and
    `<tool_call>` as ordinary tokens, which the library would find in any text.
    """

    def __init__(self, definition: dict):
        import tokenizers

        added = []
        self.special = {}
        for token in definition.get("added_tokens") or []:
            if token["special"] or re.fullmatch(r"<.+>|\[.+\]", token["content"], re.DOTALL):
                token = {**token, "special": True}
                self.special[token["content"]] = token["id"]
            added.append(token)
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps({**definition, "added_tokens": added}))
        self._tokenizer.encode_special_tokens = True  # "encode as text": the library looks for no special token
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_ids = frozenset(self.special.values())
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        text = text.encode("utf-8", errors="replace").decode()
        ids = self._encode_text(text)
        if self._special_ids.isdisjoint(ids):
            return ids
        # The model's own vocabulary lists the marker and takes the whole word. Cut every marker after its first letter.
        markup = re.compile(_any_of(self.special))
        cuts = [0, *(match.start() + 1 for match in markup.finditer(text)), len(text)]
        ids = [i for start, stop in itertools.pairwise(cuts) for i in self._encode_text(text[start:stop])]
        if not self._special_ids.isdisjoint(ids):
            forged = [marker for marker, i in self.special.items() if i in ids]
            raise ValueError(f"this tokenizer cannot spell {forged} as text: its model yields the special id for {text[:80]!r}")
        return ids

    def _encode_text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(path: str | pathlib.Path) -> HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face `tokenizer.json`, or of a checkpoint directory that holds one."""
    path = pathlib.Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer at {file}: expected a tokenizer.json or a directory that holds one")
    return HuggingFaceTokenizer(json.loads(file.read_text(encoding="utf-8")))


def _any_of(markers: Collection[str]) -> str:
    return "|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True))  # the longest first
