"""CPPO and GRESO decide as their authors' code does. The rules are restated here from that code, in plain Python.

CPPO: lzhxmu/CPPO at 52faeb3 (cppo_ray_trainer.py 310-328). GRESO: Infini-AI-Lab/GRESO at b277843
(presampling_selector.py 102-147, ray_trainer.py 1149-1219, ttis.py 24-39). Differences on purpose are tests as well.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.config.pruning import CompletionPruningConfig, GresoConfig, PromptPruningConfig
from dppo_megatron.pruning import CompletionBatch, make_completion_policy, make_prompt_policy
from dppo_megatron.pruning.prompt_baselines import has_variance, keep_probability, next_round
from dppo_megatron.randomness import uniforms

SEED, NUM_PROMPTS, PER_STEP = 11, 64, 16


# ------------------------------------------------------------------------------------------------ CPPO


def official_cppo_indices(advantages, pruning_rate):
    """Positions the verl port keeps, in order."""
    k = int(len(advantages) * (1 - pruning_rate))
    ranked = sorted(range(len(advantages)), key=lambda i: -abs(advantages[i]))
    return sorted(ranked[:k])


def cppo_selection(advantages, rate, *, method="cppo_verl", group=None):
    n = len(advantages)
    batch = CompletionBatch(
        prompt_index=np.arange(n) if group is None else group,
        completion_index=np.arange(n),
        group=np.zeros(n, int) if group is None else group,
        rewards=np.zeros(n),
        advantages=advantages,
        lengths=np.ones(n, int),
        logit_grad_norm=np.ones(n),
        denominator=np.ones(n),
        prompt_weight=np.ones(n),
        num_nominal=n,
    )
    policy = make_completion_policy(CompletionPruningConfig(method=method, rate=rate), seed=0, total_steps=10)
    return policy.prune(batch, step=0)


@pytest.mark.parametrize("rate", [0.5, 0.75, 0.875, 0.9375])
@pytest.mark.parametrize("n", [16, 64, 128, 160])
def test_cppo_keeps_what_the_verl_port_keeps(n, rate):
    """The published rates are sums of halves, exact in binary, so the authors' floor does not trip."""
    for seed in range(5):
        advantages = np.random.default_rng(seed).normal(size=n)
        selection = cppo_selection(advantages, rate)
        assert np.flatnonzero(selection.kept).tolist() == official_cppo_indices(advantages, rate)
        # Mean over the kept: on frozen denominators each carries n / k.
        assert np.allclose(selection.weight[selection.kept], n / selection.kept.sum())


def test_cppo_counts_differ_where_the_official_floor_is_one_short():
    advantages = np.random.default_rng(0).normal(size=160)
    assert len(official_cppo_indices(advantages, 0.9)) == 15
    selection = cppo_selection(advantages, 0.9)
    assert selection.kept.sum() == 16
    assert set(official_cppo_indices(advantages, 0.9)) < set(np.flatnonzero(selection.kept).tolist())


@pytest.mark.parametrize("rate", [0.5, 0.75, 0.875])
def test_cppo_per_group_is_the_verl_rule_inside_each_group(rate):
    advantages, group = np.random.default_rng(1).normal(size=96), np.repeat(np.arange(6), 16)
    selection = cppo_selection(advantages, rate, method="cppo", group=group)
    for g in range(6):
        rows = np.flatnonzero(group == g)
        kept = rows[official_cppo_indices(advantages[rows], rate)]
        assert np.flatnonzero(selection.kept & (group == g)).tolist() == kept.tolist()


def test_cppo_ties_are_broken_at_random_but_repeatably():
    advantages = np.tile([1.0, -1.0], 20)
    one, again = cppo_selection(advantages, 0.5), cppo_selection(advantages, 0.5)
    np.testing.assert_array_equal(one.kept, again.kept)
    assert np.allclose(one.inclusion_prob, 0.5)
    assert np.flatnonzero(one.kept).tolist() != list(range(20))


# ----------------------------------------------------------------------------------------------- GRESO


class OfficialProfiler:
    """The decisions of presampling_selector.py: traces of (epoch, mean reward), with the uniform numbers handed in."""

    def __init__(self):
        self.data = {}

    def add(self, epoch, prompt, mean_reward):
        self.data.setdefault(prompt, []).append((epoch, mean_reward))

    def skips(self, prompt, uniform, p_easy, p_hard):
        trace = self.data.get(prompt, [])
        if not trace:
            return False
        count = 0
        for _, reward in reversed(trace):
            if reward < 0.98:
                break
            count += 1
        if uniform < 1 - max(p_easy**count, 0.01):
            return True
        if trace[-1][1] > 0.11:
            return False
        count = 0
        for _, reward in reversed(trace):
            if reward > 0.11:
                break
            count += 1
        return uniform < 1 - max(p_hard**count, 0.01)


class OfficialAdaptation:
    """p_easy and p_hard of ray_trainer.py: one move a step after the first epoch."""

    def __init__(self, target=0.25):
        self.p_easy = self.p_hard = 0.5
        self.target_easy, self.target_hard = target / 3, target * 2 / 3

    def update(self, epoch, hard_ratio, easy_ratio):
        if epoch == 0:
            return
        down, up = (lambda p: max(p - 0.01, 0.05)), (lambda p: min(p + 0.01, 0.95))
        self.p_hard = down(self.p_hard) if hard_ratio >= self.target_hard else up(self.p_hard)
        self.p_easy = down(self.p_easy) if easy_ratio >= self.target_easy else up(self.p_easy)


def official_next_batch(reminder_samples, zero_variance_ratio, n, default):
    """Adaptive sampling batch and last_sampling, in the authors' order of operations."""
    estimated = int(reminder_samples / (1 - zero_variance_ratio) / n * 1.25)
    return max(min(estimated, default), 64), estimated <= default


def make_greso(method="greso", **changes):
    config = PromptPruningConfig(method=method, **changes)
    return make_prompt_policy(
        config,
        num_prompts=NUM_PROMPTS,
        completions_per_prompt=8,
        prompts_per_step=PER_STEP,
        total_steps=1000,
        seed=SEED,
    )


def test_greso_skips_what_the_official_rule_skips_over_a_whole_run():
    """Rewards of 1, 0.1 (format only) and mixtures; 16 epochs; every decision and both probabilities agree."""
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 4, NUM_PROMPTS)
    policy, profiler, adaptation = make_greso(), OfficialProfiler(), OfficialAdaptation()
    skipped = 0
    for step in range(64):
        epoch = step // (NUM_PROMPTS // PER_STEP)
        ids = np.random.default_rng((3, step)).permutation(NUM_PROMPTS)[:PER_STEP]
        selection = policy.select(ids, step=step)
        uniform = uniforms(SEED, "prompt coin", ids, step, 0)
        official = [
            profiler.skips(i, u, adaptation.p_easy, adaptation.p_hard) for i, u in zip(ids, uniform, strict=True)
        ]
        assert (~selection.kept).tolist() == official, step
        assert selection.metrics["p_easy"] == adaptation.p_easy and selection.metrics["p_hard"] == adaptation.p_hard
        skipped += sum(official)
        kept = ids[selection.kept]
        rewards = np.stack([one_group(rng, kind[i]) for i in kept])
        for i, row in zip(kept, rewards, strict=True):
            profiler.add(epoch, i, float(np.sum(row) / len(row)))
        policy.observe(kept, rewards, np.ones(rewards.shape, int), step=step)
        flat = rewards.max(1) == rewards.min(1)
        adaptation.update(epoch, (flat & (rewards[:, 0] == 0.1)).mean(), (flat & (rewards[:, 0] == 1.0)).mean())
    assert skipped > 100
    assert adaptation.p_easy != 0.5 and adaptation.p_hard != 0.5


def one_group(rng, kind):
    """Always right, format only, or mixed; now and then another kind, so that runs break."""
    if rng.random() < 0.1:
        kind = 2
    return np.ones(8) if kind == 0 else np.full(8, 0.1) if kind == 1 else rng.choice([1.0, 0.1, 0.0], 8)


@given(st.integers(1, 256), st.integers(0, 383), st.sampled_from([4, 8, 16]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_greso_asks_for_the_official_number_of_prompts(missing, flat, n):
    """In groups instead of samples; n = 4, 8, 16 divide exactly, so the order of operations cannot matter."""
    ratio = flat / 384
    assert next_round(missing, ratio, smallest=64, largest=384) == official_next_batch(missing * n, ratio, n, 384)


def test_greso_refill_follows_the_official_rounds():
    policy = make_greso(greso=GresoConfig(smallest_refill_prompts=4, largest_refill_prompts=24))
    mixed, flat = np.array([1.0] + [0.0] * 7), np.ones(8)
    first = np.stack([mixed] * 4 + [flat] * 12)
    # 12 groups missing, 3 of 4 flat: int(12 / .25 * 1.25) = 60, clamped to 24 and so not the last round.
    assert policy.missing_prompts(first, step=0, rounds=1) == 24
    second = np.concatenate([first, np.stack([mixed] * 6 + [flat] * 6)])
    # 6 missing, half of the last round flat: int(6 / .5 * 1.25) = 15, within 24: the last round.
    assert policy.missing_prompts(second, step=0, rounds=2) == 15
    third = np.concatenate([second, np.stack([mixed] * 2 + [flat] * 13)])
    assert policy.missing_prompts(third, step=0, rounds=3) == 0
    kept = policy.keep_groups(third, step=0)
    assert kept.kept.sum() == 12 and np.allclose(kept.weight[kept.kept], 16 / 12)
    np.testing.assert_array_equal(kept.kept, has_variance(third))
    assert policy.missing_prompts(np.stack([mixed] * 20), step=1, rounds=1) == 0
    surplus = policy.keep_groups(np.stack([mixed] * 20), step=1)
    assert surplus.kept.tolist() == [True] * 16 + [False] * 4


def test_greso_survives_a_round_without_any_variance():
    """Officially a division by zero; here the largest refill, bounded by max_rounds."""
    with pytest.raises(ZeroDivisionError):
        official_next_batch(128, 1, 8, 384)
    assert next_round(16, 1.0, smallest=64, largest=384) == (384, False)
    policy = make_greso()
    flat = np.ones((16, 8))
    assert policy.missing_prompts(flat, step=0, rounds=1) == 384
    assert policy.missing_prompts(np.ones((400, 8)), step=0, rounds=10) == 0
    assert not policy.keep_groups(np.ones((400, 8)), step=0).kept.any()


@pytest.mark.parametrize("group_size", [2, 4, 16])
def test_greso_group_size_is_free(group_size):
    """The official metric reshapes to groups of 8 whatever n is."""
    assert has_variance(np.ones((3, group_size))).tolist() == [False] * 3
    assert has_variance(np.eye(group_size)[:2]).tolist() == [True] * 2
    policy = make_greso()
    policy.observe(np.array([1]), np.ones((1, group_size)), np.ones((1, group_size), int), step=0)
    assert policy.history.arrays["easy_run"][1] == 1


def test_greso_probabilities_and_their_floor():
    pi = keep_probability(np.array([0, 1, 3, 50]), np.zeros(4, int), 0.5, 0.25, 0.01)
    np.testing.assert_allclose(pi, [1.0, 0.5, 0.125, 0.01])
    np.testing.assert_allclose(keep_probability(np.zeros(2, int), np.array([0, 2]), 0.5, 0.25, 0.01), [1.0, 0.0625])


def test_greso_ht_is_greso_with_weights_and_a_floor():
    policy = make_greso("greso_ht")
    for step in range(12):
        policy.observe(np.arange(16), np.ones((16, 8)), np.ones((16, 8), int), step=step)
    ids = np.arange(32)
    draws = [policy.select(ids, step=20, minibatch=k) for k in range(400)]
    pi = draws[0].inclusion_prob
    np.testing.assert_array_equal(pi, np.where(ids < 16, 0.2, 1.0))
    assert draws[0].ledger[0].label == "unbiased"
    assert {float(w) for d in draws for w in d.weight} == {0.0, 1.0, 5.0}
    assert np.mean([d.weight[:16].mean() for d in draws]) == pytest.approx(1.0, abs=0.15)
    plain = make_greso("greso")
    for step in range(12):
        plain.observe(np.arange(16), np.ones((16, 8)), np.ones((16, 8), int), step=step)
    selection = plain.select(ids, step=20)
    assert selection.ledger[0].label == "biased" and set(np.unique(selection.weight)) <= {0.0, 1.0}
