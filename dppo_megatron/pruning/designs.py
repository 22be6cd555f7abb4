"""Sampling designs: from a size measure to inclusion probabilities, and from those to a draw.

A design here is a pure function of probabilities and uniform numbers. Each returns the kept mask together with the
exact first-order inclusion probabilities, because a weight built from an approximate probability is a hidden bias.
Systematic sampling is the default: its size is fixed, so C/(1-P) scaling and Horvitz-Thompson agree, and on a sorted
list it stratifies for free. The price is that some pairs are never drawn together, so its own variance cannot be
estimated without bias; the Poisson formula is reported instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dppo_megatron.config.pruning import exact_rate
from dppo_megatron.types import BoolArray, FloatArray, IntArray

_SMALLEST_RELATIVE_SIZE = 1e-12
"""Positive sizes are raised to this share of the largest: 1/size stays finite, and the floor decides there anyway."""

_CERTAIN = 1.0 - 1e-11
"""A systematic draw always keeps an element above this, and reports 1: a sum of thousands has no finer resolution."""


@dataclass(frozen=True, slots=True)
class Draw:
    kept: BoolArray
    """[n], or [draws, n] for many draws."""
    inclusion_prob: FloatArray
    """[n] float64, P(kept) under the design, exact."""
    fixed_size: bool
    """The number kept is the same in every draw."""
    least_kept: int = 0
    """Every draw keeps at least this many; 0: only the rows with probability 1 are known to be kept."""
    order: IntArray | None = None
    """[n] the order in which a systematic draw cumulates probabilities; None: independent coins."""

    def redraw(self, rng: np.random.Generator, count: int) -> Draw:
        """`count` further draws of the same design. Systematic ones start at equal distances, in random order."""
        pi = self.inclusion_prob
        if self.order is None:
            return replace(self, kept=rng.random((count, len(pi))) < pi)
        begins, ordered = np.zeros(len(pi)), np.where(pi < 1.0, pi, 0.0)[self.order]
        begins[self.order] = np.cumsum(ordered) - ordered
        starts = (rng.permutation(count) + 0.5) / count
        return replace(self, kept=(starts[:, None] - begins) % 1.0 < pi)


class WaterFiller:
    """Solves pi = clip(lambda * size, lower, 1) with sum(cost * pi) = target for many targets after one sort.

    The sum is piecewise linear in lambda with a kink where an element leaves its floor and one where it reaches 1;
    sorting the kinks once leaves O(n) work per target. Among all pi with that budget and floor, this one minimises
    sum((size * sqrt(cost))^2 / pi), the design variance, when size = score / sqrt(cost) (KKT conditions).

    Args:
        size: [n] finite, >= 0.
        lower: [n] or scalar in [0, 1], floor of pi; elements with size 0 and lower 0 have no support and get pi = 0.
        cost: [n] > 0, default 1.

    Example: sizes (8, 2, 1, 1), floor 0.2, two of four to be kept. The first would get more than 1 and is certain; the
    others share the rest in proportion, lambda = 1 / 4:
        WaterFiller(np.array([8.0, 2, 1, 1]), 0.2).solve(2.0)  ->  (1, 0.5, 0.25, 0.25)
    At a target of 1.2 the last three are at the floor: (0.6, 0.2, 0.2, 0.2).
    """

    def __init__(self, size: FloatArray, lower: FloatArray | float, cost: FloatArray | None = None) -> None:
        size = np.asarray(size, dtype=np.float64)
        if (wrong := np.flatnonzero(~((size >= 0.0) & (size < np.inf)))).size:  # it would count as a row of size 0
            raise ValueError(f"size[{wrong[0]}] = {size[wrong[0]]}: must be finite and >= 0")
        self.lower = np.broadcast_to(np.asarray(lower, dtype=np.float64), size.shape)
        self.cost = np.ones_like(size) if cost is None else np.asarray(cost, dtype=np.float64)
        largest = size.max(initial=0.0)
        positive = size > 0
        scaled = size / largest if largest > 0 else size
        self.size = np.where(positive, np.maximum(scaled, _SMALLEST_RELATIVE_SIZE), 0.0)
        self.support: BoolArray = positive | (self.lower > 0)
        self._movable = np.flatnonzero(positive & (self.lower < 1))
        size_m, cost_m = self.size[self._movable], self.cost[self._movable]
        self._leaves_floor = self.lower[self._movable] / size_m
        self._reaches_one = 1.0 / size_m
        kinks = np.concatenate([self._leaves_floor, self._reaches_one])
        slopes = np.concatenate([size_m * cost_m, -size_m * cost_m])
        order = np.argsort(kinks, kind="stable")
        self._kinks = kinks[order]
        widths = np.diff(self._kinks, prepend=0.0)
        slope_before = np.concatenate([[0.0], np.cumsum(slopes[order])[:-1]]) if len(kinks) else np.zeros(0)
        self._spent_at_kink = float(np.sum(self.cost * self.lower)) + np.cumsum(slope_before * widths)

    def at(self, level: float) -> FloatArray:
        """pi [n] at a given lambda, in units of the largest size."""
        return np.clip(level * self.size, self.lower, 1.0)

    def solve(self, target: float) -> FloatArray:
        """pi [n] float64 with sum(cost * pi) = target to rounding.

        A target below the sum of the floors gives the floors; one above that of the support gives 1 on the support.
        Elements of size 0 with a floor are raised last, in proportion to their floors.
        """
        ones = self.support.astype(np.float64)
        if target >= float(np.sum(self.cost * ones)):
            return ones
        if target <= float(np.sum(self.cost * self.lower)):
            return self.lower.copy()
        after = int(np.searchsorted(self._spent_at_kink, target))
        if after >= len(self._kinks):
            return self._raise_sizeless(target)
        # Solved again from the active set: the running sums accumulate rounding errors and only find the segment.
        left = self._kinks[after - 1] if after else 0.0
        middle = 0.5 * (left + self._kinks[after])
        free = (self._leaves_floor < middle) & (middle < self._reaches_one)
        free_index = self._movable[free]
        fixed = self.at(middle)
        fixed[free_index] = 0.0
        slope = float(np.sum(self.cost[free_index] * self.size[free_index]))
        level = (target - float(np.sum(self.cost * fixed))) / slope if slope > 0 else self._kinks[after]
        return self.at(min(max(level, left), self._kinks[after]))

    def _raise_sizeless(self, target: float) -> FloatArray:
        pi = np.where(self.size > 0, 1.0, self.lower)
        rest = np.flatnonzero((self.size == 0) & (self.lower > 0))
        if len(rest):
            spent = float(np.sum(np.where(self.size > 0, self.cost, 0.0)))
            pi[rest] = WaterFiller(self.lower[rest], self.lower[rest], self.cost[rest]).solve(target - spent)
        return pi


def bisect(
    low: float, high: float, tolerance: float, is_low: Callable[[float], bool], *, whole: bool
) -> tuple[float, float]:
    """Narrow [low, high] to `tolerance`; whole: in whole-number steps, to a tolerance of 1. Returns both ends.

    `is_low(value)`: whether the wanted value is above `value`.
    """
    while high - low > (1.0 if whole else tolerance):
        middle = low + (max(round((high - low) / 2), 1) if whole else (high - low) / 2)
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return low, high


def systematic(inclusion_prob: FloatArray, *, order: IntArray, start: float) -> Draw:
    """Equally spaced points on the cumulated probabilities.

    P(kept) = inclusion_prob exactly; the count is floor or ceil of the sum, and fixed if the sum is whole.

    Args:
        order: [n] permutation in which probabilities are cumulated; neighbours are rarely kept together.
        start: one uniform number in [0, 1).

    Example: pi = (0.5, 0.7, 0.8) ends at 0.5, 1.2 and 2.0 on the cumulated line. start = 0.3 puts points at 0.3 and
    1.3: the first and the third are kept. start = 0.6 puts them at 0.6 and 1.6: the second and the third are. The first
    is kept for starts in [0, 0.5), the second for those in [0.5, 1) or [0, 0.2), the third for those in [0.2, 1).
    """
    pi = checked_probabilities(inclusion_prob)
    pi = np.where(pi > _CERTAIN, 1.0, pi)
    kept = pi >= 1.0
    # Certain elements stay out of the cumulated sum, where rounding could give such an element two points or none.
    ordered = pi[order]
    rest = order[(ordered > 0.0) & (ordered < 1.0)]
    total, cumulated = 0.0, np.cumsum(pi[rest])
    if len(rest):
        total = float(pi[rest].sum())  # summed pairwise: cumsum over a million probabilities is off by 5e-7
        if _is_whole(total):
            total = float(round(total))
            cumulated = np.minimum(cumulated, total)
            cumulated[-1] = total
        points = np.floor(np.concatenate([[0.0], cumulated]) - start)
        kept[rest] = np.diff(points) > 0.5
    sampled = round(total) if _is_whole(total) else math.floor(total)
    return Draw(kept, pi, fixed_size=_is_whole(total), least_kept=int((pi >= 1.0).sum()) + sampled, order=order)


def poisson(inclusion_prob: FloatArray, *, uniform: FloatArray) -> Draw:
    """Independent coins: kept where uniform [n], in [0, 1), < probability [n]. The count is random."""
    pi = checked_probabilities(inclusion_prob)
    return Draw(uniform < pi, pi, fixed_size=bool(np.all((pi == 0.0) | (pi == 1.0))))


def deterministic(
    score: FloatArray, num_kept: IntArray | int, *, uniform: FloatArray, group: IntArray | None = None
) -> Draw:
    """Keep the highest scores, with ties broken at random, as CPPO and Algorithm 1 of DPPO do.

    The inclusion probabilities are exact: 1 above the threshold, 0 below it, (places left) / (tied) at it. Since some
    are 0 where there is gradient, no weight can make this unbiased.

    Args:
        score: [n], no NaN.
        uniform: [n] in [0, 1), breaks ties.
        num_kept: how many of each group, scalar or [groups].
        group: [n] labels 0..groups-1; None is one group.
    """
    label = np.zeros(len(score), dtype=np.int64) if group is None else group
    kept, pi = np.zeros(len(score), dtype=np.bool_), np.zeros(len(score))
    groups = rows_of_groups(np.lexsort((uniform, -score, label)), label)
    for rows, wanted in zip(groups, np.broadcast_to(num_kept, len(groups)).tolist(), strict=True):
        count = min(wanted, len(rows))
        kept[rows[:count]] = True
        if count:
            threshold = score[rows[count - 1]]
            above, tied = score[rows] > threshold, score[rows] == threshold
            pi[rows] = np.where(above, 1.0, np.where(tied, (count - above.sum()) / tied.sum(), 0.0))
    return Draw(kept, pi, fixed_size=True)


def rows_of_groups(order: IntArray, label: IntArray) -> list[IntArray]:
    """The rows of each group; `order` [n] holds row numbers sorted by label first, with labels 0..groups-1."""
    return np.split(order, np.cumsum(np.bincount(label))[:-1]) if len(order) else []


def draw(design: str, inclusion_prob: FloatArray, *, order: IntArray, start: float, uniform: FloatArray) -> Draw:
    """Draw with the design named in the config: `systematic` or `poisson`."""
    if design == "systematic":
        return systematic(inclusion_prob, order=order, start=start)
    if design == "poisson":
        return poisson(inclusion_prob, uniform=uniform)
    raise ValueError(f"design '{design}' draws from no probabilities; known: systematic, poisson")


def count_kept(count: int, rate: float) -> int:
    """count - floor(rate * count), with the rate taken as the exact decimal that was written.

    In binary floating point int(160 * (1 - 0.9)) is 15; with 9/10 as a fraction it is the intended 16.
    """
    return count - math.floor(exact_rate(rate) * count)


def floor_kept(count: int, rate: float) -> int:
    """floor(count * (1 - rate)), exactly: one fewer than `count_kept` where rate * count is not whole."""
    return math.floor((1 - exact_rate(rate)) * count)


def design_effect(score: FloatArray, inclusion_prob: FloatArray) -> float:
    """sum(s^2 / pi) / sum(s^2), the variance of a Poisson draw relative to no pruning; 1 without pruning or score."""
    squared = np.where(inclusion_prob > 0, score, 0.0) ** 2
    total = float(np.sum(squared))
    return float(np.sum(squared / np.where(inclusion_prob > 0, inclusion_prob, 1.0))) / total if total > 0 else 1.0


def checked_probabilities(inclusion_prob: FloatArray) -> FloatArray:
    """The argument as float64; raises ValueError, with the row, for a value that is NaN or outside [0, 1]."""
    pi = np.asarray(inclusion_prob, dtype=np.float64)
    if (wrong := np.flatnonzero(~((pi >= 0.0) & (pi <= 1.0)))).size:  # NaN is neither
        raise ValueError(f"inclusion_prob[{wrong[0]}] = {pi[wrong[0]]}: must be in [0, 1]")
    return pi


def _is_whole(total: float) -> bool:
    return abs(total - round(total)) < 1e-7
