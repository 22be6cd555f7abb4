"""How a grader is called, by its signature, and what its return value means. In this process: no pool."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd_graders import obey

from dppo_megatron.rewards.functions import NamedFunction, Rewards

ROW = {"value": 7, "extra": {"unit": "cm"}}


def rewards(*names: str) -> Rewards:
    return Rewards([NamedFunction("", f"odd_graders:{name}", key=f"reward.function = '{name}'") for name in names])


@pytest.mark.parametrize(
    ("name", "wants_row", "expected"),
    [
        ("obey", False, 0.0),
        ("with_row", True, 1.0),
        ("wrapped", True, 1.0),
        ("row_by_name", True, 7.0),
        ("row_or_none", True, 7.0),
        ("with_option", False, 1.0),
        ("partial", False, 1.0),
        ("anything", False, 2.0),
        ("judge", False, 2.0),
        ("judge.method", False, 3.0),
    ],
)
def test_the_row_goes_to_those_who_ask_for_it(name: str, wants_row: bool, expected: float) -> None:
    """A third parameter without a default, or one called `row`; an option or *args is no request."""
    grader = rewards(name)
    assert grader.wants_row is wants_row
    row = {"value": 7, "extra": {"unit": "cm"}} if wants_row else None
    assert grader.grade("12 cm", "12", row) == expected


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "reward.function = 'missing' cannot be imported: AttributeError: .*has no attribute 'missing'"),
        ("not_callable", "is not callable, it is 3"),
        ("one_argument", r"takes \(completion: 'str'\).*function\(completion, answer, row\)"),
        ("four_arguments", "takes .*more"),
        ("coroutine", "is a coroutine function"),
    ],
)
def test_what_is_no_grader_is_said(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rewards(name)


@pytest.mark.parametrize(
    ("command", "reward"),
    [("value 0.3", 0.3), ("true", 1.0), ("fraction", 0.5), ("decimal", 0.25), ("numpy", 0.5), ("numpy_bool", 1.0),
     ("array0", 0.75)],
)  # fmt: skip
def test_numbers_of_every_kind_are_rewards(command: str, reward: float) -> None:
    said = rewards("obey").grade(command, "", None)
    assert said == reward and type(said) is float


@pytest.mark.parametrize(
    ("command", "failure"),
    [
        ("none", "returned None"),
        ("nan", "returned nan"),
        ("infinite", "returned inf"),
        ("text", "returned str 'no number'"),
        ("complex", "returned complex 1j"),
        ("list", "returned list [1.0]"),
        ("mapping", "returned dict {'score': 1.0}"),
        ("array", "returned ndarray array([1.])"),
        ("too_large", "which is too large"),
        ("raise", "raised ZeroDivisionError: division by zero (" + obey.__code__.co_filename),
        ("sysexit", "raised SystemExit: 0"),
        ("interrupt", "raised KeyboardInterrupt"),
        ("recursion", "raised RecursionError"),
        ("grade_failed", "raised inside"),
        ("grade_nan", "returned a Grade with the reward nan"),
        ("grade_facts", "returned a Grade whose facts['parsed_share'] is str 'yes'"),
    ],
)
def test_what_is_no_reward_is_a_failure_with_its_reason(command: str, failure: str) -> None:
    said = rewards("obey").grade(command, "", None)
    assert failure in said["failure"] and len(said["failure"]) < 600
    assert "reward" not in said


@given(st.one_of(st.floats(), st.integers(), st.booleans(), st.text(), st.none(), st.lists(st.floats()), st.binary()))
def test_a_reward_is_a_finite_float_or_a_failure(value: Any) -> None:
    """Whatever comes back, nothing but a finite float ever counts as a reward."""
    grader = Rewards([NamedFunction("", "odd_graders:obey")])
    item, _, calling = grader._functions[0]
    grader._functions = [(item, lambda completion, answer: value, calling)]
    said = grader.grade("", "", None)
    if isinstance(said, dict):
        assert said["failure"].startswith("returned ")
        assert not (isinstance(value, (int, float)) and abs(value) <= 1e300)
    else:
        assert math.isfinite(said) and said == float(value)  # an int above 2^53 is rounded


def test_a_grade_keeps_what_it_says_within_bounds() -> None:
    assert rewards("obey").grade("grade 42", "", None) == {
        "reward": 0.5,
        "extracted": "42",
        "why": "told",
        "facts": {"parsed_share": 1.0},
    }
    assert len(rewards("obey").grade("huge 1000000", "", None)["extracted"]) == 10_000


def test_weighted_rewards() -> None:
    """The sum of the weighted parts; the first one's words; a part that fails makes the whole fail, by its name."""
    both = Rewards(
        [NamedFunction("right", "odd_graders:obey", 2.0), NamedFunction("row", "odd_graders:row_by_name", -0.5)]
    )
    assert both.wants_row
    said = both.grade("grade 42", "", ROW)
    assert said["reward"] == 2.0 * 0.5 - 0.5 * 7 and said["parts"] == {"right": 0.5, "row": 7.0}
    assert said["extracted"] == "42" and said["facts"] == {"parsed_share": 1.0}
    assert both.grade("none", "", ROW)["failure"] == "returned None, in its part 'right'"
    failure = both.grade("1", "1", {})["failure"]
    assert failure.startswith("raised KeyError: 'value'") and failure.endswith("in its part 'row'")
    huge = Rewards([NamedFunction("a", "odd_graders:obey", 1e300)])
    assert "weighted sum is inf" in huge.grade("value 1e300", "", None)["failure"]
