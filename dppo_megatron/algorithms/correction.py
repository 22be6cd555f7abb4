"""Rollout/trainer mismatch: how large it is, and a factor on the policy loss that corrects it.

Even with the same weights, engine and actor give different log-probabilities (kernels, precision); a stale sync adds to
that. Then `old`, the actor before the step's first update, is not the behaviour policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dppo_megatron.algorithms.tokens import MAX_LOG_RATIO, TokenBatch, bounded_ratio, prefix_sums, sequence_sums
from dppo_megatron.config.objective import CorrectionConfig
from dppo_megatron.types import FloatArray, mean_of_sums

Logprobs = npt.NDArray[np.floating[Any]]


def importance_factor(batch: TokenBatch, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """[T] factor on each token's policy loss, without gradient, and [T] 1 where a bound changed it.

    w = old / behaviour of the token, of the completion up to it, or of the whole completion (products over tokens).
    mode=truncate: min(w, max_ratio), truncated importance sampling (Ionides 2008; for this mismatch Yao et al. 2025).
    mode=mask: w inside [min_ratio, max_ratio] and 0 outside (IcePop, arXiv 2510.18855). Both bounds are biased where
    they act. Without a bound, E_behaviour[w f] = E_old[f] holds exactly at level=sequence. At level=cumulative it holds
    for any f of a token and its prefix; what follows it, and so the reward, still has the behaviour's distribution.
    """
    max_ratio: float | Tensor = config.max_ratio
    min_ratio: float | Tensor = config.min_ratio
    log_ratio = (batch.old_logprobs - batch.behaviour_logprobs).detach()
    if config.level == "sequence":
        log_ratio = sequence_sums(log_ratio, batch)
    elif config.level == "cumulative":
        log_ratio = prefix_sums(log_ratio, batch)
        root = prefix_sums(torch.ones_like(log_ratio), batch).sqrt()  # of the token's position, from 1
        max_ratio, min_ratio = max_ratio**root, min_ratio**root
    ratio = bounded_ratio(log_ratio)
    largest = torch.as_tensor(max_ratio, dtype=ratio.dtype, device=ratio.device)
    if config.mode == "truncate":
        factor = ratio.minimum(largest)
    else:
        factor = torch.where((ratio >= min_ratio) & (ratio <= largest), ratio, 0.0)
    return factor, (factor != ratio).to(factor.dtype)


def correction_error(old: Logprobs, behaviour: Logprobs, config: CorrectionConfig) -> tuple[FloatArray, float]:
    """[n] each token's factor minus the exact one, which is the whole completion's ratio; and that ratio.

    Example: log-probabilities 0.1 and 0.3 apart at level=token: the factors are 1.105 and 1.350, the exact one is
    exp(0.4) = 1.492, so the errors are -0.387 and -0.142.
    """
    actor, engine = (torch.as_tensor(np.asarray(logprobs, np.float64)) for logprobs in (old, behaviour))
    zero, one = torch.zeros_like(actor), torch.ones_like(actor)
    batch = TokenBatch(actor, zero, engine, actor, zero, zero, one, zero.long())
    factor, _ = importance_factor(batch, config)
    exact = float(bounded_ratio((actor - engine).sum()))
    return (factor - exact).numpy(), exact


@dataclass
class Mismatch:
    """How much engine and actor differ, as sums over a step's kept completions that can be added over ranks.

    Sums except `product` and `gradient` have figure weights, so they are unbiased for all completions with gradient.

    Example: one completion of two tokens, 0.1 and 0.3 apart, kept with probability 1/2: 4 tokens, `absolute` 0.8.
    """

    tokens: float = 0.0
    absolute: float = 0.0
    """Sum of |old - behaviour| over tokens."""
    k3: float = 0.0
    """Sum over tokens of r - 1 - log r with r = old / behaviour."""
    histogram: FloatArray = field(default_factory=lambda: np.zeros(len(_EDGES) + 1))
    """Tokens by |old - behaviour|, in bins between `_EDGES`."""
    moments: FloatArray = field(default_factory=lambda: np.zeros(3))
    """Sums over completions of 1, r, r^2 for the importance weight r = old / behaviour."""
    product: FloatArray = field(default_factory=lambda: np.zeros(3))
    """The same for r times the pruning weight, over the kept completions without figure weights."""
    gradient: FloatArray = field(default_factory=lambda: np.zeros(2))
    """Squared norms of the gradient's error and of the gradient, completions taken as orthogonal."""

    def add(
        self,
        old: Logprobs,
        behaviour: Logprobs,
        figure_weight: float,
        weight: float,
        correction: CorrectionConfig | None = None,
        gradient: FloatArray | float = 1.0,
    ) -> None:
        """Add a completion.

        Args:
            old: [n] log-probabilities of its tokens under the actor before the step's first update.
            behaviour: [n] the same as recorded by the engine.
            figure_weight: its weight in metrics of the policy.
            weight: its pruning weight.
            correction: if given, the bias that it leaves is counted.
            gradient: norm of its tokens' gradients, up to a common factor; one number for all tokens, or [n].
        """
        difference = np.asarray(old, np.float64) - np.asarray(behaviour, np.float64)
        limited = np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        places = np.searchsorted(_EDGES, np.abs(difference))
        self.tokens += figure_weight * len(difference)
        self.absolute += figure_weight * float(np.abs(difference).sum())
        self.k3 += figure_weight * float((np.expm1(limited) - limited).sum())
        self.histogram += figure_weight * np.bincount(places, minlength=len(_EDGES) + 1)
        ratio = float(np.exp(np.clip(difference.sum(), -MAX_LOG_RATIO, MAX_LOG_RATIO)))
        self.moments += figure_weight * ratio ** np.arange(3)
        self.product += (ratio * weight) ** np.arange(3)
        if correction is not None and correction.level != "none":
            error, exact = correction_error(old, behaviour, correction)
            squared = np.broadcast_to(np.square(gradient) * weight, error.shape)
            self.gradient += float(squared @ np.square(error)), float(squared.sum()) * exact**2

    @staticmethod
    def join(parts: Iterable[Mismatch]) -> Mismatch:
        total = Mismatch()
        for part in parts:
            for name, value in vars(part).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    @property
    def logprob_abs_diff(self) -> float:
        """Mean |old - behaviour| per token; NaN without tokens."""
        return mean_of_sums(self.absolute, self.tokens)

    @property
    def bias(self) -> float | None:
        """Estimate of |E[g'] - g| / |g| that the correction leaves; None if it was not counted."""
        error, whole = self.gradient.tolist()
        return math.sqrt(error / whole) if whole else None

    @property
    def product_ess(self) -> float:
        """Effective share of importance times pruning weights over the kept completions; NaN without completions."""
        return _effective_share(self.product)

    def metrics(self) -> dict[str, float]:
        """`mismatch/logprob_abs_diff_mean` and `_p99` (to 2 %) over tokens; `mismatch/kl`, the k3 estimate of
        KL(behaviour || actor) per token; `mismatch/is_ess`, the effective share of the completions' importance weights.
        NaN if no completion counts."""
        return {
            "mismatch/logprob_abs_diff_mean": self.logprob_abs_diff,
            "mismatch/logprob_abs_diff_p99": self._quantile(0.99),
            "mismatch/kl": mean_of_sums(self.k3, self.tokens),
            "mismatch/is_ess": _effective_share(self.moments),
        }

    def _quantile(self, share: float) -> float:
        if not self.tokens:
            return math.nan
        position = int(np.searchsorted(np.cumsum(self.histogram), share * self.tokens))
        return float(_EDGES[min(position, len(_EDGES) - 1)]) if position else 0.0


def _effective_share(moments: FloatArray) -> float:
    """Kish's effective sample size over the number of samples, from sums of 1, w and w^2."""
    count, first, second = moments.tolist()
    return mean_of_sums(first * first, count * second)


_EDGES: FloatArray = np.concatenate([[0.0], np.geomspace(1e-9, 1e3, 1397)])
"""Edges of bins 2 % wide, from below float32's resolution to above any log-probability; bin 0 holds exact zeros."""
