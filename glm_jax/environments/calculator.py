"""Arithmetic with a calculator to call: the agentic task. "318 times 47?" → tool call "318*47" → observation "14946" → answer "14946"."""

from __future__ import annotations

import ast
import operator
import re

import numpy as np

from glm_jax.environments.base import TextEnvironment, after_thinking, register

SIGNS = {"plus": "+", "minus": "-", "times": "*"}
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
# 40 characters of digits, signs and brackets: neither the parser nor the product (below 10^40) can grow large.
_EXPRESSION = re.compile(r"[0-9+\-*() ]{1,40}")
_TOOL_CALL = re.compile(r"<tool_call>([^<>]*)</tool_call>")


def evaluate(expression: str) -> int:
    """Value of an expression of integers, + - * and brackets, at most 40 characters. Raises ValueError for anything else."""
    if not _EXPRESSION.fullmatch(expression):
        raise ValueError(f"not an expression of integers, + - * and brackets in at most 40 characters: {expression[:60]!r}")

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError(f"unsupported syntax in {expression!r}")

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"malformed expression {expression!r}") from error


@register
class Calculator(TextEnvironment):
    """Two operands of three and two digits, one operation. The policy answers, or calls the calculator first; three turns in all.

    A turn with "<tool_call>" in it is a call and is observed as the value, or as "error" when it is malformed; any other turn is the final
    answer, rewarded 1 when it is the exact number.
    """

    id = "glm_jax/Calculator-v0"
    category = "agentic"
    max_turns = 3

    def draw(self, rng: np.random.Generator) -> None:
        self.a, self.b = int(rng.integers(100, 1000)), int(rng.integers(10, 100))
        self.word = list(SIGNS)[rng.integers(len(SIGNS))]

    def content_key(self) -> str:
        return f"{self.word} {self.a} {self.b}"

    def prompt(self) -> str:
        return f"{self.a} {self.word} {self.b}?"

    @property
    def answer(self) -> int:
        return evaluate(f"{self.a}{SIGNS[self.word]}{self.b}")

    def respond(self, action: str) -> tuple[str, float, bool]:
        text = after_thinking(action)
        if "<tool_call>" not in text:
            return "", float(text == str(self.answer)), True
        call = _TOOL_CALL.fullmatch(text)
        try:
            return str(evaluate(call[1])) if call else "error", 0.0, False
        except ValueError:
            return "error", 0.0, False

    def write(self, fault: str | None, rng: np.random.Generator) -> list[tuple[str, str]]:
        if fault == "shortcut":
            return [("assistant", self._guess(rng))]
        a, b = (self.a, self.b) if fault is None else self._mistype(rng)
        expression = f"{a}{SIGNS[self.word]}{b}"
        value = str(evaluate(expression))
        return [("assistant", f"<tool_call>{expression}</tool_call>"), ("observation", value), ("assistant", value)]

    def _guess(self, rng: np.random.Generator) -> str:
        """A wrong number of the right length."""
        digits = len(str(self.answer))
        while (guess := int(rng.integers(10 ** (digits - 1), 10**digits))) == self.answer:
            pass
        return str(guess)

    def _mistype(self, rng: np.random.Generator) -> tuple[int, int]:
        """The operands with one digit changed, never into a leading zero. Another operand always gives another value, as none is 0."""
        digits = [*str(self.a), *str(self.b)]
        position = int(rng.integers(5))
        choices = [d for d in "0123456789" if d != digits[position] and not (d == "0" and position in (0, 3))]
        digits[position] = choices[rng.integers(len(choices))]
        return int("".join(digits[:3])), int("".join(digits[3:]))
