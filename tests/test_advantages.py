"""Advantages and reward shaping against their definitions, one completion at a time."""

from __future__ import annotations

import numpy as np
import pytest

from dppo_megatron.algorithms.advantages import (
    group_advantages,
    make_advantages,
    overlong_penalty,
    rloo_advantages,
    whitened_advantages,
)
from dppo_megatron.config.objective import ObjectiveConfig, OverlongConfig

NAMES = ("group_std", "group_mean", "rloo", "reinforce_baseline")


def test_grpo_and_dr_grpo_by_definition() -> None:
    """GRPO's on a worked example, Dr.GRPO's without the division."""
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    p = 3 / 8
    expected = np.where(rewards == 1, np.sqrt((1 - p) / p), -np.sqrt(p / (1 - p)))
    two = np.stack([rewards, 3 * rewards + 1])
    scaled = group_advantages(two, divide_by_std=True, eps=0.0)
    np.testing.assert_allclose(scaled, [expected, expected], rtol=1e-12)
    centred = group_advantages(two, divide_by_std=False, eps=0.0)
    np.testing.assert_allclose(centred, [rewards - p, 3 * (rewards - p)], rtol=1e-12)


def test_rloo_leaves_one_out() -> None:
    """Each reward less the mean of the others, a failed grading being nobody's other."""
    rewards = np.random.default_rng(0).normal(size=(5, 6))
    rewards[1, 2] = rewards[3, 0] = rewards[3, 5] = np.nan
    advantages = rloo_advantages(rewards)
    for group, row in zip(rewards, advantages, strict=True):
        for i, reward in enumerate(group):
            others = [r for j, r in enumerate(group) if j != i and not np.isnan(r)]
            assert row[i] == pytest.approx(0.0 if np.isnan(reward) else reward - np.mean(others), abs=1e-14)


def test_reinforce_baseline_by_definition() -> None:
    """Group mean off, then one standard deviation for the whole step."""
    rewards = np.random.default_rng(1).normal(size=(4, 8))
    centred = [[r - np.mean(group) for r in group] for group in rewards]
    expected = np.array(centred) / np.std(np.ravel(centred))
    np.testing.assert_allclose(whitened_advantages(rewards, np.ones(4), eps=0.0), expected, rtol=1e-12)


def test_whitening_counts_a_group_by_its_weight() -> None:
    """A group of weight 3 stands for three of them, one of weight 0 for none; failed gradings do not count."""
    rewards = np.array([[0.0, 1.0, np.nan, 1.0], [2.0, 5.0, 3.0, 0.0], [7.0, -7.0, 0.0, 1.0]])
    weighted = whitened_advantages(rewards, np.array([3.0, 1.0, 0.0]), eps=0.0)
    repeated = whitened_advantages(rewards[[0, 0, 0, 1]], np.ones(4), eps=0.0)
    np.testing.assert_allclose(weighted[:2], repeated[[0, 3]], rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rewards", [[1.0] * 8, [0.1] * 8, [0.7], [np.nan] * 4, [np.nan, 0.3]])
def test_groups_without_information_have_advantage_zero(rewards: list[float], name: str) -> None:
    """Exactly zero, not a rounding error divided by epsilon."""
    advantages = make_advantages(np.array([rewards]), ObjectiveConfig(advantage=name))  # type: ignore[arg-type]
    assert not advantages.any()


@pytest.mark.parametrize("name", NAMES)
def test_failed_grader_does_not_move_the_others(name: str) -> None:
    """A NaN reward gets advantage 0 and leaves the statistics."""
    config = ObjectiveConfig(advantage=name)  # type: ignore[arg-type]
    with_failure = make_advantages(np.array([[1.0, np.nan, 0.0, 0.0]]), config)
    without = make_advantages(np.array([[1.0, 0.0, 0.0]]), config)
    assert with_failure[0, 1] == 0.0
    np.testing.assert_array_equal(with_failure[:, [0, 2, 3]], without)


def test_overlong_punishment_is_the_formula_of_dapo() -> None:
    """Case by case: nothing before the buffer, linear in it, the full penalty at the end."""
    config, limit = OverlongConfig(buffer_tokens=40, penalty=0.5), 200
    lengths = np.array([[1, 159, 160], [161, 180, 200]])
    for length, penalty in zip(lengths.ravel(), overlong_penalty(lengths, config, limit).ravel(), strict=True):
        if length <= limit - 40:
            assert penalty == 0.0
        elif length < limit:
            assert penalty == pytest.approx(0.5 * ((limit - 40) - length) / 40)
        else:
            assert penalty == -0.5
    assert not overlong_penalty(lengths, OverlongConfig(), limit).any()
