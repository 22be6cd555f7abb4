"""Where a single pair of runs measures a speed-up (`pair_noise`): held on learning curves whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from dppo_megatron.workbench.compare.arms import MethodRun, Point
from dppo_megatron.workbench.compare.verdict import Curve, cost_to, pair_noise


def _measured_pair(
    rng: np.random.Generator, correlated: float, astray: float
) -> tuple[float, float | None, float] | None:
    """The true speed-up, the noise of a pair as its baseline shows it, and what the pair measures; None where nothing
    is measured. Any rise to a level, noise, number of evaluations and seconds a step; each run is slower or faster by
    `astray` all along."""
    true, noise, settles, evaluations = rng.uniform(1, 3), rng.uniform(0.01, 0.04), rng.uniform(0.2, 0.6), 5
    evaluations += int(rng.integers(1, 30))

    def run(count: int, step_s: float) -> MethodRun:
        error = rng.normal(0, noise, count)
        for i in range(1, count):
            error[i] = correlated * error[i - 1] + math.sqrt(1 - correlated**2) * error[i]
        rise = 1 - np.exp(-np.arange(count) / (settles * evaluations * math.exp(rng.normal(0, astray))))
        spent = np.cumsum(step_s * rng.uniform(0.9, 1.1, count))
        points = zip(spent - spent[0], 0.5 + 0.35 * rise + error, strict=True)
        return MethodRun("", 0, [Point(i, float(a), t, t, 0, 0) for i, (t, a) in enumerate(points)], {}, {}, {})

    base, arm = run(evaluations, true), run(2 * evaluations, 1.0)
    ours, theirs = (Curve.of(one, "train_cpu_s").smoothed() for one in (arm, base))
    level = base.curve[0].accuracy + 0.9 * (theirs.accuracy[-1] - base.curve[0].accuracy)
    if theirs.accuracy[-1] <= base.curve[0].accuracy or not (soonest := float(cost_to(theirs, level))):
        return None
    return true, pair_noise(base), soonest / float(cost_to(ours, level))


@pytest.mark.parametrize(("correlated", "astray"), [(0.0, 0.0), (0.0, 0.15), (0.4, 0.15)])
def test_one_pair_of_runs_measures_what_the_noise_of_its_baseline_allows(correlated: float, astray: float) -> None:
    """Of 1,000 pairs: at least three standard errors below the nominal 95 %, also where evaluations share their noise.
    No wider than it must be: half of the intervals are within twice the true spread."""
    rng = np.random.default_rng(int(100 * (correlated + astray)))
    pairs = [pair for _ in range(1000) if (pair := _measured_pair(rng, correlated, astray)) and pair[1] is not None]
    assert len(pairs) > 900
    off = np.array([math.log(max(measured, 1e-9) / true) for true, _, measured in pairs])
    half = np.array([noise for _, noise, _ in pairs], dtype=np.float64)
    held = float(np.mean(np.abs(off) <= half))
    assert held >= 0.93, held
    assert np.median(half) <= 2 * np.quantile(np.abs(off), 0.95)


def test_the_noise_of_a_pair_is_the_docstring_s() -> None:
    """Alternating residuals around a line in log seconds, whose slope they leave nearly alone; none without a rise."""
    seconds = 10.0 * np.exp(np.arange(8) / 4)
    wave = np.tile([1.0, -1.0, -1.0, 1.0], 2)
    accuracy = 0.6 + 0.12 * np.log(seconds / 10) + 0.03 * math.sqrt(6 / 8) * wave

    def run(accuracy: Sequence[float]) -> MethodRun:
        points = zip([0.0, *seconds], [0.3, *accuracy], strict=True)
        return MethodRun("", 0, [Point(round(t), a, t, t, 0, 0) for t, a in points], {}, {}, {})

    found = pair_noise(run(accuracy.tolist()))
    assert found == pytest.approx(0.65, abs=0.01)
    assert pair_noise(run([0.3] * 8)) is None and pair_noise(run([0.3 - i / 99 for i in range(8)])) is None
