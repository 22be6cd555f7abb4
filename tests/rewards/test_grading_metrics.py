"""What a step's gradings come to: means over what there is, null over nothing, and when failures stop a run."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.observe.progress_display import RunProgress
from dppo_megatron.rewards.measures import GradeTable, check_failures, grading_metrics
from dppo_megatron.types import Grade, Group, Prompt, RolloutPrompt, RunAborted

FAILED = Grade(math.nan, failure="raised ValueError: no")
LATE = Grade(math.nan, failure="timed out after 30 s")


def group_of(grades: list[Grade], weight: float = 1.0) -> Group:
    selected = RolloutPrompt(Prompt(0, "", (1,), "", ""), 1 / weight, 7.0)  # a cap or an estimator made the 7
    return Group(selected, (), np.array([grade.reward for grade in grades]), tuple(grades))


def same(measured: dict[str, float], expected: dict[str, float]) -> None:
    assert measured.keys() == expected.keys()
    np.testing.assert_equal(measured, expected)


def test_means_are_over_the_gradings_that_have_them() -> None:
    first = group_of([Grade(1.0, facts={"parsed_share": 1.0, "digits": 3.0}), FAILED, Grade(0.5)], weight=2.0)
    second = group_of([Grade(0.0, facts={"parsed_share": 0.0}, parts={"style": 0.25}), LATE, LATE])
    same(
        grading_metrics(GradeTable.join([GradeTable.of([first]), GradeTable.of([second])]), ["style", "right"]),
        {
            "reward/timeouts": 2.0,
            "reward/parsed_share": 2 / 3,  # one of weight 2 is 1, one of weight 1 is 0
            "reward/digits": 3.0,
            "reward/boxed_share": math.nan,
            "reward/style": 0.25,
            "reward/right": math.nan,
        },
    )


def test_a_fact_replaces_no_metric_of_its_name() -> None:
    """What `reward/` has besides facts and named rewards; else a grader's own count would pass for the trainer's."""
    facts = dict.fromkeys(("mean", "failed_count", "timeouts"), 9.0)
    found = grading_metrics(GradeTable.of([group_of([Grade(1.0, facts=facts), LATE])]))
    assert found["reward/timeouts"] == 1.0 and 9.0 not in found.values()


def test_means_over_nothing_are_null() -> None:
    """Not 0: that would look like a weak model."""
    nothing = dict.fromkeys(("parsed_share", "boxed_share", "style"), math.nan)
    for groups, timeouts in (([], 0.0), ([group_of([FAILED, LATE])], 1.0)):
        same(
            grading_metrics(GradeTable.of(groups), ["style"]),
            {"reward/timeouts": timeouts} | {f"reward/{name}": mean for name, mean in nothing.items()},
        )


@settings(deadline=None)
@given(
    rounds=st.lists(st.lists(st.booleans(), max_size=40), max_size=4),
    share=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]),
)
def test_the_guard_counts_a_whole_step(rounds: list[list[bool]], share: float) -> None:
    """After every round: stopped if and only if more than the share failed, and more than one (exact arithmetic)."""
    reward = RewardConfig(max_failed_share=share)
    failed = total = 0
    table = GradeTable.of([])
    for outcomes in rounds:
        failed, total = failed + sum(outcomes), total + len(outcomes)
        more = GradeTable.of([group_of([FAILED if bad else Grade(1.0) for bad in outcomes])])
        table = GradeTable.join([table, more])
        too_many = failed > Fraction(str(share)) * total and (failed > 1 or share == 0)
        if not too_many:
            check_failures(table, reward, step=2)
            continue
        with pytest.raises(
            RunAborted, match=f"step 2: {failed} of {total} gradings failed.*{failed} x raised ValueError"
        ):
            check_failures(table, reward, step=2)
        return


def test_progress_without_a_reward(capsys: pytest.CaptureFixture[str]) -> None:
    metrics: dict[str, Any] = {
        "prune/completions_generated": 8.0,
        "prune/completions_trained": 0.0,
        "train/grad_norm": 0.0,
        "time/step_s": 1.0,
    }
    for mean, said in ((math.nan, "reward -"), (None, "reward -"), (0.0, "reward 0.000")):
        RunProgress(3, visible=True).step(1, metrics | {"reward/mean": mean})
        assert said in capsys.readouterr().out
