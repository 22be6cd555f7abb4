"""The account of the variance against every outcome of a draw, enumerated, and against gradients that are drawn."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from label_cases import _rows_of, accepted
from label_configs import make_outcomes, takes_unit_rewards
from support.cases import Choose

from dppo_megatron.config.pruning import EarlyStopConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.pruning import CompletionBatch, PromptPolicy, Selection, StepCost
from dppo_megatron.pruning.designs import Draw, design_effect
from dppo_megatron.pruning.early_stop import end_probability
from dppo_megatron.pruning.variance import StepVariance, step_variance
from dppo_megatron.pruning.weights import weigh
from dppo_megatron.selection import Rollouts, Selector, TrainSelection
from dppo_megatron.types import BoolArray, FloatArray, IntArray

G = 2
PROMPT_PI = np.array([0.3, 0.8, 1.0, 0.5])
COMPLETION_PI = np.array([0.9, 0.4, 1.0, 0.6, 0.5, 0.5, 0.7, 1.0])
SCORES = np.array([1.0, 0.2, 3.0, 0.5, 0.0, 1.5, 2.0, 0.1])


def _selection(kept: BoolArray, pi: FloatArray, score: FloatArray) -> Selection:
    return weigh(Draw(kept, pi, fixed_size=False), name="any", score=score)


def _batch(rows: np.ndarray, prompt_weight: FloatArray) -> CompletionBatch:
    """Completions `rows` of the eight, their scores split over advantage, norm and divisor."""
    return CompletionBatch(
        prompt_index=rows // G,
        completion_index=rows % G,
        group=np.unique(rows // G, return_inverse=True)[1],
        rewards=np.zeros(len(rows)),
        advantages=-2.0 * SCORES[rows],
        lengths=np.ones(len(rows), dtype=np.int64),
        logit_grad_norm=np.full(len(rows), 3.0),
        denominator=np.full(len(rows), 6.0),
        prompt_weight=prompt_weight,
        num_nominal=len(SCORES),
    )


def _outcomes() -> list[tuple[float, StepVariance, FloatArray, float]]:
    """Chance, account, weights [8] and second moment of what was rolled out, of every outcome of independent draws."""
    found = []
    moments = np.square(SCORES).reshape(-1, G).sum(axis=1)
    for visited in product([False, True], repeat=len(PROMPT_PI)):
        kept = np.array(visited)
        first = float(np.prod(np.where(kept, PROMPT_PI, 1.0 - PROMPT_PI)))
        if first == 0:
            continue
        prompts = _selection(kept, PROMPT_PI, np.sqrt(moments))
        rows = np.flatnonzero(np.repeat(kept, G))
        batch, pi = _batch(rows, np.repeat(prompts.weight, G)[rows]), COMPLETION_PI[rows]
        for trained in product([False, True], repeat=len(rows)):
            chosen = np.array(trained)
            second = float(np.prod(np.where(chosen, pi, 1.0 - pi)))
            if second:
                completions = _selection(chosen, pi, batch.prompt_weight * SCORES[rows])
                weight = np.zeros(len(SCORES))
                weight[rows] = batch.prompt_weight * completions.weight
                offered = float(np.square(batch.prompt_weight * SCORES[rows]).sum())
                found.append((first * second, step_variance(prompts, batch, completions), weight, offered))
    return found


def test_every_outcome_enumerated() -> None:
    """Each completion's gradient is a direction of its own. Over all outcomes, the squared length of the drawn
    gradient has the mean of `kept`, the weighted moments that of the full batch, and kept over full is what the two
    predictions multiply to. In each outcome the realised growths are those sums over what was rolled out."""
    chances, accounts, weights, offered = zip(*_outcomes(), strict=True)
    chance = np.array(chances)
    assert chance.sum() == pytest.approx(1.0, abs=1e-12) and len(chance) == 180
    lengths = np.array([np.square(weight * SCORES).sum() for weight in weights])
    moments = np.square(SCORES).reshape(-1, G).sum(axis=1)
    np.testing.assert_allclose([one.kept for one in accounts], lengths, rtol=1e-12)
    assert chance @ [one.expected for one in accounts] == pytest.approx(moments.sum(), rel=1e-12)
    both = np.repeat(PROMPT_PI, G) * COMPLETION_PI
    assert chance @ lengths / moments.sum() == pytest.approx(design_effect(SCORES, both), rel=1e-12)
    # given the prompts, the second stage's prediction is the mean of what it realises
    second = np.array([one.completions.predicted for one in accounts]) * offered
    assert chance @ second == pytest.approx(chance @ lengths, rel=1e-12)
    for one, rolled_out in zip(accounts, offered, strict=True):
        assert one.prompts.predicted == pytest.approx(design_effect(np.sqrt(moments), PROMPT_PI))
        if rolled_out:
            assert one.completions.realised == pytest.approx(one.kept / rolled_out)
        assert one.growth.realised == pytest.approx(one.prompts.realised * one.completions.realised)


def test_the_example_of_its_docstring() -> None:
    prompts = _selection(np.ones(2, dtype=bool), np.array([0.5, 1.0]), np.array([1.0, 2.0]))
    batch = replace(_batch(np.array([0, 2]), np.array([2.0, 1.0])), advantages=np.array([2.0, -4.0]))
    account = step_variance(prompts, batch, _selection(np.ones(2, dtype=bool), np.ones(2), np.ones(2)))
    assert (account.kept, account.expected) == (8.0, 6.0)
    assert account.prompts.realised == account.growth.realised == pytest.approx(8 / 6)
    assert account.prompts.predicted == pytest.approx((1 / 0.5 + 4) / 5) and account.completions.predicted == 1


def test_nothing_grows_without_pruning_or_without_gradient() -> None:
    everything = _selection(np.ones(4, dtype=bool), np.ones(4), np.ones(4))
    batch = _batch(np.arange(8), np.ones(8))
    completions = _selection(np.ones(8, dtype=bool), np.ones(8), SCORES)
    for one in (batch, replace(batch, advantages=np.zeros(8))):
        assert set(step_variance(everything, one, completions).metrics().values()) == {1.0}


@pytest.mark.parametrize(("rates", "kl"), [((0.0, 0.7), 0.0), ((0.5, 0.7), 0.0), ((0.0, 0.7), 0.3)])
def test_a_selector_s_account_is_the_variance_of_its_gradients(rates: tuple[float, float], kl: float) -> None:
    """Many seeds draw from one step's outcomes, each completion's gradient being a random direction of the length of
    its score, to which a KL term adds. Over the seeds the drawn gradients' mean squared length over the full ones' is
    what the account says was realised, within three standard errors, and predicted where the scores are known."""
    prompts, size = 64, 4
    rng = np.random.default_rng(3)
    rewards = (rng.random((prompts, size)) < rng.random((prompts, 1))).astype(np.float64)
    norms, lengths = rng.uniform(0.5, 2.0, (prompts, size)), rng.integers(5, 20, (prompts, size))
    squares, fulls, predicted, realised = [], [], [], []
    for seed in range(200):
        config = Config(steps=100, seed=seed)
        config.objective.kl.coef = kl
        config.rollout.prompts_per_step, config.rollout.completions_per_prompt = prompts, size
        pruning = config.pruning
        pruning.prompt.method, pruning.prompt.rate = "dppo" if rates[0] else "none", rates[0]
        pruning.prompt.warmup_epochs, pruning.prompt.score = 1.0, "rms"
        pruning.completion.method, pruning.completion.rate = "dppo" if rates[1] else "none", rates[1]
        pruning.completion.max_design_effect, pruning.completion.design = 0.0, "poisson"
        pruning.prompt.design = "poisson"
        selector = Selector(selection_settings(config), prompts)
        for step in (1, 2):
            rows = selector.begin(step).prompt_index
            decision = selector.finish(Rollouts(rewards[rows], lengths[rows], norms[rows]), step)
            selector.feedback(StepCost(step, 1.0, 1.0, 0.1))
        score = np.hypot(decision.advantages, kl) * norms[rows].ravel() / decision.denominator
        which = (rows[:, None] * size + np.arange(size)).ravel()
        everything = selector.full_scores(Rollouts(rewards, lengths, norms))[0].ravel()
        directions = rng.normal(size=(prompts * size, 50)) / 50**0.5
        squares.append(float(np.square(directions[which].T @ (decision.weight * score)).sum()))
        fulls.append(float(np.square(directions.T @ everything).sum()))
        account = decision.variance
        realised.append(account.kept)
        predicted.append(account.growth.predicted)
    growth, error = np.mean(squares) / np.mean(fulls), np.std(np.array(squares) / fulls) / len(squares) ** 0.5
    full = float(np.square(everything).sum())
    assert growth > 1.05 and error < 0.05 * growth
    assert np.mean(realised) / full == pytest.approx(growth, abs=3 * error)
    if not rates[0]:  # the scores of completions are known before their draw; those of prompts are guesses
        assert np.mean(predicted) == pytest.approx(np.mean(realised) / full, rel=0.02)


def test_a_prompt_policy_learns_what_the_account_counts(monkeypatch: pytest.MonkeyPatch, cases: Choose) -> None:
    """Whatever the loss, KL and entropy included: the growth by skipping is that of the moments that the policy is
    shown, so a score fitted to them predicts it."""
    shown: list[FloatArray] = []
    observe = PromptPolicy.observe

    def spy(policy: PromptPolicy, *arguments: Any, second_moment: FloatArray, **more: Any) -> None:
        shown.append(second_moment)
        observe(policy, *arguments, second_moment=second_moment, **more)

    monkeypatch.setattr(PromptPolicy, "observe", spy)
    chosen, with_terms, skipped, stopped = cases("account", 150), 0, 0, 0
    for index in chosen:
        rng, selector, config, num_prompts = accepted(index)
        if config.objective.overlong.filter or selector._prompt_policy.resamples:
            continue
        binary = takes_unit_rewards(config)
        table = make_outcomes(rng, num_prompts, config.rollout.completions_per_prompt, binary=binary)
        decisions: list[tuple[TrainSelection, BoolArray]] = []
        for step in (1, 2, 3):
            draw = selector.begin(step)
            rollouts = _rows_of(table, draw.prompt_index, selection_settings(config).widest_group)
            if config.pruning.early_stop.after_tokens:
                rollouts = _stopped(rollouts, draw.limits, config.pruning.early_stop)
                stopped += int(rollouts.stopped.sum())
            there = (~np.isnan(rollouts.rewards) | rollouts.stopped).sum(axis=1) > 1  # others are in no sum
            decisions.append((selector.finish(rollouts, step), there))
            selector.feedback(StepCost(step, 2.0, 1.0, 0.5))
            for moment in shown:  # with steps begun ahead those of earlier ones, in their order
                decision, there = decisions.pop(0)
                moment, weight = moment[there], decision.prompts.weight[there]
                if total := float(weight @ moment):
                    growth = float(np.square(weight) @ moment) / total
                    assert decision.variance.prompts.realised == pytest.approx(growth, rel=1e-9), f"account {index}"
                    with_terms += selector._coefficients.slope > 0
                    skipped += growth > 1.01
            shown.clear()
    assert chosen.are_few or (with_terms > 20 and skipped > 10 and stopped > 50), (with_terms, skipped, stopped)


@pytest.mark.parametrize("aborted", [True, False])
def test_a_moment_of_a_group_with_some_stopped_and_one_missing(monkeypatch: pytest.MonkeyPatch, aborted: bool) -> None:
    """In each pattern of stops the policy is shown what the account has of what is trained on. Where an engine has
    aborted the missing one, which stands for itself, the mean over all patterns is 4 / 3 of the others. All rewards are
    the known mean: with advantages of 0 the KL term alone gives a gradient, and stops put no noise into it."""
    shown: list[FloatArray] = []
    monkeypatch.setattr(PromptPolicy, "observe", lambda *_, second_moment, **__: shown.append(second_moment))
    config = Config(steps=10)
    config.objective.kl.coef, config.objective.advantage, config.objective.normalization = 0.3, "rloo", "constant"
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 1, 4
    config.pruning.prompt.method = config.pruning.completion.method = "none"
    early = config.pruning.early_stop = EarlyStopConfig(4, 0.2)
    lengths = np.array([[2, 8, 16, 10]])
    ends, last = end_probability(early, lengths), np.arange(4) == 3
    mean, others = 0.0, np.nan
    for pattern in product([False, True], repeat=4):
        stopped = np.array([pattern])
        if not (chance := float(np.prod(np.where(stopped, 1.0 - ends, ends)))):
            continue
        missing = last & (aborted | ~stopped)
        stopped &= ~missing
        counts = np.where(stopped, 0.0, np.where(missing & aborted, 1.0, 1.0 / ends))
        rewards = np.where(missing | stopped, np.nan, 0.5)
        selector = Selector(selection_settings(config), 1)
        selector.begin(1)
        norms = np.sqrt(lengths)
        decision = selector.finish(Rollouts(rewards, lengths, norms, unfinished=stopped, stands_for=counts), 1)
        selector.feedback(StepCost(1, 1.0, 1.0, 0.0))
        selector.begin(2)
        assert not decision.advantages.any()
        assert shown[-1] == pytest.approx(decision.variance.expected, rel=1e-12, abs=0)
        mean += chance * float(shown[-1].sum())
        others = np.square(selector._coefficients.slope * norms.ravel() / decision.denominator)[:3].sum()
    assert not aborted or mean == pytest.approx(4 / 3 * others, rel=1e-12, abs=0)


def _stopped(rollouts: Rollouts, limits: IntArray, early: EarlyStopConfig) -> Rollouts:
    """What comes of them under these limits."""
    gone = rollouts.lengths > limits
    counts = np.where(gone, 0.0, 1.0 / end_probability(early, rollouts.lengths))
    rewards, lengths = np.where(gone, np.nan, rollouts.rewards), np.minimum(rollouts.lengths, limits)
    return replace(rollouts, rewards=rewards, lengths=lengths, unfinished=gone | (lengths == 0), stands_for=counts)
