"""A chain of sums on one digit: the reasoning task. "5+2-3+1" → "<think>5+2=7-3=4+1=5</think>5"."""

from __future__ import annotations

import numpy as np

from glm_jax.environments.base import TextEnvironment, after_thinking, register


@register
class DigitChain(TextEnvironment):
    """Start from a digit and apply `steps` sums and differences one after the other, each result modulo 10.

    steps: number of operations; largest: largest operand. The answer is the text after the thinking; reward 1 when it is the last digit.
    """

    id = "glm_jax/DigitChain-v0"
    category = "reasoning"

    def __init__(self, steps: int = 6, largest: int = 3):
        super().__init__()
        if not 1 <= steps <= 30 or not 1 <= largest <= 9:
            raise ValueError(f"{self.id}: needs 1 <= steps <= 30 and 1 <= largest <= 9, got steps={steps}, largest={largest}")
        self.length, self.largest = steps, largest

    def draw(self, rng: np.random.Generator) -> None:
        self.start = int(rng.integers(10))
        self.operations = [("+-"[rng.integers(2)], int(rng.integers(1, self.largest + 1))) for _ in range(self.length)]

    def content_key(self) -> str:
        return self.prompt()

    def prompt(self) -> str:
        return str(self.start) + "".join(f"{sign}{n}" for sign, n in self.operations)

    def _results(self, slip_at: int = -1, slip: int = 0) -> list[int]:
        """The digit after each operation; `slip` is added to that of operation `slip_at`, and the chain goes on from there."""
        digit, results = self.start, []
        for i, (sign, n) in enumerate(self.operations):
            digit = (digit + (n if sign == "+" else -n) + (slip if i == slip_at else 0)) % 10
            results.append(digit)
        return results

    def respond(self, action: str) -> tuple[str, float, bool]:
        return "", float(after_thinking(action) == str(self._results()[-1])), True

    def write(self, fault: str | None, rng: np.random.Generator) -> list[tuple[str, str]]:
        results = self._results()
        if fault == "shortcut":
            return [("assistant", f"<think></think>{(results[-1] + rng.integers(1, 10)) % 10}")]
        if fault == "slip":  # any slip reaches the answer: what follows only adds to it
            results = self._results(int(rng.integers(self.length)), int(rng.integers(1, 10)))
        worked = "".join(f"{sign}{n}={result}" for (sign, n), result in zip(self.operations, results, strict=True))
        return [("assistant", f"<think>{self.start}{worked}</think>{results[-1]}")]
