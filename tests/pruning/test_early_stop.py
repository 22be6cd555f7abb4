"""Limits of completions: how they are drawn, where they are refused, and what the account says of them.

That labels are true is a matter of `test_pruning_labels.py`, that the gradient is one of `test_posterior_baseline.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dppo_megatron.algorithms.advantages import early_stop_advantages, posterior_advantages, rloo_advantages
from dppo_megatron.config.pruning import EarlyStopConfig, PruningConfig
from dppo_megatron.config.selection import SelectionSettings
from dppo_megatron.pruning import StepCost, early_stop
from dppo_megatron.pruning.early_stop import draw_limits, end_probability
from dppo_megatron.pruning.policies import method_overrides
from dppo_megatron.selection import Rollouts, Selector
from dppo_megatron.steps.step import with_early_stop
from dppo_megatron.types import Completion, Group, IntArray, Prompt, RolloutPrompt, UserError


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
        ({"pruning.prompt.method": "greso"}, "needs the rewards of a whole group"),
        ({"pruning.prompt.method": "dynamic_sampling"}, "needs the rewards of a whole group"),
        ({"pruning.completion.method": "cppo_verl"}, "groups of one size"),
        ({"pruning.early_stop.after_tokens": 64}, "no completion is longer"),
        ({"pruning.early_stop.min_inclusion_prob": 1.0}, "1 stops nothing"),
    ],
)
def test_what_it_cannot_go_with(changes: dict[str, Any], said: str) -> None:
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


def _sampled(rng: np.random.Generator, limits: IntArray, early: EarlyStopConfig) -> tuple[Rollouts, Rollouts]:
    """Long completions are right more often, and everything of the others is known; the same without a limit."""
    lengths = np.minimum(rng.geometric(0.1, limits.shape), 64)
    rewards = (rng.random(limits.shape) < lengths / 64).astype(np.float64)
    stopped = lengths > limits
    table = Rollouts(
        np.where(stopped, np.nan, rewards),
        np.minimum(lengths, limits),
        np.sqrt(lengths),
        unfinished=stopped,
        stands_for=np.where(stopped, 0.0, 1 / end_probability(early, lengths)),
    )
    return table, Rollouts(rewards, lengths, np.sqrt(lengths))


@pytest.mark.parametrize(
    ("advantage", "normalization"),
    [("rloo", "sequence_mean"), ("group_mean", "constant"), ("posterior_loo", "constant")],
)
def test_figures_are_of_all_that_would_have_been_sampled(advantage: Any, normalization: Any) -> None:
    """Rewards go with length, so a mean over those that ended is half of the true one. The account's product is the
    growth of the variance by stopping, which alone makes it grow here: over the full batch that it stands for, whose
    baselines are less noisy."""
    settings = _settings()
    settings.objective.advantage, settings.objective.normalization = advantage, normalization
    early, rng = settings.pruning.early_stop, np.random.default_rng(0)
    means, true, growth, plain, drawn, whole = [], [], [], [], [], []
    for seed in range(200):
        settings.seed = seed
        selector = Selector(settings, 16)
        draw = selector.begin(1)
        table, everything = _sampled(rng, draw.limits, early)
        decision = selector.finish(table, 1)
        means.append(decision.metrics["reward/mean"])
        plain.append(float(np.nanmean(table.rewards)))
        true.append(float(everything.lengths.mean() / 64))
        assert decision.variance.growth.realised == pytest.approx(decision.variance.early.realised)
        assert not decision.kept[table.stopped.ravel()].any()
        growth.append(decision.variance.growth.realised)
        score = decision.weight * decision.advantages * table.logit_grad_norm.ravel() / decision.denominator
        drawn.append(float(np.square(score).sum()))
        whole.append(float(np.square(selector.full_scores(everything, decision.prior)[0]).sum()))
    error = np.std(means) / len(means) ** 0.5
    assert np.mean(means) == pytest.approx(np.mean(true), abs=4 * error)
    assert np.mean(plain) < 0.75 * np.mean(true)
    # above the largest weight only by the noise of baselines, which divisors alike for all leave in full
    assert 1.5 < np.mean(growth) < (1 if normalization == "sequence_mean" else 1.2) / early.min_inclusion_prob
    said = np.array(drawn) / growth
    off = np.array(whole) - said
    assert np.mean(off) == pytest.approx(0.0, abs=4 * np.std(off) / len(off) ** 0.5)
    assert np.sum(drawn) / np.sum(said) == pytest.approx(np.sum(drawn) / np.sum(whole), rel=0.05)


def _skewed(rng: np.random.Generator, limits: IntArray, early: EarlyStopConfig) -> Rollouts:
    """The longer, the less often right: one in ten is long and wrong."""
    lengths = np.where(rng.random(limits.shape) < 0.9, rng.integers(1, 4, limits.shape), 60)
    rewards, stopped = (lengths < 4).astype(np.float64), lengths > limits
    counts = np.where(stopped, 0.0, 1 / end_probability(early, lengths))
    there = np.where(stopped, np.nan, rewards)
    return Rollouts(there, np.minimum(lengths, limits), np.sqrt(lengths), unfinished=stopped, stands_for=counts)


def test_groups_that_are_stopped_whole_are_not_lost() -> None:
    """Those that came to their end count for them already: nothing of later steps does as well."""
    settings = _settings(after=2, size=2)
    selector = Selector(settings, 16)
    for step in range(1, 30):
        limits = selector.begin(step).limits
        lengths = np.full(limits.shape, 60)
        stopped = lengths > limits
        counts = np.where(stopped, 0.0, 1 / end_probability(settings.pruning.early_stop, lengths))
        rewards = np.where(stopped, np.nan, 1.0 * (np.arange(2) == 0))
        table = Rollouts(
            rewards, np.minimum(lengths, limits), np.ones(limits.shape), unfinished=stopped, stands_for=counts
        )
        decision = selector.finish(table, step)
        selector.feedback(StepCost(step, 1.0, 1.0, 0.0))
        assert stopped.all(axis=1).any() and decision.metrics["rollout/missing_groups"] == 0
        assert decision.weight[decision.kept] == pytest.approx(5.0)
    assert selector.state_dict()["missing"]["lost_share"] == (0.0,)


def test_what_is_known_of_prompts_is_not_that_of_short_answers() -> None:
    """Pass rates and lengths in the history, and the predicted divisor, whose error is no more than its noise."""
    settings = _settings(after=4, size=8)
    settings.objective.normalization = "token_mean"
    selector, rng = Selector(settings, 16), np.random.default_rng(0)
    biases = []
    for step in range(1, 101):
        table = _skewed(rng, selector.begin(step).limits, settings.pruning.early_stop)
        decision = selector.finish(table, step)
        biases.append({row.name: row for row in decision.ledger}["denominator/token_mean"].bias_estimate)
        selector.feedback(StepCost(step, 1.0, 1.0, 0.0))
    history = selector._prompt_policy.history
    assert history.pass_rate().mean() == pytest.approx(0.9, abs=0.04)  # 0.98 by those that ended
    assert history.arrays["tokens"].mean() == pytest.approx(7.8, rel=0.25)  # 2 by them
    assert selector._coefficients.mean_length == pytest.approx(7.8, rel=0.35)
    assert np.mean([one for one in biases[20:] if one is not None]) < 0.35


def test_a_length_is_learnt_of_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of groups of 4 and 12, as wide as 16. By their mates that ended, those that nobody asked for would have 2 tokens
    for the 7.8 of all. What a caller says those stand for does not matter: as 0 they were stopped ones of the group."""
    settings = _settings()
    settings.pruning.prompt.method, settings.pruning.prompt.group_size_factor = "dppo", 2.0
    early, rng, learnt = settings.pruning.early_stop, np.random.default_rng(0), []
    for seed in range(200):
        settings.seed = seed
        selector = Selector(settings, 16)
        known = np.tile([1.0, 9.0], 8), np.ones(16)
        monkeypatch.setattr(selector._prompt_policy, "expected", lambda ids, step, of=known: tuple(x[ids] for x in of))
        draw = selector.begin(1)
        assert sorted({*draw.size.tolist()}) == [4, 12] and draw.limits.shape == (16, 16)
        table, asked = _skewed(rng, draw.limits, early), np.arange(16) < draw.size[:, None]
        rollouts = Rollouts(
            np.where(asked, table.rewards, np.nan),
            np.where(asked, table.lengths, 0),
            np.where(asked, table.logit_grad_norm, 0.0),
            unfinished=~asked | table.stopped,
            stands_for=np.where(asked, table.stands_for, 1.0),
        )
        given = replace(rollouts, stands_for=np.where(asked, table.stands_for, 0.0))
        zero, usual = selector.finish(given, 1), selector.finish(rollouts, 1)
        assert np.array_equal(zero.weight, usual.weight) and np.array_equal(zero.advantages, usual.advantages)
        selector.feedback(StepCost(1, 1.0, 1.0, 0.0))
        learnt.append(selector._coefficients.mean_length)
    assert np.mean(learnt) == pytest.approx(7.8, abs=4 * np.std(learnt) / len(learnt) ** 0.5)


@pytest.mark.parametrize("to_posterior", [False, True])
def test_groups_of_which_nothing_could_be_stopped_are_as_without(to_posterior: bool) -> None:
    """To the last bit: where rewards are equal, nothing is trained on."""
    rng = np.random.default_rng(0)
    rewards, prior = np.repeat(rng.random((50, 1)), 7, axis=1), rng.uniform(0.3, 9, (50, 2))
    usual = posterior_advantages(rewards, prior) if to_posterior else rloo_advantages(rewards)
    found = early_stop_advantages(rewards, np.ones(rewards.shape), prior, to_posterior=to_posterior)
    assert (found == usual).all() and (to_posterior or not found.any())


def test_the_unpruned_method_stops_nothing() -> None:
    assert "pruning.early_stop.after_tokens=0" in method_overrides("grpo")
    assert not any("early_stop" in one for one in method_overrides("dppo"))


@pytest.mark.parametrize(("tokens", "reason"), [(7, "stop"), (5, "length")])
def test_an_engine_that_keeps_to_no_limit_is_refused(tokens: int, reason: Any) -> None:
    """One of the user's own: its completions would weigh what those weigh that were sampled under limits."""
    prompt = RolloutPrompt(Prompt(0, "", (2,), "", ""), 1.0, 1.0, 1, (5,))
    early, ids = EarlyStopConfig(2, 0.1), np.arange(tokens)

    def group(count: int, why: Any) -> Group:
        one = Completion(ids[:count], np.zeros(count, np.float32), why, "")
        return Group(prompt, (one,), np.zeros(1))

    kept = [with_early_stop([group(n, why)], early, 9)[0] for n, why in ((4, "stop"), (5, "early"), (6, "abort"))]
    assert [one.stands_for for one in kept] == [2, 0, 1], "of one that was aborted nothing is trained on"
    with pytest.raises(UserError, match=rf"{tokens} tokens that ended by `{reason}`, for a limit of 5"):
        with_early_stop([group(tokens, reason)], early, 9)


def test_rollouts_have_to_say_what_they_stand_for() -> None:
    """A trainer of one's own that draws limits and does not look at who came to an end."""
    selector = Selector(_settings(), 16)
    shape = selector.begin(1).limits.shape
    with pytest.raises(ValueError, match="what each completion stands for"):
        selector.finish(Rollouts(np.zeros(shape), np.ones(shape, np.int64), np.ones(shape)), 1)
