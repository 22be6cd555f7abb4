"""DPPO's completion selection: fixed-size systematic sampling with probabilities from a free gradient-norm score.

Rollouts are paid for at this point, so the only cost of pruning is variance, and a good score makes that cost small:
in the reference experiment 1-2 % at 50 % pruned and 9-20 % at 70 %. Without a KL term a completion with advantage 0
has no gradient and is dropped for free; with one it keeps a floor, because its KL gradient would otherwise be lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dppo_megatron.pruning.budget import RateControl
from dppo_megatron.pruning.completion_base import CompletionPolicyBase
from dppo_megatron.pruning.completion_slack import fill_slack
from dppo_megatron.pruning.designs import WaterFiller, count_kept, design_effect
from dppo_megatron.pruning.interface import CompletionBatch, Selection, StepCapacity, keep_all
from dppo_megatron.pruning.labels import label_of_settings
from dppo_megatron.pruning.prompt_base import with_metrics
from dppo_megatron.pruning.scores import budgeted_probabilities, completion_score, efficient_probabilities
from dppo_megatron.pruning.weights import weigh
from dppo_megatron.types import BoolArray, FloatArray, IntArray, Label


class DppoCompletionPolicy(CompletionPolicyBase):
    """Methods `dppo` and `dppo_auto`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.control = RateControl()

    @property
    def label(self) -> Label:
        """Of the estimator, the design and the cap against 1 / p_min; exact where the rate or an unknown cost keeps
        everything that has gradient."""
        config, by_rule = self.config, self._follows_costs
        if self._cost_ratio == 0 if by_rule else config.rate == 0:
            return "exact"
        return label_of_settings(
            config.estimator,
            # every budget is then a whole number, see `_target`
            fixed_size=config.design == "systematic" and not self._spends_tokens,
            least_prob=config.p_min,
            max_weight=config.max_weight,
        )

    @property
    def _follows_costs(self) -> bool:
        return self.config.method == "dppo_auto" and self.config.auto_rule == "cost"

    @property
    def _spends_tokens(self) -> bool:
        return self.config.cost_aware and self.config.method == "dppo"

    @property
    def _cost_ratio(self) -> float:
        return self.config.rollout_cost_ratio or self.control.cost_ratio

    def _prune_sorted(
        self, batch: CompletionBatch, counters: tuple[int, int, int], capacity: StepCapacity | None
    ) -> Selection:
        config = self.config
        live = self._can_carry_gradient(batch)
        score = np.where(live, self._score(batch), 0.0)
        cost = self._cost(batch)
        lower = np.where(live, config.p_min, 0.0)
        by_cost = self._spends_tokens
        size = score / np.sqrt(cost) if by_cost or config.method == "dppo_auto" else score
        target, note = self._target(score, cost, lower)
        if target is None:
            self.control.kept_cost = 1.0
            return keep_all(len(batch), self.name, note)
        filler = WaterFiller(size, lower, cost if by_cost else None)
        pi = budgeted_probabilities(
            filler, score, target, max_design_effect=config.max_design_effect, whole=not by_cost
        )
        spent = float(np.sum(filler.cost * pi))
        if config.max_design_effect and spent > target * (1 + 1e-9) and spent > float(np.sum(filler.cost * lower)):
            kept = spent / float(filler.cost.sum())
            note = f"max_design_effect {config.max_design_effect:g} lowers the rate to {1 - kept:.3f}"
        before, tokens = pi, batch.lengths if batch.tokens is None else batch.tokens
        if capacity is not None and config.fill_slack:
            pi = self._filled(filler, before, tokens, capacity, whole=not by_cost)
            if pi.sum() > before.sum():
                filled = f"slack filled: rate {1 - before.mean():.3f} -> {1 - pi.mean():.3f}"
                note = f"{note}; {filled}" if note else filled
        selection = weigh(
            self._draw(batch, pi, counters),
            name=self.name,
            estimator=config.estimator,
            max_weight=config.max_weight,
            note=note,
            label=self.label,
        )
        self.control.kept_cost = float(np.sum(pi * cost) / np.sum(cost))
        return with_metrics(
            selection,
            {
                "rate_effective": 1.0 - float(pi.mean()),
                "rate_before_slack": 1.0 - float(before.mean()),
                "slack_filled_tokens": float(np.sum(tokens * (pi - before))),
                "design_effect": design_effect(score, pi),
                "share_at_floor": float(np.mean(live & (pi <= lower + 1e-12))),
                "share_at_one": float(np.mean(pi >= 1)),
                "share_without_gradient": float(np.mean(~live)),
            },
        )

    def feedback(
        self,
        *,
        step: int,
        rollout_s: float,
        update_s: float,
        other_s: float = 0.0,
        noise_ratio: float | None = None,
    ) -> str | None:
        """Dropping a completion saves its update only; rollout and the rest of a step are its fixed cost."""
        self.control.observe_cost(rollout_s + other_s, update_s)
        return self.control.observe_noise(noise_ratio, self.config.max_noise_ratio, "pruning.completion")

    def _filled(
        self, filler: WaterFiller, pi: FloatArray, tokens: IntArray, capacity: StepCapacity, *, whole: bool
    ) -> FloatArray:
        count = capacity.microbatches(tokens, pi)
        fixed_size = self.config.design == "systematic"

        def holds(raised: FloatArray) -> bool:
            return capacity.holds(count, tokens, raised, fixed_size=fixed_size)

        return fill_slack(filler, pi, holds, whole=whole)

    def _can_carry_gradient(self, batch: CompletionBatch) -> BoolArray:
        carries = (batch.lengths > 0) & (batch.prompt_weight > 0)
        return carries if self.kl_coef > 0 else carries & (batch.advantages != 0)

    def _score(self, batch: CompletionBatch) -> FloatArray:
        length = batch.surprisal if self.config.score == "free_norm" else np.ones(len(batch))
        return completion_score(
            batch.advantages,
            length,
            batch.denominator,
            batch.prompt_weight,
            kl_coef=self.kl_coef,
            kl_slope=self.config.kl_slope,
        )

    def _cost(self, batch: CompletionBatch) -> FloatArray:
        tokens = np.maximum(batch.lengths, 1).astype(np.float64)
        return tokens * (1.0 + self.config.quadratic_cost_per_token * tokens)

    def _target(self, score: FloatArray, cost: FloatArray, lower: FloatArray) -> tuple[float | None, str]:
        """Budget (a whole count, or cost with cost_aware) and why it is not what the rate says; None keeps all."""
        config, scale = self.config, self.control.rate_scale
        note = f"rate scaled by {scale:.2f}: gradient noise" if scale < 1 else ""
        if self._follows_costs:
            ratio = self._cost_ratio
            if ratio == 0:
                return None, "no cost measured yet"
            pi = efficient_probabilities(score, cost, lower, ratio * float(cost.sum()))
            # The scale moves the count between the rule's and that of no pruning.
            wanted = float(pi.sum()) * scale + float(np.sum(lower > 0)) * (1.0 - scale)
            return float(math.ceil(wanted - 1e-9)), note
        if self._spends_tokens:
            return (1.0 - config.rate * scale) * float(cost.sum()), note
        least = math.ceil(float(lower.sum()) - 1e-9)
        return float(max(count_kept(len(score), config.rate * scale), least)), note

    def _extra_state(self) -> dict[str, Any]:
        return {"control": self.control.state_dict()}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        self.control.load_state_dict(state["control"])
