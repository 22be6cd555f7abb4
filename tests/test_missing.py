"""Missing completions cost themselves: what is left stands for them, and what it cannot stand for is labelled."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import urllib.error
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.engines.stub import Asked, StubServers, answer_to
from support.fake_fleet import World, answered, groups, work_of
from support.job import read_metrics
from support.killing import run_whole
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model

from dppo_megatron.algorithms.objectives import make_objective
from dppo_megatron.config.objective import CorrectionConfig, ObjectiveConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.pruning.interface import StepCost
from dppo_megatron.rewards import functions
from dppo_megatron.rollout.client.buffer import BufferedGroup, CompletionBuffer
from dppo_megatron.rollout.servers.dispatch import dispatch
from dppo_megatron.rollout.servers.wire import Event, Submit
from dppo_megatron.selection import Rollouts, Selector, TrainSelection
from dppo_megatron.types import TrainSample

K, G = 2, 3
REWARDS = np.array([[1.0, 0.0, 0.5], [0.0, 0.0, 1.0]])
LENGTHS = np.array([[5, 9, 3], [4, 8, 6]])


def _decision(
    rewards: np.ndarray,
    advantage: str = "rloo",
    pruned_by: int | None = None,
    lost_share: float = 0.0,
    age: int = 0,
    objective: Mapping[str, Any] = MappingProxyType({}),
    after_tokens: int = 0,
    **more: np.ndarray,
) -> TrainSelection:
    """Of one step; `pruned_by` is the seed with which half of the completions are dropped, `lost_share` the groups that
    earlier steps have lost by chance, `age` of its weights; `after_tokens` is the setting of that name."""
    count, size = rewards.shape
    config = Config(objective=ObjectiveConfig(**objective))
    config.rollout.async_steps, config.rollout.engine = age, "vllm"
    config.pruning.early_stop.after_tokens = after_tokens
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = count, size
    config.objective.advantage, config.objective.normalization = advantage, "constant"
    config.pruning.prompt.method = config.pruning.completion.method = "none"
    if pruned_by is not None:
        config.seed, pruning = pruned_by, config.pruning.completion
        pruning.method, pruning.rate, pruning.warmup_steps, pruning.max_design_effect = "dppo", 0.5, 0, 0.0
    selector = Selector(selection_settings(config), count)
    selector.load_state_dict(
        selector.state_dict() | {"missing": {"lost_share": (lost_share,), "known": "ratio" if lost_share else ""}}
    )
    selector.begin(1)
    lengths = more.pop("lengths", np.resize(LENGTHS, rewards.shape))
    return selector.finish(Rollouts(rewards, lengths, np.ones(rewards.shape), **more), 1)


RATE = 0.3
LOST = 3 * RATE**2 * (1 - RATE) + RATE**3
"""Of groups of 3, those with fewer than two left, at that rate: what a long run would have seen."""


def _patterns() -> Iterator[tuple[float, np.ndarray]]:
    """Every way in which completions of REWARDS can be missing, and how likely."""
    for pattern in itertools.product((False, True), repeat=K * G):
        missing = np.array(pattern).reshape(K, G)
        yield RATE ** missing.sum() * (1 - RATE) ** (~missing).sum(), missing


@pytest.mark.parametrize("advantage", ["rloo", "group_mean"])
def test_expected_coefficients_are_those_without_failures(advantage: str) -> None:
    """Over all 64 patterns, at 30 % failures: weight times advantage over divisor, to rounding."""

    def coefficients(decision: TrainSelection) -> np.ndarray:
        return decision.kept * decision.weight * decision.advantages / decision.denominator

    full = coefficients(_decision(REWARDS, advantage))
    expected, unweighted = np.zeros(K * G), np.zeros(K * G)
    for probability, missing in _patterns():
        decision = _decision(np.where(missing, np.nan, REWARDS), advantage, lost_share=LOST, by_chance=missing)
        expected += probability * coefficients(decision)
        unweighted += probability * decision.kept * decision.advantages / decision.denominator
        assert not decision.unforeseen
        assert [row.label for row in decision.ledger if row.name == "rollout/missing"] == ["ratio"], "in every pattern"
    np.testing.assert_allclose(expected, full, atol=1e-14)
    assert np.linalg.norm(unweighted - full) > 0.2 * np.linalg.norm(full), "the same enumeration sees missing weights"


def _label(decision: TrainSelection) -> str:
    return next(row.label for row in decision.recorded_ledger if row.name == "rollout/missing")


@pytest.mark.parametrize("advantage", ["rloo", "group_mean", "posterior_loo", "group_std"])
def test_the_label_says_whether_fewer_have_the_same_gradient(advantage: str) -> None:
    """Of a prompt that is seldom right and of one that is so half the time: all answers of a group of four, 30 % of
    them missing. Where each keeps another share of its gradient, the direction of their sum is another."""
    patterns = np.array(list(itertools.product((0.0, 1.0), repeat=4)))
    lost_share = 4 * RATE**3 * (1 - RATE) + RATE**4
    full, fewer = np.zeros((16, 4)), np.zeros((16, 4))
    for which, rewards in enumerate(patterns):
        full[which] = _decision(rewards[None], advantage).advantages
        for missing in patterns > 0:
            seen = np.where(missing, np.nan, rewards)[None]
            decision = _decision(seen, advantage, lost_share=lost_share, by_chance=missing[None])
            fewer[which] += np.prod(np.where(missing, RATE, 1 - RATE)) * decision.weight * decision.advantages
    shares = []
    for rate in (0.05, 0.5):
        score = (patterns - rate) * np.prod(np.where(patterns > 0, rate, 1 - rate), axis=1, keepdims=True)
        shares.append(float((fewer * score).sum() / (full * score).sum()))
    same = max(abs(share - 1.0) for share in shares) < 1e-12
    assert same or abs(shares[0] - shares[1]) > 0.03
    one = _decision(np.array([[np.nan, 1.0, 0.0, 0.0]]), advantage, by_chance=np.eye(4, dtype=bool)[:1])
    [row] = one.unforeseen
    assert (row.label, row.bias_estimate) == (("ratio", 0.0) if same else ("biased", None))
    assert _label(decision) == row.label


@pytest.mark.parametrize(
    ("age", "objective", "label"),
    [
        (0, {"updates_per_step": 2}, "biased"),
        (0, {"function": "examples.custom_loss:soft_gate"}, "biased"),
        (1, {}, "biased"),
        (1, {"correction": CorrectionConfig("sequence", max_ratio=1e9)}, "ratio"),
        (1, {"correction": CorrectionConfig("token", max_ratio=1.1)}, "ratio"),
        (1, {"correction": CorrectionConfig("token", max_ratio=1.1), "updates_per_step": 2}, "biased"),
        (1, {"loss": "cispo"}, "ratio"),
    ],
)
def test_a_loss_that_is_not_linear_sees_how_many_are_left(age: int, objective: Mapping[str, Any], label: str) -> None:
    missing = np.array([[True, False, False], [False] * 3])
    seen = np.where(missing, np.nan, REWARDS)
    assert _label(_decision(seen, by_chance=missing, age=age, objective=objective)) == label


def test_one_lost_among_those_that_may_be_stopped_early_is_biased() -> None:
    """Though by chance: which of those that were stopped would have had no reward is not known."""
    missing = np.eye(K, G, dtype=bool)
    seen, ended = np.where(missing, np.nan, REWARDS), np.ones((K, G))
    assert _label(_decision(seen, by_chance=missing)) == "ratio"
    assert _label(_decision(seen, by_chance=missing, after_tokens=8, stands_for=ended)) == "biased"


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
    for probability, missing in _patterns():
        kept = _samples(_decision(np.where(missing, np.nan, REWARDS), lost_share=LOST))
        if not kept:
            continue
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


@pytest.mark.parametrize(
    ("advantage", "prunes"), [("rloo", False), ("rloo", True), ("group_mean", False), ("group_std", False)]
)
def test_expected_gradient_at_five_percent(advantage: str, prunes: bool) -> None:
    """Groups of 8 with 5 % failures, drawn: a projection of the gradient is within 3 standard errors of the true one,
    with half of what is left pruned too; without these weights it is 5 % too short. Nothing is sampled again."""
    rng = np.random.default_rng(0)
    rewards = (rng.random((16, 8)) < np.linspace(0.1, 0.9, 16)[:, None]).astype(float)
    gradients = rng.normal(size=rewards.size) + 2.0 * (rewards - rewards.mean()).ravel()

    def projected(decision: TrainSelection, weight: np.ndarray) -> float:
        return float((weight * decision.advantages / decision.denominator) @ gradients)

    truth = projected(full := _decision(rewards, advantage), full.weight)
    weighted, plain = [], []
    for draw in range(600):
        missing = rng.random(rewards.shape) < 0.05
        seed = draw if prunes else None
        decision = _decision(np.where(missing, np.nan, rewards), advantage, seed, by_chance=missing)
        assert (decision.counts.completions_trained < 100) == prunes
        weighted.append(projected(decision, decision.weight) / truth)
        plain.append(projected(decision, decision.weight / np.repeat(decision.missing_weight, 8)) / truth)
    error = np.std(weighted) / np.sqrt(len(weighted))
    assert error < 0.012 and abs(np.mean(weighted) - 1.0) < 3 * error + (0.003 if advantage == "group_std" else 0.0)
    assert abs(np.mean(plain) - 1.0) > 3 * error


def test_what_may_depend_on_the_answer_is_labelled_and_sized() -> None:
    """Missing long wrong answers: biased, with the mates' rewards and the length that is known. One kind by chance does
    not make it better, and a setting that ends completions makes every step biased."""
    rewards, lengths = np.tile([0.0, 1.0, 1.0, 0.0], (4, 1)), np.tile([90, 5, 6, 7], (4, 1))
    missing = np.zeros(rewards.shape, bool)
    missing[:2, 0] = True
    decision = _decision(np.where(missing, np.nan, rewards), by_chance=np.eye(4, dtype=bool), lengths=lengths)
    [row] = [row for row in decision.recorded_ledger if row.name == "rollout/missing"]
    assert row.label == "biased" and row.kept_fraction == 14 / 16 and "; 1 may be missing" in row.note
    assert decision.metrics["rollout/missing_count"] == 2 and decision.metrics["rollout/missing_biased_count"] == 1
    assert decision.metrics["rollout/missing_reward_mean"] == pytest.approx(2 / 3)
    assert decision.metrics["rollout/missing_tokens_mean"] == 90
    assert not any(row.name == "rollout/missing" for row in _decision(rewards).recorded_ledger)


@pytest.mark.parametrize("failing", ["at random", "those that end late"])
def test_by_chance_is_tested_against_length(failing: str) -> None:
    """A judge that is down takes no call. If it goes down towards the end of each step, those that come then are long
    ones: after some steps that is believed no longer, and every step after is labelled biased. The same number at
    random stays what it was said to be."""
    config = Config()
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 8, 4
    config.pruning.prompt.method = config.pruning.completion.method = "none"
    config.objective.advantage = "rloo"
    selector, rng, labels = Selector(selection_settings(config), 8), np.random.default_rng(5), []
    for step in range(1, 41):
        selector.begin(step)
        lengths = rng.integers(1, 500, (8, 4))
        late = rng.random((8, 4)) < 0.2 if failing == "at random" else lengths > np.quantile(lengths, 0.8)
        rewards = np.where(late, np.nan, (rng.random((8, 4)) < 0.5).astype(float))
        decision = selector.finish(Rollouts(rewards, lengths, np.ones((8, 4)), by_chance=late), step)
        selector.feedback(StepCost(step, 1.0, 1.0, 0.1))
        labels += [(row.label, row.note) for row in decision.ledger if row.name == "rollout/missing"]
    assert len(labels) == 39 and labels[0][0] == "ratio"
    if failing == "at random":
        assert {label for label, _ in labels} == {"ratio"}
    else:
        assert labels[-1][0] == "biased" and "by tokens" in labels[-1][1]
        assert decision.metrics["rollout/missing_biased_count"] == decision.metrics["rollout/missing_count"] > 0


def test_a_sets_groups_stand_for_its_own() -> None:
    """One of two sets has its judge down in each second step: its groups count twice when they are there, the other's
    once. All sets' share would have made the other set stand for it for good."""
    config = Config()
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 8, 4
    config.pruning.prompt.method = config.pruning.completion.method = "none"
    config.objective.normalization = "constant"
    selector = Selector(selection_settings(config), 8, set_sizes={"a": 4, "b": 4})
    weights = []
    for step in range(1, 101):
        prompts = selector.begin(step).prompt_index
        gone = np.repeat((prompts >= 4)[:, None] & (step % 2 == 0), 4, axis=1)
        rewards = np.where(gone, np.nan, np.tile([0.0, 1.0, 1.0, 0.0], (8, 1)))
        decision = selector.finish(Rollouts(rewards, np.full((8, 4), 9), np.ones((8, 4)), by_chance=gone), step)
        selector.feedback(StepCost(step, 1.0, 1.0, 0.1))
        counted = np.where(gone.any(axis=1), 0.0, decision.missing_weight)
        weights.append([counted[prompts < 4].sum(), counted[prompts >= 4].sum()])
    assert np.mean(weights[50:], axis=0).tolist() == pytest.approx([4.0, 4.0], rel=0.06)


@pytest.mark.parametrize(
    ("sets", "kept"),
    [
        ({"a": 3, "b": 5}, True),
        ({"b": 5, "a": 3}, False),
        ({"a": 5, "b": 3}, False),
        ({"a": 2, "b": 3, "c": 3}, False),
        ({"all": 8}, False),
    ],
)
def test_a_resume_with_other_sets_forgets_what_was_each_sets(sets: dict[str, int], kept: bool) -> None:
    """`checkpoint.may_change` permits sets of the same total: a set takes no other's share, nor its epoch's order."""
    config = Config()
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 2, 4

    def selector(of: dict[str, int]) -> Selector:
        weights = dict.fromkeys(of, 1.0)
        settings = replace(selection_settings(config), order="easy_first", order_by="pass_rate", set_weights=weights)
        return Selector(settings, 8, set_sizes=of)

    def step(one: Selector, number: int) -> None:
        prompts = one.begin(number).prompt_index
        gone = np.repeat(prompts[:, None] >= 3, 4, axis=1)
        rewards = np.where(gone, np.nan, [0.0, 1.0, 1.0, 0.0])
        one.finish(Rollouts(rewards, np.full((2, 4), 9), np.ones((2, 4))), number)
        one.feedback(StepCost(number, 1.0, 1.0, 0.1))

    first = selector({"a": 3, "b": 5})
    step(first, 1)
    state = first.state_dict()
    share, known = state["missing"]["lost_share"], state["missing"]["known"]
    assert share[1] > share[0] == 0.0 and known == "biased" and set(state["epochs"][0]) == {0, 1}
    second = selector(sets)
    second.load_state_dict(state)
    again = second.state_dict()
    assert again["missing"] == {"lost_share": share if kept else (0.0,) * len(sets), "known": known}
    assert (again["epochs"] == state["epochs"]) == kept
    for number in range(2, 10):
        step(second, number)


def test_more_lost_groups_than_can_be_stood_for_are_biased() -> None:
    """The share that is made up for ends at a half; beyond it the step's gradient is too short, and is called so."""
    for share, label in ((0.5, "ratio"), (0.6, "biased")):
        decision = _decision(REWARDS, lost_share=share)
        assert [row.label for row in decision.ledger if row.name == "rollout/missing"] == [label]
        assert decision.missing_weight.tolist() == [2.0, 2.0]


def test_what_fails_after_a_refused_call_is_not_by_chance() -> None:
    """A refused call is, also as requests and urllib wrap it; a fallback that cannot read the completion is not."""

    def failure(*raised: BaseException) -> bool:
        error: BaseException | None = None
        for one in raised:
            one.__context__, error = error, one
        return functions._was_never_sent(error)

    refused = ConnectionRefusedError(111, "refused")
    assert failure(refused) and failure(ConnectionRefusedError(), urllib.error.URLError("refused"))
    assert not failure(ConnectionRefusedError(), ValueError("no number in the completion"))
    assert not failure(ConnectionRefusedError(), TimeoutError("the second call"))


@pytest.mark.parametrize("seed", range(5))
def test_the_size_is_that_of_the_bias(seed: int) -> None:
    """A grader that fails on the longest of each third group, always: within a factor 2 of how far the coefficients of
    orthogonal gradients are off, although what the missing ones would have been given is not known."""
    rng = np.random.default_rng(seed)
    rewards, lengths = (rng.random((24, 8)) < 0.5).astype(float), rng.integers(1, 100, (24, 8))
    missing = (lengths == lengths.max(axis=1, keepdims=True)) & (np.arange(24) % 3 == 0)[:, None]
    full = _decision(rewards, lengths=lengths)
    decision = _decision(np.where(missing, np.nan, rewards), lengths=lengths)
    [row] = [row for row in decision.recorded_ledger if row.name == "rollout/missing"]
    off = (decision.weight * decision.advantages / decision.denominator) - full.advantages / full.denominator
    true = np.linalg.norm(off) / np.linalg.norm(full.advantages / full.denominator)
    assert row.label == "biased" and row.bias_estimate is not None and 0.5 < row.bias_estimate / true < 2


@pytest.mark.parametrize("size", [2, 4])
def test_the_size_counts_groups_that_are_lost_by_chance(size: int) -> None:
    """Of 30 % of the completions no reward comes, in a first step, where no earlier one has lost any: groups of 2 lose
    0.51 of the gradient, those of 4 lose 0.08, and are told so."""
    rng, told, coefficients = np.random.default_rng(0), [], []
    rewards = np.tile(np.arange(size) % 2.0, (16, 1))
    for _ in range(300):
        missing = rng.random(rewards.shape) < 0.3
        decision = _decision(np.where(missing, np.nan, rewards), by_chance=missing)
        [row] = [row for row in decision.recorded_ledger if row.name == "rollout/missing"]
        assert row.label == "ratio" and row.bias_estimate is not None
        told.append(row.bias_estimate)
        coefficients.append(decision.weight * decision.advantages)
    full = _decision(rewards).advantages
    true = 1.0 - np.mean(coefficients, axis=0) @ full / (full @ full)
    lost = 0.3**size + size * 0.7 * 0.3 ** (size - 1)
    assert true == pytest.approx(lost, abs=0.02) and np.mean(told) == pytest.approx(lost, abs=0.02)


def test_groups_without_any_are_made_up_for_and_are_no_visit() -> None:
    """Of four groups one has none and one has one: from the next step on the others count 1 / (1 - the running share),
    and the history learns of those alone. The first step's ledger cannot have known, the next ones' do."""
    rewards = np.array([[1.0, 0.0, 1.0], [np.nan] * 3, [0.0, np.nan, np.nan], [0.0, np.nan, 1.0]])
    unfinished = np.isnan(rewards)
    config = Config()
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 4, 3
    selector = Selector(selection_settings(config), 4)
    drawn = selector.begin(1)
    lengths = np.where(unfinished, 0, 6)
    decision = selector.finish(Rollouts(rewards, lengths, np.ones((4, 3)), unfinished=unfinished), 1)
    assert decision.missing_weight[[0, 3]].tolist() == [1.0, 1.5]
    assert not decision.kept.reshape(4, 3)[[1, 2]].any() and np.isfinite(decision.denominator).all()
    assert decision.counts.tokens_generated == 6 * 6
    selector.feedback(StepCost(1, 1.0, 1.0, 0.1))
    history = selector.state_dict()["prompt"]["history"]
    assert history["visits"][drawn.prompt_index].tolist() == [1, 0, 0, 1]
    assert selector.state_dict()["missing"] == {"lost_share": (pytest.approx(0.05),), "known": "biased"}
    assert [row.name for row in decision.unforeseen] == ["rollout/missing"]
    assert "rollout/missing" not in [row.name for row in decision.ledger]
    selector.begin(2)
    nothing = selector.finish(Rollouts(np.ones((4, 3)), np.full((4, 3), 6), np.ones((4, 3))), 2)
    assert [row.label for row in nothing.ledger if row.name == "rollout/missing"] == ["biased"]
    assert not nothing.unforeseen and nothing.missing_weight.tolist() == pytest.approx([1 / 0.95] * 4)
    assert history["tokens"][drawn.prompt_index[[0, 3]]].tolist() == [6, 6], "what was not sampled is not short"


def test_mean_rewards_count_every_group_once() -> None:
    """However few rewards are left of it, one included; the other groups of its training set count for one that has
    none, and not those of all sets: the mean would move to the set whose judge is up."""
    for _, missing in _patterns():
        if not missing.all():
            seen = np.where(missing, np.nan, REWARDS)
            mean = _decision(seen, lost_share=LOST).metrics["reward/mean"]
            assert mean == pytest.approx(np.nanmean(seen[~missing.all(axis=1)], axis=1).mean())
    config = Config()
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 8, 3
    for lost_share, gone in itertools.product(((0.0, 0.0), (0.5, 0.0)), (2, 4)):
        selector = Selector(selection_settings(config), 8, set_sizes={"a": 4, "b": 4})
        past = {"lost_share": lost_share, "known": "biased" if max(lost_share) else ""}
        selector.load_state_dict(selector.state_dict() | {"missing": past})
        prompt = selector.begin(1).prompt_index
        rewards = np.repeat(np.where(prompt < gone, np.nan, prompt >= 4)[:, None], 3, axis=1)
        decision = selector.finish(Rollouts(rewards, np.full((8, 3), 6), np.ones((8, 3))), 1)
        assert decision.metrics["reward/mean"] == pytest.approx(0.5 if gone == 2 else 1.0), "or nothing is known of a"


def test_the_standard_error_of_mean_rewards_is_that_of_groups() -> None:
    """The textbook's s / sqrt(n) of the groups' means, and nothing for a single group."""
    config = Config()
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 12, 3
    for rewards in (np.random.default_rng(1).random((12, 3)), np.full((12, 3), np.nan)):
        rewards[0] = 1.0
        selector = Selector(selection_settings(config), 12)
        selector.begin(1)
        decision = selector.finish(Rollouts(rewards, np.full((12, 3), 6), np.ones((12, 3))), 1)
        expected = rewards.mean(axis=1).std(ddof=1) / np.sqrt(12)
        assert decision.metrics["reward/mean_se"] == pytest.approx(expected, rel=1e-12, nan_ok=True)


# ------------------------------------------------------------------------------------------------------ slow prompts


def _trained_from_a_queue(seconds: list[float], updates: int, most_stale: int) -> list[int]:
    """How often each prompt is trained where a slot a prompt generates without end, an update takes the first 4 groups
    that are done, and groups begun more than `most_stale` updates ago are thrown away."""
    trained, ready, version = [0] * len(seconds), list[int](), 0
    running = [(took, prompt, 0) for prompt, took in enumerate(seconds)]
    while version < updates:
        now, prompt, began = heapq.heappop(running)
        if version - began <= most_stale:
            ready.append(prompt)
        if len(ready) == 4:
            trained = [count + ready.count(one) for one, count in enumerate(trained)]
            version, ready = version + 1, []
        heapq.heappush(running, (now + seconds[prompt], prompt, version))
    return trained


def test_slow_prompts_are_not_starved() -> None:
    """Two of eight prompts take ten times as long. From a queue with a bound on staleness they are never trained; here
    a step waits for its own groups, so each is trained as often as the others."""
    seconds = [1.0] * 6 + [10.0] * 2
    starved = _trained_from_a_queue(seconds, updates=60, most_stale=1)
    assert starved[6:] == [0, 0] and min(starved[:6]) > 20
    world, since = World(), dict[int, float]()

    def reply(ask: Submit) -> Event | None:
        held = world.now - since.setdefault(ask.ticket, world.now)
        return answered(ask) if held >= seconds[ask.index] else None

    world.reply = reply
    fleet, trained = world.fleet(2), [0] * 8
    for _ in range(60):
        for index in dispatch(fleet, work := work_of(groups(*[8] * 8))):
            trained[index] += 1
        assert not work.lost
    assert trained == [60] * 8


def test_what_is_asked_for_again_goes_where_its_group_goes() -> None:
    """To the same rank of three, behind what it replaces, whichever groups have landed in between."""
    held = CompletionBuffer()
    for ticket, index in enumerate([4, 0, 2, 1, 3, 2, 0]):
        held.put(ticket, BufferedGroup(index, []))
        held.mark_ready(ticket, [str(ticket)], ())
    shares = [[(one.index, *one.texts) for one in held.take(share, 3)] for share in range(3)]
    assert shares == [[(1, "3"), (4, "0")], [(0, "1"), (0, "6"), (3, "4")], [(2, "2"), (2, "5")]]


# ------------------------------------------------------------------------------------------------ through the loop


@pytest.mark.slow
def test_failing_servers_cost_what_failed(files: Path, tmp_path: Path) -> None:
    """A run on a server that refuses one group of each step, never ends one completion of another, and aborts some:
    those are asked for again alone and are what a good server would have said; the others are missing, said and sized.
    """
    aborted, refused = set[int](), set[str]()
    right: dict[tuple[int, int, int], list[int]] = {}

    async def failing(one: Asked) -> None:
        answer, body = answer_to(one.body, one.version), one.body
        step, prompt, first = body["request_id"].split(".")[0].split("-")
        if int(step) and int(prompt) % 8 == 1:
            refused.add(step)
            return await one.reply("too long", "400 Bad Request")
        late = int(step) and int(prompt) % 8 == 2
        for choice in answer["choices"]:
            seed = body["sampling_params"]["seed"] + choice["index"]
            right[int(step), int(prompt), int(first) + choice["index"]] = choice["token_ids"]
            if (late and choice["index"] == 0) or (seed % 5 == 0 and seed not in aborted):
                aborted.add(seed)
                choice |= {
                    "token_ids": [],
                    "logprobs": {"content": []},
                    "weight_versions": [],
                    "finish_reason": "abort",
                }
        while late and not any(body["request_id"] in ids for ids in stubs.aborted.get("a", ())):
            await asyncio.sleep(0.05)
        await one.reply(json.dumps(answer))

    with StubServers({"a": failing}) as stubs:
        where = {"rollout__engine": "vllm", "rollout__servers__endpoints": f"[{stubs.url('a')}]"}
        extra = where | {
            "rollout__sync__verify_every": 0,
            "rollout__limits__request_timeout_s": 3,
            "rollout__prompts_per_step": 8,
            "reward__function": "support.faulty:length_parity",
            "reward__min_self_consistency": 0,
            "reward__max_failed_share": 0.5,
            "data__eval_paths": "{}",
            "sft__steps": 0,
            "steps": 2,
        }
        run_whole(files, tmp_path / "run", 1, extra)
    rows = read_metrics(tmp_path / "run")[1:]
    samples = pd.read_parquet(tmp_path / "run" / "samples")
    assert len(rows) == 2 and refused
    for row in rows:
        [entry] = [entry for entry in row["prune/ledger"] if entry["name"] == "rollout/missing"]
        assert entry["label"] == "biased" and 0 < entry["bias_estimate"] < 1
        assert row["rollout/missing_biased_count"] == row["rollout/missing_count"] > 0 == row["reward/failed_count"]
        assert row["prune/completions_trained"] > 0
    gone = samples[samples["why"] == "missing"]
    assert len(gone) == sum(row["rollout/missing_count"] for row in rows)
    assert gone["reward"].isna().all() and gone["correct"].isna().all() and set(gone["finish_reason"]) == {"abort"}
    assert any("too long" in why for why in gone["reward_why"]) and not gone["kept"].any()
    there = samples[samples["why"] != "missing"]
    assert there["reward"].notna().all() and len(aborted) > 2
    for one in there.itertuples():
        assert list(one.token_ids) == right[one.step, one.prompt_index, one.completion]
