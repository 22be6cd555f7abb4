"""The gradient's noise scale, by which to choose how many prompts a step has.

McCandlish et al. 2018 (arXiv 1812.06162): with noise scale B = tr(Sigma) / |G|^2, training that would take S steps of
the true gradient takes S (1 + B / N) steps of N prompts. If a step takes a + b N seconds, the time to a given level is
smallest at N = sqrt(a B / b).

Symbols: g_q is prompt q's part of the gradient with all of its weights, N the planned prompts of an update,
G_N = sum g_q / N its gradient, G and Sigma the mean and covariance of one g_q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dppo_megatron.randomness import uniforms
from dppo_megatron.types import BoolArray, IntArray

_DECAY = 0.9
_LEAST_PROBES = 4
"""Probes before it is reported: the noise of a single probe is as large as what it measures."""


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
