"""DPPO's completion selection: fixed-size systematic sampling with probabilities from a free gradient-norm score.

Rollouts are already paid for at this point, so the only cost of pruning is variance. Without a KL term, a completion
with advantage 0 has no gradient and is dropped for free. With one it keeps a floor probability.

If the kept completions do not fill the last round of micro-batches, keeping more lowers the variance without adding one
(`fill_slack`). The new probabilities are a function of the full batch alone, so weights of 1/pi stay exactly unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from dppo_megatron.config.pruning import CompletionPruningConfig, check_floor
from dppo_megatron.pruning.completion_base import CompletionPolicy, Counters
from dppo_megatron.pruning.designs import WaterFiller, bisect, count_kept, design_effect
from dppo_megatron.pruning.interface import CompletionBatch, Selection, StepCapacity, StepCost, figures, keep_all
from dppo_megatron.pruning.scores import MeasuredCost, budgeted_probabilities, completion_score, efficient_probabilities
from dppo_megatron.pruning.weights import label_of_settings, weigh_by
from dppo_megatron.types import BoolArray, FloatArray, Label, UserError

_READS = (
    "min_inclusion_prob",
    "score",
    "design",
    "estimator",
    "max_weight",
    "warmup_steps",
    "anneal_fraction",
    "max_design_effect",
    "fill_slack",
)


class DppoCompletionPolicy(CompletionPolicy):
    """Method `dppo`: drops a given share of the completions or, with cost_aware, of the tokens."""

    reads: ClassVar[tuple[str, ...]] = ("rate", "cost_aware", *_READS)
    _state_names = ("control",)
    usual_rate = 0.95
    """High because the default `max_design_effect` keeps more wherever dropping that many would cost variance."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.control = MeasuredCost()
        self._spends_tokens = self._divides_by_cost = self.config.cost_aware
        """Whether the budget counts tokens instead of completions, and whether scores are relative to costs."""

    @classmethod
    def check(cls, config: CompletionPruningConfig, key: str, *, group_size: int, minibatch_size: int) -> None:
        _check_support(key, config.min_inclusion_prob)
        check_floor(key, config.min_inclusion_prob, cls.rate_of(config))
        if config.cost_aware and config.estimator == "fixed_size_ht":
            raise UserError(
                f"{key}.estimator = fixed_size_ht with cost_aware = true: a token budget keeps no fixed number; use"
                " estimator=ht"
            )

    @property
    def label(self) -> Label:
        config = self.config
        if self._keeps_all_gradient:
            return "exact"
        return label_of_settings(
            config.estimator,
            # without cost_aware every budget is a whole number, see `_target`
            fixed_size=config.design == "systematic" and not self._spends_tokens,
            least_prob=config.min_inclusion_prob,
            max_weight=config.max_weight,
        )

    @property
    def _keeps_all_gradient(self) -> bool:
        return self.rate == 0

    def _prune_sorted(self, batch: CompletionBatch, counters: Counters, capacity: StepCapacity | None) -> Selection:
        config, bound = self.config, self.config.max_design_effect
        live = self._can_carry_gradient(batch)
        score = np.where(live, self._score(batch), 0.0)
        cost = np.maximum(batch.lengths, 1).astype(np.float64)
        lower = np.where(live, config.min_inclusion_prob, 0.0)
        whole = not self._spends_tokens  # a systematic draw keeps a fixed number only if the budget is whole
        size = score / np.sqrt(cost) if self._divides_by_cost else score
        target, notes = self._target(score, cost, lower), []
        if target is None:
            return keep_all(len(batch), self.name, "no cost measured yet")
        filler = WaterFiller(size, lower, None if whole else cost)
        growth = partial(design_effect, score)
        pi = before = budgeted_probabilities(filler, target, growth, max_design_effect=bound, whole=whole)
        spent = float(np.sum(filler.cost * pi))
        if bound and spent > target * (1 + 1e-9) and spent > float(np.sum(filler.cost * lower)):
            notes += [f"max_design_effect {bound:g} lowers the rate to {1 - spent / float(filler.cost.sum()):.3f}"]
        tokens = batch.lengths if batch.tokens is None else batch.tokens
        if capacity is not None and config.fill_slack:
            count, fixed_size = capacity.microbatches(tokens, pi), config.design == "systematic"
            holds = partial(capacity.holds, count, tokens, fixed_size=fixed_size)
            pi = fill_slack(filler, before, holds, whole=whole)
            if pi.sum() > before.sum():
                notes += [f"slack filled: rate {1 - before.mean():.3f} -> {1 - pi.mean():.3f}"]
        selection = weigh_by(self, self._draw(batch, pi, counters), note="; ".join(notes), label=self.label)
        return replace(
            selection,
            kept_cost=float(np.sum(pi * cost) / np.sum(cost)),
            growth=design_effect(score, pi),
            metrics={
                **figures(pi, live & (pi <= lower + 1e-12)),
                "rate_before_slack": 1.0 - float(before.mean()),
                "slack_filled_tokens": float(np.sum(tokens * (pi - before))),
                "share_without_gradient": float(np.mean(~live)),
            },
        )

    def feedback(self, cost: StepCost) -> list[str]:
        """Dropping a completion saves only its update; rollout and the rest of the step are the fixed cost."""
        self.control.observe_cost(cost.rollout_s + cost.other_s, cost.update_s, cost.kept_cost)
        return []

    def _can_carry_gradient(self, batch: CompletionBatch) -> BoolArray:
        carries = (batch.lengths > 0) & (batch.prompt_weight > 0)
        return carries if self.zero_advantage_slope > 0 else carries & (batch.advantages != 0)

    def _score(self, batch: CompletionBatch) -> FloatArray:
        norm = batch.logit_grad_norm if self.config.score == "free_norm" else np.ones(len(batch))
        columns = batch.advantages, norm, batch.denominator, batch.prompt_weight
        return completion_score(*columns, zero_advantage_slope=self.zero_advantage_slope)

    def _target(self, score: FloatArray, cost: FloatArray, lower: FloatArray) -> float | None:
        """Budget: a whole number of completions, or cost with cost_aware. None: no cost is known yet."""
        if self._spends_tokens:
            return (1.0 - self.rate) * float(cost.sum())
        least = math.ceil(float(lower.sum()) - 1e-9)
        return float(max(count_kept(len(score), self.rate), least))


class AutoCompletionPolicy(DppoCompletionPolicy):
    """Method `dppo_auto`: derives the number to keep from the cost of the update."""

    reads = ("rollout_cost_ratio", *_READS)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._spends_tokens, self._divides_by_cost = False, True

    @classmethod
    def check(cls, config: CompletionPruningConfig, key: str, *, group_size: int, minibatch_size: int) -> None:
        _check_support(key, config.min_inclusion_prob)

    @property
    def _keeps_all_gradient(self) -> bool:
        return self._cost_ratio == 0

    @property
    def _cost_ratio(self) -> float:
        return self.config.rollout_cost_ratio or self.control.cost_ratio

    def _target(self, score: FloatArray, cost: FloatArray, lower: FloatArray) -> float | None:
        """The sum of `efficient_probabilities`, rounded up; None: no cost is known yet."""
        if self._cost_ratio == 0:
            return None
        pi = efficient_probabilities(score, cost, lower, self._cost_ratio * float(cost.sum()))
        return float(math.ceil(float(pi.sum()) - 1e-9))


def _check_support(key: str, min_inclusion_prob: float) -> None:
    if min_inclusion_prob == 0:
        raise UserError(
            f"{key}.min_inclusion_prob = 0: must be in (0, 1]; a completion with an advantage but a score of zero would"
            " never be drawn, which is biased. 0.05 bounds the weights by 20"
        )


def fill_slack(filler: WaterFiller, pi: FloatArray, holds: Callable[[FloatArray], bool], *, whole: bool) -> FloatArray:
    """Probabilities [n] >= pi for the largest budget that `holds` accepts; pi itself if no larger one fits.

    Args:
        filler: the solver that gave pi; every probability grows with the budget.
        pi: [n].
        holds: whether the step has room for a draw with the given probabilities [n]; must not depend on any draw.
        whole: increase the budget by a whole number, so that systematic draws keep a fixed size.

    Example: sizes (4, 2, 1, 1) at a budget of 2 have pi = (1, 0.5, 0.25, 0.25). Each has 10 tokens, and the micro-batch
    that runs anyway has room for 30, so 3 can be kept: (1, 1, 0.5, 0.5), with weights of 2 instead of 4.
    """
    spent, full = float(np.sum(filler.cost * pi)), float(np.sum(filler.cost[filler.support]))
    if whole and abs(spent - round(spent)) < 1e-6:
        spent = float(round(spent))
    least_step = 1.0 if whole else 1e-3 * full
    if full - spent < least_step or not holds(pi):
        return pi
    everything = filler.solve(full)
    if holds(everything):
        return everything
    more, _ = bisect(0.0, full - spent, least_step, lambda more: holds(filler.solve(spent + more)), whole=whole)
    return filler.solve(spent + more) if more else pi
