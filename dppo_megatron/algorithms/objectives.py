"""Per-token losses. The loss hook multiplies each by its sample's weight and frozen denominator and sums.

A loss sees the tokens of one packed micro-batch as flat vectors. It must not look at the weight: weights enter
outside the clip, on the whole loss of a sequence, or the estimator is no longer unbiased (docs/pruning.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The loss-carrying view of a packed micro-batch; T tokens, padding included, on one device."""

    logprobs: Tensor
    """[T] log-probability of each target under the policy that is trained; differentiable."""
    entropy: Tensor
    """[T] entropy of the policy at each position; differentiable."""
    behaviour_logprobs: Tensor
    """[T] log-probability of each target when it was sampled; 0 where `mask` is 0."""
    old_logprobs: Tensor
    """[T] under the actor before the step's first update: the denominator of the policy ratio. The behaviour's unless
    the step recomputed them."""
    reference_logprobs: Tensor
    """[T] under the frozen reference policy; 0 where there is none."""
    advantages: Tensor
    """[T] advantage of the sequence each token belongs to."""
    mask: Tensor
    """[T] 1.0 where a completion token is predicted, else 0.0."""
    sequence: Tensor
    """[T] int64, position of the token's sequence in the micro-batch."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What an objective returns."""

    loss: Tensor
    """[T] loss of each token, unweighted; only positions with mask 1 are used."""
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    """Name to [T] detached values, averaged over completion tokens into train/<name>."""


Objective: TypeAlias = Callable[[TokenBatch], TokenLoss]

_MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8: keeps a broken sync from turning into infinities before the metrics can show it."""


def clipped_surrogate(clip_low: float, clip_high: float, dual_clip: float) -> Objective:
    """PPO's clipped surrogate with asymmetric bounds.

    loss_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A), rho_t = exp(log pi - log behaviour):
    arXiv 1707.06347 eq. 7, with DAPO's clip-higher (arXiv 2503.14476 eq. 10). With dual_clip = c > 0 the loss of a
    negative advantage is at most -c A (arXiv 1912.09729 eq. 5).
    """

    def objective(batch: TokenBatch) -> TokenLoss:
        log_ratio = (batch.logprobs - batch.behaviour_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        unclipped = -ratio * batch.advantages
        clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * batch.advantages
        loss = torch.maximum(unclipped, clipped)
        if dual_clip:
            bounded = torch.minimum(loss, -dual_clip * batch.advantages)
            loss = torch.where(batch.advantages < 0, bounded, loss)
        return TokenLoss(
            loss,
            {"ratio": ratio.detach(), "clip_fraction": (clipped > unclipped).detach().to(loss.dtype)},
        )

    return objective


def supervised() -> Objective:
    """Negative log-likelihood of the given completion: the warm start's loss, through the same hook."""

    def objective(batch: TokenBatch) -> TokenLoss:
        return TokenLoss(-batch.logprobs)

    return objective
