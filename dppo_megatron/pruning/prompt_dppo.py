"""DPPO's prompt selection, with inclusion probabilities that are known and never 0, so that 1/pi removes the bias.

The paper (arXiv 2603.04135) proves its correction for random pruning and then prunes deterministically in Algorithm 1.
`DppoPromptPolicy` is the random version; `PaperPromptPolicy` reconstructs the algorithm, as a baseline labelled biased.
Exact weights make prompt selection about as noisy as a smaller batch unless the score is good; hence a posterior over
visits in place of the last visit alone, a floor of 0.2, and unvisited prompts always kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from dppo_megatron.config.pruning import PromptPruningConfig, check_auto_rule, check_floor
from dppo_megatron.pruning.budget import RateControl
from dppo_megatron.pruning.designs import WaterFiller, count_kept, design_effect, deterministic
from dppo_megatron.pruning.interface import Selection, StepCost, keep_all, with_metrics
from dppo_megatron.pruning.prompt_base import PromptPolicyBase
from dppo_megatron.pruning.scores import budgeted_probabilities, efficient_probabilities, nondegenerate_probability
from dppo_megatron.pruning.weights import weigh_biased
from dppo_megatron.types import BoolArray, FloatArray, IntArray

_READS = (
    "p_min",
    "score",
    "discount",
    "prior",
    "design",
    "estimator",
    "max_weight",
    "warmup_epochs",
    "anneal_fraction",
    "max_design_effect",
    "max_noise_ratio",
)


class DppoPromptPolicy(PromptPolicyBase):
    """Method `dppo`: a systematic draw with probabilities in proportion to a score of the history."""

    methods: ClassVar[tuple[str, ...]] = ("dppo",)
    reads: ClassVar[tuple[str, ...]] = ("rate", "cost_aware", *_READS)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.control = RateControl()

    @classmethod
    def unread(cls, config: PromptPruningConfig) -> tuple[str, ...]:
        """See `PromptPolicyBase.unread`; the posterior is that of `score=beta`."""
        return () if config.score == "beta" else ("prior",)

    @classmethod
    def check(cls, config: PromptPruningConfig, key: str) -> None:
        """See `PromptPolicyBase.check`."""
        check_floor(key, config.p_min, config.rate)

    @classmethod
    def needs_unit_rewards(cls, config: PromptPruningConfig) -> bool:
        """A posterior counts them as successes."""
        return config.score == "beta"

    def _select_sorted(self, ids: IntArray, step: int, minibatch: int) -> Selection:
        config = self.config
        score, cost = self._score(ids, step), self._relative_cost(ids)
        size = score / np.sqrt(cost) if self._divides_by_cost else score
        lower = np.where(self.history.seen(ids), config.p_min, 1.0)
        target, note = self._target(score, cost, lower)
        if note and target >= len(ids):
            return keep_all(len(ids), self.name, note)
        pi = budgeted_probabilities(
            WaterFiller(size, lower), score, target, max_design_effect=config.max_design_effect, whole=True
        )
        if pi.sum() > target + 0.5:
            note = f"max_design_effect {config.max_design_effect:g} keeps {pi.sum():.0f} prompts, not {target:.0f}"
        # Neighbours in score replace each other in a systematic draw; the tie-break keeps equals in random order.
        order = np.lexsort((self._ties(ids, step, minibatch), score))
        selection = self._draw_and_weigh(ids, pi, order, step, minibatch, note=note)
        return with_metrics(
            selection,
            {
                "rate_effective": 1.0 - float(pi.mean()),
                "design_effect": design_effect(score, pi),
                "kept_cost": float(np.sum(pi * cost) / np.sum(cost)),
                "share_at_floor": float(np.mean((pi <= lower + 1e-12) & (lower < 1))),
                "share_at_one": float(np.mean(pi >= 1)),
            },
        )

    def feedback(self, cost: StepCost) -> str | None:
        """Skipping a prompt saves its rollout and its update; the rest of a step is its fixed cost."""
        self.control.observe_cost(cost.other_s, cost.rollout_s + cost.update_s, cost.kept_cost)
        return self.control.observe_noise(cost, self.config.max_noise_ratio, "pruning.prompt")

    @property
    def _divides_by_cost(self) -> bool:
        return self.config.cost_aware

    def _target(self, score: FloatArray, cost: FloatArray, lower: FloatArray) -> tuple[float, str]:
        """Whole number of prompts to keep, and why it is not what the rate says."""
        num_seen, scale = int((lower < 1).sum()), self.control.rate_scale
        by_rate = len(lower) - num_seen + count_kept(num_seen, self.config.rate * scale)
        return float(max(by_rate, _least(lower))), self.control.note

    def _score(self, ids: IntArray, step: int) -> FloatArray:
        """Root of the expected second moment of a prompt's gradient, up to a common factor, [n]."""
        kind, arrays = self.config.score, self.history.arrays
        if kind == "mean_abs":
            return _for_unseen(arrays["mean_abs"][ids].astype(np.float64), self.history.seen(ids))
        if kind == "rms":
            return _for_unseen(np.sqrt(arrays["variance"][ids].astype(np.float64)), self.history.seen(ids))
        successes, failures = self.history.posterior(ids, step)
        moment = arrays["moment"][ids].astype(np.float64)
        known = ~np.isnan(moment)
        moment = np.where(known, moment, moment[known].mean() if known.any() else 1.0)
        return np.sqrt(nondegenerate_probability(successes, failures, self.completions_per_prompt) * moment)

    def _relative_cost(self, ids: IntArray) -> FloatArray:
        """Mean completion length of each prompt over the batch's, [n]; 1 for unseen ones."""
        tokens = self.history.arrays["tokens"][ids].astype(np.float64)
        known = tokens > 0
        mean = float(tokens[known].mean()) if known.any() else 1.0
        return np.where(known, tokens / mean, 1.0)

    def own_state(self) -> dict[str, Any]:
        return {"control": self.control.state_dict()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.control.load_state_dict(state["control"])


class AutoPromptPolicy(DppoPromptPolicy):
    """Method `dppo_auto`: the number to keep follows from what a prompt costs, or from a bound on the variance."""

    methods: ClassVar[tuple[str, ...]] = ("dppo_auto",)
    reads: ClassVar[tuple[str, ...]] = ("rate", "auto_rule", "fixed_cost_ratio", *_READS)

    @classmethod
    def unread(cls, config: PromptPruningConfig) -> tuple[str, ...]:
        """See `PromptPolicyBase.unread`: by cost there is no rate, by a bound on the variance no cost."""
        by_rule = ("rate",) if config.auto_rule == "cost" else ("fixed_cost_ratio",)
        return (*super().unread(config), *by_rule)

    @classmethod
    def check(cls, config: PromptPruningConfig, key: str) -> None:
        """See `PromptPolicyBase.check`."""
        check_auto_rule(key, config)

    @property
    def _divides_by_cost(self) -> bool:
        return True

    def _target(self, score: FloatArray, cost: FloatArray, lower: FloatArray) -> tuple[float, str]:
        """The count of the rule; gradient noise moves it towards that of no pruning."""
        config, scale = self.config, self.control.rate_scale
        if config.auto_rule != "cost":
            return super()._target(score, cost, lower)
        ratio = config.fixed_cost_ratio or self.control.cost_ratio
        if ratio == 0:
            return float(len(lower)), "no cost measured yet"
        pi = efficient_probabilities(score, cost, lower, ratio * float(cost.sum()))
        wanted = float(pi.sum()) * scale + len(lower) * (1.0 - scale)
        return float(max(_least(lower), math.ceil(wanted - 1e-9))), self.control.note


class PaperPromptPolicy(PromptPolicyBase):
    """Method `dppo_paper`: Algorithm 1 as reconstructed from public reviews; the paper's code is not public.

    Drops floor(rate N) prompts with the lowest mean |advantage| of their last visit and multiplies the rest by
    C/(1-P) with a mean over the kept, which is 1/(1-rate) on nominal denominators. Unvisited prompts rank highest.
    A skipped prompt's score never changes, so it stays out unless `revisit_epochs` is set.
    """

    methods: ClassVar[tuple[str, ...]] = ("dppo_paper",)
    reads: ClassVar[tuple[str, ...]] = ("rate", "warmup_epochs", "anneal_fraction", "revisit_epochs")

    def _select_sorted(self, ids: IntArray, step: int, minibatch: int) -> Selection:
        config = self.config
        fresh = ~self.history.seen(ids)
        if config.revisit_epochs > 0:
            fresh |= self.history.age_epochs(ids, step) >= config.revisit_epochs
        score = np.where(fresh, np.inf, self.history.arrays["mean_abs"][ids].astype(np.float64))
        drawn = deterministic(score, count_kept(len(ids), config.rate), uniform=self._ties(ids, step, minibatch))
        selection = weigh_biased(
            drawn,
            name=self.name,
            scale=1.0 / (1.0 - config.rate),
            note="prompts below the cut are never drawn, so no weight can stand in for them",
        )
        return with_metrics(
            selection,
            {
                "rate_effective": 1.0 - float(drawn.kept.mean()),
                "design_effect": 1.0,
                "share_at_floor": float(np.mean(drawn.inclusion_prob == 0)),
                "share_at_one": float(np.mean(drawn.inclusion_prob == 1)),
            },
        )


def _least(lower: FloatArray) -> int:
    """Fewest prompts that floors [n] allow."""
    return math.ceil(float(lower.sum()) - 1e-9)


def _for_unseen(score: FloatArray, seen: BoolArray) -> FloatArray:
    """Scores with unseen prompts at the largest one, where they do not pull the others up."""
    return np.where(seen, score, score[seen].max(initial=0.0) or 1.0)
