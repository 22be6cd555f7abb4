"""Scores (how much gradient a prompt or completion is expected to carry), costs (what dropping it would save), and how
much to keep, given both. A score affects only the variance, so cheap proxies are enough, and none runs the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dppo_megatron.pruning.designs import WaterFiller, bisect
from dppo_megatron.pruning.interface import Stateful
from dppo_megatron.types import FloatArray, IntArray

_COST_DECAY = 0.9
_FLOOR_FADE, _FLOOR_STEPS, _FLOOR_ERRORS, _LARGEST_FLOOR = 0.98, 8.0, 2.0, 0.75


def logit_grad_norm(logprobs: npt.NDArray[np.floating]) -> float:
    """sqrt(sum_t (1 - p_t)^2) of one completion, from its behaviour log-probabilities [n]; 0 if it is empty.

    1 - p_t is within a factor sqrt(2) of the norm of the log-probability's gradient with respect to the logits.
    """
    return float(np.sqrt(np.sum(np.square(-np.expm1(np.asarray(logprobs, dtype=np.float64))))))


def completion_score(
    advantages: FloatArray,
    logit_grad_norms: FloatArray,
    denominator: FloatArray,
    prompt_weight: FloatArray,
    *,
    zero_advantage_slope: float = 0.0,
) -> FloatArray:
    """Proxy of the norm of each completion's weighted gradient, [n].

    prompt weight x omega x sqrt(A^2 + zero_advantage_slope^2) x logit_grad_norm, omega = 1 / denominator. The prompt's
    weight is included because rarely drawn prompts weigh more, so more of their completions are worth keeping.
    """
    slope = np.sqrt(np.square(advantages) + zero_advantage_slope**2)
    return prompt_weight / denominator * slope * logit_grad_norms


def nondegenerate_probability(successes: FloatArray, failures: FloatArray, group_size: int) -> FloatArray:
    """P(a group of G answers has both a right and a wrong one) when the pass rate is Beta(a, b), [n].

    1 - B(a+G, b)/B(a, b) - B(a, b+G)/B(a, b); each ratio is computed as a product of G fractions.
    """
    all_right, all_wrong = np.ones_like(successes), np.ones_like(successes)
    total = successes + failures
    for k in range(group_size):
        all_right *= (successes + k) / (total + k)
        all_wrong *= (failures + k) / (total + k)
    return np.clip(1.0 - all_right - all_wrong, 0.0, 1.0)


def efficient_probabilities(
    score: FloatArray, cost: FloatArray, lower: FloatArray | float, fixed_cost: float, inflation: float = 1.0
) -> FloatArray:
    """The self-tuned rule: pi = clip(sqrt(variance share / cost share), lower, 1), [n].

    Minimises (fixed_cost + sum(pi cost)) x sum(score^2 / pi). Setting the derivative to zero gives
    pi^2 = (s^2 / V) / (c / C), which is water-filling on s / sqrt(c) at one particular level; found by fixed-point
    iteration from pi = 1. If score and floor are both 0, pi = 0.

    Args:
        score, cost: [n]; score >= 0, cost > 0.
        lower: [n] or scalar, floor.
        fixed_cost: what the step costs whatever is kept, in the unit of `cost`.
        inflation: measured over predicted growth of the variance: V is sum(s^2) + inflation x the growth.
    """
    lower = np.broadcast_to(np.asarray(lower, dtype=np.float64), score.shape)
    size = score / np.sqrt(cost)
    squared = np.square(score)
    full = float(np.sum(squared))
    pi = ((score > 0) | (lower > 0)).astype(np.float64)
    for _ in range(100):
        spent = fixed_cost + float(np.sum(pi * cost))
        drawn = float(np.sum(squared / np.where(pi > 0, pi, 1.0)))
        variance = drawn + (1.0 / inflation - 1.0) * full  # V / inflation
        if variance <= 0:
            return pi
        # At least 1e-12: an element whose score nearly underflows must still count in the next variance.
        updated = np.where(pi > 0, np.clip(size * np.sqrt(spent / variance), np.maximum(lower, 1e-12), 1.0), 0.0)
        moved = float(np.max(np.abs(updated - pi), initial=0.0))
        pi = updated
        if moved < 1e-9:
            break
    return pi


def budgeted_probabilities(
    filler: WaterFiller,
    target: float,
    growth: Callable[[FloatArray], float],
    *,
    max_design_effect: float,
    whole: bool,
) -> FloatArray:
    """Probabilities [n] that spend `target`, or the smallest larger budget whose design effect is within the bound.

    The design effect falls as the budget grows, so the budget is found by bisection. It depends only on scores, which
    are known before the draw, so the estimate stays unbiased.

    Args:
        filler: sizes, floors and costs.
        growth: the design effect of probabilities [n].
        max_design_effect: >= 1, or 0 for no bound.
        whole: add only whole numbers to `target`, so that systematic draws have a fixed size.
    """
    pi = filler.solve(target)
    if max_design_effect == 0 or growth(pi) <= max_design_effect:
        return pi
    full = float(np.sum(filler.cost[filler.support]))

    def is_beyond(more: float) -> bool:
        return growth(filler.solve(target + more)) > max_design_effect

    return filler.solve(target + bisect(0.0, full - target, 1e-3 * full, is_beyond, whole=whole)[1])


def size_bounds(usual: int, factor: float) -> tuple[int, int]:
    """Smallest and largest group size around `usual`; at least 2, since a group of one has no baseline."""
    return max(2, math.ceil(usual / factor)), math.floor(usual * factor)


def group_sizes(worth: FloatArray, usual: int, factor: float) -> IntArray:
    """How many completions each prompt of a step gets, fixed before any of them is sampled: [n] whole numbers
    proportional to `worth` [n], with mean `usual`, within `size_bounds`.

    The mean over a group's completions has the same expectation whatever their number, as long as advantages are linear
    in rewards. So the number may depend on anything known beforehand. A prompt of weight w, whose completions have an
    expected squared gradient m and cost c tokens, adds w^2 m / n to the variance and n c to the cost. The optimum has n
    proportional to w sqrt(m / c) (Neyman's allocation).

    Example: usual 8, factor 2, worth (4, 1, 1, 1): proportional 18, 5, 5, 5; within bounds 16, 5.3, 5.3, 5.3; rounded
    16, 6, 5, 5.
    """
    least, most = size_bounds(usual, factor)
    shares = WaterFiller(worth, least / most).solve(len(worth) * usual / most)
    exact = np.clip(shares * most, least, most)
    sizes = np.floor(exact + 1e-9).astype(np.int64)
    left = len(worth) * usual - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:left]] += 1
    return sizes


def spread(rewards: FloatArray) -> FloatArray:
    """max - min of each group, [groups, G] -> [groups]; ignores failed gradings, 0 for a group without rewards."""
    high = np.max(np.where(np.isnan(rewards), -np.inf, rewards), axis=1, initial=-np.inf)
    low = np.min(np.where(np.isnan(rewards), np.inf, rewards), axis=1, initial=np.inf)
    # A group without any reward would give -inf - inf.
    return np.where(high >= low, high - np.where(high >= low, low, 0.0), 0.0)


def floor_share(sums: Sequence[float]) -> float:
    """Share of a full step's seconds that remains however little is kept; in [0, 0.75].

    A rollout waits for its longest completions, so its seconds do not fall to 0 with its tokens. This fits a straight
    line to seconds y over kept share x, given their sums of 1, x, y, x^2, xy and y^2 over steps. Its intercept is
    shrunk towards 0 by how much of it may be chance, and is 0 unless the x of the steps differ.

    Example: steps that kept all took 10 s and those that kept half 8: the line's intercept is 6 s, the share 0.6.
    """
    count, x, y, xx, xy, yy = sums
    if count < _FLOOR_STEPS:
        return 0.0
    var_x, cov_xy = xx - x * x / count, xy - x * y / count
    if var_x <= 1e-9 * xx:
        return 0.0
    slope = cov_xy / var_x
    intercept = (y - slope * x) / count
    residual = max(yy - y * y / count - slope * cov_xy, 0.0) / (count - 2)
    error = _FLOOR_ERRORS * math.sqrt(residual * xx / (count * var_x))
    if intercept <= error or slope <= 0:  # the model cannot explain steps that get faster when more is kept
        return 0.0
    trust = 1.0 - (error / intercept) ** 2
    return min(trust * intercept / (intercept + slope), _LARGEST_FLOOR)


@dataclass(slots=True)
class MeasuredCost(Stateful):
    """Cost that pruning at one level (prompts or completions) cannot save, over the cost that it can, as measured."""

    _state_names = ("cost_ratio", "seconds")

    cost_ratio: float = 0.0
    """Running mean of fixed over variable seconds at full batch; 0 before the first measurement."""
    seconds: list[float] = field(default_factory=lambda: [0.0] * 6)
    """Faded sums for `floor_share`."""

    def observe_cost(self, fixed_s: float, variable_s: float, kept_cost: float, *, has_floor: bool = False) -> None:
        """Add a step: seconds that pruning cannot reduce, and the others, spent on a share `kept_cost` of the cost.

        has_floor: a part of the other seconds does not shrink with what is kept; its measured share counts as fixed.
        """
        if variable_s <= 0 or fixed_s < 0 or kept_cost <= 0:
            return
        floor = 0.0
        if has_floor:
            seen = (1.0, kept_cost, variable_s, kept_cost**2, kept_cost * variable_s, variable_s**2)
            self.seconds = [_FLOOR_FADE * old + new for old, new in zip(self.seconds, seen, strict=True)]
            floor = floor_share(self.seconds)
        full = variable_s / (floor + (1.0 - floor) * kept_cost)
        ratio = (fixed_s + floor * full) / ((1.0 - floor) * full)
        self.cost_ratio = ratio if self.cost_ratio == 0 else _COST_DECAY * self.cost_ratio + (1 - _COST_DECAY) * ratio
