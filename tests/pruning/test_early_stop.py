"""Limits of completions: how they are drawn, where they are refused, and what the account says of them.

That labels are true is a matter of `test_pruning_labels.py`, that the gradient is one of `test_posterior_baseline.py`.
"""

from __future__ import annotations

import numpy as np
import pytest

from dppo_megatron.config.pruning import EarlyStopConfig, PruningConfig
from dppo_megatron.config.selection import SelectionSettings
from dppo_megatron.pruning import early_stop
from dppo_megatron.pruning.early_stop import draw_limits, end_probability
from dppo_megatron.selection import Rollouts, Selector
from dppo_megatron.types import IntArray, UserError


@pytest.mark.parametrize("floor", [0.07, 0.5, 1.0])
@pytest.mark.parametrize("after", [1, 9, 300])
def test_a_limit_is_as_often_reached_as_is_said(monkeypatch: pytest.MonkeyPatch, after: int, floor: float) -> None:
    """P(limit >= n) is S(n) for every n up to the longest, counted over 100,000 evenly spaced numbers."""
    config, longest, count = EarlyStopConfig(after, floor), 200, 100_000
    monkeypatch.setattr(early_stop, "uniforms", lambda *_: (np.arange(count) + 0.5) / count)
    limits = draw_limits(config, 0, np.arange(count), 1, 1, longest).ravel()
    lengths = np.arange(1, longest + 1)
    assert limits.min() >= 1 and limits.max() == longest
    reached = [(limits >= n).mean() for n in lengths.tolist()]
    assert reached == pytest.approx(end_probability(config, lengths).tolist(), abs=1.5 / count)


def test_each_completion_has_a_limit_of_its_own() -> None:
    """The same in another process and at another place in the step; others for its mates and in other steps; none where
    it is off."""
    config, ids = EarlyStopConfig(after_tokens=10), np.array([4, 0, 7])
    limits = draw_limits(config, 5, ids, 3, 8, 1000)
    assert (draw_limits(config, 5, ids[::-1], 3, 8, 1000) == limits[::-1]).all()
    assert limits.shape == (3, 8) and len(np.unique(limits)) > 12
    assert (draw_limits(config, 5, ids, 4, 8, 1000) != limits).mean() > 0.5
    assert draw_limits(EarlyStopConfig(), 5, ids, 3, 8, 1000).shape == (3, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective.advantage": "group_std"}, "objective.advantage = group_std"),
        ({"objective.advantage": "reinforce_baseline"}, "objective.advantage = reinforce_baseline"),
        ({"pruning.prompt.method": "greso"}, "goes by all rewards"),
        ({"pruning.prompt.method": "dynamic_sampling"}, "goes by all rewards"),
        ({"pruning.completion.method": "cppo_verl"}, "groups of one size"),
    ],
)
def test_what_it_cannot_go_with(changes: dict[str, str], said: str) -> None:
    settings = _settings()
    settings.check()
    for key, value in changes.items():
        section, *path, name = key.split(".")
        owner = getattr(settings, section)
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    with pytest.raises(UserError, match=said):
        settings.check()


def _settings(after: int = 4, size: int = 8) -> SelectionSettings:
    settings = SelectionSettings(
        prompts_per_step=16,
        completions_per_prompt=size,
        total_steps=100,
        max_completion_tokens=64,
        pruning=PruningConfig(early_stop=EarlyStopConfig(after, 0.2)),
    )
    settings.objective.advantage = "rloo"
    settings.pruning.prompt.method = settings.pruning.completion.method = "none"
    return settings


def _sampled(rng: np.random.Generator, limits: IntArray, early: EarlyStopConfig) -> Rollouts:
    """Long completions are right more often, and everything of the others is known."""
    lengths = np.minimum(rng.geometric(0.1, limits.shape), 64)
    rewards = (rng.random(limits.shape) < lengths / 64).astype(np.float64)
    stopped = lengths > limits
    return Rollouts(
        np.where(stopped, np.nan, rewards),
        np.minimum(lengths, limits),
        np.sqrt(lengths),
        unfinished=stopped,
        stands_for=np.where(stopped, 0.0, 1 / end_probability(early, lengths)),
    )


def test_figures_are_of_all_that_would_have_been_sampled() -> None:
    """Rewards go with length, so a mean over those that ended is half of the true one; and the account's product is the
    growth of the variance by stopping, which alone makes it grow here."""
    settings = _settings()
    early, rng = settings.pruning.early_stop, np.random.default_rng(0)
    means, true, growth, plain = [], [], [], []
    for seed in range(200):
        settings.seed = seed
        selector = Selector(settings, 16)
        limits = selector.begin(1).limits
        table = _sampled(rng, limits, early)
        decision = selector.finish(table, 1)
        means.append(decision.metrics["reward/mean"])
        plain.append(float(np.nanmean(table.rewards)))
        true.append(float(np.minimum(rng.geometric(0.1, limits.shape), 64).mean() / 64))
        assert decision.variance.growth.realised == pytest.approx(decision.variance.early.realised)
        assert not decision.kept[table.stopped.ravel()].any()
        growth.append(decision.variance.growth.realised)
    error = np.std(means) / len(means) ** 0.5
    assert np.mean(means) == pytest.approx(np.mean(true), abs=4 * error)
    assert np.mean(plain) < 0.75 * np.mean(true)
    assert 1.5 < np.mean(growth) < 1 / early.min_inclusion_prob
