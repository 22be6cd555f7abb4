"""What a loss sees and returns, and the one operation on packed sequences that losses share.

A loss sees the tokens of one packed micro-batch as flat vectors. It must not look at the sample's weight: weights enter
outside, on the whole loss of a sequence, or the estimator is no longer unbiased (docs/pruning.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from dppo_megatron.config.objective import ObjectiveConfig

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8: keeps a broken sync from turning into infinities before the metrics can show it."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The loss-carrying view of a packed micro-batch; T tokens, padding included, on one device.

    Sequences are always whole, also under context parallelism.
    """

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
    """[T] of each token: its sequence's, or its own."""
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
"""What the loss hook calls: everything is bound."""

PolicyLoss: TypeAlias = Callable[[TokenBatch, ObjectiveConfig], TokenLoss]
"""A built-in policy loss, or a user's own: `objective.loss`, `objective.function`."""


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp of log-ratios [T], which are clamped to +-20; no gradient outside."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def prefix_sums(values: Tensor, batch: TokenBatch) -> Tensor:
    """[T] -> [T]: at each token the sum of `values` over its sequence's completion tokens up to it. In float64: the sum
    runs over the whole pack, of which a sequence's part is a difference."""
    running = torch.where(batch.mask > 0, values, 0.0).double().cumsum(0)
    place = torch.arange(len(values), device=values.device)
    first = torch.full_like(place, len(values)).scatter_reduce(0, batch.sequence, place, "amin")
    before = torch.cat([running.new_zeros(1), running])
    return (running - before.index_select(0, first.index_select(0, batch.sequence))).to(values.dtype)


def sequence_sums(values: Tensor, batch: TokenBatch) -> Tensor:
    """[T] -> [T]: at each token the sum of `values` over its sequence's completion tokens; differentiable."""
    # as long as the pack rather than the number of sequences, which only the device knows
    sums = torch.zeros_like(values).index_add(0, batch.sequence, torch.where(batch.mask > 0, values, 0.0))
    return sums.index_select(0, batch.sequence)
