"""Prompt policies: what they keep, what they learn, and that neither order nor a restart changes a decision."""

from __future__ import annotations

import dataclasses
import itertools
from typing import get_args, get_type_hints

import numpy as np
import pytest

from dppo_megatron.config.pruning import PromptPruningConfig, RefillConfig
from dppo_megatron.pruning import StepCost, make_prompt_policy
from dppo_megatron.pruning.history import PromptHistory
from dppo_megatron.pruning.policies import PROMPT_POLICIES
from dppo_megatron.pruning.scores import nondegenerate_probability
from dppo_megatron.types import UserError

NUM_PROMPTS, PER_STEP, G, STEPS = 240, 60, 8, 400
PASS_RATE = np.clip(np.linspace(-0.3, 1.3, NUM_PROMPTS), 0, 1)


def make(method, **changes):
    config = PromptPruningConfig(**{"method": method, "fixed_cost_ratio": 1.0, **changes})
    return make_prompt_policy(
        config, num_prompts=NUM_PROMPTS, completions_per_prompt=G, prompts_per_step=PER_STEP, total_steps=STEPS, seed=5
    )


def play(policy, first, last):
    """Steps of a run with rewards that depend on step and prompt only; returns the selections."""
    selections = []
    for step in range(first, last):
        ids = np.random.default_rng((1, step)).permutation(NUM_PROMPTS)[:PER_STEP]
        selection = policy.select(ids, step=step)
        selections.append(selection)
        visit(policy, ids[selection.kept], step)
    return selections


def visit(policy, ids, step):
    uniform = np.stack([np.random.default_rng((2, step, i)).random(G) for i in ids]) if len(ids) else np.zeros((0, G))
    rewards = (uniform < PASS_RATE[ids][:, None]).astype(np.float64)
    lengths = 1 + (100 * uniform).astype(np.int64)
    policy.observe(ids, rewards, lengths, step=step)


def same(one, other):
    np.testing.assert_array_equal(one.kept, other.kept)
    np.testing.assert_array_equal(one.inclusion_prob, other.inclusion_prob)
    np.testing.assert_array_equal(one.weight, other.weight)
    assert one.ledger == other.ledger and one.metrics == other.metrics


@pytest.mark.parametrize("design", ["systematic", "poisson"])
@pytest.mark.parametrize("method", PROMPT_POLICIES)
def test_a_restored_run_continues_bit_for_bit(method, design):
    straight = make(method, design=design)
    before = play(straight, 0, 12)
    assert before[0].kept.all()
    resumed = make(method, design=design)
    resumed.load_state_dict(straight.state_dict())
    for one, other in zip(play(straight, 12, 24), play(resumed, 12, 24), strict=True):
        same(one, other)


@pytest.mark.parametrize("method", PROMPT_POLICIES)
def test_decisions_do_not_depend_on_the_order_of_prompts(method):
    policy, shuffled = make(method), make(method)
    rng = np.random.default_rng(0)
    for step in range(14):
        ids = np.random.default_rng((1, step)).permutation(NUM_PROMPTS)[:PER_STEP]
        order = rng.permutation(PER_STEP)
        one, other = policy.select(ids, step=step), shuffled.select(ids[order], step=step)
        np.testing.assert_array_equal(one.kept[order], other.kept)
        np.testing.assert_array_equal(one.weight[order], other.weight)
        visit(policy, ids[one.kept], step)
        visit(shuffled, ids[order][other.kept], step)


def test_a_state_is_a_snapshot():
    policy = make("dppo")
    play(policy, 0, 6)
    state = policy.state_dict()
    copy = state["history"]["visits"].copy()
    play(policy, 6, 9)
    np.testing.assert_array_equal(state["history"]["visits"], copy)


def test_wrong_states_are_refused_by_name():
    policy = make("dppo")
    state = policy.state_dict()
    with pytest.raises(ValueError, match="method 'dppo', this run uses 'infobatch'"):
        make("infobatch").load_state_dict(state)
    with pytest.raises(ValueError, match=r"missing keys \['control'\]"):
        policy.load_state_dict({k: v for k, v in state.items() if k != "control"})
    with pytest.raises(ValueError, match=r"unknown keys \['extra'\]"):
        policy.load_state_dict({**state, "extra": 1})
    state["history"]["visits"] = state["history"]["visits"][:-1]
    with pytest.raises(ValueError, match="was the prompt set changed"):
        policy.load_state_dict(state)


def test_dppo_probabilities_are_floored_exact_and_of_whole_sum():
    policy = make("dppo", rate=0.4, min_inclusion_prob=0.2)
    selections = play(policy, 0, 60)
    assert all(s.kept.all() and s.ledger[0].label == "exact" for s in selections[:4])  # the first epoch
    for s in selections[8:]:
        assert (s.inclusion_prob >= 0.2).all() and (s.inclusion_prob <= 1).all()
        assert s.kept.sum() == round(s.inclusion_prob.sum())
        np.testing.assert_array_equal(s.weight, np.where(s.kept, 1 / s.inclusion_prob, 0))
        assert s.ledger[0].label == "unbiased"
    assert min(s.kept.sum() for s in selections) == 36  # all visited: 60 less floor(.4 x 60)


def test_dppo_prefers_prompts_with_reward_variance():
    policy = make("dppo", rate=0.4)
    play(policy, 0, 80)
    ids = np.arange(NUM_PROMPTS)
    pi = policy.select(ids, step=80).inclusion_prob
    assert pi[(PASS_RATE > 0.3) & (PASS_RATE < 0.7)].mean() > 1.5 * pi[(PASS_RATE == 0) | (PASS_RATE == 1)].mean()


def test_draws_follow_the_probabilities():
    """One history, many steps' draws: the kept share of each prompt is within five standard errors of its pi."""
    policy = make("dppo", rate=0.4, discount=1.0, anneal_fraction=1.0)
    play(policy, 0, 20)
    ids = np.arange(PER_STEP)
    policy.last_active_step = 10**6
    draws = [policy.select(ids, step=20, minibatch=k) for k in range(1500)]
    pi = draws[0].inclusion_prob
    assert all((d.inclusion_prob == pi).all() for d in draws)
    error = np.mean([d.kept for d in draws], axis=0) - pi
    assert (np.abs(error) <= 5 * np.sqrt(pi * (1 - pi) / len(draws)) + 1e-12).all()


@pytest.mark.parametrize("score", get_args(get_type_hints(PromptPruningConfig)["score"]))
def test_unseen_prompts_are_kept_where_nothing_is_known_of_them(score):
    policy = make("dppo", rate=0.5, warmup_epochs=0.0, score=score)
    visit(policy, np.arange(40), 0)
    visit(policy, np.arange(100, 140), 0)
    selection = policy.select(np.arange(PER_STEP), step=1)
    assert (selection.inclusion_prob[40:] == 1).all() and selection.kept[40:].all()
    assert selection.kept[:40].sum() == 20


def test_warm_up_and_annealing_leave_the_run_full_at_both_ends():
    selections = play(make("dppo", rate=0.4), 0, STEPS)
    pruned = [not s.kept.all() for s in selections]
    assert not any(pruned[:4]) and any(pruned[4:12]) and all(pruned[20:350]) and not any(pruned[350:])
    assert "warm-up" in selections[0].ledger[0].note
    assert not any(s.ledger[0].note for s in play(make("none"), 0, STEPS)), "there is nothing to warm up"


def test_the_posterior_of_a_flat_prompt_sharpens_and_fades():
    history = PromptHistory(2, prior=0.5, discount=0.7, steps_per_epoch=4)
    ids = np.array([0])
    scores = []
    for step in range(0, 40, 4):
        history.update(ids, np.zeros((1, G)), np.ones((1, G), int), step=step, second_moment=None)
        scores.append(nondegenerate_probability(*history.posterior(ids, step), G)[0])
    assert all(a > b for a, b in itertools.pairwise(scores)) and scores[-1] < 0.05
    later = nondegenerate_probability(*history.posterior(ids, 400), G)[0]
    assert later == pytest.approx(nondegenerate_probability(np.array([0.5]), np.array([0.5]), G)[0], rel=1e-3)
    # Within an epoch nothing fades.
    np.testing.assert_array_equal(history.posterior(ids, 36), history.posterior(ids, 40))


def test_the_nondegenerate_probability_is_the_beta_binomial_one():
    from scipy.stats import betabinom

    a, b = np.array([0.5, 3.0, 20.0, 1e-3]), np.array([0.5, 1.0, 0.5, 9.0])
    expected = [1 - betabinom.pmf(0, G, x, y) - betabinom.pmf(G, G, x, y) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(nondegenerate_probability(a, b, G), expected, atol=1e-12)


def test_failed_gradings_leave_no_trace():
    clean, dirty = make("dppo"), make("dppo")
    rewards = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    lengths = np.full((2, 3), 10)
    clean.observe(np.array([3, 4]), rewards, lengths, step=0)
    with_failures = np.concatenate([rewards, np.full((1, 3), np.nan)])
    dirty.observe(np.array([3, 4, 5]), with_failures, np.full((3, 3), 10), step=0)
    for name, array in clean.history.arrays.items():
        np.testing.assert_array_equal(array, dirty.history.arrays[name], err_msg=name)
    dirty.observe(np.array([6]), np.array([[1.0, np.nan, 0.0]]), np.full((1, 3), 10), step=0)
    assert dirty.history.arrays["successes"][6] == pytest.approx(0.35 + 1)
    assert dirty.history.arrays["failures"][6] == pytest.approx(0.35 + 1)
    for array in dirty.history.arrays.values():
        assert not np.isnan(array[6]).any() or array is dirty.history.arrays["moment"]


def test_second_moments_are_learned_from_groups_with_variance_only():
    policy = make("dppo", discount=0.5)
    flat, mixed = np.zeros((1, 2)), np.array([[1.0, 0.0]])
    one = np.ones((1, 2), int)
    policy.observe(np.array([0]), flat, one, step=0, second_moment=np.array([0.0]))
    assert np.isnan(policy.history.arrays["moment"][0])
    policy.observe(np.array([0]), mixed, one, step=1, second_moment=np.array([8.0]))
    policy.observe(np.array([0]), mixed, one, step=2, second_moment=np.array([4.0]))
    assert policy.history.arrays["moment"][0] == pytest.approx(6.0)
    assert np.isfinite(policy.select(np.arange(5), step=5).weight).all()


@pytest.mark.parametrize("bad", [-0.5, 1.5, np.inf])
def test_rewards_that_are_no_pass_rate_are_refused_under_the_beta_score(bad):
    rewards = np.array([[0.0, 1.0], [0.5, bad]])
    with pytest.raises(UserError, match=r"reward of prompt 9, completion 1 is .*score=rms"):
        make("dppo", score="beta").observe(np.array([8, 9]), rewards, np.ones((2, 2), int), step=0)
    if np.isfinite(bad):
        make("dppo").observe(np.array([8, 9]), rewards, np.ones((2, 2), int), step=0)


def test_bad_arrays_are_refused():
    policy = make("dppo")
    with pytest.raises(ValueError, match=r"prompt set has rows 0\.\.239"):
        policy.select(np.array([240]), step=0)
    with pytest.raises(ValueError, match="integers"):
        policy.select(np.array([0.5]), step=0)
    with pytest.raises(ValueError, match="must both be"):
        policy.observe(np.array([0]), np.zeros((2, 2)), np.zeros((2, 2), int), step=0)
    assert len(policy.select(np.zeros(0, int), step=50).kept) == 0


@pytest.mark.parametrize("method", PROMPT_POLICIES)
def test_rewards_all_equal_and_groups_of_one_keep_every_policy_going(method):
    for size in (1, 4):
        policy = make(method, warmup_epochs=0.0)
        for step in range(8):
            ids = np.arange(PER_STEP)
            selection = policy.select(ids, step=step)
            assert np.isfinite(selection.weight).all() and np.isfinite(list(selection.metrics.values())).all()
            kept = ids[selection.kept]
            policy.observe(kept, np.ones((len(kept), size)), np.ones((len(kept), size), int), step=step)


@pytest.mark.parametrize("score", ["beta", "mean_abs", "rms"])
def test_every_score_selects(score):
    selections = play(make("dppo", score=score, cost_aware=True), 0, 20)
    assert not selections[-1].kept.all() and selections[-1].ledger[0].label == "unbiased"


@pytest.mark.parametrize(("estimator", "design", "label"), [
    ("fixed_size_ht", "systematic", "unbiased"),
    ("fixed_size_ht", "poisson", "ratio"),
    ("hajek", "systematic", "ratio"),
    ("ht", "poisson", "unbiased"),
])  # fmt: skip
def test_labels_of_the_estimators(estimator, design, label):
    selection = play(make("dppo", estimator=estimator, design=design), 0, 20)[-1]
    assert selection.ledger[0].label == label
    if estimator == "hajek":
        assert selection.weight.sum() == pytest.approx(PER_STEP)


def test_a_weight_cap_that_binds_is_labelled_and_one_that_cannot_is_not():
    capped = play(make("dppo", rate=0.5, max_weight=1.5), 0, 20)[-1]
    assert capped.weight.max() == 1.5 and capped.ledger[0].label == "biased"
    assert "max_weight 1.5 can bind: weights of ht reach up to" in capped.ledger[0].note
    loose = play(make("dppo", rate=0.5, max_weight=5.0), 0, 20)[-1]
    assert loose.ledger[0].label == "unbiased"


@pytest.mark.parametrize("estimator", ["hajek", "fixed_size_ht"])
def test_a_cap_is_judged_by_the_largest_weight_that_can_occur(estimator):
    """1/pi ends at 1/min_inclusion_prob; a ratio's weights do not, where few of the independent coins fall well."""
    common = {"rate": 0.5, "min_inclusion_prob": 0.2, "design": "poisson", "estimator": estimator}
    labels = [
        play(make("dppo", max_weight=cap, **common), 0, 20)[-1].ledger[0].label for cap in (0.0, 5.0, PER_STEP * 5.0)
    ]
    assert labels == ["ratio", "biased", "ratio"]


def test_the_design_effect_bound_backs_off():
    free, bound = (play(make("dppo", rate=0.6, max_design_effect=d), 0, 40)[-1] for d in (0.0, 1.15))
    assert free.growth > 1.15 >= bound.growth
    assert bound.kept.sum() > free.kept.sum() and "max_design_effect 1.15 keeps" in bound.ledger[0].note


def test_auto_waits_for_a_measurement_and_prunes_more_when_less_is_fixed():
    policy = make("dppo_auto", fixed_cost_ratio=0.0, rate=0.9)
    play(policy, 0, 20)
    ids = np.arange(0, NUM_PROMPTS, NUM_PROMPTS // PER_STEP)  # of every pass rate
    waiting = policy.select(ids, step=20)
    assert waiting.kept.all() and waiting.ledger[0].note == "no cost measured yet"
    policy.feedback(StepCost(21, rollout_s=8.0, update_s=2.0, other_s=5.0))
    dear = policy.select(ids, step=20).inclusion_prob.sum()
    assert dear == pytest.approx(round(dear)) and dear < PER_STEP
    cheap = make("dppo_auto", fixed_cost_ratio=0.005, rate=0.9)
    play(cheap, 0, 20)
    assert cheap.select(ids, step=20).inclusion_prob.sum() < dear


def test_the_paper_prunes_a_fixed_fraction_and_leaves_prompts_behind():
    policy = make("dppo_paper", rate=0.65)
    selections = play(policy, 0, 40)
    last = selections[-1]
    assert last.kept.sum() == 21 and np.allclose(last.weight[last.kept], 1 / 0.35)
    assert last.ledger[0].label == "biased" and "never drawn" in last.ledger[0].note
    assert (last.inclusion_prob == 0).sum() > 20
    stuck = policy.history.age_epochs(np.arange(NUM_PROMPTS), 40)
    play(policy, 40, 80)
    still = policy.history.age_epochs(np.arange(NUM_PROMPTS), 80)
    assert ((stuck > 3) & (still > 13)).sum() > 40


def test_infobatch_keeps_the_upper_class_and_weights_the_lower_one():
    policy = make("infobatch", rate=0.5)
    selections = play(policy, 0, 40)
    assert selections[0].kept.all()
    last = selections[-1]
    assert set(np.unique(last.inclusion_prob)) == {0.5, 1.0} and last.growth == pytest.approx(
        (1 / last.inclusion_prob).mean()
    )
    equal = make("infobatch", warmup_epochs=0.0)
    equal.observe(np.arange(PER_STEP), np.ones((PER_STEP, 2)), np.ones((PER_STEP, 2), int), step=0)
    assert equal.select(np.arange(PER_STEP), step=1).kept.all()  # nothing is below the mean
    assert set(np.unique(last.weight)) == {0.0, 1.0, 2.0} and last.ledger[0].label == "unbiased"


@pytest.mark.parametrize("total_steps", [17, 30, 33])
def test_infobatch_anneals_when_the_end_is_no_whole_epoch(total_steps):
    """The authors reset weights only if delta x epochs is a whole number; ours end wherever the fraction falls."""
    policy = make_prompt_policy(
        PromptPruningConfig(method="infobatch"),
        num_prompts=NUM_PROMPTS,
        completions_per_prompt=G,
        prompts_per_step=PER_STEP,
        total_steps=total_steps,
        seed=0,
    )
    selections = play(policy, 0, total_steps)
    end = int(np.ceil(0.875 * total_steps))
    assert not selections[end - 1].kept.all()
    assert all((s.weight == 1).all() for s in selections[end:])


def test_dynamic_sampling_refills_until_enough_groups_vary_and_stops_at_its_bound():
    policy = make("dynamic_sampling", refill=RefillConfig(max_rounds=3))
    flat, mixed = np.zeros((60, 4)), np.tile([0.0, 1.0, 0.0, 0.0], (40, 1))
    rewards = np.concatenate([flat, mixed])
    assert policy.missing_prompts(rewards, step=0, rounds=1) == PER_STEP
    enough = np.concatenate([rewards, mixed])
    assert policy.missing_prompts(enough, step=0, rounds=2) == 0
    kept = policy.keep_groups(enough, step=0)
    assert kept.kept.sum() == PER_STEP and (kept.weight[kept.kept] == 1.0).all() and kept.ledger[0].label == "biased"
    assert kept.kept[60:].tolist() == [True] * 60 + [False] * 20
    assert policy.missing_prompts(flat, step=0, rounds=3) == 0
    short = policy.keep_groups(rewards, step=0)
    assert short.kept.sum() == 40 and (short.weight[short.kept] == 1.5).all()
    assert "only 40 of 60" in short.ledger[0].note
    none = policy.keep_groups(flat, step=0)
    assert not none.kept.any() and (none.weight == 0).all()


@pytest.mark.parametrize("method", sorted(set(PROMPT_POLICIES) - {"dynamic_sampling", "greso"}))
def test_other_methods_never_refill(method):
    policy = make(method)
    assert policy.missing_prompts(np.zeros((3, 4)), step=0, rounds=1) == 0
    groups = policy.keep_groups(np.zeros((3, 4)), step=0)
    assert groups.kept.all() and groups.ledger[0].label == "exact"


def test_history_figures_and_memory():
    policy = make("dppo")
    assert policy.history.metrics(9) == {
        "prune/history_coverage": 0.0,
        "prune/history_staleness_mean_epochs": 0.0,
        "prune/history_staleness_max_epochs": 0.0,
    }
    for prompt, step in ((0, 2), (1, 6)):
        policy.observe(np.array([prompt]), np.zeros((1, 2)), np.ones((1, 2), int), step=step)
    assert policy.history.metrics(10) == {
        "prune/history_coverage": pytest.approx(2 / 240),
        "prune/history_staleness_mean_epochs": 1.5,
        "prune/history_staleness_max_epochs": 2.0,
    }
    assert sum(array.nbytes for array in policy.history.arrays.values()) <= 100 * 240


def test_what_a_selection_consists_of():
    assert [f.name for f in dataclasses.fields(make("none").select(np.arange(3), step=0))] == [
        "kept",
        "inclusion_prob",
        "weight",
        "ledger",
        "metrics",
        "growth",
        "planned_prob",
        "kept_cost",
        "effect",
        "mean_weight",
        "redraw",
    ]
