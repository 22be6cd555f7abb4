"""KL terms and the rollout correction against exact sums over a small vocabulary, and what a user's loss is told."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.job import job_config, write_job_files
from support.tiny import write_model
from torch import Tensor

from dppo_megatron.algorithms.advantages import denominators, make_advantages
from dppo_megatron.algorithms.correction import Mismatch, correction_error, importance_factor
from dppo_megatron.algorithms.objectives import check_policy_loss, kl_estimate, make_objective
from dppo_megatron.algorithms.policy_losses import clip
from dppo_megatron.algorithms.tokens import PolicyLoss, TokenBatch, TokenLoss, sequence_sums
from dppo_megatron.config.objective import CorrectionConfig, KLConfig, ObjectiveConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.job import check_settings, prepare_job
from dppo_megatron.platform.capabilities import this_machine
from dppo_megatron.steps.coordinator import off_policy_rows
from dppo_megatron.steps.step import Step
from dppo_megatron.types import UpdateResult, UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.workbench.quickstart.tiny_model import make_tokenizer

VOCABULARY = 7
ESTIMATORS = ("k1", "k2", "k3", "k3_unbiased")


def _distributions(*seeds: int) -> list[Tensor]:
    """Random logits over a small vocabulary, float64."""
    return [torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in seeds]


def _batch(logprobs: Tensor, **fields: Tensor) -> TokenBatch:
    """Every token a sequence of its own, unless told otherwise."""
    plain = logprobs.detach()
    values = {
        "entropy": torch.zeros_like(plain),
        "behaviour_logprobs": plain,
        "old_logprobs": plain,
        "reference_logprobs": torch.zeros_like(plain),
        "advantages": torch.ones_like(plain),
        "mask": torch.ones_like(plain),
        "sequence": torch.arange(len(plain)),
    }
    return TokenBatch(logprobs=logprobs, **(values | fields))


def _expected_gradient(logits: Tensor, behaviour: Tensor, reference: Tensor, estimator: str) -> tuple[float, Tensor]:
    """Value and gradient of the estimate, as the exact expectation over tokens drawn from `behaviour`."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    batch = _batch(logprobs, behaviour_logprobs=behaviour.log_softmax(0), reference_logprobs=reference.log_softmax(0))
    value = behaviour.softmax(0) @ kl_estimate(batch, KLConfig(estimator=estimator))  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(value, logits)
    return value.item(), gradient


def _exact(logits: Tensor, reference: Tensor, *, reverse: bool) -> tuple[float, Tensor]:
    """KL(policy || reference) and its gradient, or with the two exchanged."""
    logits = logits.clone().requires_grad_()
    policy, other = logits.log_softmax(0), reference.log_softmax(0)
    kl = other.exp() @ (other - policy) if reverse else policy.exp() @ (policy - other)
    return kl.item(), torch.autograd.grad(kl, logits)[0]


def test_expected_kl_gradients_by_enumeration() -> None:
    """On-policy: k2 and k3_unbiased have the KL's gradient, k3 the reverse KL's, k1 none; all values but k2's right."""
    policy, reference = _distributions(0, 1)
    value, gradient = _exact(policy, reference, reverse=False)
    _, reverse = _exact(policy, reference, reverse=True)
    expected = {"k1": torch.zeros_like(gradient), "k2": gradient, "k3": reverse, "k3_unbiased": gradient}
    assert torch.linalg.norm(gradient - reverse) > 0.1 * torch.linalg.norm(gradient)
    for name in ESTIMATORS:
        estimated, slope = _expected_gradient(policy, policy, reference, name)
        torch.testing.assert_close(slope, expected[name], rtol=1e-10, atol=1e-12)
        assert name == "k2" or estimated == pytest.approx(value, rel=1e-12)


def test_unbiased_kl_is_right_off_policy_too() -> None:
    """Tokens drawn from another policy: only k3_unbiased still has the KL's value and gradient."""
    policy, behaviour, reference = _distributions(0, 2, 1)
    value, gradient = _exact(policy, reference, reverse=False)
    for name in ESTIMATORS:
        estimated, slope = _expected_gradient(policy, behaviour, reference, name)
        right = torch.allclose(slope, gradient, rtol=1e-10, atol=1e-12) and estimated == pytest.approx(value)
        assert right == (name == "k3_unbiased"), name


def test_kl_values_by_hand() -> None:
    """policy 0.5, reference 0.25, behaviour 0.4."""
    logs = [torch.tensor([p], dtype=torch.float64).log() for p in (0.5, 0.25, 0.4)]
    batch = _batch(logs[0], reference_logprobs=logs[1], behaviour_logprobs=logs[2])
    k3 = 0.5 - np.log(0.5) - 1
    for name, expected in (("k1", np.log(2)), ("k2", np.log(2) ** 2 / 2), ("k3", k3), ("k3_unbiased", 1.25 * k3)):
        assert kl_estimate(batch, KLConfig(estimator=name)).item() == pytest.approx(expected)  # type: ignore[arg-type]


def _correction(level: str, mode: str = "truncate", max_ratio: float = 1e6, min_ratio: float = 0.0) -> ObjectiveConfig:
    return ObjectiveConfig(correction=CorrectionConfig(level, mode, max_ratio, min_ratio))  # type: ignore[arg-type]


def _sequences_gradient(
    config: ObjectiveConfig, behaviour: Tensor, policy: Tensor, draw_from: Tensor, *, rewards_prefix: bool = False
) -> Tensor:
    """Exact expectation over all sequences of two tokens, with a reward for each sequence, of the loss's gradient.

    Args:
        behaviour, draw_from: [V] logits, or [2, V] of each place: a sync between the two tokens.
        rewards_prefix: a token's advantage depends on nothing behind it.
    """
    first, second = (index.ravel() for index in torch.meshgrid(*[torch.arange(VOCABULARY)] * 2, indexing="ij"))
    tokens = torch.stack([first, second], dim=1)  # [V^2, 2]
    reward = torch.sin(3.0 * first + second * second).double()
    logits = policy.clone().requires_grad_()

    advantages = reward.repeat_interleave(2)
    if rewards_prefix:
        advantages = torch.stack([torch.cos(first.double()), reward], dim=1).ravel()

    def at(values: Tensor) -> Tensor:
        first, second = values.log_softmax(-1).expand(2, VOCABULARY)
        return torch.stack([first[tokens[:, 0]], second[tokens[:, 1]]], dim=1).ravel()

    batch = _batch(
        at(logits),
        behaviour_logprobs=at(behaviour),
        old_logprobs=at(policy),
        advantages=advantages,
        sequence=torch.arange(len(tokens)).repeat_interleave(2),
    )
    probability = at(draw_from).exp().view(-1, 2).prod(dim=1).repeat_interleave(2)
    return torch.autograd.grad(probability @ make_objective(config)(batch).loss, logits)[0]


def test_sequence_correction_makes_the_estimate_right() -> None:
    """Drawn from an engine that differs, trained with its log-probabilities recomputed: the exact on-policy gradient
    with the whole sequence's ratio, wrong without a correction, less wrong with a bound on it."""
    policy, behaviour = _distributions(3, 4)
    behaviour = policy + 0.4 * (behaviour - policy)
    target = _sequences_gradient(ObjectiveConfig(), policy, policy, draw_from=policy)

    def error(config: ObjectiveConfig) -> float:
        gradient = _sequences_gradient(config, behaviour, policy, draw_from=behaviour)
        return float(torch.linalg.norm(gradient - target) / torch.linalg.norm(target))

    uncorrected = error(ObjectiveConfig())
    assert error(_correction("sequence")) < 1e-12
    assert uncorrected > 0.1
    assert 1e-3 < error(_correction("sequence", max_ratio=2.0)) < uncorrected


COMPLETIONS = [(0,), (1, 0), (2, 0), *itertools.product((1, 2), (1, 2), (0, 1, 2))]
"""Token 0 ends one, and the third place."""
LENGTHS = np.array([len(tokens) for tokens in COMPLETIONS])
REWARDS = np.array([0.4 * (tokens[-1] == 0) + 0.6 * (len(tokens) < 3 and tokens[0] != 2) for tokens in COMPLETIONS])
PAIRS = np.array(list(itertools.product(range(len(COMPLETIONS)), repeat=2)))


def _pairs_gradient(config: ObjectiveConfig, policy: Tensor, behaviour: Tensor, before: Tensor | None = None) -> Tensor:
    """Exact expectation over all pairs of completions drawn from `behaviour` of the loss's gradient at `policy`, each
    completion with the pair's advantages and its divisor. Logits are [place, token]; `before`: of the actor before the
    step's first update, where this is not the first."""
    drawn, lengths = [COMPLETIONS[which] for which in PAIRS.ravel()], LENGTHS[PAIRS]
    tokens = torch.tensor([token for one in drawn for token in one])
    places = torch.tensor([place for one in drawn for place in range(len(one))])
    sequence = torch.repeat_interleave(torch.arange(len(drawn)), torch.tensor([len(one) for one in drawn]))
    logits = policy.clone().requires_grad_()
    first = policy if before is None else before
    now, theirs, old = (values.log_softmax(-1)[places, tokens] for values in (logits, behaviour, first))
    prior = np.tile([2.0, 1.0], (len(PAIRS), 1))  # far from the mean
    advantages = torch.from_numpy(make_advantages(REWARDS[PAIRS], config, lengths=lengths, prior=prior).ravel())
    divisor = denominators(
        config.normalization, lengths, lengths.sum(axis=1), nominal=2, max_completion_tokens=int(lengths.max())
    )
    batch = _batch(now, behaviour_logprobs=theirs, old_logprobs=old, advantages=advantages[sequence], sequence=sequence)
    chance = sequence_sums(theirs, batch).exp()[sequence.diff(prepend=torch.tensor([-1])) > 0].view(-1, 2).prod(dim=1)
    each = torch.repeat_interleave(chance, 2) / torch.from_numpy(divisor.ravel())
    return torch.autograd.grad(each[sequence] @ make_objective(config)(batch).loss, logits)[0]


STREAMED = [
    ("none", "truncate", 2.0, 0.0),
    ("token", "truncate", 1e9, 0.0),
    ("cumulative", "truncate", 1e9, 0.0),
    ("sequence", "truncate", 1e9, 0.0),
    ("sequence", "truncate", 1e9, 0.8),
    ("sequence", "mask", 1e9, 0.0),
    ("sequence", "mask", 1e9, 0.8),
    ("sequence", "truncate", 1.1, 0.0),
]


@pytest.mark.parametrize("normalization", ["constant", "sequence_mean", "token_mean"])
@pytest.mark.parametrize("advantage", ["rloo", "posterior_loo", "group_mean", "group_std"])
def test_the_row_of_stale_tokens_is_true(advantage: str, normalization: str) -> None:
    """Completions of one to three tokens, of which the first is of other older weights than those behind it, by
    enumeration of all pairs: the expected gradient is the newest weights' exactly where the row says so. A completion
    that its own length divides is not among those: its mates' mean is the older weights'. Nor is a second update, which
    clips by an advantage that this mean has a part in; nor sampling from the two likeliest tokens, which are others
    under the older weights."""
    random = torch.Generator().manual_seed(0)
    policy = torch.randn(3, 3, generator=random, dtype=torch.float64)
    older = torch.randn(3, 3, generator=random, dtype=torch.float64) * torch.tensor([[0.6], [-0.4], [-0.4]])
    plain = ObjectiveConfig(advantage=advantage, normalization=normalization)  # type: ignore[arg-type]
    target = _pairs_gradient(plain, policy, policy)
    later = policy + torch.randn(3, 3, generator=random, dtype=torch.float64)
    of_later = _pairs_gradient(plain, later, policy, before=policy)

    def cut(logits: Tensor) -> Tensor:
        return torch.where(logits == logits.min(dim=-1, keepdim=True).values, -60.0, logits)

    for level, mode, max_ratio, min_ratio in STREAMED:
        config = Config(objective=replace(plain, correction=_correction(level, mode, max_ratio, min_ratio).correction))
        config.rollout.async_steps = 2
        found = _pairs_gradient(config.objective, policy, policy + older)
        error = float(torch.linalg.norm(found - target) / torch.linalg.norm(target))
        [row] = off_policy_rows(config)
        assert row.label == ("unbiased" if error < 1e-12 else "biased"), (level, mode, min_ratio, error)
        assert not 1e-12 < error < 1e-3
        config.objective.updates_per_step = 2
        found = _pairs_gradient(config.objective, later, policy + older, before=policy)
        assert float(torch.linalg.norm(found - of_later) / torch.linalg.norm(of_later)) > 1e-4
        assert [row.label for row in off_policy_rows(config)] == ["biased"]
        config.objective.updates_per_step, config.rollout.sampling.top_k = 1, 2
        newest, found = (_pairs_gradient(config.objective, policy, cut(one)) for one in (policy, policy + older))
        assert float(torch.linalg.norm(found - newest) / torch.linalg.norm(newest)) > 1e-4
        assert [row.label for row in off_policy_rows(config)] == ["biased"]
        config.rollout.sampling.top_k = 0
        config.rollout.async_steps, config.rollout.quantization = 0, "fp8"
        [rounded] = off_policy_rows(config)
        assert (rounded.name, rounded.label) == ("rollout/quantized", row.label)
        config.rollout.quantization = "off"
        assert not off_policy_rows(config)


@pytest.mark.parametrize(
    "more",
    [{"kl": KLConfig(0.3)}, {"entropy_coef": 0.3}, {"function": "a:loss"}, {"token_values": "a:function"}],
    ids=["kl", "entropy", "function", "token values"],
)
def test_what_no_ratio_multiplies_makes_stale_tokens_biased(more: dict[str, Any]) -> None:
    """With the whole sequence's ratio, which makes up for them otherwise: KL and entropy terms stand beside the
    product, and of a loss of one's own nothing is known. The KL term's share is enumerated here."""
    random = torch.Generator().manual_seed(0)
    policy, older = (torch.randn(3, 3, generator=random, dtype=torch.float64) for _ in range(2))
    exact = replace(_correction("sequence", max_ratio=1e9), advantage="rloo", normalization="constant")
    for objective, label in ((exact, "unbiased"), (replace(exact, **more), "biased")):
        config = Config(objective=objective)
        config.rollout.async_steps, config.rollout.quantization = 2, "fp8"
        assert [row.label for row in off_policy_rows(config)] == [label, label]
    with_kl = replace(exact, kl=KLConfig(0.3))
    newest, stale = (_pairs_gradient(with_kl, policy, behaviour) for behaviour in (policy, policy + 0.3 * older))
    assert float(torch.linalg.norm(stale - newest) / torch.linalg.norm(newest)) > 1e-3


@pytest.mark.parametrize(("age", "level", "warned"), [(0, "none", False), (2, "none", True), (2, "token", False)])
def test_stale_rollouts_that_nothing_makes_up_for_are_warned_of(
    tmp_path: Path, age: int, level: str, warned: bool
) -> None:
    config = Config(objective=_correction(level))
    config.rollout.async_steps = age
    architecture = read_architecture(write_model(tmp_path, family="qwen3", max_position_embeddings=4096))
    lines = check_settings(config, architecture, 1, this_machine())
    assert any("warning: rollout.async_steps = 2" in line for line in lines) == warned


@pytest.mark.parametrize(("level", "max_ratio"), [("token", 1.2), ("token", 1e6), ("sequence", 1.2)])
def test_the_bias_that_a_correction_leaves_is_about_the_enumerated(level: str, max_ratio: float) -> None:
    """Over 20 pairs of policy and engine, the median of estimate / bias: single ones are off by up to three, since the
    gradients of this toy's completions have 4 directions and are far from orthogonal."""
    generator, ratios = torch.Generator().manual_seed(0), []
    first, second = (index.ravel() for index in torch.meshgrid(*[torch.arange(VOCABULARY)] * 2, indexing="ij"))
    for _ in range(20):
        policy = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
        behaviour = policy + 0.4 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
        target = _sequences_gradient(ObjectiveConfig(), policy, policy, draw_from=policy)
        config = _correction(level, max_ratio=max_ratio)
        found = _sequences_gradient(config, behaviour, policy, draw_from=behaviour)
        seen = Mismatch()
        for one, other in zip(first.tolist(), second.tolist(), strict=True):
            old, theirs = (logits.log_softmax(-1)[[one, other]].numpy() for logits in (policy, behaviour))
            reward = float(np.sin(3.0 * one + other * other))
            seen.add(old, theirs, 1.0, float(np.exp(theirs.sum())), config.correction, reward)  # as often as drawn
        assert seen.bias is not None
        ratios.append(seen.bias / float(torch.linalg.norm(found - target) / torch.linalg.norm(target)))
    assert 0.6 < np.median(ratios) < 1.7, ratios
    exact = Mismatch()
    exact.add(old, theirs, 1.0, 1.0, CorrectionConfig("sequence", max_ratio=1e9), 1.0)
    assert exact.bias == pytest.approx(0.0, abs=1e-12)
    assert Mismatch().bias is None
    of_docstring, exact_ratio = correction_error(np.array([0.1, 0.3]), np.zeros(2), CorrectionConfig("token"))
    np.testing.assert_allclose([*of_docstring, exact_ratio], [-0.387, -0.142, 1.492], atol=1e-3)


def test_the_size_of_a_bias_does_not_grow_without_bound() -> None:
    """Of 512 completions of 4,000 tokens, each 0.03 off: factors of single tokens leave about all of it."""
    random = np.random.default_rng(0)
    seen = Mismatch()
    for _ in range(512):
        behaviour = random.normal(0.0, 0.03, 4000) - 0.03**2 / 2
        seen.add(np.zeros(4000), behaviour, 1.0, 1.0, CorrectionConfig("token", max_ratio=2.0), 1.0)
    assert seen.bias is not None and 0.5 < seen.bias < 2.0


def test_the_cumulative_ratio_is_exact_for_what_the_prefix_decides() -> None:
    policy, older = _distributions(3, 4)
    behaviour = torch.stack([policy + 0.4 * (older - policy), policy - 0.2 * (older - policy)])

    def gradient(config: ObjectiveConfig, drawn: Tensor) -> Tensor:
        return _sequences_gradient(config, drawn, policy, drawn, rewards_prefix=True)

    target = gradient(ObjectiveConfig(), policy)
    torch.testing.assert_close(gradient(_correction("cumulative", max_ratio=1e9), behaviour), target)
    assert float(torch.linalg.norm(gradient(_correction("token", max_ratio=1e9), behaviour) - target)) > 1e-3


def test_importance_factors_by_hand() -> None:
    """Two sequences with a prompt token each; ratios 2, 0.25 | 4, by token and by sequence, truncated and masked."""
    log_ratio = torch.tensor([5.0, np.log(2), np.log(0.25), 7.0, np.log(4)])
    mask = torch.tensor([0.0, 1, 1, 0, 1])
    batch = _batch(torch.zeros(5), old_logprobs=log_ratio, mask=mask, sequence=torch.tensor([0, 0, 0, 1, 1]))
    cases = {
        ("token", "truncate", 3.0, 0.0): ([2, 0.25, 3], [0, 0, 1]),
        ("token", "mask", 3.0, 0.5): ([2, 0, 0], [0, 1, 1]),
        ("cumulative", "truncate", 1.5, 0.0): ([1.5, 0.5, 1.5], [1, 0, 1]),
        ("cumulative", "mask", 4.5, 0.6): ([2, 0.5, 4], [0, 0, 0]),
        ("cumulative", "mask", 3.0, 0.62): ([2, 0, 0], [0, 1, 1]),  # 0.62 to the root of 2 is 0.509
        ("sequence", "truncate", 3.0, 0.0): ([0.5, 0.5, 3], [0, 0, 1]),
        ("sequence", "mask", 4.5, 0.6): ([0, 0, 4], [1, 1, 0]),
    }
    for arguments, (expected, bounded) in cases.items():
        factor, changed = importance_factor(batch, _correction(*arguments).correction)
        torch.testing.assert_close(factor[mask > 0], torch.tensor(expected, dtype=factor.dtype))
        assert changed[mask > 0].tolist() == bounded


def _mismatch(old: list, behaviour: list, counted: list, weights: list) -> Mismatch:
    found = Mismatch()
    for each in zip(old, behaviour, counted, weights, strict=True):
        found.add(*each)
    return found


def test_mismatch_figures_by_hand() -> None:
    """Kish's effective shares of the sequences' ratios 1 and 3, and of those times the weights 2 and 1."""
    old = [np.log([0.5, 0.5]), np.log([0.6])]
    behaviour = [np.log([0.5, 0.5]), np.log([0.2])]
    found = _mismatch(old, behaviour, [1.0, 1.0], [2.0, 1.0])
    figures = found.metrics()
    assert figures["mismatch/is_ess"] == pytest.approx((1 + 3) ** 2 / (2 * (1 + 9)))
    assert found.product_ess == pytest.approx((2 + 3) ** 2 / (2 * (4 + 9)))
    assert figures["mismatch/logprob_abs_diff_mean"] == pytest.approx(np.log(3) / 3)
    assert figures["mismatch/kl"] == pytest.approx((3 - 1 - np.log(3)) / 3)
    assert figures["mismatch/logprob_abs_diff_p99"] == pytest.approx(np.log(3), rel=0.02)  # of three tokens the largest
    assert np.isnan([*Mismatch.join([]).metrics().values(), Mismatch().product_ess, Mismatch().logprob_abs_diff]).all()


def test_mismatch_adds_up_over_ranks() -> None:
    """However completions are spread over ranks: the figures of all of them, and numpy's own weighted 99th percentile
    to the width of a bin (2 %)."""
    rng = np.random.default_rng(0)
    behaviour = [-rng.exponential(1.0, n) for n in (400, 1, 0, 900, 30)]
    old = [values + 10.0 ** rng.uniform(-6, -1) * rng.standard_normal(len(values)) for values in behaviour]
    weights = rng.uniform(1, 4, 5).tolist()
    whole = _mismatch(old, behaviour, weights, weights).metrics()
    split = [_mismatch(old[r::3], behaviour[r::3], weights[r::3], weights[r::3]) for r in range(3)]
    assert Mismatch.join(split).metrics() == pytest.approx(whole)
    tokens = np.abs(np.concatenate(old) - np.concatenate(behaviour))
    each = np.repeat(weights, [len(values) for values in old])
    inverted = np.quantile(tokens, 0.99, method="inverted_cdf", weights=each)
    assert inverted <= whole["mismatch/logprob_abs_diff_p99"] <= 1.021 * inverted


def _returns_a_mean(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    return TokenLoss(clip(batch, config).loss.mean())


def _returns_a_tensor(batch: TokenBatch, config: ObjectiveConfig) -> Tensor:
    return batch.logprobs


def _detached(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    return TokenLoss(batch.logprobs.detach() * batch.advantages)


def _raises(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    return TokenLoss(batch.rewards)  # type: ignore[attr-defined]


def _named_as_ours(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    return TokenLoss(clip(batch, config).loss, {"entropy": batch.entropy.detach()})


def _named_now_and_then(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    diagnostics = {"ratio": batch.mask}
    if (batch.advantages > 0).any():
        diagnostics["positive_logprob"] = batch.logprobs.detach() * (batch.advantages > 0)
    return TokenLoss(clip(batch, config).loss, diagnostics)


def _clips_gradients(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    logprobs = batch.logprobs.clone()
    logprobs.register_hook(lambda gradient: gradient.clamp(-50, 50))
    return clip(replace(batch, logprobs=logprobs), config)


def _of_the_largest(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    """Linear in a weight that all tokens share, and not in those of `objective.token_values`."""
    logprobs = batch.logprobs.clone()
    logprobs.register_hook(lambda gradient: gradient * (gradient.abs() >= 0.5 * _sequence_max(gradient.abs(), batch)))
    return clip(replace(batch, logprobs=logprobs), config)


def _of_a_reference(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    return TokenLoss(clip(batch, config).loss * (batch.logprobs - batch.reference_logprobs).exp())


def _of_the_token_before(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    """Of another sequence where the prompt has one token."""
    return TokenLoss(clip(batch, config).loss + 0.01 * torch.roll(batch.logprobs, 1) * batch.advantages)


def _sequence_max(values: Tensor, batch: TokenBatch) -> Tensor:
    return torch.zeros_like(values).scatter_reduce(0, batch.sequence, values, "amax")[batch.sequence]


def _with_own_kl(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    return TokenLoss(clip(batch, config).loss + 0.1 * (batch.logprobs - batch.old_logprobs).square())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_returns_a_mean, r"loss is \[\], expected one value a token, \[8\]"),
        (_returns_a_tensor, "returned Tensor, expected TokenLoss"),
        (_detached, "does not depend on batch.logprobs"),
        (_raises, "raised AttributeError on a small made-up batch"),
        (_named_as_ours, "train/entropy is the trainer's"),
        (_named_now_and_then, "returns the diagnostic 'positive_logprob' with some batches only"),
        (_clips_gradients, "its gradient is not in proportion to the weights"),
        (_of_a_reference, r"reads batch\.reference_logprobs, which are 0 while objective\.kl\.coef = 0"),
        (_of_the_token_before, "changes with what else is in the micro-batch"),
        (_of_the_largest, "its gradient is not in proportion to the weights"),
        (_with_own_kl, "set objective.zero_advantage_slope"),
    ],
)
def test_a_wrong_loss_of_ones_own_is_said_at_once(function: object, message: str) -> None:
    """Each mistake has its own message."""
    with pytest.raises(UserError, match=message):
        check_policy_loss(function, ObjectiveConfig(function="mine:loss"))  # type: ignore[arg-type]


@pytest.mark.parametrize("coef", [0.0, 0.01])
def test_a_diagnostic_may_depend_on_whether_there_is_a_reference(coef: float) -> None:
    """That does not change within a run; what changes in it is refused with a reference and without."""

    def loss(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
        distance = (batch.logprobs - batch.reference_logprobs).detach()
        diagnostics = {"my_kl": distance} if batch.reference_logprobs.any() else {}
        return TokenLoss(clip(batch, config).loss, {"ratio": batch.mask} | diagnostics)

    config = ObjectiveConfig(function="mine:loss", kl=KLConfig(coef=coef))
    check_policy_loss(loss, config)
    with pytest.raises(UserError, match="returns the diagnostic 'positive_logprob' with some batches only"):
        check_policy_loss(_named_now_and_then, config)


@pytest.mark.parametrize("name", ["kl", "correction", "correction_bounded"])
def test_a_diagnostic_that_the_trainer_may_add_is_refused(name: str) -> None:
    """Also in a run that does not, since settings may change at a resume."""
    with pytest.raises(UserError, match=f"train/{name} is the trainer's; rename the diagnostic"):
        check_policy_loss(
            lambda batch, config: replace(clip(batch, config), diagnostics={name: batch.mask}),
            ObjectiveConfig(function="mine:loss"),
        )


def test_a_diagnostic_of_some_updates_is_a_mean_over_all() -> None:
    """What no trial can find: a name that a loss gives first at an advantage of 30, say."""
    updates: Any = [SimpleNamespace(plan=SimpleNamespace(has_support=True))] * 2
    given: list[dict[str, float]] = [{"rare": 3.0}, {}]
    for sums in (given, given[::-1]):
        measured = [
            UpdateResult(0.0, 1.0, 1e-6, False, tokens, one) for tokens, one in zip((2.0, 4.0), sums, strict=True)
        ]
        assert Step(1, updates=updates, measured=measured).update_metrics()["train/rare"] == 0.5


def _where(trains: Callable[[TokenBatch], Tensor]) -> PolicyLoss:
    """Trains these tokens alone."""
    return lambda batch, config: TokenLoss(-batch.logprobs * batch.advantages * trains(batch))


@pytest.mark.parametrize(
    "trains",
    [
        lambda batch: batch.advantages > 1,
        lambda batch: batch.entropy.detach() > 1.2,
        lambda batch: batch.logprobs.detach() < -2.5,
        lambda batch: batch.old_logprobs < -2.3,
        lambda batch: (batch.logprobs.detach() - batch.old_logprobs).abs() > 0.3,
    ],
)
def test_a_loss_that_trains_few_tokens_passes(trains: Callable[[TokenBatch], Tensor]) -> None:
    """The best answers alone, uncertain or rare tokens, those whose ratio has moved."""
    check_policy_loss(_where(trains), ObjectiveConfig(function="mine:loss"))


def test_a_right_loss_of_ones_own_passes() -> None:
    """Also one that moves completions with advantage 0, once that is declared."""
    config = ObjectiveConfig(function="mine:loss")
    check_policy_loss(clip, config)
    empty = lambda batch, config: clip(batch, config) if batch.mask.any() else TokenLoss(batch.logprobs)  # noqa: E731
    check_policy_loss(empty, config)
    check_policy_loss(_with_own_kl, replace(config, zero_advantage_slope=0.1))
    check_policy_loss(_of_a_reference, replace(config, kl=KLConfig(coef=1e-9)))


def test_a_reference_may_have_other_layers_that_predict_several_tokens(tmp_path: Path) -> None:
    """A run's hf/ has none of the original's, and either may be the reference of the other."""
    files = write_job_files(tmp_path / "files")
    for name, count in (("original", 1), ("export", 0)):
        own = {"vocab_size": len(make_tokenizer()), "num_nextn_predict_layers": count}
        model = write_model(tmp_path / name, family="glm4_moe", **own)
        make_tokenizer().save_pretrained(model)
        if count:
            weights = load_file(model / "model.safetensors") | {"model.layers.4.eh_proj.weight": torch.zeros(2)}
            save_file(weights, model / "model.safetensors", {"format": "pt"})
    for policy, other in (("export", "original"), ("original", "export")):
        paths = {"model__hf_path": tmp_path / policy, "objective__kl__reference_path": tmp_path / other}
        job = prepare_job(job_config(files, tmp_path / "run", **paths, objective__kl__coef=0.1), 1)
        job.grade.close()
        assert job.reference is not None and job.reference.names == job.checkpoint.names
