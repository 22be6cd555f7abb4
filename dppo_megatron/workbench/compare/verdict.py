"""The conclusions that the runs of a comparison support, by the rules of docs/pruning.md ("Speed-up over GRPO").

- Where a noisy curve first touches a level is luck: the more evaluations, the earlier. So levels are read off a moving
  mean over three evaluations, the baseline's too. (An isotonic fit is raised by every peak: with 3 points of noise it
  errs 1.4 times as much, and is 9 to 17 % low to 95 % of the gain.)
- Each seed has its own level: its start plus a share of the gain that the best baseline made on that seed.
- A factor has the error of its seeds and that of its curves: near the end a curve is so flat that a point of noise
  moves a crossing by a fifth of the run. Noisy copies of every curve show how much, end and level included.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from dppo_megatron.evaluation.bootstrap import Difference, bootstrap_over_seeds
from dppo_megatron.evaluation.eval_scores import students_t
from dppo_megatron.randomness import generator
from dppo_megatron.selection.coefficients import is_of_method
from dppo_megatron.types import FloatArray
from dppo_megatron.workbench.compare.arms import BASELINE, Arm, Cost, MethodRun

SHARES = (0.9, 0.95)
"""The levels, as shares of the baseline's gain."""
BUDGETS = (1 / 2, 1 / 3)
"""Shares of the baseline's seconds after which accuracies are compared."""
WINDOW = 3
"""Evaluations in a moving mean."""
FEWEST = 4
"""Evaluations of a run, that of its start included, below which it is in no factor: three show a single residual, which
is no noise to judge by."""
COPIES = 1_000
"""Noisy copies of a curve."""
RESAMPLES = 10_000
ASTRAY = 0.15
"""Relative spread of the time to a level between runs that differ only in their draws, beyond the noise of a curve. One
run cannot show it: a run that is slow by luck looks like a slow task. Ten seeds of the quickstart had speed-ups of 1.2
to 3.1 (docs/pruning.md), a spread of .31 in the logarithm, of which the noise of their curves is .2 to .25; the rest is
the spread of two runs."""
MOST_NOISE = math.log(10.0)
"""Limit of `pair_noise`: an interval that reaches ten times as soon or late says nothing."""
MOST_CLOCK_SPREAD = 1.3
"""Clock seconds per CPU second, the largest over the smallest of all arms: above this the clock is not to be used."""
CLOCKS: tuple[Cost, ...] = ("train_s", "train_cpu_s")


@dataclass(frozen=True, slots=True)
class Curve:
    """Accuracy against one kind of cost."""

    cost: FloatArray
    """[n] seconds, tokens or steps up to each evaluation; grows, from 0."""
    accuracy: FloatArray
    """[..., n], one curve or many; of a run in [0, 1]."""

    @staticmethod
    def of(run: MethodRun, cost: Cost) -> Curve:
        """A run's evaluations against `cost`."""
        costs = np.array([getattr(point, cost) for point in run.curve], dtype=np.float64)
        return Curve(costs, np.array([point.accuracy for point in run.curve]))

    def smoothed(self) -> Curve:
        """The same with a moving mean of the accuracies; a start and an end alone stay as they are, since their mean
        would count the untrained model in the end."""
        return self if len(self.cost) < WINDOW else Curve(self.cost, moving_mean(self.accuracy))

    def with_copies(self, name: str) -> Curve:
        """[1 + COPIES, n] this curve and noisy copies of it, all smoothed; equal for equal `name` and length.

        A copy is the smoothed curve plus residuals, drawn one by one with random signs from those of the inner points,
        enlarged by what each point's own share in its mean takes away. In blocks, residuals of neighbours, which
        smoothing makes opposite, would average out in the copy: 95 % intervals of one seed would hold the truth in 78
        to 92 % of cases (one by one: 93 to 99; but 74 to 87 if an evaluation's noise correlates by .4 with the next).
        """
        mean, draw = moving_mean(self.accuracy), generator(0, f"noise of {name}")
        noise = (self.accuracy - mean)[1:-1] * np.sqrt(WINDOW / (WINDOW - 1))
        copies = mean + draw.choice([*noise, *-noise], (COPIES, len(mean)))
        copies[:, 0] = self.accuracy[0]  # on a steep curve the mean of two is far from the start
        return Curve(self.cost, np.vstack([mean, moving_mean(copies)]))


@dataclass(frozen=True, slots=True)
class Interval:
    """A median over seeds."""

    median: float
    low: float
    """2.5 % quantile of the median over resampled seeds and noisy copies of their curves."""
    high: float
    """97.5 % quantile."""
    is_noise: bool
    """It contains 1 and is no single point: the error is larger than the effect."""

    def times(self) -> str:
        """Example: `2.10x (1.85-2.42)`."""
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})" if self.median else "not reached"


def moving_mean(values: FloatArray) -> FloatArray:
    """[..., n] centred mean over `WINDOW` values; at the ends over fewer.

    Example: [0, 3, 6, 9] -> [1.5, 3, 6, 7.5].
    """
    half = WINDOW // 2
    means = [values[..., max(0, i - half) : i + half + 1].mean(axis=-1) for i in range(values.shape[-1])]
    return np.stack(means, axis=-1)


def cost_to(curve: Curve, level: FloatArray | float) -> FloatArray:
    """[...] the cost at which each curve first reaches its level, interpolated between its points; inf if it never did.

    Example: cost [0, 10, 20], accuracy [.2, .4, .8], level .6 -> 15.
    """
    above = curve.accuracy >= np.asarray(level)[..., None]
    i = above.argmax(axis=-1)
    before = np.maximum(i - 1, 0)
    low, high = (np.take_along_axis(curve.accuracy, at[..., None], axis=-1)[..., 0] for at in (before, i))
    share = np.divide(level - low, high - low, out=np.zeros_like(high), where=i > 0)
    cost = curve.cost[before] + share * (curve.cost[i] - curve.cost[before])
    return np.where(above.any(axis=-1), cost, np.inf)


def median_over_seeds(values: Sequence[float] | Sequence[FloatArray]) -> Interval:
    """Median with its bootstrap interval: n seeds are drawn with replacement, again and again, and on average
    2 n / (n + 1) of the n values drawn are those of a noisy copy of the seed.

    One seed has no spread but that of its copies; the spread of ten includes their noise. Seeds alone are too few: the
    interval of three contains the true median in 75 % of cases, since otherwise all three are on one side of it. With
    this share it is 94 to 97 % for 1, 3, 5 and 10 seeds that differ by noise; with all drawn from copies, 99 to 100 %.

    Args:
        values: one a seed, at least one; 0 for the factor of a run that never reached the level, since it is slower
            than any that did. Or [1 + copies] for each seed: the value, and those of its noisy copies.
    """
    array = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
    count, draw = len(array), generator(0, "bootstrap over seeds", len(array))
    chosen = draw.integers(count, size=(RESAMPLES, count))
    copy = draw.integers(array.shape[1] > 1, array.shape[1], size=chosen.shape)
    drawn = array[chosen, np.where(draw.random(chosen.shape) * (count + 1) < 2, copy, 0)]
    low, high = (float(end) for end in np.quantile(np.median(drawn, axis=1), (0.025, 0.975)))
    median = float(np.median(array[:, 0]))
    return Interval(median, low, high, is_noise=median > 0 and low < high and low <= 1.0 <= high)


def pair_noise(run: MethodRun) -> float | None:
    """How far noise alone takes the measured speed-up of one pair of runs from its mean: half of its logarithm's 95 %
    interval, from the curve of the recorded `run`. None if the curve rises too little, or if half reaches `MOST_NOISE`.

    With a line of slope S through the k accuracies from a third of the gain on, over the logarithm of the CPU seconds,
    sigma^2 their variance about it, and v the relative spread of the seconds of a step from evaluation to evaluation:

        half^2 = 2 (t sigma)^2 / (3 S^2) + 2 x 1.96^2 (v^2 / k + ASTRAY^2),    t: Student's of k - 2

    A curve is read as a mean of three, so it reaches a level sigma / (sqrt(3) S) sooner or later; an error of the level
    itself moves both runs alike.

    Example: sigma 3 points, S 12 points for e times the seconds, k = 8: t is 2.45, so 0.50^2 + 0.42^2 = 0.65^2. A pair
    whose mean speed-up is 2 measures 1.04 to 3.83.
    """
    curve = Curve.of(run, "train_cpu_s")
    smoothed, steps = curve.smoothed().accuracy, np.array([point.step for point in run.curve])
    risen = (smoothed - run.curve[0].accuracy) * 3 >= smoothed[-1] - run.curve[0].accuracy
    risen &= curve.cost > 0
    if (count := int(risen.sum())) < 3:
        return None
    x, y = np.log(curve.cost[risen]), curve.accuracy[risen]
    x, y = x - x.mean(), y - y.mean()
    if not (slope := float(x @ y) / max(float(x @ x), 1e-12)) > 0:
        return None
    sigma = math.sqrt(float(np.square(y - slope * x).sum()) / (count - 2))
    step_s = np.diff(curve.cost) / np.diff(steps)
    others = float(step_s.var() / step_s.mean() ** 2) / len(step_s) + ASTRAY**2
    half = math.sqrt(2.0 * ((students_t(count - 2) * sigma / slope) ** 2 / WINDOW + 1.96**2 * others))
    return half if half < MOST_NOISE else None


@dataclass(frozen=True, slots=True)
class ArmVerdict:
    arm: str
    seeds: int
    evaluations: int
    """Of a run, that of its start included; the fewest of all seeds."""
    end: float
    """Accuracy at the end, smoothed; median over seeds."""
    costs: dict[str, float]
    """Kind of cost to its total; medians."""
    factors: dict[str, dict[str, Interval | None]]
    """Clock, then share of the gain (`0.9`), to the factor; None where the baseline gained nothing."""
    by_seed: dict[str, dict[str, list[float]]]
    """The same for each seed; 0: not reached."""
    at_budget_cpu: dict[str, float]
    """Share of the baseline's CPU seconds (`0.50`) to the smoothed accuracy there; medians."""
    end_difference: Difference | None
    """End minus the baseline's, over the same problems of all seeds, with an interval over seeds and problems; None for
    the baseline itself."""
    phase_s: dict[str, float]
    """Seconds of each phase, median over seeds."""
    biased: bool
    """A selection of the method changes the expected gradient; what the job does under every method does not count."""
    variance: float | None = None
    """Realised growth of the gradient's variance by pruning; median over seeds, None if a run has not recorded it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    baseline: str
    """The arm whose seconds the others' are compared with."""
    gain_from: str
    """Arm whose gain the levels are shares of."""
    candidates: list[str]
    """The arms that the baseline was chosen from."""
    start: float
    """Accuracy before training, median over seeds."""
    gain: float
    """Median over seeds."""
    clock_spread: float
    """Clock seconds per CPU second: the largest over the smallest of the arms' medians."""
    arms: list[ArmVerdict]


def judge(runs: Sequence[MethodRun], arms: Sequence[Arm], *, same_problems: bool = False) -> Verdict:
    """Compare all arms with the baseline.

    Args:
        runs: of every arm on the same seeds.
        arms: in the order of the table; without a GRPO arm the first is the baseline.
        same_problems: all seeds are evaluated on the same problems.
    """
    by_arm = {arm.name: {run.seed: run for run in runs if run.arm == arm.name} for arm in arms}
    candidates = [arm.name for arm in arms if arm.method == BASELINE] or [arms[0].name]
    best = max(candidates, key=lambda name: statistics.median(map(smoothed_end, by_arm[name].values())))
    ends = {seed: smoothed_end(run) for seed, run in by_arm[best].items()}
    baseline = min(candidates, key=lambda name: _typical_cost(by_arm[name], ends))
    base = by_arm[baseline]
    lasts = [[run.curve[-1] for run in own.values()] for own in by_arm.values()]
    pace = [statistics.median(one.train_s / max(one.train_cpu_s, 1e-9) for one in last) for last in lasts]
    return Verdict(
        baseline=baseline,
        gain_from=best,
        candidates=candidates,
        start=statistics.median(run.curve[0].accuracy for run in base.values()),
        gain=statistics.median(ends[seed] - run.curve[0].accuracy for seed, run in base.items()),
        clock_spread=max(pace) / max(min(pace), 1e-9),
        arms=[_arm_verdict(name, own, base, by_arm[best], same_problems) for name, own in by_arm.items()],
    )


def _arm_verdict(
    name: str, runs: dict[int, MethodRun], base: dict[int, MethodRun], best: dict[int, MethodRun], same_problems: bool
) -> ArmVerdict:
    factors = _factors(runs, base, best)
    kinds: tuple[Cost, ...] = ("step", *CLOCKS, "tokens_generated", "tokens_trained")
    phases = list(dict.fromkeys(phase for run in runs.values() for phase in run.phase_s))
    grown = [run.variance for run in runs.values() if run.variance is not None]
    return ArmVerdict(
        arm=name,
        seeds=len(runs),
        evaluations=min(len(run.curve) for run in runs.values()),
        end=statistics.median(map(smoothed_end, runs.values())),
        costs={kind: statistics.median(getattr(run.curve[-1], kind) for run in runs.values()) for kind in kinds},
        factors={
            clock: {share: median_over_seeds(values) if values else None for share, values in shares.items()}
            for clock, shares in factors.items()
        },
        by_seed={
            clock: {share: [float(value[0]) for value in values] for share, values in shares.items()}
            for clock, shares in factors.items()
        },
        at_budget_cpu=_at_budgets(runs, base),
        end_difference=None if runs is base else _ends_compared(runs, base, same_problems),
        phase_s={phase: statistics.median(run.phase_s.get(phase, 0.0) for run in runs.values()) for phase in phases},
        biased=any(
            is_of_method(row) for run in runs.values() for row, label in run.labels.items() if label == "biased"
        ),
        variance=statistics.median(grown) if len(grown) == len(runs) else None,
    )


def smoothed_end(run: MethodRun) -> float:
    """The last accuracy of the moving mean."""
    return float(Curve.of(run, "step").smoothed().accuracy[-1])


def _typical_cost(runs: dict[int, MethodRun], ends: dict[int, float]) -> float:
    """Median CPU seconds to the highest level, infinite where it was not reached."""
    costs = []
    for seed, run in runs.items():
        start = run.curve[0].accuracy
        level = start + SHARES[-1] * (ends[seed] - start) if ends[seed] > start else np.inf
        costs.append(float(cost_to(Curve.of(run, "train_cpu_s").smoothed(), level)))
    return statistics.median(costs)


def _factors(
    runs: dict[int, MethodRun], base: dict[int, MethodRun], best: dict[int, MethodRun]
) -> dict[str, dict[str, list[FloatArray]]]:
    """Clock, then share of the gain of `best`, to the factors of each seed and its copies, [1 + COPIES] each."""
    factors: dict[str, dict[str, list[FloatArray]]] = {clock: {str(share): [] for share in SHARES} for clock in CLOCKS}
    for clock, seed in product(CLOCKS, runs):
        three = runs[seed], base[seed], best[seed]
        if min(len(run.curve) for run in three) < FEWEST:
            continue
        ours, theirs, top = (Curve.of(run, clock).with_copies(f"{run.arm} on seed {seed}") for run in three)
        start, end = base[seed].curve[0].accuracy, top.accuracy[:, -1]
        for share in SHARES if end[0] > start else ():
            factor = _factor(ours, theirs, start + share * (end - start))
            if np.isfinite(factor[0]):
                factors[clock][str(share)].append(factor)
    return factors


def _factor(curve: Curve, base: Curve, level: FloatArray) -> FloatArray:
    """[1 + COPIES] the baseline's cost to the level over the arm's; 0 where the arm never reached it.

    All infinite, which leaves the seed out, if the baseline itself never reached the level, or had it at its start. If
    only a copy of the baseline did so, it has the cost of its whole run, or that of its first evaluation.
    """
    theirs, ours = cost_to(base, level), cost_to(curve, level)
    # smoothing lifts the start too: cost 0 means only that the level was reached by the first evaluation
    factor = np.where(theirs == 0, base.cost[:2][-1], np.minimum(theirs, base.cost[-1]))
    factor /= np.where(ours == 0, curve.cost[:2][-1], ours)
    factor[np.isinf(theirs) & np.isinf(ours)] = 1.0
    return factor if 0 < theirs[0] < np.inf else np.full_like(level, np.inf)


def _at_budgets(runs: dict[int, MethodRun], base: dict[int, MethodRun]) -> dict[str, float]:
    curves = {seed: Curve.of(run, "train_cpu_s").smoothed() for seed, run in runs.items()}
    return {
        f"{budget:.2f}": statistics.median(
            # a run that ended before then keeps its last accuracy
            float(np.interp(budget * base[seed].curve[-1].train_cpu_s, curve.cost, curve.accuracy))
            for seed, curve in curves.items()
        )
        for budget in BUDGETS
    }


def _ends_compared(runs: dict[int, MethodRun], base: dict[int, MethodRun], same_problems: bool) -> Difference | None:
    """Difference of the ends over seeds and their problems: a problem is resampled with its outcome under both arms."""
    by_seed = []
    for seed, run in runs.items():
        both = [
            pair
            for name, ours in run.solved.items()
            for pair in zip(base[seed].solved.get(name, []), ours, strict=False)
        ]
        known = [(a, b) for a, b in both if a is not None and b is not None]
        if known:
            a, b = np.array(known, dtype=np.float64).T
            by_seed.append((a, b))
    return bootstrap_over_seeds(by_seed, same_problems=same_problems) if by_seed else None
