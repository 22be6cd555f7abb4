"""Completion methods of other papers, for comparison under the same loop: CPPO, DPPO's Algorithm 1, GRESO's filter,
InfoBatch's rule and PODS' subset.

Most keep the completions that look best, with certainty. On-policy, with binary rewards and constant weighting that
only re-weights prompts; with 1/length, KL terms or graded rewards it turns the gradient. Each says so in the ledger,
with the share of the score mass that it never trains on.
"""

from __future__ import annotations

import numpy as np

from dppo_megatron.pruning.completion_base import CompletionPolicyBase
from dppo_megatron.pruning.designs import Draw, count_kept, design_effect, deterministic
from dppo_megatron.pruning.interface import CompletionBatch, Selection, StepCapacity
from dppo_megatron.pruning.prompt_base import with_metrics
from dppo_megatron.pruning.prompt_infobatch import two_class
from dppo_megatron.pruning.subsets import max_variance_draw
from dppo_megatron.pruning.weights import weigh, weigh_biased
from dppo_megatron.types import BoolArray, FloatArray, IntArray, UserError


class CppoPolicy(CompletionPolicyBase):
    """Methods `cppo`, `cppo_verl` and `dppo_paper`: the largest |advantage|, as a mean over the kept.

    cppo: the top floor(G (1 - rate)) of each group (arXiv 2503.22342). cppo_verl: the top floor(n (1 - rate)) of the
    whole mini-batch, as in the authors' verl port. dppo_paper: all but the floor(rate G) lowest of each group, times
    1 / (1 - rate). Ties are broken by a counter-based key, where torch.topk leaves them undefined. Counts are exact,
    where int(160 * (1 - 0.9)) of the authors' code is 15.
    """

    @property
    def prompts_multiplier(self) -> float:
        """1 / (1 - rate) with `allocation`: more questions fill the places of pruned completions."""
        allocates = self.config.allocation and self.config.method in ("cppo", "cppo_verl")
        return 1.0 / (1.0 - self.config.rate) if allocates else 1.0

    def _prune_sorted(
        self, batch: CompletionBatch, counters: tuple[int, int, int], capacity: StepCapacity | None
    ) -> Selection:
        score, method, rate = np.abs(batch.advantages), self.config.method, self.config.rate
        sizes = np.bincount(batch.group) if method != "cppo_verl" else np.array([len(batch)])
        group = batch.group if method != "cppo_verl" else np.zeros(len(batch), dtype=np.int64)
        if method == "dppo_paper":
            kept = np.array([count_kept(int(size), rate) for size in sizes], dtype=np.int64)
        else:
            kept = np.floor(sizes * (1.0 - rate) + 1e-9).astype(np.int64)
        empty = (kept == 0) & (sizes > 0)
        if empty.any():
            size = int(sizes[empty][0])
            raise UserError(
                f"pruning.completion.rate = {rate}: method={method} would keep none of {size} completions;"
                f" must be at most {1 - 1 / size:.4g}"
            )
        drawn = deterministic(score, kept, uniform=self._ties(batch, counters), group=group)
        scale: FloatArray | float = sizes[group] / kept[group] if method != "dppo_paper" else 1.0 / (1.0 - rate)
        note = f"the lowest |advantages| are never trained on: {_lost(score, drawn):.1%} of their sum"
        return _with_figures(weigh_biased(drawn, name=self.name, scale=scale, note=note), drawn, score)


class ZeroVariancePolicy(CompletionPolicyBase):
    """Methods `greso` and `greso_ht`: groups without reward variance are dropped.

    greso averages over the other groups, which is dynamic sampling's target. greso_ht keeps the nominal denominators
    and drops groups whose advantages are all 0: exact without a KL term, biased with one.
    """

    def _prune_sorted(
        self, batch: CompletionBatch, counters: tuple[int, int, int], capacity: StepCapacity | None
    ) -> Selection:
        score = np.abs(batch.advantages)
        if self.config.method == "greso_ht":
            kept = np.bincount(batch.group, weights=score)[batch.group] > 0
            drawn = Draw(kept, kept.astype(np.float64), fixed_size=True)
            if self.kl_coef > 0:
                note = f"the KL gradient of {1 - float(kept.mean()):.1%} of the completions is lost"
                return _with_figures(weigh_biased(drawn, name=self.name, scale=1.0, note=note), drawn, score)
            return _with_figures(weigh(drawn, name=self.name, note="dropped groups have no gradient"), drawn, score)
        kept = _groups_with_variance(batch.rewards, batch.group)
        drawn = Draw(kept, kept.astype(np.float64), fixed_size=True)
        scale = len(batch) / int(kept.sum()) if kept.any() else 0.0
        note = "target is the mean over groups with reward variance"
        return _with_figures(weigh_biased(drawn, name=self.name, scale=scale, note=note), drawn, score)


class InfoBatchCompletionPolicy(CompletionPolicyBase):
    """Method `infobatch`: completions below the mean |advantage| are dropped with probability `rate`, weighted 1/pi."""

    def _prune_sorted(
        self, batch: CompletionBatch, counters: tuple[int, int, int], capacity: StepCapacity | None
    ) -> Selection:
        config, score = self.config, np.abs(batch.advantages)
        drawn = self._draw(batch, two_class(score < score.mean(), config.rate), counters)
        selection = weigh(drawn, name=self.name, estimator=config.estimator, max_weight=config.max_weight)
        return _with_figures(selection, drawn, score)


class MaxVariancePolicy(CompletionPolicyBase):
    """Method `max_variance`: of each group the subset with the largest reward variance (PODS, arXiv 2504.13818).

    As a mean over the kept. Advantages stay those of the full group. Failed gradings are never kept.
    """

    def _prune_sorted(
        self, batch: CompletionBatch, counters: tuple[int, int, int], capacity: StepCapacity | None
    ) -> Selection:
        drawn = max_variance_draw(batch.rewards, batch.group, self.config.rate, self._ties(batch, counters))
        sizes = np.bincount(batch.group)
        kept = np.maximum(np.bincount(batch.group, weights=drawn.kept), 1)
        score = np.abs(batch.advantages)
        note = f"rewards in the middle are never trained on: {_lost(score, drawn):.1%} of the sum of |advantages|"
        selection = weigh_biased(drawn, name=self.name, scale=(sizes / kept)[batch.group], note=note)
        return _with_figures(selection, drawn, score)


def _groups_with_variance(rewards: FloatArray, group: IntArray) -> BoolArray:
    """[n]: the row's group has two different rewards; failed gradings are left out."""
    high, low = np.full(int(group.max()) + 1, -np.inf), np.full(int(group.max()) + 1, np.inf)
    graded = ~np.isnan(rewards)
    np.maximum.at(high, group[graded], rewards[graded])
    np.minimum.at(low, group[graded], rewards[graded])
    return np.asarray((high > low)[group])


def _lost(score: FloatArray, drawn: Draw) -> float:
    total = float(score.sum())
    return float(np.sum(score * (1.0 - drawn.inclusion_prob))) / total if total > 0 else 0.0


def _with_figures(selection: Selection, drawn: Draw, score: FloatArray) -> Selection:
    pi = drawn.inclusion_prob
    return with_metrics(
        selection,
        {
            "rate_effective": 1.0 - float(pi.mean()),
            "design_effect": design_effect(score, pi),
            "share_at_floor": float(np.mean(pi == pi.min())) if pi.min() < 1 else 0.0,
            "share_at_one": float(np.mean(pi >= 1)),
        },
    )
