"""Completion methods of other papers: CPPO, DPPO's Algorithm 1, GRESO's filter, InfoBatch's rule and PODS' subset.

Most keep the highest-scoring completions with certainty. On-policy, with binary rewards and constant weighting, this
only re-weights prompts; with 1/length, KL terms or graded rewards it changes the direction of the gradient. The ledger
row of each method reports this, with the share of the score mass that is never trained on.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from dppo_megatron.config.pruning import CompletionPruningConfig
from dppo_megatron.pruning.completion_base import CompletionPolicy, Counters
from dppo_megatron.pruning.designs import Draw, count_kept, deterministic, floor_kept, rows_of_groups
from dppo_megatron.pruning.interface import CompletionBatch, Selection, StepCapacity, keep_all
from dppo_megatron.pruning.prompt_baselines import keep_share, two_class
from dppo_megatron.pruning.weights import label_of_settings, weigh, weigh_biased, weigh_by
from dppo_megatron.types import BoolArray, FloatArray, IntArray, Label, UserError


class _RulePolicy(CompletionPolicy):
    """Keeps by a fixed rule; where the rule is biased, what it leaves out has no chance of being kept."""

    @property
    def label(self) -> Label:
        return "exact" if self.rate == 0 else "biased"

    @property
    def has_support(self) -> bool:
        return self.label != "biased"

    def _weigh(self, batch: CompletionBatch, drawn: Draw, scale: FloatArray | float, note: str) -> Selection:
        score = np.abs(batch.advantages)
        return weigh_biased(drawn, name=self.name, scale=scale, note=note, label=self.label, score=score)


class CppoPolicy(_RulePolicy):
    """Method `cppo`: the largest |advantage| of each group, as a mean over the kept (arXiv 2503.22342).

    Keeps the top floor(G (1 - rate)) of each group, the paper's formula; its two implementations differ, see the
    subclasses. Ties are broken by a counter-based key; torch.topk leaves them undefined. Counts are exact; the authors'
    int(160 * (1 - 0.9)) gives 15.

    Example: G = 5, rate = 0.5. `cppo` keeps 2 of each group, `cppo_trl` and `dppo_paper` keep 3, and `cppo_verl` keeps
    40 of the 80 completions of 16 groups.
    """

    reads: ClassVar[tuple[str, ...]] = ("rate", "allocation", "warmup_steps", "anneal_fraction")
    _count = staticmethod(floor_kept)
    _whole_minibatch = False
    """Keep the best of the whole mini-batch instead of the best of each group."""

    @classmethod
    def check(cls, config: CompletionPruningConfig, key: str, *, group_size: int, minibatch_size: int) -> None:
        offered, rate = minibatch_size if cls._whole_minibatch else group_size, cls.rate_of(config)
        if offered and cls._count(offered, rate) == 0:
            raise UserError(
                f"{key}.rate = {rate}: method={config.method} would keep none of {offered} completions; must be"
                f" at most {1 - 1 / offered:.4g}, or method=cppo_trl, which keeps one"
            )

    def _prune_sorted(self, batch: CompletionBatch, counters: Counters, capacity: StepCapacity | None) -> Selection:
        score, rate = np.abs(batch.advantages), self.rate
        group = np.zeros(len(batch), dtype=np.int64) if self._whole_minibatch else batch.group
        sizes = np.bincount(group)
        if not self.group_size:
            self.check(self.config, "pruning.completion", group_size=int(sizes.max()), minibatch_size=len(batch))
        # At least one: a group or mini-batch may be smaller than planned (objective.overlong.filter, few prompts).
        kept = np.array([max(self._count(int(size), rate), min(int(size), 1)) for size in sizes], dtype=np.int64)
        drawn = deterministic(score, kept, uniform=self._ties(batch.ids, *counters), group=group)
        note = f"the lowest |advantages| are never trained on: {_lost(score, drawn):.1%} of their sum"
        return self._weigh(batch, drawn, self._scale(sizes[group] / kept[group]), note)

    def _scale(self, mean_over_kept: FloatArray) -> FloatArray | float:
        return mean_over_kept


class CppoTrlPolicy(CppoPolicy):
    """Method `cppo_trl`: all but the floor(G rate) lowest of each group, as in the authors' TRL trainer."""

    _count = staticmethod(count_kept)


class CppoVerlPolicy(CppoPolicy):
    """Method `cppo_verl`: the top floor(n (1 - rate)) of the whole mini-batch, as in the authors' verl port."""

    _whole_minibatch = True


class PaperCompletionPolicy(CppoTrlPolicy):
    """Method `dppo_paper`: keeps what `cppo_trl` keeps, scaled by 1 / (1 - rate) whatever number was kept."""

    reads = ("rate", "warmup_steps", "anneal_fraction")

    def _scale(self, mean_over_kept: FloatArray) -> FloatArray | float:
        return 1.0 / (1.0 - self.rate)


class ZeroVariancePolicy(_RulePolicy):
    """Method `greso`: drops groups without reward variance and averages over the others, as dynamic sampling does."""

    reads = ("warmup_steps", "anneal_fraction")

    @property
    def label(self) -> Label:
        """Always biased: whether a batch has any such group is an outcome, and a label must not depend on outcomes."""
        return "biased"

    def _prune_sorted(self, batch: CompletionBatch, counters: Counters, capacity: StepCapacity | None) -> Selection:
        kept = _groups_with_variance(batch.rewards, batch.group)
        drawn = Draw(kept, kept.astype(np.float64), fixed_size=True)
        scale = len(batch) / int(kept.sum()) if kept.any() else 0.0
        note = "target is the mean over groups with reward variance"
        return self._weigh(batch, drawn, scale, note)


class ZeroAdvantagePolicy(_RulePolicy):
    """Method `greso_ht`: drops groups whose advantages are all 0, and keeps the nominal denominators.

    Unbiased without a KL or entropy term, biased with one.
    """

    reads = ("warmup_steps", "anneal_fraction")

    @property
    def label(self) -> Label:
        """biased with a KL or entropy term, else unbiased. Whether a batch has any such group is an outcome."""
        return "unbiased" if self.zero_advantage_slope == 0 else "biased"

    def _prune_sorted(self, batch: CompletionBatch, counters: Counters, capacity: StepCapacity | None) -> Selection:
        score = np.abs(batch.advantages)
        kept = np.bincount(batch.group, weights=score)[batch.group] > 0
        drawn = Draw(kept, kept.astype(np.float64), fixed_size=True)
        if self.zero_advantage_slope > 0:
            note = f"the KL gradient (or entropy's) of {1 - float(kept.mean()):.1%} of the completions is lost"
            return self._weigh(batch, drawn, 1.0, note)
        note = "dropped groups have no gradient"
        return weigh(drawn, name=self.name, note=note, label=self.label, score=score)


class InfoBatchCompletionPolicy(CompletionPolicy):
    """Method `infobatch`: completions below the mean |advantage| are dropped with probability `rate`, weighted 1/pi."""

    reads = ("rate", "design", "estimator", "max_weight", "warmup_steps", "anneal_fraction")

    @property
    def label(self) -> Label:
        """By estimator and cap. No design has a fixed size: how many scores are below the mean is an outcome."""
        config = self.config
        least = keep_share(self.rate)
        if least == 1.0:
            return "exact"
        return label_of_settings(config.estimator, fixed_size=False, least_prob=least, max_weight=config.max_weight)

    def _prune_sorted(self, batch: CompletionBatch, counters: Counters, capacity: StepCapacity | None) -> Selection:
        score = np.abs(batch.advantages)
        drawn = self._draw(batch, two_class(score < score.mean(), self.rate), counters)
        return weigh_by(self, drawn, label=self.label, score=score)


class MaxVariancePolicy(_RulePolicy):
    """Method `max_variance`: of each group the subset with the largest reward variance (PODS, arXiv 2504.13818).

    Averages over the kept. Advantages stay those of the full group. Failed gradings are kept only at rate 0.
    """

    reads = ("rate", "warmup_steps", "anneal_fraction")

    def _prune_sorted(self, batch: CompletionBatch, counters: Counters, capacity: StepCapacity | None) -> Selection:
        if self.rate == 0:
            return keep_all(len(batch), self.name)
        drawn = max_variance_draw(batch.rewards, batch.group, self.rate, self._ties(batch.ids, *counters))
        sizes = np.bincount(batch.group)
        kept = np.maximum(np.bincount(batch.group, weights=drawn.kept), 1)
        lost = _lost(np.abs(batch.advantages), drawn)
        note = f"rewards in the middle are never trained on: {lost:.1%} of the sum of |advantages|"
        return self._weigh(batch, drawn, (sizes / kept)[batch.group], note)


def _groups_with_variance(rewards: FloatArray, group: IntArray) -> BoolArray:
    """[n]: whether the row's group has two different rewards."""
    high, low = np.full(int(group.max()) + 1, -np.inf), np.full(int(group.max()) + 1, np.inf)
    graded = ~np.isnan(rewards)
    np.maximum.at(high, group[graded], rewards[graded])
    np.minimum.at(low, group[graded], rewards[graded])
    return np.asarray((high > low)[group])


def _lost(score: FloatArray, drawn: Draw) -> float:
    """Expected share of the score mass that is not kept."""
    total = float(score.sum())
    return float(np.sum(score * (1.0 - drawn.inclusion_prob))) / total if total > 0 else 0.0


def max_variance_draw(rewards: FloatArray, group: IntArray, rate: float, uniform: FloatArray) -> Draw:
    """Keeps, of each group, the count_kept(G, rate) rewards with the largest variance; ties are broken at random.

    The best m of G are always the i lowest and the m - i highest for some i.

    Args:
        rewards: [n], NaN where grading failed: such rows are never kept.
        group: [n] labels 0..groups-1.
        rate: share to drop of the group's size, failed gradings included.
        uniform: [n] random numbers that break ties.

    Returns:
        A draw with exact inclusion probabilities under the random ties.
    """
    kept, pi = np.zeros(len(rewards), dtype=np.bool_), np.zeros(len(rewards))
    for members in rows_of_groups(np.lexsort((uniform, rewards, group)), group):
        rows = members[~np.isnan(rewards[members])]
        wanted = min(count_kept(len(members), rate), len(rows))
        kept[rows], pi[rows] = _widest(rewards[rows], wanted)
    return Draw(kept, pi, fixed_size=True)


def _widest(ascending: FloatArray, wanted: int) -> tuple[BoolArray, FloatArray]:
    """Kept mask and inclusion probabilities, both [n], of one group's rewards [n], sorted."""
    size = len(ascending)
    # Centred first: a variance computed as the difference of two large sums would lose its digits.
    centred = ascending - ascending.mean() if size else ascending
    # In units of the largest, so that the rounding to 12 digits below does not depend on the scale of the rewards.
    centred = centred / (np.abs(centred).max(initial=0.0) or 1.0)
    sums, squares = (np.concatenate([[0.0], np.cumsum(each)]) for each in (centred, np.square(centred)))
    low = np.arange(wanted + 1)
    first_high = size - wanted + low
    total = sums[low] + sums[size] - sums[first_high]
    total_squares = squares[low] + squares[size] - squares[first_high]
    variance = total_squares / max(wanted, 1) - np.square(total / max(wanted, 1))
    num_low = int(np.argmax(np.round(variance, 12)))
    position = np.arange(size)
    chosen = (position < num_low) | (position >= size - wanted + num_low)
    # Equal rewards are in random order, so each is kept with probability (chosen of its run) / (length of the run).
    _, run, counts = np.unique(ascending, return_inverse=True, return_counts=True)
    return chosen, (np.bincount(run, weights=chosen, minlength=len(counts)) / counts)[run]
