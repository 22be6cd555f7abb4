"""Missing completions cost themselves: what is left stands for them, and what it cannot stand for is labelled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model

from dppo_megatron.algorithms.objectives import make_objective
from dppo_megatron.config.objective import ObjectiveConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.pruning.interface import StepCost
from dppo_megatron.selection import Rollouts, Selector, TrainSelection
from dppo_megatron.types import TrainSample

K, G = 2, 3
REWARDS = np.array([[1.0, 0.0, 0.5], [0.0, 0.0, 1.0]])
LENGTHS = np.array([[5, 9, 3], [4, 8, 6]])


def _decision(rewards: np.ndarray, advantage: str = "rloo", **more: np.ndarray) -> TrainSelection:
    count, size = rewards.shape
    config = Config()
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = count, size
    config.objective.advantage, config.objective.normalization = advantage, "constant"
    config.pruning.prompt.method = config.pruning.completion.method = "none"
    selector = Selector(config, count)
    selector.begin(1)
    lengths = more.pop("lengths", np.resize(LENGTHS, rewards.shape))
    return selector.finish(Rollouts(rewards, lengths, np.ones(rewards.shape), **more), 1)


def _patterns(rate: float) -> Iterator[tuple[float, np.ndarray]]:
    """Every way in which completions of REWARDS can be missing that leaves a group with a baseline, and how likely."""
    found = []
    for pattern in itertools.product((False, True), repeat=K * G):
        missing = np.array(pattern).reshape(K, G)
        if ((~missing).sum(axis=1) >= 2).any():
            found.append((rate ** missing.sum() * (1 - rate) ** (~missing).sum(), missing))
    total = sum(probability for probability, _ in found)
    for probability, missing in found:
        yield probability / total, missing


@pytest.mark.parametrize("advantage", ["rloo", "group_mean"])
def test_expected_coefficients_are_those_without_failures(advantage: str) -> None:
    """Over all 64 patterns, at 30 % failures: weight times advantage over divisor, to rounding."""

    def coefficients(decision: TrainSelection) -> np.ndarray:
        return decision.kept * decision.weight * decision.advantages / decision.denominator

    full = coefficients(_decision(REWARDS, advantage))
    expected, unweighted = np.zeros(K * G), np.zeros(K * G)
    for probability, missing in _patterns(0.3):
        decision = _decision(np.where(missing, np.nan, REWARDS), advantage, by_chance=missing)
        expected += probability * coefficients(decision)
        unweighted += probability * decision.kept * decision.advantages / decision.denominator
        assert [row.label for row in decision.ledger if row.name == "rollout/missing"] == ["ratio"] * bool(
            missing.any()
        )
    np.testing.assert_allclose(expected, full, atol=1e-14)
    assert np.linalg.norm(unweighted - full) > 0.2 * np.linalg.norm(full), "the same enumeration sees missing weights"


def _samples(decision: TrainSelection) -> list[TrainSample]:
    """The kept completions of REWARDS with what was decided about each."""
    every = random_samples(K * G, 37, seed=3)
    columns = decision.advantages, decision.weight, decision.denominator
    return [
        replace(every[i], advantage=float(a[i]), weight=float(w[i]), denominator=float(d[i]))
        for a, w, d in [columns]
        for i in np.flatnonzero(decision.kept)
    ]


def _enumerate(model: Path) -> dict[str, np.ndarray]:
    """Gradient without failures and the expectation over all patterns of them, with our weights and with none."""
    actor = build_actor(model, Parallel(dtype=torch.float64))
    # linear in the advantage, which a clip is only where the policy is the behaviour's
    objective = make_objective(ObjectiveConfig(loss="cispo", clip_low=1.0, clip_high=0.28))

    def gradient(samples: list[TrainSample]) -> np.ndarray:
        actor.accumulate(samples, plan_for(samples, Parallel(), cap=64), objective)
        return np.concatenate([tensor.double().numpy().ravel() for _, tensor in actor.gradients()])

    full = gradient(_samples(_decision(REWARDS)))
    weighted, plain = np.zeros_like(full), np.zeros_like(full)
    for probability, missing in _patterns(0.3):
        kept = _samples(_decision(np.where(missing, np.nan, REWARDS)))
        weighted += probability * gradient(kept)
        plain += probability * gradient([replace(sample, weight=1.0) for sample in kept])
    return {"full": full, "weighted": weighted, "plain": plain}


def test_expected_gradient_is_that_without_failures(tmp_path: Path) -> None:
    """Through the real loss and backward pass: no sampling error, only rounding."""
    model = write_model(tmp_path / "model", num_hidden_layers=2, hidden_size=32, intermediate_size=48)
    found = run_ranks(_enumerate, 1, model, timeout_s=300)[0]
    scale = np.linalg.norm(found["full"])
    assert scale > 1e-3
    assert np.linalg.norm(found["weighted"] - found["full"]) < 1e-10 * scale
    assert np.linalg.norm(found["plain"] - found["full"]) > 0.1 * scale


@pytest.mark.parametrize("advantage", ["rloo", "group_mean", "group_std"])
def test_expected_gradient_at_five_percent(advantage: str) -> None:
    """Groups of 8 with 5 % failures, drawn: a projection of the gradient is within 3 standard errors of the true one,
    without weights it is 5 % too short; and nothing is sampled again."""
    rng = np.random.default_rng(0)
    rewards = (rng.random((16, 8)) < np.linspace(0.1, 0.9, 16)[:, None]).astype(float)
    gradients = rng.normal(size=rewards.size) + 2.0 * (rewards - rewards.mean()).ravel()

    def projected(decision: TrainSelection, weight: np.ndarray) -> float:
        return float((weight * decision.advantages / decision.denominator) @ gradients)

    truth = projected(full := _decision(rewards, advantage), full.weight)
    weighted, plain = [], []
    for _ in range(600):
        missing = rng.random(rewards.shape) < 0.05
        decision = _decision(np.where(missing, np.nan, rewards), advantage, by_chance=missing)
        weighted.append(projected(decision, decision.weight) / truth)
        plain.append(projected(decision, decision.kept.astype(float)) / truth)
    error = np.std(weighted) / np.sqrt(len(weighted))
    assert error < 0.004 and abs(np.mean(weighted) - 1.0) < 3 * error + (0.003 if advantage == "group_std" else 0.0)
    assert abs(np.mean(plain) - 1.0) > 5 * error


def test_what_may_depend_on_the_answer_is_labelled_and_sized() -> None:
    """Missing long wrong answers: biased, with the mates' rewards and the length that is known. One kind by chance does
    not make it better, and a setting that ends completions makes every step biased."""
    rewards, lengths = np.tile([0.0, 1.0, 1.0, 0.0], (4, 1)), np.tile([90, 5, 6, 7], (4, 1))
    missing = np.zeros(rewards.shape, bool)
    missing[:2, 0] = True
    decision = _decision(np.where(missing, np.nan, rewards), by_chance=np.eye(4, dtype=bool), lengths=lengths)
    [row] = [row for row in decision.ledger if row.name == "rollout/missing"]
    assert row.label == "biased" and row.kept_fraction == 14 / 16 and "; 1 may be missing" in row.note
    # one of four in one of four groups, as if it never came, and the three that stand for it
    assert row.bias_estimate is not None and 0.1 < row.bias_estimate < 0.6
    assert decision.metrics["rollout/missing_count"] == 2 and decision.metrics["rollout/missing_biased_count"] == 1
    assert decision.metrics["rollout/missing_reward_mean"] == pytest.approx(2 / 3)
    assert decision.metrics["rollout/missing_tokens_mean"] == 90
    assert not any(row.name == "rollout/missing" for row in _decision(rewards).ledger)


def test_groups_without_any_are_made_up_for_and_are_no_visit() -> None:
    """Of four groups one has none and one has one: the others count twice, and the history learns of those alone."""
    rewards = np.array([[1.0, 0.0, 1.0], [np.nan] * 3, [0.0, np.nan, np.nan], [0.0, 0.0, 1.0]])
    unfinished = np.isnan(rewards)
    config = Config()
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 4, 3
    selector = Selector(config, 4)
    drawn = selector.begin(1)
    lengths = np.where(unfinished, 0, 6)
    decision = selector.finish(Rollouts(rewards, lengths, np.ones((4, 3)), unfinished=unfinished), 1)
    assert decision.missing_weight[[0, 3]].tolist() == [2.0, 2.0]
    assert not decision.kept.reshape(4, 3)[[1, 2]].any() and np.isfinite(decision.denominator).all()
    assert decision.counts.tokens_generated == 6 * 7
    selector.feedback(StepCost(1, 1.0, 1.0, 0.1))
    history = selector.state_dict()["prompt"]["history"]
    assert history["visits"][drawn.prompt_index].tolist() == [1, 0, 0, 1]
    assert history["tokens"][drawn.prompt_index[[0, 3]]].tolist() == [6, 6], "what was not sampled is not short"
