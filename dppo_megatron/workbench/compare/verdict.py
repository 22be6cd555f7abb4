"""From runs to what may be said about them.

The rules, chosen so that a sceptic would choose them:

- The baseline is the best of the GRPO arms: the best end sets the gain, and the arm that is soonest at 95 % of it sets
  the seconds. `grpo_nonzero` is an arm like any other.
- A factor is the baseline's own cost to a level over the arm's cost to the same level, on curves smoothed alike. It is
  given for 90 and 95 % of the gain, by the clock and in CPU seconds; the latter hardly feel what else the machine does.
- Where a noisy curve first touches a level is luck: the more evaluations, the earlier. So every curve is a moving mean
  over three evaluations before anything is read from it, the baseline's too.
- A level is a seed's own: its start plus a share of the gain that the best baseline made on that seed.
- Ends are compared problem by problem. Seeds are resampled as well as problems, since runs differ by noise too; what
  the interval cannot tell from 0 is within noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dppo_megatron.evaluation.bootstrap import Difference, bootstrap_over_seeds
from dppo_megatron.randomness import generator
from dppo_megatron.types import FloatArray
from dppo_megatron.workbench.compare.arms import BASELINE, Arm
from dppo_megatron.workbench.compare.method_run import Cost, MethodRun

SHARES = (0.9, 0.95)
"""Of the baseline's gain: the levels."""
BUDGETS = (1 / 2, 1 / 3)
"""Of the baseline's seconds: where accuracies are compared."""
WINDOW = 3
"""Evaluations in a moving mean."""
RESAMPLES = 10_000
CLOCKS: tuple[Cost, ...] = ("train_s", "train_cpu_s")


@dataclass(frozen=True, slots=True)
class Curve:
    """Accuracy against one kind of cost."""

    cost: FloatArray
    """[n] seconds, tokens or steps up to each evaluation; grows, from 0."""
    accuracy: FloatArray
    """[n] in [0, 1]."""

    @staticmethod
    def of(run: MethodRun, cost: Cost) -> Curve:
        """A run's evaluations against `cost`."""
        costs = np.array([getattr(point, cost) for point in run.curve], dtype=np.float64)
        return Curve(costs, np.array([point.accuracy for point in run.curve]))

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


@dataclass(frozen=True, slots=True)
class ArmVerdict:
    arm: str
    seeds: int
    end: float
    """Accuracy at the end, smoothed; median over seeds."""
    costs: dict[str, float]
    """Kind of cost to its total; medians."""
    factors: dict[str, dict[str, Interval | None]]
    """Clock, then share of the gain (`0.9`), to the factor; None where the baseline gained nothing."""
    by_seed: dict[str, dict[str, list[float]]]
    """The same for each seed; 0: not reached."""
    at_budget: dict[str, float]
    """Share of the baseline's seconds (`0.50`) to the smoothed accuracy there; medians."""
    at_budget_cpu: dict[str, float]
    """The same of its CPU seconds."""
    end_difference: Difference | None
    """End minus the baseline's, over the same problems of all seeds, with an interval over seeds and problems; None for
    the baseline itself."""
    end_difference_by_seed: list[float]
    """Smoothed end minus the baseline's."""
    phase_s: dict[str, float]
    """Seconds of each phase, median over seeds."""
    biased: bool
    """A selection of it changes the expected gradient."""
    variance: float | None = None
    """Realised growth of the gradient's variance by pruning; median over seeds, None where a run does not say."""


@dataclass(frozen=True, slots=True)
class Verdict:
    baseline: str
    """Arm that the seconds are compared with."""
    gain_from: str
    """Arm whose gain the levels are shares of."""
    candidates: list[str]
    """The arms that the baseline was chosen from."""
    start: float
    """Accuracy before training, median over seeds."""
    gain: float
    """Median over seeds."""
    arms: list[ArmVerdict]


def judge(runs: Sequence[MethodRun], arms: Sequence[Arm], *, same_problems: bool = False) -> Verdict:
    """Compare all arms with the baseline.

    Args:
        runs: of every arm on the same seeds.
        arms: in the order of the table; without a GRPO arm the first is the baseline.
        same_problems: all seeds are evaluated on the same ones.
    """
    by_arm = {arm.name: {run.seed: run for run in runs if run.arm == arm.name} for arm in arms}
    candidates = [arm.name for arm in arms if arm.method == BASELINE] or [arms[0].name]
    best = max(candidates, key=lambda name: statistics.median(map(_end, by_arm[name].values())))
    ends = {seed: _end(run) for seed, run in by_arm[best].items()}
    baseline = min(candidates, key=lambda name: _typical_cost(by_arm[name], ends))
    base = by_arm[baseline]
    return Verdict(
        baseline=baseline,
        gain_from=best,
        candidates=candidates,
        start=statistics.median(run.curve[0].accuracy for run in base.values()),
        gain=statistics.median(ends[seed] - run.curve[0].accuracy for seed, run in base.items()),
        arms=[
            _arm_verdict(
                arm.name,
                by_arm[arm.name],
                base,
                ends,
                None if arm.name == baseline else _ends_compared(by_arm[arm.name], base, same_problems),
            )
            for arm in arms
        ],
    )


def _arm_verdict(
    name: str,
    runs: dict[int, MethodRun],
    base: dict[int, MethodRun],
    ends: dict[int, float],
    end_difference: Difference | None,
) -> ArmVerdict:
    by_seed: dict[str, dict[str, list[float]]] = {}
    for clock in CLOCKS:
        by_seed[clock] = {str(share): _factors(runs, base, ends, clock, share) for share in SHARES}
    kinds: tuple[Cost, ...] = ("step", *CLOCKS, "tokens_generated", "tokens_trained")
    phases = list(dict.fromkeys(phase for run in runs.values() for phase in run.phase_s))
    grown = [run.variance for run in runs.values() if run.variance is not None]
    return ArmVerdict(
        arm=name,
        seeds=len(runs),
        end=statistics.median(map(_end, runs.values())),
        costs={kind: statistics.median(getattr(run.curve[-1], kind) for run in runs.values()) for kind in kinds},
        factors={
            clock: {share: median_over_seeds(values) if values else None for share, values in shares.items()}
            for clock, shares in by_seed.items()
        },
        by_seed=by_seed,
        at_budget=_at_budgets(runs, base, "train_s"),
        at_budget_cpu=_at_budgets(runs, base, "train_cpu_s"),
        end_difference=end_difference,
        end_difference_by_seed=[_end(run) - _end(base[seed]) for seed, run in runs.items()],
        phase_s={phase: statistics.median(run.phase_s.get(phase, 0.0) for run in runs.values()) for phase in phases},
        biased=any("biased" in run.labels.values() for run in runs.values()),
        variance=statistics.median(grown) if len(grown) == len(runs) else None,
    )


def _end(run: MethodRun) -> float:
    """The smoothed accuracy at the end."""
    return float(Curve.of(run, "step").smoothed().accuracy[-1])


def _level(run: MethodRun, end: float, share: float) -> float | None:
    """Start plus a share of the gain; None if there was no gain."""
    start = run.curve[0].accuracy
    return start + share * (end - start) if end > start else None


def _typical_cost(runs: dict[int, MethodRun], ends: dict[int, float]) -> float:
    """Median CPU seconds to the highest level, infinite where it was not reached."""
    costs = []
    for seed, run in runs.items():
        level = _level(run, ends[seed], SHARES[-1])
        cost = None if level is None else cost_to(Curve.of(run, "train_cpu_s").smoothed(), level)
        costs.append(float("inf") if cost is None else cost)
    return statistics.median(costs)


def _factors(
    runs: dict[int, MethodRun], base: dict[int, MethodRun], ends: dict[int, float], clock: Cost, share: float
) -> list[float]:
    """The baseline's cost to the level over the arm's, one a seed; 0 where the arm never got there.

    Seeds whose level the baseline itself has not reached, or already had at its start, are left out.
    """
    factors = []
    for seed, run in runs.items():
        level = _level(base[seed], ends[seed], share)
        theirs = None if level is None else cost_to(Curve.of(base[seed], clock).smoothed(), level)
        if level is None or not theirs:
            continue
        curve = Curve.of(run, clock)
        ours = cost_to(curve.smoothed(), level)
        if ours == 0:  # smoothing lifts the start too: it was there by the first evaluation, no sooner is known
            ours = float(curve.cost[1])
        factors.append(0.0 if ours is None else theirs / ours)
    return factors


def _at_budgets(runs: dict[int, MethodRun], base: dict[int, MethodRun], clock: Cost) -> dict[str, float]:
    found = {}
    for budget in BUDGETS:
        values = [
            accuracy_at(Curve.of(run, clock).smoothed(), budget * getattr(base[seed].curve[-1], clock))
            for seed, run in runs.items()
        ]
        found[f"{budget:.2f}"] = statistics.median(values)
    return found


def _ends_compared(runs: dict[int, MethodRun], base: dict[int, MethodRun], same_problems: bool) -> Difference | None:
    """Over the seeds and the problems of each: a problem is resampled with its outcome under both."""
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
