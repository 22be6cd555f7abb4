"""The inputs and outputs of a loss, and the sums over packed sequences that losses share.

A loss never sees the sample's weight: weights must be applied outside, to the whole loss of a sequence, or the
estimator is no longer unbiased (docs/pruning.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from dppo_megatron.config.objective import ObjectiveConfig

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8: a broken weight sync then shows in the metrics instead of as infinities."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The loss-carrying view of a packed micro-batch; T tokens, padding included, on one device.

    Sequences are always whole, also under context parallelism.
    """

    logprobs: Tensor
    """[T] log-probability of each target under the policy being trained; differentiable."""
    entropy: Tensor
    """[T] entropy of the policy at each position; differentiable."""
    behaviour_logprobs: Tensor
    """[T] log-probability of each target when it was sampled; 0 where `mask` is 0."""
    old_logprobs: Tensor
    """[T] log-probability under the actor before the step's first update: the denominator of the policy ratio. Equals
    `behaviour_logprobs` unless the step recomputed it."""
    reference_logprobs: Tensor
    """[T] log-probability under the frozen reference policy; 0 without one."""
    advantages: Tensor
    """[T] the advantage of each token's sequence, or the token's own."""
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
"""The function that the loss hook calls, with all settings bound."""

PolicyLoss: TypeAlias = Callable[[TokenBatch, ObjectiveConfig], TokenLoss]
"""A built-in policy loss (`objective.loss`) or a user's own (`objective.function`)."""


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp of log-ratios [T] clamped to +-20; no gradient outside."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def prefix_sums(values: Tensor, batch: TokenBatch) -> Tensor:
    """[T] -> [T]: at each token the sum of `values` over its sequence's completion tokens up to it. In float64, since
    it is a difference of sums over the whole pack."""
    running = torch.where(batch.mask > 0, values, 0.0).double().cumsum(0)
    place = torch.arange(len(values), device=values.device)
    first = torch.full_like(place, len(values)).scatter_reduce(0, batch.sequence, place, "amin")
    before = torch.cat([running.new_zeros(1), running])
    return (running - before.index_select(0, first.index_select(0, batch.sequence))).to(values.dtype)


def sequence_sums(values: Tensor, batch: TokenBatch) -> Tensor:
    """[T] -> [T]: at each token the sum of `values` over its sequence's completion tokens; differentiable."""
    # as long as the pack rather than the number of sequences, which is only known on the device
    sums = torch.zeros_like(values).index_add(0, batch.sequence, torch.where(batch.mask > 0, values, 0.0))
    return sums.index_select(0, batch.sequence)
