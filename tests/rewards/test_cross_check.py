"""`reward.cross_check`: the share of gradings that another grader repeats, beside the training."""

from __future__ import annotations

import importlib.util
import math
import time
from contextlib import closing

import numpy as np
import pytest

from dppo_megatron.config.reward import RewardConfig, check_reward
from dppo_megatron.rewards import cross_check
from dppo_megatron.rewards.cross_check import CrossCheck, check_installed
from dppo_megatron.rewards.functions import NamedFunction
from dppo_megatron.types import Completion, Grade, Group, Prompt, RolloutPrompt, UserError

NO_IDS = np.zeros(0, np.int64)


def group_of(texts: list[str], rewards: list[float]) -> Group:
    """Graded 0 or 1, or failed (NaN)."""
    completions = tuple(Completion(NO_IDS, np.zeros(0, np.float32), "stop", text) for text in texts)
    grades = tuple(Grade(one, failure="raised" if math.isnan(one) else "") for one in rewards)
    return Group(RolloutPrompt(Prompt(0, "", (1,), "1", ""), 1.0, 1.0), completions, np.array(rewards), grades)


def finished(check: CrossCheck, count: int) -> dict[str, float]:
    """The metrics once so many comparisons are over."""
    while sum(future.done() for _, _, future in check._open) < count:
        time.sleep(0.01)
    return check.metrics()


def test_disagreement_is_counted_and_a_hang_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`obey` in Math-Verify's place. The hang is killed and counts as no comparison, nor does what was not graded."""
    function = NamedFunction("", "odd_graders:obey", key="reward.cross_check")
    monkeypatch.setattr(cross_check, "_FUNCTION", function)
    group = group_of(["hang", "1", "1", "0", "1", "1"], [1.0, 1.0, 0.0, 0.0, 1.0, math.nan])
    with closing(CrossCheck(RewardConfig(cross_check=1.0, timeout_s=4.0))) as check:
        check.begin([group])
        assert check.metrics()["reward/cross_check_count"] == 0.0  # the first one hangs still
        assert finished(check, 5) == {"reward/cross_check_count": 4.0, "reward/cross_check_disagreement": 0.25}
        nothing = check.metrics()
        assert nothing["reward/cross_check_count"] == 0.0 and math.isnan(nothing["reward/cross_check_disagreement"])


def test_a_share_of_the_gradings_is_compared_and_no_more_than_can_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(["1"] * 2000, [1.0] * 2000)
    for share, fewest, most in ((0.1, 130, 270), (1.0, 512, 512), (0.0, 0, 0)):
        with closing(CrossCheck(RewardConfig(cross_check=share))) as check:
            monkeypatch.setattr(check._grader, "submit", lambda tasks: None)
            check.begin([group])
            assert fewest <= len(check._open) <= most
    assert not check.metrics()


def test_what_cannot_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is built."""
    check_reward(RewardConfig(cross_check=0.01))
    with pytest.raises(UserError, match=r"reward\.cross_check = 0\.01 compares the built-in graders"):
        check_reward(RewardConfig(cross_check=0.01, function="my_grader:grade"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_installed(RewardConfig())
    with pytest.raises(UserError, match="pip install math-verify"):
        check_installed(RewardConfig(cross_check=0.01))
