"""What is particular to one task."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_jax.environments import make, split_of
from glm_jax.environments.calculator import evaluate
from glm_jax.environments.code_steps import apply, spell

INTEGERS = st.integers(0, 9999)


@given(INTEGERS, INTEGERS, INTEGERS, st.sampled_from("+-*"), st.sampled_from("+-*"))
def test_calculator_evaluates_as_python_does(a, b, c, first, second):
    assert evaluate(f"{a}{first}{b}{second}{c}") == eval(f"{a}{first}{b}{second}{c}")
    assert evaluate(f"{a} {first} -({b}{second}{c})") == eval(f"{a} {first} -({b}{second}{c})")


REFUSED = ["", "2**9", "9/3", "1//1", "a", "()", "1,2", "07", "1+", "3(4)", "1\n+1", "9" * 41, "__import__('os')"]


@pytest.mark.parametrize("expression", REFUSED)
def test_calculator_refuses(expression):
    with pytest.raises(ValueError):
        evaluate(expression)


def test_calculator_turns():
    environment = make("glm_jax/Calculator-v0")
    environment.reset(seed=0)
    assert environment.step("<tool_call>1+")[:2] == ("error", 0.0)
    assert environment.step("<think>hm</think><tool_call>(2+3)*4</tool_call>")[0] == "20"
    observation, reward, terminated, truncated, info = environment.step("<tool_call>2-5</tool_call>")
    assert (observation, reward, terminated, truncated, info) == ("-3", 0.0, False, True, {"status": "TRUNCATED"})


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), steps=st.integers(1, 12), largest=st.integers(1, 9))
def test_digit_chain_is_the_sum_modulo_ten(seed, steps, largest):
    environment = make("glm_jax/DigitChain-v0", steps=steps, largest=largest)
    observation, _ = environment.reset(seed=seed)
    assert environment.step(str(eval(observation) % 10))[1] == 1.0


@pytest.mark.parametrize("bounds", [{"steps": 0}, {"largest": 10}])
def test_digit_chain_refuses_impossible_bounds(bounds):
    with pytest.raises(ValueError, match="DigitChain"):
        make("glm_jax/DigitChain-v0", **bounds)


def test_two_spellings_of_a_function_share_a_split():
    environment = make("glm_jax/CodeSteps-v0")
    keys = set()
    for steps in ([("times", 2), ("add", 6)], [("add", 3), ("times", 2)], [("times", 2), ("add", 2), ("add", 4)]):
        environment.steps = steps
        keys.add(environment.content_key())
    assert len(keys) == 1 and len({split_of(key) for key in keys}) == 1


def test_code_steps_hide_cases_that_tell():
    environment = make("glm_jax/CodeSteps-v0")
    for seed in range(200):
        prompt, _ = environment.reset(seed=seed)
        assert [(word, int(n)) for word, n in (step.split() for step in prompt.split(", "))] == environment.steps
        namespace = {}
        exec(spell(environment.steps), namespace)
        assert [namespace["f"](x) for x in environment.inputs] == [apply(environment.steps, x) for x in environment.inputs]
        assert len(set(environment.expected)) >= 4


@pytest.mark.parametrize(
    "wrap",
    [
        lambda right: right.replace("return x", "return float(x)"),
        lambda right: right.replace("return x", "return str(x)"),
        lambda right: right.replace("return x", "while True: pass"),
        lambda right: right.replace("def f", "def g"),
        lambda right: right + "\nimport os\nos._exit(0)",
        lambda right: right + "\nexit()",
        lambda right: "`" + right,
    ],
)
def test_code_steps_blames_the_program(wrap):
    environment = make("glm_jax/CodeSteps-v0", deadline=0.3)
    environment.reset(seed=5)
    right = environment.demonstrate(np.random.default_rng(0)).messages[1][1]
    _, reward, terminated, _, info = environment.step(wrap(right))
    assert (reward, terminated, info["status"]) == (0.0, True, "COMPLETED")
    environment.reset(seed=5)
    assert environment.step(f"<think>as said</think>{right}\n")[1] == 1.0
