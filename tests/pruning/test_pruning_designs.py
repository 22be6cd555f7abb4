"""Inclusion probabilities are what they are said to be: solved exactly, drawn exactly, and independent of order."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dppo_megatron.pruning.completion_baselines import max_variance_draw
from dppo_megatron.pruning.designs import (
    WaterFiller,
    count_kept,
    design_effect,
    deterministic,
    draw,
    poisson,
    systematic,
)
from dppo_megatron.pruning.scores import budgeted_probabilities, efficient_probabilities
from dppo_megatron.randomness import generator, philox4x32, uniforms

sizes = hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(0.0, 1e6) | st.sampled_from([0.0, 1.0, 2.0]))


def waterfill(size, target, lower=0.0, cost=None):
    """Probabilities of one target."""
    return WaterFiller(size, lower, cost).solve(target)


@given(sizes, st.floats(0.0, 1.0), st.floats(0.0, 0.9), st.integers(0, 10**6))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_waterfill_spends_its_target_within_its_bounds(size, share, floor, seed):
    rng = np.random.default_rng(seed)
    lower = floor * rng.integers(0, 2, len(size))
    cost = rng.uniform(0.1, 10.0, len(size))
    target = share * cost.sum()
    pi = waterfill(size, target, lower, cost)
    support = (size > 0) | (lower > 0)
    assert ((pi >= lower) & (pi <= 1)).all()
    assert (pi[~support] == 0).all()
    most, least = cost[support].sum(), (cost * lower).sum()
    assert (pi * cost).sum() == pytest.approx(min(max(target, least), most), rel=1e-9, abs=1e-9)
    if target >= most:
        assert (pi == support).all()


def test_waterfill_is_proportional_to_size_between_its_bounds():
    compared = 0

    @given(sizes, st.floats(0.0, 1.0), st.integers(0, 10**6))
    @settings(max_examples=100, deadline=None, derandomize=True)
    def between_its_bounds(size, share, seed):
        nonlocal compared
        lower = 0.05 * np.random.default_rng(seed).integers(0, 2, len(size))
        pi = waterfill(size, share * len(size), lower)
        between = (pi > lower + 1e-9) & (pi < 1 - 1e-9) & (size > size.max() * 1e-9)
        if between.sum() > 1:
            levels = pi[between] / (size[between] / size.max())  # sizes as small as subnormals would overflow
            assert levels.max() / levels.min() == pytest.approx(1.0, abs=1e-6)
            compared += 1

    between_its_bounds()
    assert compared > 20


def test_waterfill_is_optimal_among_feasible_perturbations():
    rng = np.random.default_rng(0)
    score, cost, budget = rng.exponential(size=12), rng.uniform(1, 9, 12), 25.0
    best = waterfill(score / np.sqrt(cost), budget, 0.02, cost)
    optimum = (score**2 / best).sum()
    feasible = 0
    for _ in range(2000):
        other = np.clip(best * np.exp(0.1 * rng.normal(size=12)), 0.02, 1.0)
        other = other * min(1.0, budget / (other * cost).sum())
        if (other >= 0.02).all():
            assert (score**2 / other).sum() >= optimum * (1 - 1e-9)
            feasible += 1
    assert feasible > 100


def test_waterfill_raises_elements_without_a_size_last():
    pi = waterfill(np.array([2.0, 1.0, 0.0, 0.0]), 3.0, np.array([0.1, 0.1, 0.2, 0.1]))
    np.testing.assert_allclose(pi, [1.0, 1.0, 2 / 3, 1 / 3])
    np.testing.assert_allclose(waterfill(np.zeros(4), 2.0, 0.1), np.full(4, 0.5))
    assert (waterfill(np.zeros(3), 2.0) == 0).all()
    assert len(waterfill(np.zeros(0), 1.0)) == 0


def test_waterfill_survives_sizes_of_any_scale():
    for scale in (1e-300, 1.0, 1e300):
        np.testing.assert_allclose(waterfill(np.array([1.0, 3.0]) * scale, 1.0), [0.25, 0.75])
    pi = waterfill(np.array([1e-300, 1.0, 1e300]), 1.5, 0.1)
    assert pi.sum() == pytest.approx(1.5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -2.0])
def test_waterfill_names_the_row_of_a_wrong_size(value):
    """Else the row would count as one without gradient: without a floor it would never be kept."""
    with pytest.raises(ValueError, match=rf"size\[1\] = {value}"):
        WaterFiller(np.array([1.0, value]), 0.0)


@given(hnp.arrays(np.float64, st.integers(1, 15), elements=st.floats(0.0, 1.0)), st.randoms())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_systematic_inclusion_probabilities_by_integrating_over_the_start(pi, random):
    order = np.array(random.sample(range(len(pi)), len(pi)))
    middle = pi[order][(pi[order] > 0) & (pi[order] < 1)]
    cuts = np.unique(np.concatenate([[0.0, 1.0], np.cumsum(middle) % 1.0]))
    included, counts = np.zeros(len(pi)), set()
    for low, high in itertools.pairwise(cuts):
        drawn = systematic(pi, order=order, start=(low + high) / 2)
        included += (high - low) * drawn.kept
        if high - low > 1e-9:
            counts.add(int(drawn.kept.sum()))
    np.testing.assert_allclose(included, pi, atol=1e-7)
    assert max(counts) - min(counts) <= 1
    if abs(pi.sum() - round(pi.sum())) > 1e-6:
        assert counts <= {int(np.floor(pi.sum())), int(np.ceil(pi.sum()))}


def test_systematic_keeps_a_fixed_count_when_the_sum_is_whole():
    rng = np.random.default_rng(0)
    for _ in range(200):
        pi = waterfill(rng.exponential(size=50), 17.0, 0.05)
        drawn = systematic(pi, order=rng.permutation(50), start=float(rng.random()))
        assert drawn.fixed_size and drawn.kept.sum() == 17
    for start in (0.0, np.nextafter(1.0, 0.0)):
        assert systematic(np.full(10, 0.1), order=np.arange(10), start=start).kept.sum() == 1


@pytest.mark.parametrize("bad", [-0.1, 1.5, np.nan, np.inf])
def test_probabilities_outside_their_range_are_errors(bad):
    pi = np.array([0.5, bad])
    with pytest.raises(ValueError, match=r"inclusion_prob\[1\]"):
        systematic(pi, order=np.arange(2), start=0.5)
    with pytest.raises(ValueError, match=r"inclusion_prob\[1\]"):
        poisson(pi, uniform=np.zeros(2))


def test_an_unknown_design_is_an_error():
    with pytest.raises(ValueError, match="known: systematic, poisson"):
        draw("bernoulli", np.ones(1), order=np.arange(1), start=0.0, uniform=np.zeros(1))


@pytest.mark.slow
@given(st.lists(st.integers(0, 3), min_size=1, max_size=7), st.integers(0, 7))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_deterministic_probabilities_by_enumerating_the_order_of_ties(values, wanted):
    score = np.array(values, dtype=np.float64)
    n, included, orders = len(score), np.zeros(len(score)), 0
    for permutation in itertools.islice(itertools.permutations(range(n)), 5040):
        drawn = deterministic(score, wanted, uniform=np.array(permutation) / n)
        assert drawn.kept.sum() == min(wanted, n)
        assert not drawn.kept.any() or score[drawn.kept].min() >= score[~drawn.kept].max(initial=-1.0)
        included += drawn.kept
        orders += 1
    np.testing.assert_allclose(included / orders, drawn.inclusion_prob, atol=1e-12)


def test_deterministic_works_group_by_group():
    score = np.array([3.0, 1.0, 2.0, 9.0, 8.0, 7.0])
    drawn = deterministic(score, np.array([1, 2]), uniform=np.zeros(6), group=np.array([0, 0, 0, 1, 1, 1]))
    assert drawn.kept.tolist() == [True, False, False, True, True, False]
    assert deterministic(np.zeros(0), 3, uniform=np.zeros(0)).kept.shape == (0,)


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([0.0, 0.25, 1.0, np.nan]), min_size=1, max_size=6), st.sampled_from([0.0, 0.3, 0.5, 0.8])
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_the_max_variance_subset_by_brute_force(values, rate):
    rewards = np.array(values)
    graded = np.flatnonzero(~np.isnan(rewards))
    wanted = min(count_kept(len(rewards), rate), len(graded))
    included, orders = np.zeros(len(rewards)), 0
    for permutation in itertools.permutations(range(len(rewards))):
        drawn = max_variance_draw(rewards, np.zeros(len(rewards), int), rate, np.array(permutation) / len(rewards))
        assert drawn.kept.sum() == wanted and not drawn.kept[np.isnan(rewards)].any()
        included += drawn.kept
        orders += 1
    np.testing.assert_allclose(included / orders, drawn.inclusion_prob, atol=1e-12)
    if wanted:
        best = max(np.var(rewards[list(subset)]) for subset in itertools.combinations(graded, wanted))
        assert np.var(rewards[drawn.kept]) == pytest.approx(best, abs=1e-12)


def test_counts_avoid_the_floor_trap_of_binary_fractions():
    assert int(160 * (1 - 0.9)) == 15
    assert count_kept(160, 0.9) == 16
    assert [count_kept(5, rate) for rate in (0.5, 0.7, 0.9)] == [3, 2, 1]
    assert int(0.29 * 100) == 28 and count_kept(100, 0.29) == 71
    assert count_kept(10, 0.0) == 10


def test_the_self_tuned_rule_is_a_minimum_of_cost_times_variance():
    rng = np.random.default_rng(1)
    score, cost, fixed = rng.exponential(size=20), rng.uniform(1, 9, 20), 30.0
    pi = efficient_probabilities(score, cost, 0.01, fixed)

    def objective(p):
        return (fixed + (p * cost).sum()) * (score**2 / p).sum()

    best = objective(pi)
    for _ in range(1000):
        assert objective(np.clip(pi * np.exp(0.05 * rng.normal(size=20)), 0.01, 1.0)) >= best * (1 - 1e-9)
    inside = (pi > 0.011) & (pi < 1)
    variance, spent = (score**2 / pi).sum(), fixed + (pi * cost).sum()
    np.testing.assert_allclose(pi[inside], np.sqrt((score**2 / variance) / (cost / spent))[inside], rtol=1e-6)


def test_the_self_tuned_rule_prunes_less_when_more_of_the_step_is_fixed():
    rng = np.random.default_rng(2)
    score, cost = rng.exponential(size=200), rng.uniform(1, 9, 200)
    kept = [efficient_probabilities(score, cost, 0.01, ratio * cost.sum()).sum() for ratio in (0.0, 0.5, 2.0, 1e6)]
    assert kept == sorted(kept) and kept[0] < 60 and kept[-1] > 199
    assert (efficient_probabilities(np.zeros(3), np.ones(3), 0.0, 1.0) == 0).all()


@pytest.mark.parametrize("whole", [True, False])
def test_the_budget_backs_off_to_hold_the_design_effect(whole):
    score = np.random.default_rng(3).exponential(size=100)
    filler = WaterFiller(score, 0.05)
    free = budgeted_probabilities(filler, 20.0, partial(design_effect, score), max_design_effect=0.0, whole=whole)
    bound = budgeted_probabilities(filler, 20.0, partial(design_effect, score), max_design_effect=1.2, whole=whole)
    assert free.sum() == pytest.approx(20.0) and design_effect(score, free) > 1.2
    assert design_effect(score, bound) <= 1.2
    one_less = filler.solve(bound.sum() - 1.0)
    assert design_effect(score, one_less) > 1.2
    if whole:
        assert bound.sum() == pytest.approx(round(bound.sum()))


def test_philox_known_answers():
    """Random123's vectors for philox4x32-10."""

    def words(value):
        return tuple(np.array([value], dtype=np.uint64) for _ in range(4))

    assert [int(w[0]) for w in philox4x32(words(0), 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = [int(w[0]) for w in philox4x32(words(0xFFFFFFFF), 2**64 - 1)]
    assert ones == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_uniform_numbers_belong_to_their_id():
    ids = np.random.default_rng(0).permutation(5000)
    numbers = uniforms(7, "coin", ids, 3)
    np.testing.assert_array_equal(uniforms(7, "coin", np.arange(5000), 3)[ids], numbers)
    np.testing.assert_array_equal(uniforms(7, "coin", ids[:10], 3), numbers[:10])
    for other in (uniforms(8, "coin", ids, 3), uniforms(7, "tie", ids, 3), uniforms(7, "coin", ids, 4)):
        assert (other != numbers).all()
    assert (numbers >= 0).all() and (numbers < 1).all()
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 30  # chi-squared with 9 degrees: P < 5e-4, and the draw is fixed


@pytest.mark.parametrize("count", [65536, 1 << 20])
def test_a_large_draw_has_its_size(count):
    """Rounding does not make a fixed size a random one."""
    rng = np.random.default_rng(0)
    pi = WaterFiller(rng.lognormal(0, 2, count), 0.05).solve(float(count // 3))
    drawn = systematic(pi, order=rng.permutation(count), start=0.3)
    assert drawn.fixed_size and drawn.kept.sum() == drawn.least_kept == count // 3


def test_pairs_of_ids_are_distinct_streams():
    pairs = np.stack(np.meshgrid(np.arange(50), np.arange(50)), axis=-1).reshape(-1, 2)
    assert len(np.unique(uniforms(0, "x", pairs))) == 2500
    with pytest.raises(ValueError, match="expected"):
        uniforms(0, "x", np.zeros((2, 3), dtype=np.int64))
    assert uniforms(0, "x", pairs[:0]).shape == uniforms(0, "x", pairs[:0, 0]).shape == (0,)


def test_generators_are_keyed_by_all_counters():
    first = generator(0, "start", 1, 2).random()
    assert generator(0, "start", 1, 2).random() == first
    others = [
        generator(0, "start", 12),
        generator(0, "start", 2, 1),
        generator(1, "start", 1, 2),
        generator(0, "s", 1, 2),
    ]
    assert all(other.random() != first for other in others)


def test_the_examples_of_the_docstrings():
    """`WaterFiller` and `systematic`, with the numbers that they show."""
    filler = WaterFiller(np.array([8.0, 2, 1, 1]), 0.2)
    np.testing.assert_allclose(filler.solve(2.0), [1, 0.5, 0.25, 0.25])
    np.testing.assert_allclose(filler.solve(1.2), [0.6, 0.2, 0.2, 0.2])
    pi = np.array([0.5, 0.7, 0.8])
    for start, kept in ((0.3, [True, False, True]), (0.6, [False, True, True]), (0.1, [True, True, False])):
        assert systematic(pi, order=np.arange(3), start=start).kept.tolist() == kept
