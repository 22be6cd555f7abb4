"""How a grader is called, by its signature, and what its return value means. In this process: no pool."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from odd_graders import obey

from dppo_megatron.rewards.calling import Sample
from dppo_megatron.rewards.functions import NamedFunction, Rewards
from dppo_megatron.types import Grade, is_correct
from examples import judge_grader

ROW = {"value": 7, "extra": {"unit": "cm"}}


def rewards(*names: str) -> Rewards:
    return Rewards([NamedFunction("", f"odd_graders:{name}", key=f"reward.function = '{name}'") for name in names])


@pytest.mark.parametrize(
    ("name", "wants_context", "expected"),
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
def test_the_row_goes_to_those_who_ask_for_it(name: str, wants_context: bool, expected: float) -> None:
    """A third parameter without a default, or one called `row`; an option or *args is no request."""
    grader = rewards(name)
    assert grader.wants_context is wants_context
    row = {"value": 7, "extra": {"unit": "cm"}} if wants_context else {}
    assert grader.grade(Sample("12 cm", "12", row)) == expected


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "reward.function = 'missing' cannot be imported: AttributeError: .*has no attribute 'missing'"),
        ("not_callable", "is not callable, it is 3"),
        ("one_argument", r"takes \(completion: 'str'\).*function\(completion, answer, row\)"),
        ("four_arguments", "takes .*more"),
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
    said = rewards("obey").grade(Sample(command, "", {}))
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
        ("mapping", "returned dict {'reward': 1.0}"),
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
    said = rewards("obey").grade(Sample(command, "", {}))
    assert failure in said["failure"] and len(said["failure"]) < 600
    assert "reward" not in said


@given(st.one_of(st.floats(), st.integers(), st.booleans(), st.text(), st.none(), st.lists(st.floats()), st.binary()))
def test_a_reward_is_a_finite_float_or_a_failure(value: Any) -> None:
    """Whatever comes back, nothing but a finite float ever counts as a reward."""
    grader = Rewards([NamedFunction("", "odd_graders:obey")])
    item, calling = grader._functions[0]
    grader._functions = [(item, replace(calling, call=lambda sample: value))]
    said = grader.grade(Sample("", "", {}))
    if isinstance(said, dict):
        assert said["failure"].startswith("returned ")
        assert not (isinstance(value, (int, float)) and abs(value) <= 1e300)
    else:
        assert math.isfinite(said) and said == float(value)  # an int above 2^53 is rounded


def test_a_grade_keeps_what_it_says_within_bounds() -> None:
    assert rewards("obey").grade(Sample("grade 42", "", {})) == {
        "reward": 0.5,
        "extracted": "42",
        "why": "told",
        "facts": {"parsed_share": 1.0},
    }
    assert len(rewards("obey").grade(Sample("huge 1000000", "", {}))["extracted"]) == 10_000


def test_the_parts_of_a_single_grader_are_facts() -> None:
    """Else the first of them, whatever it is about, would decide what is correct."""
    said = rewards("obey").grade(Sample("grade_parts", "", {}))
    assert said == {"reward": 0.0, "facts": {"format": 1.0}} and is_correct(Grade(**said), 1.0) is False
    both = Rewards([NamedFunction("a", "odd_graders:obey"), NamedFunction("b", "odd_graders:length")])
    said = both.grade(Sample("grade_parts", "", {}))
    assert said["parts"] == {"a": 0.0, "b": 11.0} and said["facts"] == {"format": 1.0}


def test_weighted_rewards() -> None:
    """The sum of the weighted parts; the first one's words; a part that fails makes the whole fail, by its name."""
    both = Rewards(
        [NamedFunction("right", "odd_graders:obey", 2.0), NamedFunction("row", "odd_graders:row_by_name", -0.5)]
    )
    assert both.wants_context
    said = both.grade(Sample("grade 42", "", ROW))
    assert said["reward"] == 2.0 * 0.5 - 0.5 * 7 and said["parts"] == {"right": 0.5, "row": 7.0}
    assert said["extracted"] == "42" and said["facts"] == {"parsed_share": 1.0}
    assert both.grade(Sample("none", "", ROW))["failure"] == "returned None, in its part 'right'"
    failure = both.grade(Sample("1", "1", {}))["failure"]
    assert failure.startswith("raised KeyError: 'value'") and failure.endswith("in its part 'row'")
    huge = Rewards([NamedFunction("a", "odd_graders:obey", 1e300)])
    assert "weighted sum is inf" in huge.grade(Sample("value 1e300", "", {}))["failure"]


# ---------------------------------------------------------------------------------------------- verl and TRL

VERL_ROW = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "3 times 4?"}],
    "reward_model": {"style": "rule", "ground_truth": "12"},
    "extra_info": {"index": 5, "split": "train"},
}


def in_turn(name: str, samples: list[Sample]) -> list[Any]:
    """As a grader process calls it in its mode."""
    grader = rewards(name)
    if grader.mode == "each":
        return [grader.grade(one) for one in samples]
    if grader.mode == "batch":
        return grader.grade_together(samples)

    async def all_of_them() -> list[Any]:
        return list(await asyncio.gather(*map(grader.grade_async, samples)))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("name", ["compute_score", "verl_batched", "verl_async"])
def test_verls_functions_get_what_verl_hands_to_them(name: str) -> None:
    """By their names, from a row of verl's Parquet files; beside the score other numbers are facts."""
    said = in_turn(name, [Sample("it is 12", "12", VERL_ROW), Sample("13", "12", VERL_ROW), Sample("12", "12", {})])
    good = {"reward": 1.0, "facts": {"acc": 1.0}, "extracted": "gsm8k 5"}
    assert said[:2] == [good, good | {"reward": 0.0, "facts": {"acc": 0.0}}]
    assert said[2] == good | {"extracted": " None"}, "without such a row: empty, and the reference"


def test_a_reference_of_verls_may_be_more_than_text() -> None:
    row = VERL_ROW | {"reward_model": {"ground_truth": {"target": ["12", "twelve"]}}}
    assert in_turn("verl_target", [Sample("twelve", "12", row), Sample("x", "12", row)]) == [1.0, 0.0]
    assert in_turn("verl_gsm8k", [Sample("so #### 12", "12", {}), Sample("12", "12", {})]) == [1.0, 0.0]


def test_trls_functions_get_lists_of_columns() -> None:
    row = {"prompt": "x:", "solution": "12", "extra": {"unit": "cm"}, "completion": "never handed on"}
    assert in_turn("trl_text", [Sample("x: 12 cm", "12", row), Sample("x: 12", "12", row)]) == [1.0, 0.0]
    unread = row | {"solution": "?"}
    first, second, third = in_turn("trl_chat", [Sample("12", "", row), Sample("1", "", row), Sample("1", "", unread)])
    assert (first, second) == (1.0, 0.0) and third == {"failure": "returned None for this completion"}
    assert in_turn("trl_chat", [Sample("12", "12", {})]) == [1.0], "the reference, where the rows have no such column"
    assert in_turn("trl_async", [Sample("it is 12", "12", {}), Sample("13", "12", {})]) == [1.0, 0.0]


def test_completions_are_chats_where_the_rows_prompts_are() -> None:
    texts = [Sample("1", "", {"prompt": "a"}), Sample("2", "", {}, "as text")]
    assert in_turn("trl_prompts", texts) == [-1.0, -1.0]
    assert in_turn("trl_prompts", [Sample("1", "", VERL_ROW)]) == [1.0]


def test_a_batched_grader_of_ours_gets_texts() -> None:
    """Whatever the rows' prompts are: of a chat `answer in completion` is false without a word."""
    assert in_turn("batched", [Sample("value 3", "12", VERL_ROW)]) == [3.0]
    assert in_turn("found", [Sample("it is 12", "12", VERL_ROW), Sample("13", "12", VERL_ROW)]) == [1.0, 0.0]


def test_a_grader_is_told_tokens_and_how_the_completion_ended() -> None:
    sample = Sample("", "", {}, "2 + 2 =", 31, "length")
    assert in_turn("told", [sample]) == [{"reward": 31.0, "extracted": "2 + 2 = length"}]
    assert in_turn("overlong", [sample, sample._replace(completion_tokens=20)]) == [-1.0, 0.0]
    (said,) = in_turn("repetition", [sample])
    assert "gets only their number" in said["failure"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("verl_router", r"'router_address'.*compute_score\(data_source, solution_str, ground_truth, extra_info\)"),
        ("openrlhf", r"takes \(queries.*TRL's as function\(prompts, completions, \*\*columns\)"),
        ("swapped", r"takes \(answer.*function\(completion, answer\)"),
    ],
)
def test_what_would_bind_to_the_wrong_arguments_is_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rewards(name)


def test_shipped_examples_are_hinted_at() -> None:
    """A wheel has them elsewhere."""
    with pytest.raises(ValueError, match=r"No module named 'examples.*`dppo-megatron init DIR` copies"):
        Rewards([NamedFunction("reward.function", "examples.of_a_wheel:grade", 1.0)])


def test_a_list_that_does_not_fit_is_a_failure() -> None:
    (said,) = in_turn("trl_column", [Sample("", "", {"unit": 1})])
    assert said["failure"] == "asks for the column 'difficulty', and the rows have: unit"
    two = in_turn("too_few", [Sample("", "", {}), Sample("", "", {})])
    assert [one["failure"] for one in two] == ["returned a list of 1 for 2 completions"] * 2


def test_a_failure_in_a_list_is_that_of_one_sample() -> None:
    """The others are asked again, each alone."""
    good, *others = in_turn("batched", [Sample(text, "", {}) for text in ("value 3", "raise", "x")])
    assert good == 3.0 and others[0]["failure"].startswith("raised ZeroDivisionError") and others[1] == 100.0


def test_of_several_rewards_those_count_that_judge() -> None:
    """TRL's None: the reward is that of the others. Without the first it is not known what is correct: a format's 1
    would pass for a right answer. None at all is a failure."""
    both = Rewards([NamedFunction("a", "odd_graders:trl_chat", 2.0), NamedFunction("b", "odd_graders:obey", 0.5)])
    assert both.mode == "batch"
    samples = [Sample("value 3", "?", {}), Sample("value 3", "3", {}), Sample("none", "?", {})]
    assert [one.get("parts") for one in both.grade_together(samples)] == [{"b": 3.0}, {"a": 1.0, "b": 3.0}, None]
    assert [one.get("reward") for one in both.grade_together(samples)] == [1.5, 3.5, None]
    assert [is_correct(Grade(**one), 1.0) for one in both.grade_together(samples)[:2]] == [None, True]
    other = Rewards([NamedFunction("b", "odd_graders:obey"), NamedFunction("a", "odd_graders:trl_chat")])
    assert [is_correct(Grade(**one), 4.0) for one in other.grade_together(samples)[:2]] == [False, False]
    alone = Rewards([NamedFunction("a", "odd_graders:trl_chat")])
    assert alone.grade_together(samples[:1]) == [{"failure": "returned None for this completion"}]


JUDGED: dict[str | None, float | None] = {
    "7": 0.7,
    "3/10": 0.3,
    "0/10": 0.0,
    "2 out of 10.": 0.2,
    "10": 1.0,
    "**8.5** / 10": 0.85,
    "Mark: 10/10": 1.0,
}
JUDGED |= {"</think>9": 0.9, "<think>\nOkay, 10 points": None, None: None, "Right.": None}


def test_the_examples_judge_gives_marks_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server's replies: `out of 10` is no mark, and a reply without one is a failure, not a 0. A model that thinks
    is told not to: its thoughts would take all the tokens of a mark."""
    replies, asked = iter(JUDGED), list[dict[str, Any]]()

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"choices": [{"message": {"content": next(replies)}}]})

    async def all_marks() -> list[Grade]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        async with TestServer(app) as server:
            monkeypatch.setenv("JUDGE_URL", str(server.make_url("/v1")))
            grades = [
                await judge_grader.judge("x", "1", row={}, prompt="", finish_reason="stop") for _ in range(len(JUDGED))
            ]
            await judge_grader._sessions.pop().close()
        return grades

    monkeypatch.setenv("JUDGE_MODEL", "a model")
    grades = asyncio.run(all_marks())
    marks = [None if grade.failure else grade.reward for grade in grades]
    assert marks == list(JUDGED.values())
    assert all(math.isnan(grade.reward) for grade in grades if "got no mark from the judge" in grade.failure)
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in asked)
