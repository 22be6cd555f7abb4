"""Rollout/trainer mismatch: how large it is, and a factor on the policy loss that undoes it.

With the same weights, engine and actor still give different log-probabilities (kernels, precision, a stale sync). Then
`old`, the actor before the step's first update, is not the behaviour.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dppo_megatron.algorithms.tokens import MAX_LOG_RATIO, TokenBatch, bounded_ratio, sequence_sums
from dppo_megatron.config.objective import CorrectionConfig
from dppo_megatron.types import FloatArray, IntArray

Logprobs = npt.NDArray[np.floating[Any]]


def importance_factor(batch: TokenBatch, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """What each token's policy loss is multiplied by, [T], without gradient; and where the bound changed it, [T].

    w = old / behaviour of the token, or of the whole completion (the product over its tokens). mode=truncate: min(w,
    max_ratio), truncated importance sampling (Ionides 2008; for this mismatch Yao et al. 2025). mode=mask: w inside
    [min_ratio, max_ratio] and 0 outside (IcePop, arXiv 2510.18855). Both bounds are biased where they act; without a
    bound E_behaviour[w f] = E_old[f] exactly, at level=sequence.
    """
    log_ratio = (batch.old_logprobs - batch.behaviour_logprobs).detach()
    if config.level == "sequence":
        log_ratio = sequence_sums(log_ratio, batch)
    ratio = bounded_ratio(log_ratio)
    if config.mode == "truncate":
        factor = ratio.clamp_max(config.max_ratio)
    else:
        factor = torch.where((ratio >= config.min_ratio) & (ratio <= config.max_ratio), ratio, 0.0)
    return factor, (factor != ratio).to(factor.dtype)


@dataclass
class Mismatch:
    """How far engine and actor are apart on a step's kept completions, as sums that ranks can add up.

    Example: one completion of two tokens, 0.1 and 0.3 apart: 2 tokens, `absolute` 0.4, one ratio exp(0.4).
    """

    tokens: int = 0
    absolute: float = 0.0
    """Sum of |old - behaviour| over tokens."""
    k3: float = 0.0
    """Sum over tokens of r - 1 - log r with r = old / behaviour."""
    histogram: IntArray = field(default_factory=lambda: np.zeros(len(_EDGES) + 1, dtype=np.int64))
    """Tokens by |old - behaviour|, between `_EDGES`."""
    completions: int = 0
    moments: FloatArray = field(default_factory=lambda: np.zeros(4))
    """Sums over completions of r, r^2, r w, (r w)^2: importance weight r = old / behaviour, pruning weight w."""

    def add(self, old: Logprobs, behaviour: Logprobs, weight: float) -> None:
        """Account for a completion.

        Args:
            old: [n] log-probabilities of its tokens under the actor before the step's first update.
            behaviour: [n] the same as the engine recorded them.
            weight: its pruning weight.
        """
        difference = np.asarray(old, np.float64) - np.asarray(behaviour, np.float64)
        limited = np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        self.tokens += len(difference)
        self.absolute += float(np.abs(difference).sum())
        self.k3 += float((np.expm1(limited) - limited).sum())
        self.histogram += np.bincount(np.searchsorted(_EDGES, np.abs(difference)), minlength=len(_EDGES) + 1)
        self.completions += 1
        ratio = float(np.exp(np.clip(difference.sum(), -MAX_LOG_RATIO, MAX_LOG_RATIO)))
        self.moments += [ratio, ratio**2, ratio * weight, (ratio * weight) ** 2]

    @staticmethod
    def join(parts: Iterable[Mismatch]) -> Mismatch:
        """The sum of several ranks'."""
        total = Mismatch()
        for part in parts:
            total.tokens += part.tokens
            total.absolute += part.absolute
            total.k3 += part.k3
            total.histogram += part.histogram
            total.completions += part.completions
            total.moments += part.moments
        return total

    def metrics(self) -> dict[str, float]:
        """Nothing without completions; else `mismatch/logprob_abs_diff_mean` and `_p99` (to 2 %) over tokens;
        `mismatch/kl`, the k3 estimate of KL(behaviour || actor) a token; `mismatch/is_ess`, the effective share of the
        completions' importance weights, and `mismatch/product_ess` of those times the pruning weights."""
        if not self.completions:
            return {}
        r, r2, rw, rw2 = self.moments
        count = max(self.tokens, 1)
        return {
            "mismatch/logprob_abs_diff_mean": self.absolute / count,
            "mismatch/logprob_abs_diff_p99": self._quantile(0.99),
            "mismatch/kl": self.k3 / count,
            "mismatch/is_ess": float(r * r / (self.completions * r2)) if r2 > 0 else 1.0,
            "mismatch/product_ess": float(rw * rw / (self.completions * rw2)) if rw2 > 0 else 1.0,
        }

    def _quantile(self, share: float) -> float:
        """The upper edge of the bin in which the share of tokens is reached."""
        if not self.tokens:
            return 0.0
        position = int(np.searchsorted(np.cumsum(self.histogram), share * self.tokens))
        return float(_EDGES[min(position, len(_EDGES) - 1)]) if position else 0.0


_EDGES: FloatArray = np.concatenate([[0.0], np.geomspace(1e-9, 1e3, 1397)])
"""Bins 2 % apart, from below float32's resolution to above any log-probability; the first holds exact zeros."""
