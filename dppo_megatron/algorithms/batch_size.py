"""Advises how many prompts a step should have, from the gradient's noise scale and a model of a step's seconds.

McCandlish et al. 2018 (arXiv 1812.06162): with noise scale B = tr(Sigma) / |G|^2, training that would take S steps of
the true gradient takes S (1 + B / N) steps of N prompts. If a step takes a + b N seconds, the time to a given level is
smallest at N = sqrt(a B / b).

Symbols: g_q is prompt q's part of the gradient with all of its weights, N the planned prompts of an update,
G_N = sum g_q / N its gradient, G and Sigma the mean and covariance of one g_q.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dppo_megatron.randomness import uniforms
from dppo_megatron.types import BoolArray, IntArray

_DECAY = 0.9
_LEAST_PROBES = 4
"""Probes before advice is given: the noise of a single probe is as large as what it measures."""
_LEAST_STEPS = 8
_WORTH_LOGGING = 0.95
"""Advice that saves less than a twentieth of the time is not logged."""
_FURTHEST = 4.0
"""The model is trusted up to this factor above and below the present number of prompts."""


def half_of(groups: IntArray, seed: int, step: int) -> BoolArray:
    """[n] which of `groups` [n] (positions in the step) are in the half of a probe, each with probability 1/2."""
    return np.asarray(uniforms(seed, "half batch", groups, step) < 0.5 if len(groups) else np.zeros(0, np.bool_))


@dataclass(slots=True)
class NoiseScale:
    """Running means of |G|^2 and tr(Sigma), from probes: the gradient of an update and of a random half of its prompts.

    Let G_half be 2 / N times the sum over a half that contains each prompt with probability 1/2. The mean over halves
    is E |G_half|^2 = |G_N|^2 + sum |g_q|^2 / N^2, whatever the g_q are (0 for skipped prompts, weighted for others). So
    D = |G_half|^2 - |G_N|^2 has mean E |g|^2 / N. With E |G_N|^2 = |G|^2 + tr(Sigma) / N this gives the two estimates
    of `add`, both unbiased for prompts drawn independently. Their ratio is not, so the ratio of running means is used.

    Example: N = 64, |G_N|^2 = 0.10, |G_half|^2 = 0.16: |G|^2 is about (0.10 - 0.06) 64 / 63 = 0.041, tr(Sigma) about
    64 * 0.06 - 0.041 = 3.80, and the noise scale 93 prompts.
    """

    probes: int = 0
    signal: float = 0.0
    """|G|^2."""
    noise: float = 0.0
    """tr(Sigma)."""

    def add(self, whole: float, half: float, prompts: int) -> None:
        """Add a probe's squared norms |G_N|^2 and |G_half|^2, N = `prompts` > 1. Ignored if one is not finite."""
        if not (math.isfinite(whole) and math.isfinite(half)) or prompts < 2:
            return
        signal = (whole - (half - whole)) * prompts / (prompts - 1)
        noise = prompts * (half - whole) - signal
        self.probes += 1
        share = max(1.0 / self.probes, 1 - _DECAY)  # a plain mean at first
        self.signal += share * (signal - self.signal)
        self.noise += share * (noise - self.noise)

    @property
    def prompts(self) -> float | None:
        """B; None until there are enough probes, or while the estimate of |G|^2 is not positive."""
        if self.probes < _LEAST_PROBES or self.signal <= 0 or self.noise <= 0:
            return None
        return self.noise / self.signal


@dataclass(slots=True)
class FadingFit:
    """Weighted least squares of y = a + b x over past points, with higher weights on newer ones; a and b are >= 0."""

    count: int = 0
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Add a point; the weights of all earlier points are multiplied by 0.98."""
        self.count += 1
        self.weight = 1.0 + 0.98 * self.weight
        share = 1.0 / self.weight
        dx, dy = x - self.x, y - self.y
        self.x += share * dx
        self.y += share * dy
        self.xx += share * ((1 - share) * dx * dx - self.xx)
        self.xy += share * ((1 - share) * dx * dy - self.xy)

    def fit(self) -> tuple[float, float] | None:
        """(a, b); None until there are enough points."""
        if self.count < _LEAST_STEPS or self.x <= 0:
            return None
        slope = self.xy / self.xx if self.xx > 0 else 0.0
        slope = min(max(slope, 0.0), self.y / self.x)
        return self.y - slope * self.x, slope


@dataclass(frozen=True, slots=True)
class BatchSizeAdvice:
    """The number of prompts that reaches a level soonest, and its time over now's; `fixed_s`, `per_prompt_s`: a, b."""

    prompts: int
    relative_time: float
    noise_scale: float
    fixed_s: float
    per_prompt_s: float


@dataclass(slots=True)
class BatchAdvisor:
    """Combines noise scale and seconds; all results count prompts as `rollout.prompts_per_step` does.

    Args:
        prompts: `rollout.prompts_per_step`.
        updates: optimizer updates of a step, which share its prompts.
        planned: nominal prompts of a step; more than `prompts` with CPPO's allocation.
        problems: number of problems in all training sets, the largest possible step.
    """

    prompts: int
    updates: int
    planned: int
    problems: int
    noise: NoiseScale = field(default_factory=NoiseScale)
    rollout: FadingFit = field(default_factory=FadingFit)
    """Seconds of generating and grading against generated tokens."""
    update: FadingFit = field(default_factory=FadingFit)
    """Seconds of the updates against trained tokens."""
    other_s: float = 0.0
    said: int = 0
    """Prompts that were last advised in the log; 0: none yet."""

    def probe(self, whole: float, half: float) -> None:
        self.noise.add(whole * whole, half * half, self.planned // self.updates)

    def time(self, rollout_s: float, update_s: float, other_s: float, generated: float, trained: float) -> None:
        """Add the seconds of one step, without those of a probe, and its tokens."""
        self.rollout.add(generated, rollout_s)
        self.update.add(trained, update_s)
        self.other_s += (other_s - self.other_s) / self.rollout.weight

    @property
    def noise_scale(self) -> float | None:
        """B in prompts of an update; None while unknown."""
        scale = self.noise.prompts
        return None if scale is None else scale * self.prompts / self.planned

    def advice(self) -> BatchSizeAdvice | None:
        """None while there is too little data."""
        scale, rollout, update = self.noise_scale, self.rollout.fit(), self.update.fit()
        if scale is None or rollout is None or update is None:
            return None
        # a step's tokens are proportional to its prompts
        per_prompt = (rollout[1] * self.rollout.x + update[1] * self.update.x) / self.prompts
        fixed = rollout[0] + update[0] + self.other_s
        scale *= self.updates  # now in prompts of a step
        most = self.problems * self.prompts // self.planned // self.updates * self.updates
        bounds = self.prompts / _FURTHEST, min(self.prompts * _FURTHEST, most)
        best = math.sqrt(fixed * scale / per_prompt) if per_prompt > 0 else bounds[1]
        prompts = max(self.updates, round(min(max(best, bounds[0]), bounds[1]) / self.updates) * self.updates)

        def seconds(count: float) -> float:
            return (1 + scale / count) * (fixed + per_prompt * count)

        return BatchSizeAdvice(
            prompts, seconds(prompts) / seconds(self.prompts), scale / self.updates, fixed, per_prompt
        )

    def metrics(self) -> dict[str, float]:
        """The `batch/*` metrics that are known."""
        values = {"batch/noise_scale_prompts": self.noise_scale}
        if (advice := self.advice()) is not None:
            values |= {"batch/best_prompts": float(advice.prompts), "batch/relative_time": advice.relative_time}
            values |= {"batch/fixed_s": advice.fixed_s, "batch/per_prompt_s": advice.per_prompt_s}
        return {name: value for name, value in values.items() if value is not None}

    def lines(self) -> list[str]:
        """A log line, if the advice saves enough and differs from the last logged one by more than a factor of 1.5."""
        advice = self.advice()
        if advice is None or advice.relative_time > _WORTH_LOGGING:
            return []
        if self.said and 2 / 3 <= advice.prompts / self.said <= 1.5:
            return []
        self.said = advice.prompts
        return [
            f"batch: the gradient's noise scale is {advice.noise_scale:.3g} prompts an update, a step takes"
            f" {advice.fixed_s:.3g} s + {advice.per_prompt_s:.3g} s a prompt; rollout.prompts_per_step ="
            f" {advice.prompts} (now {self.prompts}) should take {advice.relative_time:.2f} of the time to the same"
            " level, at the same learning rate for each step"
        ]

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; a run resumed with another number of prompts or updates per step starts over."""
        if any(state[name] != getattr(self, name) for name in ("prompts", "updates", "planned")):
            return
        self.noise, self.rollout = NoiseScale(**state["noise"]), FadingFit(**state["rollout"])
        self.update, self.other_s, self.said = FadingFit(**state["update"]), state["other_s"], state["said"]
