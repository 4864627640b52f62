"""ChatML, the chat template of SmolLM2 and Qwen, on token ids; and a model folder's own template. JAX-free.

A turn reads `<|im_start|>role\\ncontent<|im_end|>\\n`. Unlike GLM's, its end has a marker of its own, which the policy samples.
The methods and promises are those of `ChatTemplate`, so that an episode takes either.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from glm_jax.data.chat import ChatTemplate
from glm_jax.data.tokenizers import ROLES, Tokenizer, load_tokenizer

START, END = "<|im_start|>", "<|im_end|>"
NAMES = {role: role for role in ROLES} | {"observation": "user"}  # small ChatML models know no role for a tool's answer


class ChatMLTemplate:
    """Renders conversations for one tokenizer; ValueError names the marker that the tokenizer lacks.

    system  content of the system turn put before a conversation that has none; None puts none

    A turn of others is tokenised as one text, role and content, as the reference does. The assistant's content is tokenised apart from
    its role, because it is sampled apart: the ids differ from those of a rendered text where the content begins with white space.
    """

    def __init__(self, tokenizer: Tokenizer, system: str | None = None):
        self.tokenizer = tokenizer
        self.system = system
        self.start, self.end = tokenizer.special_id(START), tokenizer.special_id(END)
        self.role_ids = (self.end, tokenizer.pad_id)  # what ends a sampled turn
        self._newline = tokenizer.encode("\n")
        self._content_markers = [m for m, i in tokenizer.special.items() if i not in (self.start, *self.role_ids)]

    def prompt(self, messages: Iterable[tuple[str, str]]) -> list[int]:
        """Ids of a conversation, ending in `<|im_start|>assistant\\n`: the policy speaks next."""
        turns = [[*self._turn(role, content), self.end, *self._newline] for role, content in self._with_system(messages)]
        return [*sum(turns, []), *self._turn("assistant", "")]

    def demonstration(self, messages: Sequence[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [L], loss mask uint8 [L]) of a conversation whose last turn is the assistant's.

        The mask is 1 on what the policy should sample: assistant content and the `<|im_end|>` that closes it.
        """
        if not messages or messages[-1][0] != "assistant":
            raise ValueError(f"a demonstration ends with the assistant's turn, not with {messages[-1][0] if messages else 'nothing'!r}")
        opening = len(self._turn("assistant", ""))
        ids, mask = [], []
        for role, content in self._with_system(messages):
            turn = [*self._turn(role, content), self.end]
            unsampled = opening if role == "assistant" else len(turn)
            ids += [*turn, *self._newline]
            mask += [0] * unsampled + [1] * (len(turn) - unsampled) + [0] * len(self._newline)
        length = len(ids) - len(self._newline)
        return np.array(ids[:length], np.int32), np.array(mask[:length], np.uint8)

    def observe(self, last_token: int, text: str, role: str = "observation") -> list[int]:
        """Ids to append after a sampled turn that ended in `last_token`: its `<|im_end|>`, where the policy did not sample it,
        the answer of `role`, and the opening of the assistant's next turn.
        """
        closing = [] if last_token == self.end else [self.end]
        return [*closing, *self._newline, *self._turn(role, text), self.end, *self._newline, *self._turn("assistant", "")]

    def action(self, tokens: Sequence[int]) -> str:
        """Text of a sampled turn, markers spelled, without the marker that closes it."""
        closed = len(tokens) > 0 and tokens[-1] in self.role_ids
        return self.tokenizer.decode(tokens[:-1] if closed else tokens)

    def _with_system(self, messages: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        messages = list(messages)
        if self.system is not None and messages and messages[0][0] != "system":
            return [("system", self.system), *messages]
        return messages

    def _turn(self, role: str, content: str) -> list[int]:
        """Ids of a turn without its end."""
        if role not in NAMES:
            raise ValueError(f"unknown role {role!r}; a message's role is one of {', '.join(NAMES)}")
        if role == "assistant":
            return [self.start, *self.tokenizer.encode("assistant\n"), *self.tokenizer.encode_markup(content, self._content_markers)]
        return [self.start, *self.tokenizer.encode(f"{NAMES[role]}\n{content}")]


def load_chat_template(folder: str | pathlib.Path) -> ChatTemplate | ChatMLTemplate:
    """The template for the tokenizer of a Hugging Face folder: ChatML where it has `<|im_start|>`, otherwise GLM's.

    A ChatML folder's own template (Jinja: chat_template.jinja, or in tokenizer_config.json) is rendered to learn its default system turn,
    and to see that its text is the one written here. Raises: ValueError when it is not, or for a tokenizer without either's markers.
    """
    folder = pathlib.Path(folder)
    tokenizer = load_tokenizer(folder)
    if START not in tokenizer.special:
        return ChatTemplate(tokenizer)
    source = _read_template(folder)
    if source is None:
        return ChatMLTemplate(tokenizer)
    head = _render(source, [("user", "?")]).removesuffix(_text([("user", "?")]))
    system = head.removeprefix(f"{START}system\n").removesuffix(f"{END}\n") if head else None
    default = [("system", system)] if head else []
    for turns, expected in (
        ([("user", "?")], [*default, ("user", "?")]),
        ([("user", "a"), ("assistant", "b"), ("user", "c")], [*default, ("user", "a"), ("assistant", "b"), ("user", "c")]),
        ([("system", "a"), ("user", "b")], [("system", "a"), ("user", "b")]),
    ):
        if (theirs := _render(source, turns)) != _text(expected):
            raise ValueError(f"{folder}: its chat template is not plain ChatML: it renders {theirs!r}, expected {_text(expected)!r}")
    return ChatMLTemplate(tokenizer, system)


def _text(messages: Sequence[tuple[str, str]]) -> str:
    return "".join(f"{START}{role}\n{content}{END}\n" for role, content in messages) + f"{START}assistant\n"


def _read_template(folder: pathlib.Path) -> str | None:
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    if (file := folder / "tokenizer_config.json").is_file():
        return json.loads(file.read_text(encoding="utf-8")).get("chat_template")
    return None


def _render(source: str, messages: Sequence[tuple[str, str]]) -> str:
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # the template comes with the model: it runs no code of its own

    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    turns = [{"role": role, "content": content} for role, content in messages]
    return template.render(messages=turns, add_generation_prompt=True)
