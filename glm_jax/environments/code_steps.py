"""Writing a function from its description: the coding task. "add 17, times 3, mod 50" → a Python function f, run against hidden cases."""

from __future__ import annotations

import numpy as np

from glm_jax.environments.base import TextEnvironment, after_thinking, register
from glm_jax.environments.sandbox import PythonSandbox, Result, default_sandbox

OPERATORS = {"add": "+", "sub": "-", "times": "*", "mod": "%"}
# Where two functions of a few steps differ, they differ on one of these; they decide the split, hidden cases the reward.
PROBES = (
    *(-(10**12) - 39, -1_000_003, -65_537, -9_973, -1_001, -512, -101, -97, -50, -13, -7, -1),
    *(0, 1, 2, 5, 17, 64, 99, 360, 1_009, 31_337, 10**6 + 3, 10**12 + 61),
)
HIDDEN_CASES = 8

Step = tuple[str, int]


def apply(steps: list[Step], x: int) -> int:
    """The described function: steps (add | sub | times | mod, n) in order; mod is Python's, never negative."""
    for word, n in steps:
        match word:
            case "add":
                x += n
            case "sub":
                x -= n
            case "times":
                x *= n
            case "mod":
                x %= n
    return x


def spell(steps: list[Step]) -> str:
    """The steps as Python source."""
    return "\n".join(["def f(x):", *(f" x{OPERATORS[word]}={n}" for word, n in steps), " return x"])


@register
class CodeSteps(TextEnvironment):
    """A function of one integer in two or three steps. The policy's program runs in the sandbox; reward 1 when all 8 hidden cases pass.

    Splits hold unseen functions: the content is what the function does to fixed probes, so two spellings of one function stay together.
    A program that is wrong, crashes or passes its `deadline` (seconds for all cases) earns 0; a sandbox that breaks raises
    `EnvironmentFailure`. The expected outputs never enter the sandbox.
    """

    id = "glm_jax/CodeSteps-v0"
    category = "coding"

    def __init__(self, deadline: float = 1.0, sandbox: PythonSandbox | None = None):
        super().__init__()
        self.deadline = deadline
        self._sandbox = sandbox

    def draw(self, rng: np.random.Generator) -> None:
        while True:
            self.steps = self._draw_steps(rng)
            self.inputs = [int(x) for x in rng.integers(-99, 1000, HIDDEN_CASES)]
            self.expected = [apply(self.steps, x) for x in self.inputs]
            # No step may be idle on the hidden cases, and a constant must not pass most of them.
            shorter = [self.steps[:i] + self.steps[i + 1 :] for i in range(len(self.steps))]
            if len(set(self.expected)) >= 4 and not any(self._passes(steps) for steps in shorter):
                return

    @staticmethod
    def _draw_steps(rng: np.random.Generator) -> list[Step]:
        """Two or three steps, neighbours of different kinds: two sums in a row would be one step in two words."""
        kinds = {"add": ("add", "sub"), "sub": ("add", "sub"), "times": ("times",), "mod": ("mod",)}
        steps: list[Step] = []
        for _ in range(rng.integers(2, 4)):
            words = [word for word in OPERATORS if not steps or word not in kinds[steps[-1][0]]]
            word = words[rng.integers(len(words))]
            steps.append((word, int(rng.integers(7 if word == "mod" else 2, 100))))
        return steps

    def _passes(self, steps: list[Step]) -> bool:
        return [apply(steps, x) for x in self.inputs] == self.expected

    def content_key(self) -> str:
        return " ".join(str(apply(self.steps, x)) for x in PROBES)

    def prompt(self) -> str:
        return ", ".join(f"{word} {n}" for word, n in self.steps)

    def respond(self, action: str) -> tuple[str, float, bool]:
        return self._judge(self._box().run(after_thinking(action), "f", self.inputs, self.deadline))

    async def respond_async(self, action: str) -> tuple[str, float, bool]:
        return self._judge(await self._box().run_async(after_thinking(action), "f", self.inputs, self.deadline))

    def _box(self) -> PythonSandbox:
        return self._sandbox or default_sandbox()

    def _judge(self, result: Result) -> tuple[str, float, bool]:
        # Exact types: 1.0 and True are not the integer 1.
        passed = result.kind == "ok" and all(type(x) is int for x in result.outputs) and result.outputs == self.expected
        return "", float(passed), True

    def write(self, fault: str | None, rng: np.random.Generator) -> list[tuple[str, str]]:
        steps = self.steps
        if fault == "shortcut":
            steps = self.steps[:-1]
        # A slip can be harmless, such as sub 50 for add 50 before mod 100: drawn again until a hidden case shows it.
        while fault == "slip" and self._passes(steps):
            steps = self._slip(rng)
        return [("assistant", spell(steps))]

    def _slip(self, rng: np.random.Generator) -> list[Step]:
        """The steps with one wrong operator, or one wrong digit in one constant."""
        steps = list(self.steps)
        i = rng.integers(len(steps))
        word, n = steps[i]
        if rng.random() < 0.5:
            others = [other for other in OPERATORS if other != word]
            steps[i] = others[rng.integers(3)], n
        else:
            digits = list(str(n))
            position = rng.integers(len(digits))
            choices = [d for d in "0123456789" if d != digits[position] and not (d == "0" and position == 0)]
            digits[position] = choices[rng.integers(len(choices))]
            steps[i] = word, int("".join(digits))
        return steps
