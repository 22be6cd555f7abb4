"""Builds the one function that the loss hook calls on every micro-batch from the objective's settings.

    policy loss x rollout correction + kl.coef x KL - entropy_coef x entropy

The hook multiplies the whole of it by the sample's weight and divides by its frozen denominator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dppo_megatron.algorithms.correction import importance_factor
from dppo_megatron.algorithms.policy_losses import POLICY_LOSSES
from dppo_megatron.algorithms.tokens import (
    MAX_LOG_RATIO,
    Objective,
    PolicyLoss,
    TokenBatch,
    TokenLoss,
    bounded_ratio,
)
from dppo_megatron.config.objective import KLConfig, ObjectiveConfig
from dppo_megatron.types import UserError

_OWN_FIGURES = frozenset(("loss", "tokens", "entropy", "grad_norm", "learning_rate", "skipped_updates"))
"""What a loss's diagnostics may not be called."""

__all__ = ["Objective", "PolicyLoss", "TokenBatch", "TokenLoss", "clipped_surrogate", "make_objective", "supervised"]


def make_objective(config: ObjectiveConfig, function: PolicyLoss | None = None) -> Objective:
    """The configured objective.

    Args:
        config: checked.
        function: the user's policy loss, already loaded; None: the built-in one of `config.loss`.
    """
    policy_loss = function or POLICY_LOSSES[config.loss]

    def objective(batch: TokenBatch) -> TokenLoss:
        result = policy_loss(batch, config)
        if function is not None:
            check_result(result, batch, config.function)
        loss, diagnostics = result.loss, dict(result.diagnostics)
        if config.correction.level != "none":
            factor, bounded = importance_factor(batch, config.correction)
            loss = factor * loss
            diagnostics |= {"correction": factor, "correction_bounded": bounded}
        if config.kl.coef:
            kl = kl_estimate(batch, config.kl)
            loss = loss + config.kl.coef * kl
            diagnostics["kl"] = kl.detach()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * batch.entropy
        return TokenLoss(loss, diagnostics)

    return objective


def kl_estimate(batch: TokenBatch, config: KLConfig) -> Tensor:
    """[T] estimate of KL(policy || reference) at each token; differentiable in the policy.

    That a value is an unbiased estimate says nothing about its gradient, because the tokens were drawn from the policy
    that is differentiated; what follows of gradients is in expectation over on-policy tokens.

    With d = log reference - log policy, clamped to +-20 (Schulman, "Approximating KL divergence", 2020):

    - k1 = -d. Its gradient is 0 in expectation: as a loss it is noise, in the reward it would be right.
    - k2 = d^2 / 2. Biased as a value; its gradient is that of KL(policy || reference), on-policy.
    - k3 = exp(d) - d - 1. The value is unbiased and never negative; its gradient is that of KL(reference || policy).
    - k3_unbiased = k3 policy / behaviour. The ratio carries the derivative of the sampling distribution, so the value
      and the gradient are right for each token, off-policy too (arXiv 2506.09477; DeepSeek-V3.2, 2512.02556, 3.1).

    The last holds token by token: how an update changes which prefixes are reached is left out, as in every estimate
    that is summed over tokens.
    """
    difference = (batch.reference_logprobs - batch.logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if config.estimator == "k1":
        return -difference
    if config.estimator == "k2":
        return 0.5 * difference.square()
    k3: Tensor = difference.exp() - difference - 1.0
    if config.estimator == "k3":
        return k3
    return bounded_ratio(batch.logprobs - batch.behaviour_logprobs) * k3


def clipped_surrogate(clip_low: float, clip_high: float, dual_clip: float) -> Objective:
    """`make_objective` for the clipped surrogate alone."""
    return make_objective(ObjectiveConfig(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip))


def supervised() -> Objective:
    """Negative log-likelihood of the given completion: SFT's loss, through the same hook."""

    def objective(batch: TokenBatch) -> TokenLoss:
        return TokenLoss(-batch.logprobs)

    return objective


def check_policy_loss(function: PolicyLoss, config: ObjectiveConfig, key: str = "objective.function") -> None:
    """Try a user's loss on eight made-up tokens, before anything expensive.

    Raises:
        UserError: it raises, returns something else than a TokenLoss of the batch's shape, has no gradient, is not
            finite, or moves completions with advantage 0 while the settings say that it does not.
    """
    at_advantage = _slopes(function, config, key, [0.5, -1.0])
    if not bool(torch.isfinite(at_advantage).all()):
        raise UserError(f"{key} = '{config.function}': its gradient is not finite on a small made-up batch")
    if not bool((at_advantage != 0).any()):
        raise UserError(
            f"{key} = '{config.function}': its loss does not depend on batch.logprobs, so nothing would be learned;"
            " do not detach it"
        )
    if config.zero_advantage_slope == 0 and bool((_slopes(function, config, key, [0.0, 0.0]) != 0).any()):
        raise UserError(
            f"{key} = '{config.function}': has a gradient where the advantage is 0, and completion pruning drops such"
            " completions as if they had none; set objective.zero_advantage_slope to about the size of that gradient"
            " in the log-probability (a KL term c * kl has about c)"
        )


def check_result(result: object, batch: TokenBatch, function: str) -> None:
    """Raise UserError unless a user's loss returned a TokenLoss of vectors [T]."""
    if not isinstance(result, TokenLoss):
        raise UserError(f"objective.function = '{function}': returned {type(result).__name__}, expected TokenLoss")
    if taken := sorted(_OWN_FIGURES & result.diagnostics.keys()):
        raise UserError(f"objective.function = '{function}': train/{taken[0]} is the trainer's; rename the diagnostic")
    for name, values in {"loss": result.loss, **result.diagnostics}.items():
        if not isinstance(values, Tensor) or values.shape != batch.logprobs.shape:
            got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise UserError(
                f"objective.function = '{function}': {name} is {got}, expected one value a token,"
                f" {list(batch.logprobs.shape)}; the loss hook sums and normalizes"
            )


def _slopes(function: PolicyLoss, config: ObjectiveConfig, key: str, advantages: list[float]) -> Tensor:
    """Derivative of the summed loss in each log-probability [8], for two sequences of four tokens, one of prompt."""
    generator = torch.Generator().manual_seed(0)
    logprobs = (-1.0 - torch.rand(8, generator=generator)).requires_grad_()
    entropy = (1.0 + torch.rand(8, generator=generator)).requires_grad_()
    behaviour, old, reference = (
        logprobs.detach() + 0.05 * torch.randn(8, generator=generator) for _ in ("behaviour", "old", "reference")
    )
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    sequence = torch.arange(8) // 4
    batch = TokenBatch(
        logprobs=logprobs,
        entropy=entropy,
        behaviour_logprobs=behaviour * mask,
        old_logprobs=old * mask,
        reference_logprobs=reference * mask,
        advantages=torch.tensor(advantages)[sequence],
        mask=mask,
        sequence=sequence,
    )
    try:
        result = function(batch, config)
    except Exception as error:
        raise UserError(
            f"{key} = '{config.function}': raised {type(error).__name__} on a small made-up batch: {error}"
        ) from error
    check_result(result, batch, config.function)
    if not result.loss.requires_grad:
        return torch.zeros(8)
    inputs = [logprobs, entropy]
    gradients = torch.autograd.grad((result.loss * mask).sum(), inputs, allow_unused=True)
    return torch.stack([g if g is not None else torch.zeros(8) for g in gradients]).abs().sum(dim=0)
