"""Completion policies: budgets, support, labels, and the same decision for any order of rows."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path

import numpy as np
import pytest

from dppo_megatron.config.pruning import CompletionPruningConfig, prompts_multiplier
from dppo_megatron.pruning import (
    CompletionBatch,
    StepCost,
    biased_rows,
    logit_grad_norm,
    make_completion_policy,
    step_metrics,
)
from dppo_megatron.pruning.interface import keep_all
from dppo_megatron.pruning.policies import COMPLETION_POLICIES
from dppo_megatron.types import UserError

GROUPS, G = 30, 8
METHODS = sorted(COMPLETION_POLICIES)


def make_batch(seed=0, *, groups=GROUPS, size=G, failed=0, pass_rate=None):
    rng = np.random.default_rng(seed)
    share = np.linspace(0.0, 1.0, groups) if pass_rate is None else np.full(groups, pass_rate)
    rewards = (rng.random((groups, size)) < share[:, None]).astype(np.float64)
    rewards.ravel()[rng.permutation(rewards.size)[:failed]] = np.nan
    graded = ~np.isnan(rewards)
    count = np.maximum(graded.sum(1, keepdims=True), 1)
    mean = np.where(graded, rewards, 0).sum(1, keepdims=True) / count
    deviation = np.where(graded, rewards - mean, 0.0)
    advantages = deviation / (np.sqrt(np.square(deviation).sum(1, keepdims=True) / count) + 1e-6)
    advantages[np.abs(advantages) < 1e-9] = 0.0
    lengths = rng.integers(5, 200, groups * size)
    return CompletionBatch(
        prompt_index=np.repeat(rng.permutation(1000)[:groups], size),
        completion_index=np.tile(np.arange(size), groups),
        group=np.repeat(np.arange(groups), size),
        rewards=rewards.ravel(),
        advantages=advantages.ravel(),
        lengths=lengths,
        logit_grad_norm=np.sqrt(lengths) * rng.uniform(0.2, 0.6, groups * size),
        denominator=groups * size * lengths.astype(np.float64),
        prompt_weight=np.repeat(rng.uniform(1, 5, groups), size),
        num_nominal=2 * groups * size,
    )


def make(method="dppo", *, kl_coef=0.0, **changes):
    config = CompletionPruningConfig(
        **{"method": method, "rate": 0.5, "max_design_effect": 0.0, "rollout_cost_ratio": 1.0, **changes}
    )
    return make_completion_policy(config, seed=3, total_steps=100, zero_advantage_slope=kl_coef)


@pytest.mark.parametrize("method", METHODS)
def test_decisions_do_not_depend_on_the_order_of_rows(method):
    batch = make_batch(failed=5)
    order = np.random.default_rng(1).permutation(len(batch))
    one, other = make(method).prune(batch, step=2), make(method).prune(batch.take(order), step=2)
    np.testing.assert_array_equal(one.kept[order], other.kept)
    np.testing.assert_array_equal(one.weight[order], other.weight)
    np.testing.assert_array_equal(one.inclusion_prob[order], other.inclusion_prob)


@pytest.mark.parametrize("method", METHODS)
def test_a_restored_policy_decides_the_same(method):
    policy, other = make(method), make(method)
    policy.prune(make_batch(), step=0)
    policy.feedback(StepCost(1, rollout_s=3.0, update_s=1.0, other_s=0.0))
    other.load_state_dict(policy.state_dict())
    for step in (1, 2):
        one, two = policy.prune(make_batch(step), step=step), other.prune(make_batch(step), step=step)
        np.testing.assert_array_equal(one.weight, two.weight)
    with pytest.raises(ValueError, match="unknown keys"):
        other.load_state_dict({**policy.state_dict(), "more": 0})
    with pytest.raises(ValueError, match="missing keys"):
        other.load_state_dict({})


@pytest.mark.parametrize("method", METHODS)
def test_probabilities_and_weights_are_consistent(method):
    selection = make(method).prune(make_batch(failed=5), step=1)
    assert ((selection.inclusion_prob >= 0) & (selection.inclusion_prob <= 1)).all()
    assert (selection.inclusion_prob[selection.kept] > 0).all()
    assert (selection.weight[~selection.kept] == 0).all() and (selection.weight[selection.kept] > 0).all()
    assert selection.ledger[0].name == f"completion/{method}"
    assert selection.ledger[0].kept_fraction == pytest.approx(selection.kept.mean())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_degenerate_batches(method, kl_coef):
    """All rewards equal, groups of one, every grading failed, no rows: finite weights and figures, nothing invented."""
    policy = make(method, kl_coef=kl_coef, rate=0.4)
    single = make(method, kl_coef=kl_coef, rate=0.0)
    empty = make_batch().take(np.zeros(0, int))
    cases = [
        (policy, make_batch(pass_rate=1.0)),
        (policy, make_batch(failed=GROUPS * G)),
        (single, make_batch(size=1)),
        (policy, empty),
    ]
    for chosen, batch in cases:
        selection = chosen.prune(batch, step=0)
        assert np.isfinite(selection.weight).all()
        metrics = step_metrics(keep_all(GROUPS, "prompt/none"), batch, selection)
        assert np.isfinite(list(metrics.values())).all(), metrics
        assert not biased_rows(selection.ledger) or method not in ("none", "dppo", "dppo_auto", "infobatch")


def test_without_advantages_nothing_has_support_unless_there_is_a_kl_term():
    flat = make_batch(pass_rate=1.0)
    selection = make().prune(flat, step=0)
    assert not selection.kept.any() and (selection.inclusion_prob == 0).all()
    assert selection.ledger[0].label == "unbiased" and selection.metrics["share_without_gradient"] == 1.0
    with_kl = make(kl_coef=0.04).prune(flat, step=0)
    assert with_kl.kept.sum() == len(flat) // 2 and (with_kl.inclusion_prob >= 0.05).all()
    # A faint KL term has a faint score; the floor holds all the same.
    assert (make(kl_coef=1e-9, rate=0.8).prune(make_batch(), step=0).inclusion_prob >= 0.05).all()


def test_a_support_smaller_than_the_target_is_kept_whole():
    batch = make_batch()
    live = batch.advantages != 0
    selection = make(rate=0.1).prune(batch, step=0)
    assert live.sum() < 0.9 * len(batch)
    np.testing.assert_array_equal(selection.inclusion_prob, live)
    np.testing.assert_array_equal(selection.weight, live)


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.9])
def test_the_count_is_fixed_and_follows_the_rate(rate):
    batch = make_batch(pass_rate=0.5)
    for step in range(20):
        selection = make(rate=rate).prune(batch, step=step)
        assert selection.kept.sum() == len(batch) - int(rate * len(batch) + 1e-9)
        assert (selection.inclusion_prob >= 0.05).all() or (batch.advantages == 0).any()


def test_draws_follow_the_probabilities():
    batch = make_batch()
    for design in ("systematic", "poisson"):
        policy = make(rate=0.6, design=design, anneal_fraction=1.0)
        draws = [policy.prune(batch, step=0, minibatch=k) for k in range(1200)]
        pi = draws[0].inclusion_prob
        error = np.mean([d.kept for d in draws], axis=0) - pi
        assert (np.abs(error) <= 5 * np.sqrt(pi * (1 - pi) / len(draws)) + 1e-12).all(), design
        total = np.mean([d.weight.sum() for d in draws])
        assert total == pytest.approx((pi > 0).sum(), rel=0.01)


def test_the_start_of_a_systematic_draw_is_new_for_every_step_and_minibatch():
    """Groups of one right and one wrong answer leave the random key nothing to order: only the start can differ."""
    n = 2 * GROUPS
    batch = dataclasses.replace(
        make_batch().take(np.arange(n)),
        prompt_index=np.repeat(np.arange(GROUPS), 2),
        group=np.repeat(np.arange(GROUPS), 2),
        advantages=np.tile([1.0, -1.0], GROUPS),
    )
    policy = make(rate=0.7)
    for counter in ("step", "minibatch"):
        draws = {policy.prune(batch, **{"step": 0, counter: k}).kept.tobytes() for k in range(20)}
        assert len(draws) > 5, counter


def test_rarely_drawn_prompts_keep_more_of_their_completions():
    batch = make_batch(pass_rate=0.5)
    pi = make(rate=0.7).prune(batch, step=0).inclusion_prob
    heavy = batch.prompt_weight > 3
    assert pi[heavy].mean() > 1.3 * pi[~heavy].mean()


def test_a_token_budget_is_spent_in_tokens():
    batch = make_batch(pass_rate=0.5)
    selection = make(rate=0.6, cost_aware=True).prune(batch, step=0)
    expected = (selection.inclusion_prob * batch.lengths).sum()
    assert expected == pytest.approx(0.4 * batch.lengths.sum(), rel=1e-9)
    assert selection.ledger[0].label == "unbiased"


def test_the_score_orders_probabilities_and_can_be_replaced_by_abs_advantage():
    batch = dataclasses.replace(make_batch(pass_rate=0.5), prompt_weight=np.ones(GROUPS * G))
    size = np.abs(batch.advantages) * batch.logit_grad_norm / batch.denominator
    for score, measure in (("free_norm", size), ("abs_advantage", np.abs(batch.advantages) / batch.denominator)):
        pi = make(rate=0.8, score=score).prune(batch, step=0).inclusion_prob
        inside = (pi > 0.05 + 1e-9) & (pi < 1 - 1e-9)
        levels = pi[inside] / measure[inside]
        assert inside.sum() > 20 and levels.max() / levels.min() == pytest.approx(1.0, abs=1e-9), score


def test_auto_follows_the_cost_of_rollouts():
    batch = make_batch(pass_rate=0.5)
    policy = make("dppo_auto", rollout_cost_ratio=0.0)
    assert policy.prune(batch, step=0).ledger[0].note == "no cost measured yet"
    kept = []
    for ratio in (0.1, 1.0, 10.0):
        kept.append(make("dppo_auto", rollout_cost_ratio=ratio).prune(batch, step=0).kept.sum())
    assert kept[0] < kept[1] < kept[2]
    policy.feedback(StepCost(1, rollout_s=10.0, update_s=1.0, other_s=0.0))
    assert policy.prune(batch, step=1).kept.sum() == kept[2]
    bounded = make("dppo_auto", max_design_effect=1.1, rollout_cost_ratio=0.1).prune(batch, step=0)
    assert 1.0 < bounded.growth <= 1.1
    assert "max_design_effect 1.1 lowers the rate" in bounded.ledger[0].note


def test_warm_up_and_annealing():
    batch = make_batch(pass_rate=0.5)
    policy = make(warmup_steps=3, anneal_fraction=0.5)
    kept_whole = [bool(policy.prune(batch, step=step).kept.all()) for step in range(100)]
    assert kept_whole == [True] * 3 + [False] * 47 + [True] * 50


@pytest.mark.parametrize(
    ("method", "size", "expected"),
    [("cppo", 8, 2), ("dppo_paper", 5, 2), ("max_variance", 5, 2)],
)
def test_per_group_counts_and_scales(method, size, expected):
    batch = make_batch(size=size, pass_rate=0.5)
    rate = 0.75 if method == "cppo" else 0.7
    selection = make(method, rate=rate).prune(batch, step=0)
    assert (np.bincount(batch.group, weights=selection.kept) == expected).all()
    scale = 1 / (1 - rate) if method == "dppo_paper" else size / expected
    assert np.allclose(selection.weight[selection.kept], scale)
    assert selection.ledger[0].label == "biased" and "never trained on" in selection.ledger[0].note
    assert len(biased_rows(selection.ledger)) == 1


@pytest.mark.parametrize("exponent", [-150, -20, 8, 150])
def test_max_variance_does_not_depend_on_the_scale_of_rewards(exponent):
    batch = make_batch(size=8, pass_rate=0.5)
    batch = dataclasses.replace(batch, rewards=np.random.default_rng(2).choice([0.0, 0.25, 0.5, 2.0], len(batch)))
    one = make("max_variance", rate=0.5).prune(batch, step=0)
    scaled = dataclasses.replace(batch, rewards=batch.rewards * 2.0**exponent)
    other = make("max_variance", rate=0.5).prune(scaled, step=0)
    np.testing.assert_array_equal(one.kept, other.kept)
    np.testing.assert_array_equal(one.inclusion_prob, other.inclusion_prob)


def test_max_variance_takes_as_many_right_as_wrong_answers_where_it_can():
    batch = make_batch(size=8, pass_rate=0.5)
    kept = make("max_variance", rate=0.5).prune(batch, step=0).kept.reshape(-1, 8)
    rewards = batch.rewards.reshape(-1, 8)
    both = (rewards.sum(1) >= 2) & (rewards.sum(1) <= 6)
    assert both.sum() > 10 and ((rewards * kept).sum(1)[both] == 2).all()


def test_flat_groups_are_dropped_exactly_or_by_label():
    batch = make_batch()
    flat = np.abs(np.add.reduceat(np.abs(batch.advantages), np.arange(0, len(batch), G)))[batch.group] == 0
    plain, exact = make("greso").prune(batch, step=0), make("greso_ht").prune(batch, step=0)
    np.testing.assert_array_equal(plain.kept, ~flat)
    np.testing.assert_array_equal(exact.kept, ~flat)
    assert plain.weight.sum() == pytest.approx(len(batch)) and plain.ledger[0].label == "biased"
    assert set(np.unique(exact.weight)) == {0.0, 1.0} and exact.ledger[0].label == "unbiased"
    with_kl = make("greso_ht", kl_coef=0.1).prune(batch, step=0).ledger[0]
    assert with_kl.label == "biased" and "KL gradient" in with_kl.note


def test_infobatch_is_the_two_class_rule():
    batch = make_batch()
    selection = make("infobatch", rate=0.5).prune(batch, step=0)
    low = np.abs(batch.advantages) < np.abs(batch.advantages).mean()
    np.testing.assert_array_equal(selection.inclusion_prob, np.where(low, 0.5, 1.0))
    assert selection.ledger[0].label == "unbiased"
    assert make("infobatch", rate=0.5).prune(make_batch(pass_rate=1.0), step=0).kept.all()  # nothing is below the mean
    assert make("infobatch", rate=0.97).prune(batch, step=0).inclusion_prob.min() == 0.1


def test_a_rate_that_keeps_nothing_is_an_error_that_says_what_fits():
    with pytest.raises(
        UserError, match=r"pruning.completion.rate = 0.9: .* none of 8 completions; must be at most 0.875"
    ):
        make("cppo", rate=0.9).prune(make_batch(), step=0)


def test_allocation_plans_more_prompts():
    assert prompts_multiplier(CompletionPruningConfig(method="cppo", rate=0.75, allocation=True)) == 4
    assert prompts_multiplier(CompletionPruningConfig(method="cppo", rate=0.75)) == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("advantages", np.nan, "advantages of prompt .* is nan"),
        ("logit_grad_norm", -1.0, "logit_grad_norm of prompt .* is -1"),
        ("denominator", 0.0, "denominator of prompt .* is 0"),
        ("prompt_weight", np.inf, "prompt_weight of prompt .* is inf"),
        ("rewards", np.inf, "rewards of prompt .* is inf"),
        ("group", 10**6, "labels 0..groups-1"),
    ],
)
def test_bad_rows_are_named(field, value, message):
    batch = make_batch()
    array = getattr(batch, field).copy()
    array[7] = value
    with pytest.raises(ValueError, match=message):
        make().prune(dataclasses.replace(batch, **{field: array}), step=0)
    with pytest.raises(ValueError, match=f"CompletionBatch.{field} has shape"):
        make().prune(dataclasses.replace(batch, **{field: array[:-1]}), step=0)


def test_surprisal_of_log_probabilities():
    assert logit_grad_norm(np.log(np.array([0.5, 0.9], dtype=np.float32))) == pytest.approx(np.sqrt(0.26), rel=1e-6)
    assert (
        logit_grad_norm(np.zeros(3, dtype=np.float32)) == 0.0 and logit_grad_norm(np.zeros(0, dtype=np.float32)) == 0.0
    )


def test_certain_completions_with_an_advantage_still_have_a_floor():
    batch = dataclasses.replace(make_batch(pass_rate=0.5), logit_grad_norm=np.zeros(GROUPS * G))
    selection = make().prune(batch, step=0)
    assert (selection.inclusion_prob[batch.advantages != 0] > 0).all()


def test_monitors_read_one_when_weights_are_right_and_move_when_they_are_wrong():
    batch = dataclasses.replace(
        make_batch(groups=400), prompt_weight=np.ones(400 * G), num_nominal=400 * G
    )  # every prompt of the nominal batch was rolled out
    prompts = keep_all(400, "prompt/none")
    selection = make(rate=0.6).prune(batch, step=0)
    metrics = step_metrics(prompts, batch, selection)
    assert metrics["prune/weight_total"] == pytest.approx(1.0, abs=0.05)
    assert metrics["prune/weight_total_tokens"] == pytest.approx(1.0, abs=0.1)
    assert metrics["prune/completions_kept_over_expected"] == pytest.approx(1.0)
    assert metrics["prune/completions_kept"] == selection.kept.sum()
    assert metrics["prune/tokens_kept"] == batch.lengths[selection.kept].sum()
    weights = selection.weight[selection.kept]
    assert metrics["prune/weight_max"] == weights.max() <= 20

    twice = dataclasses.replace(selection, weight=selection.weight**2)
    assert step_metrics(prompts, batch, twice)["prune/weight_total"] > 1.2
    biased = step_metrics(prompts, batch, make("cppo", rate=0.5).prune(batch, step=0))
    assert biased["prune/weight_total"] == pytest.approx(1.0)


def test_balanced_groups_show_no_imbalance():
    batch = make_batch()
    full = make("none").prune(batch, step=0)
    metrics = step_metrics(keep_all(GROUPS, "prompt/none"), batch, full)
    assert metrics["prune/group_imbalance"] < 1e-9
    assert metrics["prune/tokens_kept_share"] == 1.0
    pruned = make(rate=0.6).prune(batch, step=0)
    assert step_metrics(keep_all(GROUPS, "prompt/none"), batch, pruned)["prune/group_imbalance"] > 0.1


def test_the_library_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """examples/pruning_library.py works as it stands, prunes at both levels, says so, and measures what that does."""
    example = Path(__file__).parents[2] / "examples" / "pruning_library.py"
    monitor = runpy.run_path(str(example))["prompts"].monitor
    said = capsys.readouterr().out
    assert "prompt/dppo: unbiased" in said and "completion/dppo: unbiased" in said
    assert monitor.effect() is not None
