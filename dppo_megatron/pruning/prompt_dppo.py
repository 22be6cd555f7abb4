"""DPPO's prompt selection, with inclusion probabilities that are known and never 0, so that 1/pi removes the bias.

The paper (arXiv 2603.04135) proves its correction for random pruning and then prunes deterministically in Algorithm 1.
`DppoPromptPolicy` is the random version; `PaperPromptPolicy` reconstructs the algorithm, as a baseline labelled biased.
Exact weights make prompt selection about as noisy as a smaller batch unless the score is good; hence a posterior over
visits in place of the last visit alone, a floor of 0.2, and unvisited prompts always kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dppo_megatron.pruning.budget import RateControl
from dppo_megatron.pruning.designs import WaterFiller, count_kept, design_effect, deterministic
from dppo_megatron.pruning.interface import Selection, keep_all
from dppo_megatron.pruning.prompt_base import PromptPolicyBase, with_metrics
from dppo_megatron.pruning.scores import budgeted_probabilities, efficient_probabilities, nondegenerate_probability
from dppo_megatron.pruning.weights import weigh_biased
from dppo_megatron.types import BoolArray, FloatArray, IntArray


class DppoPromptPolicy(PromptPolicyBase):
    """Methods `dppo` and `dppo_auto`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.control = RateControl()

    def _select_sorted(self, ids: IntArray, step: int, minibatch: int) -> Selection:
        config = self.config
        score, cost = self._score(ids, step), self._relative_cost(ids)
        size = score / np.sqrt(cost) if config.cost_aware or config.method == "dppo_auto" else score
        lower = np.where(self.history.seen(ids), config.p_min, 1.0)
        target, note = self._target(score, cost, lower)
        if note and target >= len(ids):
            self.control.kept_cost = 1.0
            return keep_all(len(ids), self.name, note)
        pi = budgeted_probabilities(
            WaterFiller(size, lower), score, target, max_design_effect=config.max_design_effect, whole=True
        )
        if pi.sum() > target + 0.5:
            note = f"max_design_effect {config.max_design_effect:g} keeps {pi.sum():.0f} prompts, not {target:.0f}"
        # Neighbours in score replace each other in a systematic draw; the tie-break keeps equals in random order.
        order = np.lexsort((self._ties(ids, step, minibatch), score))
        selection = self._draw_and_weigh(ids, pi, order, step, minibatch, note=note)
        self.control.kept_cost = float(np.sum(pi * cost) / np.sum(cost))
        return with_metrics(
            selection,
            {
                "rate_effective": 1.0 - float(pi.mean()),
                "design_effect": design_effect(score, pi),
                "share_at_floor": float(np.mean((pi <= lower + 1e-12) & (lower < 1))),
                "share_at_one": float(np.mean(pi >= 1)),
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
        """Skipping a prompt saves its rollout and its update; the rest of a step is its fixed cost."""
        self.control.observe_cost(other_s, rollout_s + update_s)
        return self.control.observe_noise(noise_ratio, self.config.max_noise_ratio, "pruning.prompt")

    def _target(self, score: FloatArray, cost: FloatArray, lower: FloatArray) -> tuple[float, str]:
        """Whole number of prompts to keep, and why it is not what the rate says."""
        config, num_seen = self.config, int((lower < 1).sum())
        least = math.ceil(float(lower.sum()) - 1e-9)
        by_rate = len(lower) - num_seen + count_kept(num_seen, config.rate * self.control.rate_scale)
        note = f"rate scaled by {self.control.rate_scale:.2f}: gradient noise" if self.control.rate_scale < 1 else ""
        if config.method == "dppo_auto" and config.auto_rule == "cost":
            ratio = config.fixed_cost_ratio or self.control.cost_ratio
            if ratio == 0:
                return float(len(lower)), "no cost measured yet"
            pi = efficient_probabilities(score, cost, lower, ratio * float(cost.sum()))
            return float(max(by_rate, least, math.ceil(float(pi.sum()) - 1e-9))), note
        return float(max(by_rate, least)), note

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

    def _needs_binary_rewards(self) -> bool:
        return self.config.score == "beta"

    def _extra_state(self) -> dict[str, Any]:
        return {"control": self.control.state_dict()}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        self.control.load_state_dict(state["control"])


class PaperPromptPolicy(PromptPolicyBase):
    """Method `dppo_paper`: Algorithm 1 as reconstructed from public reviews; the paper's code is not public.

    Drops floor(rate N) prompts with the lowest mean |advantage| of their last visit and multiplies the rest by
    C/(1-P) with a mean over the kept, which is 1/(1-rate) on nominal denominators. Unvisited prompts rank highest.
    A skipped prompt's score never changes, so it stays out unless `revisit_epochs` is set.
    """

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


def _for_unseen(score: FloatArray, seen: BoolArray) -> FloatArray:
    """Scores with unseen prompts at the largest one, where they do not pull the others up."""
    return np.where(seen, score, score[seen].max(initial=0.0) or 1.0)
