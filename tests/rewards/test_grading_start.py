"""A grader is tried before a model exists, and the references go through it: what must stop a start, and what not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from dppo_megatron.config.ranges import check_ranges
from dppo_megatron.config.reward import RewardConfig, RewardFunctionConfig, check_reward
from dppo_megatron.rewards.grading import Grader, make_grader
from dppo_megatron.rewards.start_checks import (
    MOST_REFERENCES,
    RewardBounds,
    check_grader,
    check_references,
    unused_grader,
)
from dppo_megatron.types import Prompt, UserError


def prompts_of(answers: list[str]) -> list[Prompt]:
    return [
        Prompt(i, f"problem {i}", (1,), answer, "", row={"value": 1.0}, origin=f"train.jsonl:{i + 1}")
        for i, answer in enumerate(answers)
    ]


@contextlib.contextmanager
def grader_of(reward: RewardConfig) -> Iterator[Grader]:
    grader = make_grader(reward)
    try:
        yield grader
    finally:
        grader.close()


def reward_of(function: str, **settings: Any) -> RewardConfig:
    return RewardConfig(function=function if ":" in function else f"odd_graders:{function}", **settings)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("dppo_megatron.rewards.functions:nope", "nope' cannot be imported"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("one_argument", "takes (completion"),
        ("fails_on_empty", "fails on an empty text: called with completion = '' and answer = '7' (train.jsonl:1)"),
        ("fails_on_empty", "raised IndexError: string index out of range"),
        ("with_row", "raised KeyError: 'extra'"),
    ],
)
def test_a_broken_grader_is_named_with_what_came_back(function: str, said: str) -> None:
    with grader_of(reward_of(function)) as grader, pytest.raises(UserError) as error:
        check_grader(grader, prompts_of(["7"])[0])
    assert said in str(error.value)
    assert str(error.value).startswith(f"reward.function = '{reward_of(function).function}'")


@pytest.mark.parametrize("outcome", ["none", "nan", "text", "raise", "exit7", "list"])
def test_none_nan_and_the_like_are_seen_at_once(outcome: str) -> None:
    """The reference is the command that the grader obeys: in its plain form only."""
    with grader_of(reward_of("obey")) as grader, pytest.raises(UserError, match="fails on the reference plain"):
        check_grader(grader, prompts_of([outcome])[0])


def test_a_function_of_several_is_named() -> None:
    reward = RewardConfig(
        functions={
            "right": RewardFunctionConfig("final_answer"),
            "style": RewardFunctionConfig("odd_graders:missing", 0.1),
        }
    )
    with grader_of(reward) as grader, pytest.raises(UserError) as error:
        check_grader(grader, prompts_of(["7"])[0])
    assert str(error.value).startswith("reward.functions.style.function = 'odd_graders:missing' cannot be imported")


@pytest.mark.parametrize(
    "function",
    ["final_answer", "odd_graders:boxed_only", "odd_graders:hashes_only", "odd_graders:counts_on_context"],
)
def test_references_count_in_whichever_form_the_grader_reads(function: str) -> None:
    """Also by one that goes by the prompt and divides by the tokens."""
    reward = RewardConfig(function=function)
    with grader_of(reward) as grader:
        check_grader(grader, prompts_of(["7"])[0])
        said = check_references(grader, reward, "train", prompts_of([str(i) for i in range(50)]))
    assert said == "train: of its 50 references the grader takes 100 % for right when given as an answer"


@pytest.mark.parametrize("function", ["math", "math_boxed"])
def test_references_that_math_compares_as_text_are_said(function: str) -> None:
    """Each is right when it is repeated: `exact`. Words and choices are what they are."""
    unread = [r"f(x) = a \quad \mho(a) = 0", "t(0,4]", r"\int_0^1 x dx", "a..b", r"\oint y", r"\lim_{x\to 0} x"]
    answers = [*unread, "7", r"\text{odd}", "A, C", r"\textbf{(C)}\ 15", r"k\pi (k\in\mathbb{Z})"]
    for reward in (RewardConfig(function=function), RewardConfig(functions={"a": RewardFunctionConfig(function)})):
        with grader_of(reward) as grader:
            said = check_references(grader, reward, "train", prompts_of(answers))
            alone = check_references(grader, reward, "train", prompts_of(answers[len(unread) :]))
        assert "takes 100 % for right when given as an answer; 6 of them are compared as text only" in said
        assert "'t(0,4]' (train.jsonl:2)" in said and said.endswith("(train.jsonl:5), ...")
        assert alone.endswith("for right when given as an answer")


def test_a_grader_that_takes_a_wrong_answer_for_right_is_said() -> None:
    """Every reference is right to it as well, which looks like a good grader."""
    reward = reward_of("length", correct_from=1.0)
    with grader_of(reward) as grader:
        said = check_references(grader, reward, "train", prompts_of(["7"]))
    assert (
        "takes 100 % for right" in said
        and "; warning: 'The answer is $\\\\boxed{this is not the answer}$.' too" in said
    )


def test_too_few_right_references_stop_the_start_and_are_listed() -> None:
    answers = [str(i) for i in range(100)]
    with grader_of(reward_of("even_only")) as grader:
        with pytest.raises(UserError) as error:
            check_references(grader, reward_of("even_only"), "train", prompts_of(answers))
        said = str(error.value)
        assert "train: of its 100 references the grader takes 50 % for right" in said
        assert "\n  train.jsonl:2: '1': reward 0 ('odd numbers are beyond me')" in said
        assert said.count("train.jsonl:") == 10 and "and 40 more" in said
        assert "reward.min_self_consistency=0" in said
        assert check_references(grader, reward_of("even_only", min_self_consistency=0.5), "x", prompts_of(answers))
        assert (
            check_references(grader, reward_of("even_only", min_self_consistency=0.0), "x", prompts_of(answers)) == ""
        )
        only_one = [*["2"] * 98, "1", "4"]
        assert "99 %" in check_references(grader, reward_of("even_only"), "x", prompts_of(only_one))


def test_a_large_set_is_sampled_evenly_and_says_so() -> None:
    """Every other reference of the last half cannot be read: a check of the first ones alone would not see it."""
    half = 10 * MOST_REFERENCES
    answers = ["2"] * half + ["1"] * half
    with grader_of(reward_of("even_only")) as grader, pytest.raises(UserError) as error:
        check_references(grader, reward_of("even_only"), "train", prompts_of(answers))
    assert "of 2,000 of its 40,000 references the grader takes 50 % for right" in str(error.value)


def test_the_first_of_several_rewards_decides() -> None:
    """Before its weight, and whatever the others add."""
    functions = {
        "right": RewardFunctionConfig("final_answer", 0.1),
        "length": RewardFunctionConfig("odd_graders:length", -1.0),
    }
    reward = RewardConfig(functions=functions)
    with grader_of(reward) as grader:
        assert "100 %" in check_references(grader, reward, "train", prompts_of(["1", "2"]))
    reversed_order = RewardConfig(functions=dict(reversed(functions.items())), correct_from=1e9)
    with grader_of(reversed_order) as grader, pytest.raises(UserError, match="takes 0 % for right"):
        check_references(grader, reversed_order, "train", prompts_of(["1", "2"]))


def test_references_that_the_first_does_not_judge_are_counted_apart() -> None:
    """They are neither right nor wrong, whatever a later function says. If the first judges none of them,
    nothing could be correct."""
    functions = {
        "right": RewardFunctionConfig("odd_graders:trl_chat"),
        "length": RewardFunctionConfig("odd_graders:length"),
    }
    reward = RewardConfig(functions=functions)
    with grader_of(reward) as grader:
        said = check_references(grader, reward, "train", prompts_of(["1", "?", "2"]))
        with pytest.raises(UserError, match=r"of 0 of its 1 references .*, does not judge 1, fewer"):
            check_references(grader, reward, "train", prompts_of(["?"]))
        reward.min_self_consistency = 0
        assert check_references(grader, reward, "train", prompts_of(["?"])) == ""
    assert said.startswith("train: of 2 of its 3 references the grader takes 100 % for right")
    assert said.endswith("; the first function, which decides what is correct, does not judge 1")


def test_a_grader_of_a_set_is_called_by_its_own_setting() -> None:
    with pytest.raises(
        UserError,
        match=r"data.eval_sets.x.reward.function = 'mth': expected a built-in grader \(final_answer, math, ",
    ):
        make_grader(RewardConfig(function="mth"), "data.eval_sets.x.reward")
    several = RewardConfig(functions={"right": RewardFunctionConfig("math"), "short": RewardFunctionConfig("my:f")})
    assert make_grader(several, "data.train_sets.x.reward").key == "data.train_sets.x.reward.functions"
    with pytest.raises(UserError, match=r"reward.function = ':f': expected"):
        make_grader(RewardConfig(function=":f"))


def test_a_function_that_is_not_used_is_said() -> None:
    """From the command line it does not replace the named ones of a file."""
    named = {"right": RewardFunctionConfig("math"), "short": RewardFunctionConfig("mine:f")}
    [said] = unused_grader(RewardConfig("mine:grade", functions=named))
    assert said.startswith("warning: reward.function = 'mine:grade' is not used: reward.functions (right, short)")
    assert not unused_grader(RewardConfig(functions=named)) and not unused_grader(RewardConfig("mine:grade"))


def test_a_file_is_no_module() -> None:
    with pytest.raises(UserError, match=r"a module is named without \.py, as it is imported: lib\.graders:grade"):
        make_grader(RewardConfig(function="./lib/graders.py:grade"))
    with pytest.raises(UserError, match=r"as it is imported: graders:grade, with /home/ada/lib on PYTHONPATH$"):
        make_grader(RewardConfig(function="/home/ada/lib/graders.py:grade"))
    with pytest.raises(UserError, match=r"as it is imported: graders:grade, with \.\./lib on PYTHONPATH$"):
        make_grader(RewardConfig(function="./../lib/graders.py:grade"))


def test_a_reward_that_the_prompt_score_cannot_use_is_said_before_the_run() -> None:
    """score=beta counts rewards as successes: 1.1 would end the run in its first step, after SFT."""
    bounds = RewardBounds(0.0, 1.0, "pruning.prompt.score = beta counts it as a success")
    with grader_of(reward_of("obey")) as grader:
        check_grader(grader, prompts_of(["value 0.5"])[0], bounds)
        with pytest.raises(UserError, match=r"is 1\.1, and must be from 0 to 1: pruning\.prompt\.score"):
            check_grader(grader, prompts_of(["value 1.1"])[0], bounds)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"timeout_s": float("inf")}, "reward.timeout_s"),
        ({"timeout_s": float("nan")}, "reward.timeout_s"),
        ({"timeout_s": 0.0}, "reward.timeout_s"),
        ({"processes": -1}, "reward.processes"),
        ({"memory_mb": -1}, "reward.memory_mb"),
        ({"max_failed_share": 1.1}, "reward.max_failed_share"),
        ({"min_self_consistency": float("nan")}, "reward.min_self_consistency"),
        ({"correct_from": float("nan")}, "reward.correct_from"),
        ({"function": ""}, "reward.function = '': must not be empty"),
        ({"functions": {"mean": RewardFunctionConfig("math")}}, "reward/mean is already a metric"),
        ({"functions": {"a": RewardFunctionConfig()}}, "reward.functions.a.function is not set"),
        ({"functions": {"a": RewardFunctionConfig("math", float("inf"))}}, "reward.functions.a.weight"),
    ],
)
def test_settings_out_of_range(change: dict[str, Any], said: str) -> None:
    reward = RewardConfig(**change)
    with pytest.raises(UserError, match=said):
        check_ranges(reward, "reward.")
        check_reward(reward)
