"""Rollout/trainer mismatch: how large it is, and a factor on the policy loss that undoes it.

The engine that samples and the actor that trains have the same weights and still give different log-probabilities
(kernels, precision, a stale sync). Then `old`, the actor before the step's first update, is not the behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dppo_megatron.algorithms.tokens import MAX_LOG_RATIO, TokenBatch, bounded_ratio, sequence_sums
from dppo_megatron.config.objective import CorrectionConfig
from dppo_megatron.types import FloatArray

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


def effective_share(weights: FloatArray) -> float:
    """Kish's effective sample size over the count, (sum w)^2 / (n sum w^2) in [0, 1]; 1 for no weights [0]."""
    squares = float(np.square(weights).sum())
    return float(weights.sum()) ** 2 / (len(weights) * squares) if squares > 0 else 1.0


def mismatch_metrics(
    old: Sequence[Logprobs], behaviour: Sequence[Logprobs], weights: Sequence[float]
) -> dict[str, float]:
    """Figures of a step's kept completions.

    Args:
        old: log-probabilities [n_i] of each completion's tokens under the actor before the first update.
        behaviour: the same as the engine recorded them.
        weights: the pruning weight of each completion.

    Returns:
        `mismatch/logprob_abs_diff_mean` and `_p99` over tokens; `mismatch/kl`, the k3 estimate of
        KL(behaviour || actor) a token; `mismatch/is_ess`, the effective share of the completions' importance weights
        old / behaviour, and `mismatch/product_ess` of those times the pruning weights. Empty without completions.
    """
    if not old:
        return {}
    differences = [np.asarray(a, np.float64) - np.asarray(b, np.float64) for a, b in zip(old, behaviour, strict=True)]
    tokens = np.concatenate(differences)
    limited = np.clip(tokens, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    sums = np.array([difference.sum() for difference in differences])
    ratios = np.exp(np.clip(sums, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return {
        "mismatch/logprob_abs_diff_mean": float(np.abs(tokens).mean()) if len(tokens) else 0.0,
        "mismatch/logprob_abs_diff_p99": float(np.quantile(np.abs(tokens), 0.99)) if len(tokens) else 0.0,
        "mismatch/kl": float((np.expm1(limited) - limited).mean()) if len(tokens) else 0.0,
        "mismatch/is_ess": effective_share(ratios),
        "mismatch/product_ess": effective_share(ratios * np.asarray(weights, np.float64)),
    }
