"""Rewards of a set: what they inherit, which grader grades what, and that limits and failures are each grader's own."""

from __future__ import annotations

import math
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dppo_megatron.config.checks import check_values
from dppo_megatron.config.load import load_config, save_config
from dppo_megatron.config.reference import find, page_for
from dppo_megatron.config.resolved_sets import set_rewards
from dppo_megatron.config.reward import RewardConfig, RewardFunctionConfig, SetRewardConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.rewards.grading import Graders, GradeTask
from dppo_megatron.rewards.measures import GradeTable, check_failures, set_metrics
from dppo_megatron.selection.arrays import PromptDraw, Rollouts, reward_metrics
from dppo_megatron.types import UNSAMPLED, Grade, Group, Prompt, RolloutPrompt, RunAborted, UserError

CODE, TEST = "data.train_sets.code.reward", "data.eval_sets.a.b.reward"


def _config(*more: str) -> Config:
    settings = [
        "reward.functions.right.function=math",
        "reward.timeout_s=7",
        "data.train_sets.math.path=m.jsonl",
        "data.train_sets.code.path=c.jsonl",
        "data.train_sets.code.reward.function=final_answer",
        'data.eval_sets."a.b".path=t.jsonl',
        'data.eval_sets."a.b".reward.functions.own.function=math_boxed',
        "data.eval_sets.plain.path=p.jsonl",
        *more,
    ]
    return load_config("", settings, writes_run=False, purpose="grade")


def test_what_a_set_leaves_out_is_inherited(tmp_path: Path) -> None:
    config = _config("data.train_sets.code.reward.processes=3")
    rewards = set_rewards(config)
    assert list(rewards) == ["reward", CODE, TEST]
    assert rewards["reward"] is config.reward
    assert rewards[CODE] == RewardConfig(function="final_answer", timeout_s=7.0, processes=3)  # not the functions
    assert rewards[TEST].functions == {"own": RewardFunctionConfig("math_boxed")} and rewards[TEST].timeout_s == 7.0
    save_config(config, tmp_path / "config.yaml")
    again = load_config(str(tmp_path / "config.yaml"), [], writes_run=False, purpose="grade")
    assert set_rewards(again) == rewards
    assert SetRewardConfig().over(config.reward) == config.reward


def test_one_rank_alone_has_the_whole_limit() -> None:
    """Of 64 that share 96,000 in a minute each begins 25 in a second, and the one that checks references all 1,600."""
    shared = Graders({"reward": RewardConfig(max_per_minute=96_000)}, shared_by=64)
    assert shared["reward"]._pace.free() == 25 and shared.alone()["reward"]._pace.free() == 1600
    alone = shared.alone()
    assert alone is not shared and alone.alone() is alone


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.train_sets.code.reward.processes=-1", "data.train_sets.code.reward.processes = -1: must not be"),
        ("data.train_sets.code.reward.function=''", "data.train_sets.code.reward.function = '': must not be empty"),
        ("data.train_sets.code.reward.cross_check=1", "unknown key 'data.train_sets.code.reward.cross_check'"),
        ("data.train_sets.math.reward.functions.x.weight=2", "sets.math.reward.functions.x.function is not set"),
        ("data.train_sets.code.reward.functions.x.function=math", "reward.functions (x) are both set; drop one"),
        ("data.train_sets.code.reward_function=math", "here it is reward.function (in the set's own entry)"),
    ],
)
def test_mistakes_name_the_set(setting: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        check_values(_config(setting), "plan")
    assert said in str(error.value)


def test_settings_of_a_set_are_explained() -> None:
    [one] = find("data.eval_sets.x.reward.functions.y.weight")
    assert one.key == "data.eval_sets.<name>.reward.functions.<name>.weight" and one.page == "rewards.md"
    assert page_for(f"{one.key.replace('<name>', 'gsm8k')} = 'x': no such function") == "rewards.md"
    [one] = find("data.train_sets.x.reward.timeout_s")
    assert one.meaning.startswith("A grading that takes longer is ended")


def _rewards(**code: object) -> dict[str, RewardConfig]:
    general = RewardConfig(function="odd_graders:obey")
    own = SetRewardConfig(function="odd_graders:length", **code)  # type: ignore[arg-type]
    return {"reward": general, CODE: own.over(general), TEST: own.over(general)}


def _tasks(texts: list[str], keys: list[str]) -> list[GradeTask]:
    return [GradeTask(text, "1", graded_by=key) for text, key in zip(texts, keys, strict=True)]


@pytest.fixture
def graders() -> object:
    made = Graders({key: replace(one, processes=1) for key, one in _rewards(timeout_s=1.0).items()})
    yield made
    made.close()


def test_each_is_graded_by_its_own(graders: Graders) -> None:
    """In one call and in order; equal settings share a grader; a failure is said by the grader that it is of."""
    tasks = _tasks(["value 0.5", "abc", "raise", "", "12345"], ["reward", CODE, "reward", TEST, CODE])
    grades = graders.grade(tasks)
    assert [grade.reward for grade in grades[:2]] == [0.5, 3.0] and [one.reward for one in grades[3:]] == [0.0, 5.0]
    assert grades[2].failure.startswith("raised")
    assert graders.grade(tasks[1:2])[0].reward == 3.0 and graders.grade([]) == []
    assert graders[CODE] is graders[TEST] and len(graders[CODE].processes) == len(graders["reward"].processes) == 1
    assert graders[CODE].timeout_s == 1.0 and graders["reward"].timeout_s == 30.0
    assert graders.key_of("data.train_sets.code") == CODE and graders.key_of("data.train_path") == "reward"
    graders.close({CODE})  # another needs its grader
    assert len(graders[CODE].processes) == 1
    graders.close({CODE, TEST})
    assert not graders[CODE].processes and len(graders["reward"].processes) == 1


def test_what_is_cancelled_or_broken_reaches_every_part() -> None:
    rewards = _rewards() | {TEST: RewardConfig(function="odd_graders:no_such")}
    graders = Graders(rewards)
    try:
        with pytest.raises(UserError, match=r"data.eval_sets.a.b.reward.function = 'odd_graders:no_such' cannot"):
            graders.grade(_tasks(["value 1", "a"], ["reward", TEST]))
        future = graders.submit(_tasks(["hang", "a"], ["reward", CODE]))
        future.cancel()
        with pytest.raises(CancelledError):
            future.result()
    finally:
        graders.close()


def test_metrics_and_failures_are_each_sets_own() -> None:
    """A set all of whose gradings fail stops the run by its own limit, however many others succeed. What was never
    sampled is a failure by that limit, and no failed grading: neither of a set nor of all."""
    failed, good = Grade(math.nan, failure="timed out after 1 s"), Grade(3.0, parts={"own": 1.5})

    def group(grades: tuple[Grade, ...], prob: float) -> Group:
        rewards = np.array([one.reward for one in grades])
        return Group(RolloutPrompt(Prompt(0, "", (), "", ""), prob, 1 / prob), (), rewards, grades)

    table = GradeTable.of([group((good, failed), 0.5), group((Grade(0.0), failed), 1.0)])
    found = set_metrics(table, ["own"], "code")
    assert found["reward/code/mean"] == pytest.approx(3 * 2 / 3) and found["reward/code/own"] == 1.5
    assert (found["reward/code/failed_count"], found["reward/code/timeouts"]) == (2.0, 2.0)
    unsampled = GradeTable.of([group((good, failed), 0.5), group((Grade(0.0), Grade(math.nan, failure=UNSAMPLED)), 1)])
    draw = PromptDraw(
        np.arange(2),
        np.ones(2),
        np.ones(2),
        np.zeros(2, np.int64),
        np.ones(2),
        np.full(2, 2),
        np.zeros((2, 0), np.int64),
    )
    unfinished, lengths = np.array([[False, False], [False, True]]), np.full((2, 2), 3)
    rollouts = Rollouts(unsampled.reward.reshape(2, 2), lengths, np.ones((2, 2)), unfinished=unfinished)
    assert reward_metrics(rollouts, draw, np.ones(2))["reward/failed_count"] == 1.0
    assert set_metrics(unsampled, [], "code")["reward/code/failed_count"] == 1.0
    assert all(name.startswith("reward/code/") for name in found)
    assert math.isnan(set_metrics(GradeTable.of([]), [], "code")["reward/code/mean"])
    check_failures(table, RewardConfig(max_failed_share=0.5), 1, CODE)
    with pytest.raises(RunAborted, match=rf"2 of 4 gradings failed, more than {CODE}.max_failed_share = 0.4 allows"):
        check_failures(table, RewardConfig(max_failed_share=0.4), 1, CODE)
