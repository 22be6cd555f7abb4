"""How many prompts a step should have: the gradient's noise scale, a model of a step's seconds, and what follows.

McCandlish et al. 2018 (arXiv 1812.06162): with noise scale B = tr(Sigma) / |G|^2, training that would take S steps of
the true gradient takes S (1 + B / N) steps of N prompts. If a step takes a + b N seconds, the time to a given level is
least at N = sqrt(a B / b). This file only advises: it changes no batch and so no estimator.

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
"""Before advice is given: the noise of one probe is of the order of what it measures."""
_LEAST_STEPS = 8
_WORTH_SAYING = 0.95
"""Advice that saves less than a twentieth of the time is not given."""
_FURTHEST = 4.0
"""The model is trusted up to this factor from the present number of prompts."""


def half_of(groups: IntArray, seed: int, step: int) -> BoolArray:
    """[n] which of `groups` [n] (positions in the step) are in the half of a probe: each with probability 1/2, on every
    rank alike."""
    half: BoolArray = uniforms(seed, "half batch", groups, step) < 0.5 if len(groups) else np.zeros(0, np.bool_)
    return half


@dataclass(slots=True)
class NoiseScale:
    """Running means of |G|^2 and tr(Sigma), by probes of one gradient and of that of a random half of its prompts.

    With G_half = 2 / N times the sum over a half in which each prompt is with probability 1/2, the mean over halves is
    E |G_half|^2 = |G_N|^2 + sum |g_q|^2 / N^2, whatever the g_q are: skipped prompts have 0, others their weight. So
    D = |G_half|^2 - |G_N|^2 has mean E |g|^2 / N. With E |G_N|^2 = |G|^2 + tr(Sigma) / N that gives the two estimates
    of `add`, both unbiased for prompts drawn independently. Their ratio is not, so it is that of running means.

    Example: N = 64, |G_N|^2 = 0.10, |G_half|^2 = 0.16: |G|^2 is about (0.10 - 0.06) 64 / 63 = 0.041, tr(Sigma) about
    64 * 0.06 - 0.041 = 3.80, and the noise scale 93 prompts.
    """

    probes: int = 0
    signal: float = 0.0
    """|G|^2."""
    noise: float = 0.0
    """tr(Sigma)."""

    def add(self, whole: float, half: float, prompts: int) -> None:
        """Squared norms |G_N|^2 and |G_half|^2 of one probe, with N = `prompts` > 1. Not finite: no probe."""
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
        """B; None before there are enough probes, or while the signal is lost in the noise."""
        if self.probes < _LEAST_PROBES or self.signal <= 0 or self.noise <= 0:
            return None
        return self.noise / self.signal


@dataclass(slots=True)
class FadingFit:
    """Weighted least squares of y = a + b x over the past, the newer the heavier; a and b are at least 0."""

    count: int = 0
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """One more point; all earlier ones count 0.98 times as much as before."""
        self.count += 1
        self.weight = 1.0 + 0.98 * self.weight
        share = 1.0 / self.weight
        dx, dy = x - self.x, y - self.y
        self.x += share * dx
        self.y += share * dy
        self.xx += share * ((1 - share) * dx * dx - self.xx)
        self.xy += share * ((1 - share) * dx * dy - self.xy)

    def fit(self) -> tuple[float, float] | None:
        """(a, b); None before there is something to fit."""
        if self.count < _LEAST_STEPS or self.x <= 0:
            return None
        slope = self.xy / self.xx if self.xx > 0 else 0.0
        slope = min(max(slope, 0.0), self.y / self.x)
        return self.y - slope * self.x, slope


@dataclass(frozen=True, slots=True)
class BatchSizeAdvice:
    """Prompts that would reach the same level soonest, and in what share of the time; `a` and `b` in seconds."""

    prompts: int
    relative_time: float
    noise_scale: float
    fixed_s: float
    per_prompt_s: float


@dataclass(slots=True)
class BatchAdvisor:
    """Puts both together; everything that comes out counts prompts as `rollout.prompts_per_step` does.

    Args:
        prompts: `rollout.prompts_per_step`.
        updates: optimizer updates of a step, which share its prompts.
        planned: prompts that a step plans for those; more with CPPO's allocation.
        problems: of all training sets; a step plans no more.
    """

    prompts: int
    updates: int
    planned: int
    problems: int
    noise: NoiseScale = field(default_factory=NoiseScale)
    rollout: FadingFit = field(default_factory=FadingFit)
    """Seconds of generating and grading by generated tokens."""
    update: FadingFit = field(default_factory=FadingFit)
    """Seconds of the updates by trained tokens."""
    other_s: float = 0.0
    said: int = 0
    """Prompts in the last line of the log; 0: none."""

    def probe(self, whole: float, half: float) -> None:
        """Gradient norms of one update and of a random half of its prompts."""
        self.noise.add(whole * whole, half * half, self.planned // self.updates)

    def time(self, rollout_s: float, update_s: float, other_s: float, generated: float, trained: float) -> None:
        """Seconds of one step, a probe's left out, and its tokens."""
        self.rollout.add(generated, rollout_s)
        self.update.add(trained, update_s)
        self.other_s += (other_s - self.other_s) / self.rollout.weight

    @property
    def noise_scale(self) -> float | None:
        """Prompts of an update; None while it is not known."""
        scale = self.noise.prompts
        return None if scale is None else scale * self.prompts / self.planned

    def advice(self) -> BatchSizeAdvice | None:
        """None while there is too little to go by."""
        scale, rollout, update = self.noise_scale, self.rollout.fit(), self.update.fit()
        if scale is None or rollout is None or update is None:
            return None
        # tokens of a step are in proportion to its prompts
        per_prompt = (rollout[1] * self.rollout.x + update[1] * self.update.x) / self.prompts
        fixed = rollout[0] + update[0] + self.other_s
        scale *= self.updates  # as prompts of a step
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
        """`batch/*`, once they are known."""
        found = {"batch/noise_scale_prompts": self.noise_scale}
        if (advice := self.advice()) is not None:
            found |= {"batch/best_prompts": float(advice.prompts), "batch/relative_time": advice.relative_time}
            found |= {"batch/fixed_s": advice.fixed_s, "batch/per_prompt_s": advice.per_prompt_s}
        return {name: value for name, value in found.items() if value is not None}

    def lines(self) -> list[str]:
        """A line for the log when the advice is worth it and is not the last one over again."""
        advice = self.advice()
        if advice is None or advice.relative_time > _WORTH_SAYING:
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
        """Restore; a run that is resumed with other prompts or updates a step begins anew."""
        if any(state[name] != getattr(self, name) for name in ("prompts", "updates", "planned")):
            return
        self.noise, self.rollout = NoiseScale(**state["noise"]), FadingFit(**state["rollout"])
        self.update, self.other_s, self.said = FadingFit(**state["update"]), state["other_s"], state["said"]
