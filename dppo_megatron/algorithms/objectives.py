"""Builds the one function that the loss hook calls on every micro-batch from the objective's settings.

    policy loss x rollout correction + kl.coef x KL - entropy_coef x entropy

The hook multiplies the whole of it by the sample's weight and divides by its frozen denominator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dppo_megatron.algorithms.correction import importance_factor
from dppo_megatron.algorithms.kl import kl_estimate
from dppo_megatron.algorithms.policy_losses import POLICY_LOSSES
from dppo_megatron.algorithms.tokens import Objective, PolicyLoss, TokenBatch, TokenLoss
from dppo_megatron.config.objective import ObjectiveConfig
from dppo_megatron.types import UserError

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


def clipped_surrogate(clip_low: float, clip_high: float, dual_clip: float) -> Objective:
    """`make_objective` for the clipped surrogate alone."""
    return make_objective(ObjectiveConfig(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip))


def supervised() -> Objective:
    """Negative log-likelihood of the given completion: the warm start's loss, through the same hook."""

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
