"""Slack filling: unbiased to rounding, never less than the rate keeps, and rarely one round of micro-batches more."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.config.pruning import CompletionPruningConfig
from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.packing.planner import TokenCapacity, plan_microbatches
from dppo_megatron.pruning import CompletionBatch, make_completion_policy
from dppo_megatron.pruning.completion_dppo import DppoCompletionPolicy, fill_slack
from dppo_megatron.pruning.designs import Draw, WaterFiller, design_effect, systematic
from dppo_megatron.selection.arrays import merge
from dppo_megatron.types import FloatArray, TrainSample

CAP = 20480


RATE_75 = CompletionPruningConfig(rate=0.75, max_design_effect=0.0)


def make_batch(groups: int, size: int, seed: int) -> CompletionBatch:
    """Binary rewards, log-normal lengths, prompts of 100 tokens."""
    rng = np.random.default_rng(seed)
    rewards = (rng.random((groups, size)) < rng.uniform(0.1, 0.9, groups)[:, None]).astype(np.float64)
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)).ravel()
    lengths = np.clip(rng.lognormal(np.log(2500), 0.9, groups * size), 64, 16000).astype(np.int64)
    return CompletionBatch(
        prompt_index=np.repeat(np.arange(groups), size),
        completion_index=np.tile(np.arange(size), groups),
        group=np.repeat(np.arange(groups), size),
        rewards=rewards.ravel(),
        advantages=advantages,
        lengths=lengths,
        logit_grad_norm=0.4 * np.sqrt(lengths),
        denominator=groups * size * lengths.astype(np.float64),
        prompt_weight=np.ones(groups * size),
        num_nominal=groups * size,
        tokens=lengths + 100,
    )


def capacity(data_parallel: int = 8, cap: int = CAP) -> TokenCapacity:
    return TokenCapacity(PackingLayout(data_parallel=data_parallel), cap)


class _DrawAt(DppoCompletionPolicy):
    """The policy with the one random number of a systematic draw given."""

    start = 0.0

    def _draw(self, batch: CompletionBatch, pi: FloatArray, counters: tuple[int, int, int]) -> Draw:
        return systematic(pi, order=np.arange(len(pi)), start=self.start)


@pytest.mark.parametrize(
    "settings_", [{}, {"cost_aware": True}, {"max_design_effect": 1.1}, {"min_inclusion_prob": 0.2}]
)
def test_weights_are_exactly_unbiased(settings_: dict[str, Any]) -> None:
    """Integrate the systematic start over [0, 1): the mean weight is 1 for every completion that carries gradient.

    The draw is constant between the fractional parts of the cumulated probabilities, so the sum over those intervals
    is the integral itself.
    """
    batch = make_batch(8, 8, seed=1)
    policy = _DrawAt(CompletionPruningConfig(rate=0.75, **settings_), seed=0, total_steps=10)
    room = capacity(data_parallel=4)
    first = policy.prune(batch, step=0, capacity=room)
    assert first.metrics["slack_filled_tokens"] > 0
    pi = first.inclusion_prob
    ends = np.unique(np.concatenate([[0.0, 1.0], np.cumsum(pi[pi < 1]) % 1.0]))
    mean = np.zeros(len(pi))
    for left, right in itertools.pairwise(ends):
        policy.start = (left + right) / 2
        selection = policy.prune(batch, step=0, capacity=room)
        assert np.array_equal(selection.inclusion_prob, pi)
        mean += (right - left) * selection.weight
    assert np.abs(mean[batch.advantages != 0] - 1.0).max() < 1e-9
    assert not mean[batch.advantages == 0].any()


def test_probabilities_do_not_depend_on_the_draw() -> None:
    """Other seeds and steps draw others with the same probabilities."""
    batch = make_batch(16, 8, seed=2)
    selections = [
        make_completion_policy(RATE_75, seed=seed, total_steps=10).prune(batch, step=step, capacity=capacity())
        for seed in range(3)
        for step in range(3)
    ]
    assert all(np.array_equal(s.inclusion_prob, selections[0].inclusion_prob) for s in selections)
    assert len({tuple(s.kept) for s in selections}) > 1


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rate=st.sampled_from([0.25, 0.5, 0.75, 0.9]),
    data_parallel=st.sampled_from([1, 4, 16, 64]),
    method=st.sampled_from(["dppo", "dppo_auto"]),
    bound=st.sampled_from([0.0, 1.05]),
    cost_aware=st.booleans(),
)
def test_never_keeps_less(
    seed: int, rate: float, data_parallel: int, method: str, bound: float, cost_aware: bool
) -> None:
    """Each probability is at least that without slack; metrics and the design effect's bound follow."""
    batch = make_batch(24, 8, seed)
    config = CompletionPruningConfig(
        method=method, rate=rate, max_design_effect=bound, cost_aware=cost_aware, rollout_cost_ratio=1.0
    )
    plain = make_completion_policy(config, seed=0, total_steps=10).prune(batch, step=1)
    filled = make_completion_policy(config, seed=0, total_steps=10).prune(
        batch, step=1, capacity=capacity(data_parallel)
    )
    assert batch.tokens is not None
    assert (filled.inclusion_prob >= plain.inclusion_prob - 1e-12).all()
    assert filled.metrics["rate_before_slack"] == plain.metrics["rate_effective"]
    added = float(np.sum(batch.tokens * (filled.inclusion_prob - plain.inclusion_prob)))
    assert filled.metrics["slack_filled_tokens"] == pytest.approx(added, abs=1e-6)
    assert filled.growth <= plain.growth + 1e-12
    if not cost_aware or method == "dppo_auto":
        assert filled.inclusion_prob.sum() == pytest.approx(round(filled.inclusion_prob.sum()), abs=1e-6)
    if bound:
        assert filled.growth <= bound + 1e-9


def test_mini_batches_add_up_to_the_step() -> None:
    """Tokens are their sum; a share is that of all rows, of which mini-batches may hold unequally many, or none."""
    tokens, parts = 0.0, []
    for k, groups in enumerate((24, 8, 0)):
        batch, policy = make_batch(groups, 8, seed=k), DppoCompletionPolicy(RATE_75, seed=0, total_steps=10)
        plain = policy.prune(batch, step=0, minibatch=k)
        parts.append(policy.prune(batch, step=0, minibatch=k, capacity=capacity()))
        assert batch.tokens is not None
        tokens += float(np.sum(batch.tokens * (parts[-1].inclusion_prob - plain.inclusion_prob)))
    merged = merge(parts, np.arange(32 * 8))
    assert merged.metrics["slack_filled_tokens"] == pytest.approx(tokens) and tokens > 0
    assert merged.metrics["rate_effective"] == pytest.approx(1.0 - merged.inclusion_prob.mean())
    assert merged.metrics["share_at_one"] == pytest.approx(float(np.mean(merged.inclusion_prob >= 1)))
    assert merge([parts[2]] * 2, np.arange(0)).metrics == parts[2].metrics


def test_switch_and_other_methods() -> None:
    """`fill_slack=false`, and every method that does not read it, decides as without a capacity."""
    batch = make_batch(16, 8, seed=3)
    for config in (CompletionPruningConfig(rate=0.75, fill_slack=False), CompletionPruningConfig(method="cppo")):
        policy = make_completion_policy(config, seed=0, total_steps=10)
        plain, offered = policy.prune(batch, step=1), policy.prune(batch, step=1, capacity=capacity())
        assert np.array_equal(plain.kept, offered.kept) and np.array_equal(plain.weight, offered.weight)
        assert plain.metrics == offered.metrics


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 39), st.floats(0, 4e5))
def test_fills_all_there_is(seed: int, target: int, room: float) -> None:
    """Against every whole budget in turn: the largest that fits, or the given one."""
    rng = np.random.default_rng(seed)
    score, tokens = rng.exponential(size=40), rng.integers(100, 16000, 40)
    filler = WaterFiller(score, 0.01)

    def holds(pi: FloatArray) -> bool:
        return float(np.sum(tokens * pi)) <= room

    filled = fill_slack(filler, filler.solve(target), holds, whole=True)
    fitting = [count for count in range(target, 41) if holds(filler.solve(count))]
    assert filled.sum() == pytest.approx(max(fitting, default=target))


def test_margin_of_independent_draws() -> None:
    """Mean and variance over all 256 outcomes of eight coins give the bound at which `holds` turns."""
    tokens = np.array([100, 900, 40, 333, 512, 7, 250, 800])
    pi = np.array([0.3, 0.9, 0.5, 1.0, 0.05, 0.7, 0.4, 0.6])
    mean = square = 0.0
    for outcome in itertools.product((False, True), repeat=8):
        kept = np.array(outcome)
        probability = float(np.prod(np.where(kept, pi, 1 - pi)))
        mean += probability * tokens[kept].sum()
        square += probability * tokens[kept].sum() ** 2
    bound = mean + 2 * np.sqrt(square - mean**2)
    for cap, fits in ((bound * 1.001, True), (bound * 0.999, False)):
        room = TokenCapacity(PackingLayout(), 10**6, achievable_fill=float(cap) / 10**6)
        assert room.holds(1, tokens, pi, fixed_size=False) == fits


def test_large_samples_do_not_share() -> None:
    """Three samples of 60 % of the cap need three micro-batches, whatever their total."""
    room = TokenCapacity(PackingLayout(), 100)
    tokens, certain = np.array([60, 60, 60]), np.ones(3)
    assert not room.holds(2, tokens, certain, fixed_size=True)
    assert room.holds(3, tokens, certain, fixed_size=True)


@pytest.mark.parametrize("layout", [PackingLayout(data_parallel=16), PackingLayout(4, 2, 2, True, 2, 2)])
def test_one_more_round_is_rare_and_variance_falls(layout: PackingLayout) -> None:
    """Over 60 full batches at 75 % pruned: what was filled still packs into the micro-batches it was filled into."""
    over = filled = 0
    effects: list[tuple[float, float]] = []
    room = TokenCapacity(layout, CAP)
    for seed in range(60):
        batch = make_batch(64, 8, seed)
        assert batch.tokens is not None
        policy = make_completion_policy(RATE_75, seed=seed, total_steps=10)
        plain = policy.prune(batch, step=1)
        selection = policy.prune(batch, step=1, capacity=room)
        if selection.metrics["slack_filled_tokens"] == 0:
            continue
        filled += 1
        count = room.microbatches(batch.tokens, plain.inclusion_prob)
        samples = [
            TrainSample(f"{i}:0", np.zeros(n + 1, np.int64), 1, np.zeros(n, np.float32), 1.0, 1.0, 1.0)
            for i, n in enumerate(batch.tokens[selection.kept].tolist())
        ]
        plan = plan_microbatches(samples, layout=layout, max_tokens_per_microbatch=CAP)
        over += plan.num_microbatches * layout.data_parallel > count
        effects.append((plain.growth, selection.growth))
    assert filled >= 20
    assert over <= 0.1 * filled
    before, after = np.mean(effects, axis=0)
    assert after < before


def test_design_effect_is_of_the_filled_probabilities() -> None:
    """The reported figure is sum(s^2/pi)/sum(s^2) of what was drawn with."""
    batch = make_batch(16, 8, seed=5)
    selection = make_completion_policy(RATE_75, seed=0, total_steps=10).prune(batch, step=1, capacity=capacity())
    score = np.abs(batch.advantages) * batch.logit_grad_norm / batch.denominator
    assert selection.growth == pytest.approx(design_effect(score, selection.inclusion_prob))
    assert selection.metrics["rate_effective"] == pytest.approx(1 - selection.inclusion_prob.mean())


def test_the_example_of_fill_slack() -> None:
    """The numbers of its docstring."""
    filler = WaterFiller(np.array([4.0, 2, 1, 1]), 0.0)
    pi = filler.solve(2.0)
    np.testing.assert_allclose(pi, [1, 0.5, 0.25, 0.25])
    filled = fill_slack(filler, pi, lambda raised: bool(10 * raised.sum() <= 30), whole=True)
    np.testing.assert_allclose(filled, [1, 1, 0.5, 0.5])
