"""What goes into a step's selection and what comes out of it. Tokens and texts stay on the ranks that hold them.

Optimizer mini-batches are drawn independently of each other; `merge` combines their selections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dppo_megatron.pruning import CompletionBatch, LedgerRow, Selection
from dppo_megatron.pruning.interface import Effect
from dppo_megatron.pruning.variance import StepVariance
from dppo_megatron.pruning.weights import worst
from dppo_megatron.types import BoolArray, FloatArray, IntArray, StepCounts, mean_of_sums

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class PromptDraw:
    """Prompts to roll out."""

    prompt_index: IntArray
    """[K]."""
    inclusion_prob: FloatArray
    """[K]."""
    weight: FloatArray
    """[K]."""
    minibatch: IntArray
    """[K] optimizer mini-batch that each was assigned to; 0 in a refill round, whose groups are assigned at the end."""
    planned_prob: FloatArray
    """[K] probability with which each would have been drawn if the method had skipped."""
    size: IntArray
    """[K] completions to sample of each."""
    limits: IntArray
    """[K, G] tokens at which each completion is stopped early; [K, 0] if early stopping is off."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The outcome of a rollout; groups in the order in which their prompts were chosen. With groups of several sizes,
    G is the largest size allowed, and completions that were not requested are unfinished."""

    rewards: FloatArray
    """[K, G], NaN if there is none: the grader failed, or the completion is unfinished."""
    lengths: IntArray
    """[K, G] completion tokens."""
    logit_grad_norm: FloatArray
    """[K, G] root of the sum of squared (1 - p) of the sampled tokens."""
    prompt_tokens: IntArray | None = None
    """[K] tokens of each prompt; None if not recorded: only completions then count in a micro-batch."""
    truncated: BoolArray | None = None
    """[K, G] generation reached max_completion_tokens. None if not recorded: completions of that length count as so."""
    unfinished: BoolArray | None = None
    """[K, G] generation never finished. None if not recorded: completions without tokens and reward count as so."""
    by_chance: BoolArray | None = None
    """[K, G] the cause of a missing reward cannot depend on the completion's content. None: not known of any."""
    stands_for: FloatArray | None = None
    """[K, G] weight of each completion that makes up for those stopped early, which have 0. None: none could be."""

    @property
    def stopped(self) -> BoolArray:
        """[K, G] was stopped early."""
        return np.zeros(self.rewards.shape, np.bool_) if self.stands_for is None else self.stands_for == 0

    def counted(self, values: FloatArray) -> FloatArray:
        """[K, G] `values` times `stands_for`: 0 for completions that were stopped, even if the value is NaN."""
        return values if self.stands_for is None else np.where(self.stopped, 0.0, values * self.stands_for)

    def with_unrequested(self, requested: BoolArray) -> Rollouts:
        """Completions that were never requested do not count as stopped."""
        stands_for = self.stands_for
        return self if stands_for is None else replace(self, stands_for=np.where(requested, stands_for, 1.0))


@dataclass(frozen=True, slots=True)
class TrainSelection:
    """What to train on: flat arrays [K * G]."""

    kept: BoolArray
    weight: FloatArray
    """Product of the weights of all selections; 0 where not kept."""
    advantages: FloatArray
    denominator: FloatArray
    minibatch: IntArray
    """Optimizer mini-batch, 0 to updates_per_step - 1; a group is never split."""
    ledger: tuple[LedgerRow, ...]
    metrics: dict[str, float]
    counts: StepCounts
    variance: StepVariance
    effect: Effect | None
    """What skipping prompts has done to the variance so far; None: not measured."""
    offered: IntArray
    """All nominal prompts of the step, refills and skipped prompts included."""
    offered_prob: FloatArray
    """The inclusion probability of each."""
    prompts: PromptDraw
    completion_prob: FloatArray
    """Inclusion probability of each completion given its group, times the probability that it finishes if it may be
    stopped early. NaN if it took no part in the draw: its group was not kept, or it was filtered."""
    has_support: bool
    """Every prompt, and every completion with gradient, could be kept. False with a fixed rule that excludes some."""
    zero_carries: bool
    """Completions with advantage 0 carry gradient too: there is a KL or entropy term."""
    missing_weight: FloatArray
    """[K] factor in `weight` of each group's completions that makes up for missing ones."""
    in_mean: FloatArray
    """[K] the same in means of rewards, where groups count equally and one without a reward by others of its set."""
    unforeseen: tuple[LedgerRow, ...]
    """The row of missing completions, if this step is the first to lose any of that kind; later in `ledger`."""
    prior: FloatArray | None = None
    """[offered, 2] Beta parameters of each offered prompt's reward before the step; None: no advantage reads them."""

    @property
    def recorded_ledger(self) -> tuple[LedgerRow, ...]:
        """The ledger, with the unforeseen row in place of its own of that name."""
        names = {row.name for row in self.unforeseen}
        return tuple(row for row in self.ledger if row.name not in names) + self.unforeseen

    @property
    def figure_weight(self) -> FloatArray:
        """[K * G] weight of a kept completion's tokens in metrics of the policy.

        1 / probability if it carries gradient, else 0. Sums with this weight are unbiased for all completions that
        carry gradient, rolled out or of prompts skipped by chance. Without support the weight is 1: the metrics then
        describe what was kept, and their names say so.
        """
        if not self.has_support:
            return self.kept.astype(np.float64)
        counted = self.kept & (self.zero_carries | (self.advantages != 0))
        size = len(self.kept) // max(len(self.prompts.prompt_index), 1)
        pi = np.repeat(self.prompts.inclusion_prob, size) * self.completion_prob
        return np.where(counted, np.repeat(self.missing_weight, size) / np.where(counted, pi, 1.0), 0.0)


def join(chosen: list[PromptDraw]) -> PromptDraw:
    """Concatenates the prompts of mini-batches and refill rounds, in order."""
    names = [one.name for one in fields(PromptDraw)]
    return PromptDraw(*(np.concatenate([getattr(one, name) for one in chosen]) for name in names))


def completion_batch(
    prompts: PromptDraw,
    rollouts: Rollouts,
    advantages: FloatArray,
    denominator: FloatArray,
    group_weight: FloatArray,
    trainable: BoolArray,
    num_nominal: int,
) -> CompletionBatch:
    """The trainable completions [n] of the whole step; `group_weight` [K] multiplies the prompts' weights."""
    everything = CompletionBatch.of_groups(
        prompts.prompt_index,
        rewards=rollouts.rewards,
        advantages=advantages,
        lengths=rollouts.lengths,
        logit_grad_norm=rollouts.logit_grad_norm,
        denominator=denominator,
        prompt_weight=prompts.weight * group_weight,
        num_nominal=num_nominal,
        prompt_tokens=rollouts.prompt_tokens,
    )
    if rollouts.stands_for is not None:
        everything = replace(everything, prompt_weight=everything.prompt_weight * rollouts.stands_for.ravel())
    return part(everything, np.flatnonzero(trainable), 1)


def part(batch: CompletionBatch, rows: IntArray, parts: int) -> CompletionBatch:
    """The rows of one of `parts` equal mini-batches, with groups numbered from 0 without gaps."""
    taken = batch.take(rows)
    labels: IntArray = np.unique(taken.group, return_inverse=True)[1].astype(np.int64)
    return replace(taken, group=labels, num_nominal=batch.num_nominal // parts)


def merge(parts: list[Selection], order: IntArray) -> Selection:
    """Combines the selections of mini-batches; `order` puts their concatenated rows into place."""
    if len(parts) == 1:
        return parts[0]
    costs = [part.kept_cost for part in parts if part.kept_cost is not None]
    return Selection(
        **{name: column[order] for name, column in _columns(parts).items()},
        ledger=_merge_rows([(row, len(part.kept)) for part in parts for row in part.ledger]),
        metrics={name: _metric(name, parts) for name in dict.fromkeys(name for part in parts for name in part.metrics)},
        growth=float(np.mean([part.growth for part in parts])),
        kept_cost=float(np.mean(costs)) if costs else None,
        effect=next((part.effect for part in parts if part.effect is not None), None),
    )


def _metric(name: str, parts: list[Selection]) -> float:
    having = [part for part in parts if name in part.metrics]
    values, rows = [part.metrics[name] for part in having], [len(part.kept) for part in having]
    if name.endswith("_tokens"):
        return float(sum(values))
    return float(np.average(values, weights=rows if any(rows) else None))


def with_refills(planned: Selection, refills: list[Selection]) -> Selection:
    """All rows of a step; ledger and metrics stay those of `planned`, the first round."""
    return replace(planned, **_columns([planned, *refills]))


def _columns(parts: list[Selection]) -> dict[str, Any]:
    every = [part.columns() for part in parts]
    return {name: np.concatenate([columns[name] for columns in every]) for name in every[0]}


def _merge_rows(rows: list[tuple[LedgerRow, int]]) -> tuple[LedgerRow, ...]:
    """One row per name, with the worst label, from (row, number of elements it describes)."""
    merged = []
    for name in dict.fromkeys(row.name for row, _ in rows):
        same_name = [(row, count) for row, count in rows if row.name == name]
        offered = sum(count for _, count in same_name)
        kept = sum(row.kept_fraction * count for row, count in same_name) / offered if offered else 1.0
        notes = "; ".join(dict.fromkeys(row.note for row, _ in same_name if row.note))
        merged.append(LedgerRow(name, kept, worst(row.label for row, _ in same_name), notes))
    return tuple(merged)


def to_all_rows(values: NDArray[T], rows: IntArray, rollouts: Rollouts, fill: bool | float) -> NDArray[T]:
    """[K * G] the `values` [n] of the trainable completions `rows` [n], and `fill` for the others."""
    every = np.full(rollouts.rewards.size, fill, dtype=values.dtype)
    every[rows] = values
    return every


def counts_of(offered: Selection, prompts: PromptDraw, tokens_sampled: int, trained: IntArray) -> StepCounts:
    """`trained`: the lengths of the completions that are trained on."""
    return StepCounts(
        prompts_considered=len(offered.kept),
        prompts_generated=int(offered.kept.sum()),
        completions_generated=int(prompts.size.sum()),
        completions_trained=len(trained),
        tokens_generated=tokens_sampled,
        tokens_trained=int(trained.sum()),
    )


def was_requested(rollouts: Rollouts, sizes: IntArray) -> BoolArray:
    """[K, G] whether each completion was requested, given the number [K] requested of each prompt."""
    return np.asarray(np.arange(rollouts.rewards.shape[1]) < sizes[:, None])


def reward_metrics(rollouts: Rollouts, prompts: PromptDraw, in_mean: FloatArray) -> dict[str, float]:
    """`reward/*`; `in_mean` [K] weights each group's completions, to make up for missing ones."""
    rewards, graded = rollouts.rewards, ~np.isnan(rollouts.rewards)
    failed = ~graded & ~rollouts.stopped & was_requested(rollouts, prompts.size)
    unfinished = 0.0 if rollouts.unfinished is None else float((failed & rollouts.unfinished).sum())
    # 1/pi, whatever estimator and cap the training weights use
    group_weight = in_mean / (prompts.size * prompts.inclusion_prob)
    weight = np.where(graded, rollouts.counted(group_weight[:, None] * np.ones(rewards.shape)), 0.0)
    # weighted, because the generated prompts are a sample of the considered ones
    mean = mean_of_sums(float((weight * np.where(graded, rewards, 0.0)).sum()), float(weight.sum()))
    # of groups, because completions of one prompt are not independent
    deviations = (weight * np.where(graded, rewards - mean, 0.0)).sum(axis=1)
    groups = int(graded.any(axis=1).sum())
    spread = math.sqrt(float(np.square(deviations).sum()) * groups / (groups - 1)) if groups > 1 else math.nan
    return {
        "reward/mean": mean,
        "reward/mean_se": mean_of_sums(spread, float(weight.sum())),
        "reward/failed_count": float(failed.sum()) - unfinished,
    }
