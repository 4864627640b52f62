"""GLM's chat template on token ids. JAX-free.

A conversation reads `[gMASK]<sop>` and then `<|role|>content` turn by turn. A role's marker opens its turn and closes the one
before it, so the policy ends its own turn by sampling the next role's marker. The template adds no newlines.

A rollout's ids only ever grow, they are never made anew from text:

    prompt(messages up to turn k + 1) = prompt(messages up to turn k) + sampled turn k + observe(last sampled id, text)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from glm_jax.data.tokenizers import ROLES, Tokenizer

PREFIX = ("[gMASK]", "<sop>")


class Message(NamedTuple):
    """One turn; a plain (role, content) pair does as well.

    Assistant content is markup: `<think>`, `<tool_call>` and the like become special ids. All other content is plain text,
    where a marker is only spelled. No content can hold a role's marker, which would forge a turn: it stays text.
    """

    role: str
    content: str


class ChatTemplate:
    """Renders conversations for one tokenizer; ValueError names the marker that the tokenizer lacks."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.prefix = [tokenizer.special_id(marker) for marker in PREFIX]
        self.role_id = {role: tokenizer.special_id(f"<|{role}|>") for role in ROLES}
        self.role_ids = tokenizer.role_ids
        self._content_markers = [m for m, i in tokenizer.special.items() if i not in self.role_ids and i not in self.prefix]

    def prompt(self, messages: Iterable[tuple[str, str]]) -> list[int]:
        """Ids of a conversation, ending in `<|assistant|>`: the policy speaks next."""
        ids = list(self.prefix)
        for role, content in messages:
            ids += [self._role(role), *self._content(role, content)]
        return [*ids, self.role_id["assistant"]]

    def demonstration(self, messages: Sequence[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [L], loss mask uint8 [L]) of a conversation whose last turn is the assistant's.

        The mask is 1 on what the policy should sample: assistant content and the role marker that closes it, which is the
        next role's and `<|user|>` after the last turn.
        """
        if not messages or messages[-1][0] != "assistant":
            raise ValueError(f"a demonstration ends with the assistant's turn, not with {messages[-1][0] if messages else 'nothing'!r}")
        ids, mask = list(self.prefix), [0] * len(self.prefix)
        closes_assistant = False
        for role, content in messages:
            content_ids = self._content(role, content)
            ids += [self._role(role), *content_ids]
            mask += [int(closes_assistant)] + [int(role == "assistant")] * len(content_ids)
            closes_assistant = role == "assistant"
        return np.array([*ids, self.role_id["user"]], np.int32), np.array([*mask, 1], np.uint8)

    def observe(self, last_token: int, text: str, role: str = "observation") -> list[int]:
        """Ids to append after a sampled turn that ended in `last_token`: the answer of `role`, then `<|assistant|>`.

        The role's marker is left out when the policy has sampled it already.
        """
        marker = self._role(role)
        opening = [] if last_token == marker else [marker]
        return [*opening, *self._content(role, text), self.role_id["assistant"]]

    def action(self, tokens: Sequence[int]) -> str:
        """Text of a sampled turn, markers spelled, without the marker that closes it."""
        closed = len(tokens) > 0 and tokens[-1] in self.role_ids
        return self.tokenizer.decode(tokens[:-1] if closed else tokens)

    def _role(self, role: str) -> int:
        if role not in self.role_id:
            raise ValueError(f"unknown role {role!r}; a message's role is one of {', '.join(ROLES)}")
        return self.role_id[role]

    def _content(self, role: str, content: str) -> list[int]:
        if role == "assistant":
            return self.tokenizer.encode_markup(content, self._content_markers)
        return self.tokenizer.encode(content)
