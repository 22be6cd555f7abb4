"""DPPO's prompt selection, with inclusion probabilities that are known and never 0, so that 1/pi removes the bias.

The paper (arXiv 2603.04135) proves its correction for random pruning and then prunes deterministically in Algorithm 1.
`DppoPromptPolicy` is the random version; `PaperPromptPolicy` reconstructs the algorithm, as a baseline labelled biased.
With exact weights, prompt selection is about as noisy as a smaller batch unless the score is good. So scores `beta` and
`fit` use more than the last visit, the floor is 0.2, and prompts whose score rests on no data are always kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from dppo_megatron.config.pruning import PromptPruningConfig, check_floor, check_sizes
from dppo_megatron.pruning.designs import WaterFiller, count_kept, design_effect, deterministic
from dppo_megatron.pruning.interface import Selection, StepCost, figures, keep_all
from dppo_megatron.pruning.prompt_base import PromptPolicy, Visits
from dppo_megatron.pruning.prompt_score import FittedScore
from dppo_megatron.pruning.scores import (
    MeasuredCost,
    budgeted_probabilities,
    efficient_probabilities,
    nondegenerate_probability,
    spread,
)
from dppo_megatron.pruning.variance import EffectMonitor
from dppo_megatron.pruning.weights import weigh_biased
from dppo_megatron.types import BoolArray, FloatArray, IntArray

_SCORE_REJECTED = "the score's measured effect is worse than skipping at random"
_READS = (
    "min_inclusion_prob",
    "score",
    "discount",
    "prior",
    "design",
    "estimator",
    "max_weight",
    "warmup_epochs",
    "anneal_fraction",
    "max_design_effect",
    "group_size_factor",
)


@dataclass(frozen=True, slots=True)
class _DrawPlan:
    """A step's probabilities and what they are computed from, each [n]."""

    score: FloatArray
    cost: FloatArray
    lower: FloatArray
    pi: FloatArray
    growth: Callable[[FloatArray], float]
    """Predicted growth of the variance by a draw with given probabilities [n]."""
    note: str


class DppoPromptPolicy(PromptPolicy):
    """Method `dppo`: a systematic draw with probabilities proportional to a score known before the step."""

    reads: ClassVar[tuple[str, ...]] = ("rate", "cost_aware", *_READS)
    _state_names = ("control", "monitor", "_said", "fitted")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.control = MeasuredCost()
        self.monitor = EffectMonitor()
        self.fitted = FittedScore(self.history, self.features) if self.config.score == "fit" else None
        self._said = ""
        self._divides_by_cost = self.config.cost_aware

    @classmethod
    def unread(cls, config: PromptPruningConfig) -> tuple[str, ...]:
        """Only `score=beta` uses the posterior, and so the prior."""
        return () if config.score == "beta" else ("prior",)

    @classmethod
    def check(cls, config: PromptPruningConfig, key: str) -> None:
        check_floor(key, config.min_inclusion_prob, config.rate)
        check_sizes(key, config)

    @classmethod
    def in_unit(cls, config: PromptPruningConfig) -> str:
        """With `score=beta`, whose posterior counts rewards as successes."""
        counts = config.score == "beta"
        return "pruning.prompt.score = beta counts successes; score=rms takes any reward" if counts else ""

    def feedback(self, cost: StepCost) -> list[str]:
        """Skipping a prompt saves its update and its part of the rollout; the rest of a step is its fixed cost."""
        self.control.observe_cost(cost.other_s, cost.rollout_s + cost.update_s, cost.kept_cost, has_floor=True)
        line, self._said = self._said, ""  # saved in checkpoints as `said`: a log line not yet returned
        return [line] if line else []

    def expected(self, ids: IntArray, step: int) -> tuple[FloatArray, FloatArray] | None:
        if self.fitted is None or not (self.fitted.is_ready and self.monitor.believed):
            return None
        return np.square(self._score(ids, step)), self._relative_cost(ids, step)

    def _select_sorted(self, ids: IntArray, step: int, minibatch: int) -> Selection:
        plan = self._plan(ids, step)
        if plan is None or not self.monitor.believed:
            return self._keep_all(ids, plan, "no cost measured yet" if plan is None else _SCORE_REJECTED)
        selection = self._draw_and_weigh(ids, plan.pi, plan.score, step, minibatch, note=plan.note)
        return self._with_metrics(selection, plan, plan.pi)

    def _select_inactive(self, ids: IntArray, step: int, reason: str) -> Selection:
        return self._keep_all(ids, self._plan(ids, step), reason)

    def _keep_all(self, ids: IntArray, plan: _DrawPlan | None, reason: str) -> Selection:
        """Skips nothing, but records what the plan would have skipped, so that its effect is still measured."""
        selection = keep_all(len(ids), self.name, reason)
        if plan is None:
            return selection
        return self._with_metrics(replace(selection, planned_prob=plan.pi), plan, selection.inclusion_prob)

    def _with_metrics(self, selection: Selection, plan: _DrawPlan, pi: FloatArray) -> Selection:
        metrics = figures(pi, (pi <= plan.lower + 1e-12) & (plan.lower < 1))
        metrics["planned_effect"] = plan.growth(plan.pi)
        kept_cost = float(np.sum(pi * plan.cost) / np.sum(plan.cost))
        return replace(
            selection, metrics=metrics, growth=plan.growth(pi), kept_cost=kept_cost, effect=self.monitor.effect()
        )

    def _plan(self, ids: IntArray, step: int) -> _DrawPlan | None:
        """The probabilities with which a step would skip prompts; None: no cost has been measured yet."""
        score, cost = self._score(ids, step), self._relative_cost(ids, step)
        size = score / np.sqrt(cost) if self._divides_by_cost else score
        lower = np.where(self._may_skip(ids), self.config.min_inclusion_prob, 1.0)
        target = self._target(score, cost, lower)
        if target is None:
            return None
        errors = self.fitted.errors(ids, step) if self.fitted else None
        growth = partial(self._growth, self._moment(ids, step), errors)
        bound = self.config.max_design_effect
        pi = budgeted_probabilities(WaterFiller(size, lower), target, growth, max_design_effect=bound, whole=True)
        note = f"max_design_effect {bound:g} keeps {pi.sum():.0f} prompts, not {target:.0f}"
        return _DrawPlan(score, cost, lower, pi, growth, note if pi.sum() > target + 0.5 else "")

    def _growth(self, moment: FloatArray, errors: FloatArray | None, pi: FloatArray) -> float:
        """Growth of the variance as the score predicts it, corrected for its errors and by earlier steps' growth."""
        missed = 0.0 if errors is None else optimism(moment, errors, pi, self.config.min_inclusion_prob)
        return 1.0 + (design_effect(np.sqrt(moment), pi) * (1.0 + missed) - 1.0) * self._inflation()

    def _inflation(self) -> float:
        measured = self.monitor.effect()
        return 1.0 if measured is None else measured.inflation

    def _target(self, score: FloatArray, cost: FloatArray, lower: FloatArray) -> float | None:
        """Whole number of prompts to keep: all that may not be skipped, and by the rate a share of the others."""
        num_skippable = int((lower < 1).sum())
        by_rate = len(lower) - num_skippable + count_kept(num_skippable, self.config.rate)
        return float(max(by_rate, _least(lower)))

    def _may_skip(self, ids: IntArray) -> BoolArray:
        """[n]: whether a prompt's score rests on any data about that prompt; the others are always kept."""
        if self.fitted is None or (self.fitted.is_ready and not self.fitted.distinguishes_unseen):
            return self.history.seen(ids)
        return np.full(len(ids), self.fitted.is_ready)

    def _score(self, ids: IntArray, step: int) -> FloatArray:
        """Root of the expected second moment of a prompt's gradient, up to a common factor, [n]."""
        kind, arrays = self.config.score, self.history.arrays
        if self.fitted is not None:
            return np.sqrt(self.fitted.expected(ids, step, cautious=True))
        if kind == "mean_abs":
            return _for_unseen(arrays["mean_abs"][ids].astype(np.float64), self.history.seen(ids))
        if kind == "rms":
            return _for_unseen(np.sqrt(arrays["variance"][ids].astype(np.float64)), self.history.seen(ids))
        successes, failures = self.history.posterior(ids, step)
        moment = arrays["moment"][ids].astype(np.float64)
        known = ~np.isnan(moment)
        moment = np.where(known, moment, moment[known].mean() if known.any() else 1.0)
        return np.sqrt(nondegenerate_probability(successes, failures, self.completions_per_prompt) * moment)

    def _moment(self, ids: IntArray, step: int) -> FloatArray:
        """Expected second moment for a sum over the batch, up to a common factor, [n]."""
        return np.square(self._score(ids, step)) if self.fitted is None else self.fitted.expected(ids, step)

    def _relative_cost(self, ids: IntArray, step: int) -> FloatArray:
        """Mean completion length of each prompt over the batch's, [n]; 1 for unseen prompts unless score=fit."""
        if self.fitted is not None:
            return self.fitted.expected_cost(ids, step)
        tokens = self.history.arrays["tokens"][ids].astype(np.float64)
        known = tokens > 0
        mean = float(tokens[known].mean()) if known.any() else 1.0
        return np.where(known, tokens / mean, 1.0)

    def _learn(self, visits: Visits, step: int) -> None:
        if not len(visits.ids):
            return
        graded = ~np.isnan(visits.rewards).all(axis=1)
        moment = visits.second_moment
        if moment is None:
            moment = (spread(visits.rewards) > 0).astype(np.float64)
        expected, weight, missed = self._moment(visits.ids, step), 1.0 / visits.inclusion, 0.0
        if self.fitted:
            errors, floor = self.fitted.errors(visits.ids, step)[graded], self.config.min_inclusion_prob
            missed = optimism(expected[graded], errors, visits.planned[graded], floor, weight[graded])
        self.monitor.observe(
            moment[graded],
            expected[graded],
            visits.lengths.mean(axis=1, dtype=np.float64)[graded],
            visits.inclusion[graded],
            visits.planned[graded],
            missed,
        )
        self._said = self.monitor.judge() or self._said
        if self.fitted:
            self.fitted.learn(visits.ids, visits.rewards, visits.lengths, moment, weight, step)
        super()._learn(visits, step)


class AutoPromptPolicy(DppoPromptPolicy):
    """Method `dppo_auto`: derives the number of prompts to keep from what a prompt costs."""

    reads = ("fixed_cost_ratio", *_READS)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._divides_by_cost = True

    @classmethod
    def check(cls, config: PromptPruningConfig, key: str) -> None:
        check_sizes(key, config)

    def _target(self, score: FloatArray, cost: FloatArray, lower: FloatArray) -> float | None:
        """The sum of `efficient_probabilities`, rounded up; None: no cost is known yet."""
        ratio = self.config.fixed_cost_ratio or self.control.cost_ratio
        if ratio == 0:
            return None
        pi = efficient_probabilities(score, cost, lower, ratio * float(cost.sum()), self._inflation())
        return float(max(_least(lower), math.ceil(float(pi.sum()) - 1e-9)))


class PaperPromptPolicy(PromptPolicy):
    """Method `dppo_paper`: Algorithm 1 as reconstructed from public reviews; the paper's code is not public.

    Drops the floor(rate N) prompts with the lowest mean |advantage| at their last visit and multiplies the rest by
    C/(1-P) with a mean over the kept, which is 1/(1-rate) on nominal denominators. Unvisited prompts rank highest.
    The score of a skipped prompt never changes, so the prompt stays out.
    """

    reads = ("rate", "warmup_epochs", "anneal_fraction")

    @property
    def has_support(self) -> bool:
        return self.config.rate == 0

    def _select_sorted(self, ids: IntArray, step: int, minibatch: int) -> Selection:
        config = self.config
        fresh = ~self.history.seen(ids)
        score = np.where(fresh, np.inf, self.history.arrays["mean_abs"][ids].astype(np.float64))
        drawn = deterministic(score, count_kept(len(ids), config.rate), uniform=self._ties(ids, step, minibatch))
        selection = weigh_biased(
            drawn,
            name=self.name,
            scale=1.0 / (1.0 - config.rate),
            note="prompts below the cut are never drawn, so no weight can stand in for them",
            score=np.zeros(len(ids)),  # makes the design effect 1: without 1/pi weights nothing grows
        )
        at_floor, rate = float(np.mean(drawn.inclusion_prob == 0)), 1.0 - float(drawn.kept.mean())
        return replace(selection, metrics=selection.metrics | {"rate_effective": rate, "share_at_floor": at_floor})


def optimism(
    moment: FloatArray, errors: FloatArray, pi: FloatArray, floor: float, weight: FloatArray | float = 1.0
) -> float:
    """Share by which the design effect of probabilities [n], derived from the score, is predicted too low.

    With e the error of a moment's logarithm, log pi is wrong by g: e / 2 less a common term that keeps the sum of pi; 0
    at the floor and at 1. The prediction has e in the moments and g in pi, the true effect g alone. To second order the
    mean logarithm of true over predicted is Var_s(e) / 2 - Var_a(e) / 2 + Cov_a(e, g), over the batch in proportion to
    s, the moments, or a, moments / pi. `errors` [n, k] as in `FittedScore`; `weight`: prompts stand for a batch.
    """
    follows = (pi > floor + 1e-12) & (pi < 1.0)
    moving = weight * pi * follows
    common = np.einsum("n,nk->k", moving, errors) / max(float(moving.sum()), np.finfo(np.float64).tiny)
    g = follows[:, None] * (errors - common) / 2.0

    def covariance(by: FloatArray, other: FloatArray) -> float:
        share = by / by.sum()
        return float(np.einsum("n,nk,nk->", share, errors - np.einsum("n,nk->k", share, errors), other))

    s = weight * moment
    return covariance(s, errors / 2.0) + covariance(s / pi, g - errors / 2.0)


def _least(lower: FloatArray) -> int:
    """Fewest prompts that can be kept under floors [n]."""
    return math.ceil(float(lower.sum()) - 1e-9)


def _for_unseen(score: FloatArray, seen: BoolArray) -> FloatArray:
    """Scores, with unseen prompts given the largest score of the seen ones."""
    return np.where(seen, score, score[seen].max(initial=0.0) or 1.0)
