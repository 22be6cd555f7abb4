"""Smoothed curves, the cost to a level, and intervals over seeds. Pure arithmetic.

Where a noisy curve first touches a level is luck: the more evaluations, the earlier. So every curve is a moving mean
over three evaluations before anything is read off it, the baseline's too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dppo_megatron.randomness import generator
from dppo_megatron.types import FloatArray

WINDOW = 3
"""Evaluations in a moving mean."""
RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Curve:
    """Accuracy against one kind of cost."""

    cost: FloatArray
    """[n] seconds, tokens or steps up to each evaluation; grows, from 0."""
    accuracy: FloatArray
    """[n] in [0, 1]."""

    def smoothed(self) -> Curve:
        """The same with a moving mean of the accuracies."""
        return Curve(self.cost, moving_mean(self.accuracy))


@dataclass(frozen=True, slots=True)
class Interval:
    """A median over seeds."""

    median: float
    low: float
    """2.5 % quantile of the median over resampled seeds."""
    high: float
    """97.5 % quantile."""

    def times(self) -> str:
        """Example: `2.10x (1.85-2.42)`."""
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})" if self.median else "not reached"


def moving_mean(values: FloatArray) -> FloatArray:
    """Centred mean over `WINDOW` values; at the ends over those that there are.

    Example:
        [0, 3, 6, 9] -> [1.5, 3, 6, 7.5]
    """
    half = WINDOW // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def cost_to(curve: Curve, level: float) -> float | None:
    """The cost at which a curve first is at `level`, interpolated between its points; None if it never is.

    Example:
        cost [0, 10, 20], accuracy [.2, .4, .8], level .6 -> 15
    """
    above = np.flatnonzero(curve.accuracy >= level)
    if not len(above):
        return None
    i = int(above[0])
    if i == 0:
        return float(curve.cost[0])
    share = (level - curve.accuracy[i - 1]) / (curve.accuracy[i] - curve.accuracy[i - 1])
    return float(curve.cost[i - 1] + share * (curve.cost[i] - curve.cost[i - 1]))


def accuracy_at(curve: Curve, cost: float) -> float:
    """The accuracy at `cost`, interpolated; a run that had ended by then stays at its last."""
    return float(np.interp(cost, curve.cost, curve.accuracy))


def median_over_seeds(values: Sequence[float]) -> Interval:
    """Median with its bootstrap interval: as many seeds drawn with replacement, again and again.

    With few seeds the interval is hardly narrower than smallest to largest, and that is the truth about few seeds.

    Args:
        values: one a seed, at least one; 0 for a factor of a run that never got there, since it is slower than any
            that did.
    """
    array = np.asarray(values, dtype=np.float64)
    draws = generator(0, "bootstrap over seeds", len(array)).integers(len(array), size=(RESAMPLES, len(array)))
    low, high = np.quantile(np.median(array[draws], axis=1), (0.025, 0.975))
    return Interval(float(np.median(array)), float(low), float(high))
