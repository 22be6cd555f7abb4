"""The proof: over every outcome of a draw, the expected weighted gradient is the full batch's, to rounding.

And the ways it breaks, each shown breaking, beside the reason why the policies cannot be configured into it or are
labelled biased.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy_policy import (
    CLIP_HIGH,
    CLIP_LOW,
    DUAL_CLIP,
    NORMALISATIONS,
    OBJECTIVES,
    all_subsets,
    denominators,
    logit_grad_norms,
    logprobs,
    make_problem,
    poisson_probability,
    sequence_gradients,
    sequence_losses,
)

from dppo_megatron.config.pruning import CompletionPruningConfig
from dppo_megatron.pruning import CompletionBatch, make_completion_policy
from dppo_megatron.pruning.designs import Draw, WaterFiller, poisson, systematic
from dppo_megatron.pruning.scores import completion_score
from dppo_megatron.pruning.weights import fixed_size_ht, hajek, horvitz_thompson

TOLERANCE = 1e-12


def scored_probabilities(problem, normalisation, *, kl_coef, rate=0.5, floor=0.1, prompt_weight=None):
    """Inclusion probabilities of the real score and water-filling."""
    advantages = problem.advantages
    weight = np.ones(len(advantages)) if prompt_weight is None else prompt_weight
    score = completion_score(
        advantages,
        logit_grad_norms(problem),
        denominators(problem, normalisation),
        weight,
        zero_advantage_slope=kl_coef,
    )
    lower = np.where((advantages != 0) | (kl_coef > 0), floor, 0.0)
    return WaterFiller(np.where(lower > 0, score, 0.0), lower).solve((1 - rate) * len(advantages))


def poisson_outcomes(pi):
    """Every (probability, draw) of independent coins, made by the real design from uniforms that force the pattern."""
    patterns = all_subsets(len(pi))
    for pattern, probability in zip(patterns, poisson_probability(patterns, pi), strict=True):
        if probability > 0:
            drawn = poisson(pi, uniform=np.where(pattern, 0.0, np.nextafter(1.0, 0.0)))
            assert (drawn.kept == pattern).all()
            yield probability, drawn


def systematic_outcomes(pi, order):
    """Every (probability, draw): the sample is constant between the starts where a cumulated sum crosses a point."""
    cumulated = np.cumsum(pi[order][(pi[order] > 0) & (pi[order] < 1)])
    cuts = np.unique(np.concatenate([[0.0, 1.0], cumulated % 1.0]))
    for low, high in itertools.pairwise(cuts):
        yield high - low, systematic(pi, order=order, start=(low + high) / 2)


def relative_error(estimate, truth):
    return np.linalg.norm(estimate - truth) / np.linalg.norm(truth)


@pytest.mark.parametrize("objective", ["clip", "dual_clip_kl", "gspo"])
def test_the_analytic_gradients_of_the_test_policy_are_right(objective):
    problem = make_problem(3)
    step = 1e-6
    numeric = np.stack(
        [
            (
                sequence_losses(problem.at(problem.theta + step * e), objective)
                - sequence_losses(problem.at(problem.theta - step * e), objective)
            )
            / (2 * step)
            for e in np.eye(len(problem.theta))
        ],
        axis=1,
    )
    np.testing.assert_allclose(sequence_gradients(problem, objective), numeric, atol=1e-7)


def test_the_test_problem_reaches_every_branch():
    """Clipped above, clipped below, dual-clipped and unclipped tokens all occur, or the proof is of the easy case."""
    problem = make_problem()
    ratio = np.exp(logprobs(problem)[0] - problem.old)
    sign = np.sign(problem.advantages)[:, None] * problem.mask
    assert ((sign > 0) & (ratio > 1 + CLIP_HIGH)).any()
    assert ((sign < 0) & (ratio < 1 - CLIP_LOW)).any()
    assert ((sign < 0) & (ratio > DUAL_CLIP)).any()
    assert ((sign != 0) & (np.abs(ratio - 1) < CLIP_LOW)).any()


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_horvitz_thompson_is_unbiased_over_all_keep_patterns(objective, normalisation):
    problem = make_problem()
    kl_coef = problem.kl_coef if objective == "dual_clip_kl" else 0.0
    terms = sequence_gradients(problem, objective) / denominators(problem, normalisation)[:, None]
    pi = scored_probabilities(problem, normalisation, kl_coef=kl_coef)
    expected = sum(p * (horvitz_thompson(drawn) @ terms) for p, drawn in poisson_outcomes(pi))
    assert np.abs(expected - terms.sum(0)).max() < TOLERANCE


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_systematic_sampling_is_unbiased_over_all_starts(objective, normalisation):
    problem = make_problem(1)
    kl_coef = problem.kl_coef if objective == "dual_clip_kl" else 0.0
    terms = sequence_gradients(problem, objective) / denominators(problem, normalisation)[:, None]
    pi = scored_probabilities(problem, normalisation, kl_coef=kl_coef)
    order = np.lexsort((np.sign(problem.advantages), problem.group))
    outcomes = list(systematic_outcomes(pi, order))
    assert sum(p for p, _ in outcomes) == pytest.approx(1.0, abs=1e-14)
    assert len({int(drawn.kept.sum()) for _, drawn in outcomes}) == 1
    expected = sum(p * (horvitz_thompson(drawn) @ terms) for p, drawn in outcomes)
    assert np.abs(expected - terms.sum(0)).max() < TOLERANCE


def test_two_levels_are_unbiased_together():
    """Prompts first, then completions of the kept prompts with probabilities that depend on which prompts were kept."""
    problem = make_problem()
    terms = sequence_gradients(problem, "dual_clip_kl") / denominators(problem, "sequence_mean")[:, None]
    prompt_pi = np.array([0.7, 0.4])
    expected = np.zeros(terms.shape[1])
    for p_prompts, prompts in poisson_outcomes(prompt_pi):
        rows = np.flatnonzero(prompts.kept[problem.group])
        if len(rows) == 0:
            continue
        prompt_weight = horvitz_thompson(prompts)[problem.group][rows]
        score = completion_score(
            problem.advantages[rows],
            logit_grad_norms(problem)[rows],
            denominators(problem, "sequence_mean")[rows],
            prompt_weight,
            zero_advantage_slope=problem.kl_coef,
        )
        pi = WaterFiller(score, 0.1).solve(0.5 * len(rows))
        for p_rows, drawn in poisson_outcomes(pi):
            expected += p_prompts * p_rows * ((prompt_weight * horvitz_thompson(drawn)) @ terms[rows])
    assert np.abs(expected - terms.sum(0)).max() < TOLERANCE


def test_break_denominators_of_the_kept():
    """Dividing by the survivors' count or tokens instead of the full batch's inflates the gradient."""
    problem = make_problem()
    terms = sequence_gradients(problem, "clip") / denominators(problem, "token_mean")[:, None]
    pi = scored_probabilities(problem, "token_mean", kl_coef=0.0, rate=0.6)
    total = problem.lengths.sum()
    by_tokens, by_count = np.zeros(terms.shape[1]), np.zeros(terms.shape[1])
    for p, drawn in poisson_outcomes(pi):
        if drawn.kept.any():
            estimate = horvitz_thompson(drawn) @ terms
            by_tokens += p * estimate * total / problem.lengths[drawn.kept].sum()
            by_count += p * estimate * len(pi) / drawn.kept.sum()
    assert relative_error(by_tokens, terms.sum(0)) > 0.5
    assert relative_error(by_count, terms.sum(0)) > 0.5


def test_break_no_support_without_advantage_under_kl():
    """pi = 0 at A = 0 loses those completions' KL gradient; the policy therefore floors them when the loss has KL."""
    problem = make_problem(degenerate_group=True)
    terms = sequence_gradients(problem, "dual_clip_kl") / denominators(problem, "sequence_mean")[:, None]
    blind = scored_probabilities(problem, "sequence_mean", kl_coef=0.0)
    assert (blind[:4] == 0).all()
    expected = sum(p * (horvitz_thompson(drawn) @ terms) for p, drawn in poisson_outcomes(blind))
    assert relative_error(expected, terms.sum(0)) > 0.01

    without_kl = sequence_gradients(problem, "clip") / denominators(problem, "sequence_mean")[:, None]
    exact = sum(p * (horvitz_thompson(drawn) @ without_kl) for p, drawn in poisson_outcomes(blind))
    assert np.abs(exact - without_kl.sum(0)).max() < TOLERANCE

    config = CompletionPruningConfig(method="dppo", rate=0.5, max_design_effect=0.0)
    floored = make_completion_policy(config, seed=0, total_steps=10, zero_advantage_slope=0.04).prune(
        as_batch(problem), step=0
    )
    free = make_completion_policy(config, seed=0, total_steps=10, zero_advantage_slope=0.0).prune(
        as_batch(problem), step=0
    )
    assert (floored.inclusion_prob >= config.min_inclusion_prob).all()
    assert (free.inclusion_prob[:4] == 0).all() and (free.inclusion_prob[4:] > 0).all()


def test_break_weights_on_the_advantage_only():
    """The KL term left unweighted over the kept is scaled by pi instead of 1."""
    problem = make_problem()
    omega = 1 / denominators(problem, "sequence_mean")[:, None]
    both = sequence_gradients(problem, "dual_clip_kl") * omega
    kl = sequence_gradients(problem, "dual_clip_kl", kl_only=True) * omega
    pi = scored_probabilities(problem, "sequence_mean", kl_coef=problem.kl_coef)
    expected = sum(p * (horvitz_thompson(drawn) @ (both - kl) + drawn.kept @ kl) for p, drawn in poisson_outcomes(pi))
    assert relative_error(expected - (both - kl).sum(0), kl.sum(0)) > 0.1
    np.testing.assert_allclose(expected, (both - kl).sum(0) + pi @ kl, atol=TOLERANCE)


def test_break_the_same_draw_in_a_second_epoch():
    """After a step on the kept samples theta depends on the draw; only a fresh draw stays conditionally unbiased."""
    problem = make_problem(2)
    denominator = denominators(problem, "sequence_mean")[:, None]
    pi = scored_probabilities(problem, "sequence_mean", kl_coef=0.0, rate=0.6)
    first = sequence_gradients(problem, "clip") / denominator
    reused, fresh, full, size = (np.zeros(first.shape[1]) for _ in range(4))
    outcomes = list(poisson_outcomes(pi))
    for p, drawn in outcomes:
        moved = problem.at(problem.theta - 2.0 * (horvitz_thompson(drawn) @ first))
        second = sequence_gradients(moved, "clip") / denominator
        reused += p * (horvitz_thompson(drawn) @ second)
        fresh += p * sum(q * (horvitz_thompson(again) @ second) for q, again in outcomes)
        full += p * second.sum(0)
        size += p * np.abs(second.sum(0))
    assert np.abs(fresh - full).max() < TOLERANCE
    assert np.linalg.norm(reused - full) / np.linalg.norm(size) > 0.03


def test_the_policy_draws_anew_for_every_step_and_minibatch():
    batch = as_batch(make_problem(), copies=40)
    policy = make_completion_policy(
        CompletionPruningConfig(method="dppo", rate=0.5, max_design_effect=0.0), seed=0, total_steps=10
    )
    draws = [
        policy.prune(batch, step=step, minibatch=minibatch).kept for step, minibatch in [(0, 0), (0, 1), (1, 0), (1, 1)]
    ]
    for i, one in enumerate(draws):
        assert all((one != other).any() for other in draws[i + 1 :])


def test_break_advantages_recomputed_from_the_kept():
    """A mean over survivors is another baseline for every draw: not the full batch's gradient in expectation."""
    problem = make_problem()
    denominator = denominators(problem, "sequence_mean")[:, None]
    terms = sequence_gradients(problem, "clip") / denominator
    pi = scored_probabilities(problem, "sequence_mean", kl_coef=0.0)
    expected = np.zeros(terms.shape[1])
    for p, drawn in poisson_outcomes(pi):
        advantages = np.zeros(len(pi))
        for g in (0, 1):
            rows = (problem.group == g) & drawn.kept
            if rows.any():
                rewards = problem.rewards[rows]
                advantages[rows] = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        expected += p * (
            horvitz_thompson(drawn) @ (sequence_gradients(problem, "clip", advantages=advantages) / denominator)
        )
    assert relative_error(expected, terms.sum(0)) > 0.05


def test_hajek_bias_is_its_covariance_with_the_estimated_count():
    """E[R] - Y = -Cov(R, N)/n with N = sum of 1/pi over the kept; exact, the empty sample aside."""
    problem = make_problem()
    terms = sequence_gradients(problem, "clip") / denominators(problem, "sequence_mean")[:, None]
    pi = np.array([0.9, 0.5, 0.4, 0.3, 0.6, 0.2, 0.2, 0.35])
    mean, with_count, covariance = np.zeros(terms.shape[1]), 0.0, np.zeros(terms.shape[1])
    for p, drawn in poisson_outcomes(pi):
        ratio, count = hajek(drawn) @ terms, horvitz_thompson(drawn).sum()
        mean += p * ratio
        with_count += p * count
        covariance += p * ratio * count
    covariance -= mean * with_count
    assert with_count == pytest.approx(len(pi), abs=1e-12)
    np.testing.assert_allclose(mean - terms.sum(0), -covariance / len(pi), atol=1e-12)
    assert relative_error(mean, terms.sum(0)) > 1e-3


def test_c_form_is_biased_with_a_random_size_and_exact_with_a_fixed_one():
    problem = make_problem()
    terms = sequence_gradients(problem, "clip") / denominators(problem, "sequence_mean")[:, None]
    pi = WaterFiller(logit_grad_norms(problem), 0.1).solve(4.0)
    random_size = sum(p * (fixed_size_ht(drawn) @ terms) for p, drawn in poisson_outcomes(pi))
    assert relative_error(random_size, terms.sum(0)) > 1e-3
    for _, drawn in systematic_outcomes(pi, np.arange(8)):
        assert drawn.fixed_size
        assert (fixed_size_ht(drawn) == horvitz_thompson(drawn)).all()


def test_probability_one_is_bitwise_the_unpruned_run():
    everything = Draw(np.ones(8, dtype=bool), np.ones(8), fixed_size=True)
    for estimator in (horvitz_thompson, fixed_size_ht, hajek):
        assert (estimator(everything) == 1.0).all()
    batch = as_batch(make_problem())
    for method in ("dppo", "cppo", "cppo_verl", "dppo_paper", "infobatch", "max_variance"):
        policy = make_completion_policy(
            CompletionPruningConfig(method=method, rate=0.0), seed=0, total_steps=10, zero_advantage_slope=0.1
        )
        selection = policy.prune(batch, step=0)
        assert selection.kept.all() and (selection.weight == 1.0).all(), method
        assert selection.ledger[0].label == "exact", method


def as_batch(problem, copies=1):
    n = len(problem.rewards)
    shift = np.repeat(np.arange(copies), n) * 2
    return CompletionBatch(
        prompt_index=np.tile(problem.group, copies) + shift,
        completion_index=np.tile(np.arange(n) % 4, copies),
        group=np.tile(problem.group, copies) + shift,
        rewards=np.tile(problem.rewards, copies),
        advantages=np.tile(problem.advantages, copies),
        lengths=np.tile(problem.lengths, copies),
        logit_grad_norm=np.tile(logit_grad_norms(problem), copies),
        denominator=np.tile(denominators(problem, "sequence_mean"), copies),
        prompt_weight=np.ones(n * copies),
        num_nominal=n * copies,
    )
