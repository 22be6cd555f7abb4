"""From a draw to weights and to the honest label of what they estimate.

Horvitz-Thompson is the default because it is exactly unbiased for any design. The two ratio forms are here since papers
use them: C/(1-P) equals Horvitz-Thompson when the size is fixed and is a ratio estimator otherwise; Hajek pays
O(1/n) bias for a lower variance that zero-sum advantages do not give it. The cap trades bias for variance.
"""

from __future__ import annotations

import numpy as np

from dppo_megatron.pruning.designs import Draw
from dppo_megatron.pruning.interface import LedgerRow, Selection
from dppo_megatron.types import FloatArray, Label


def horvitz_thompson(draw: Draw) -> FloatArray:
    """Weights 1/pi of the kept [n]; E[weight] = 1 wherever pi > 0."""
    return np.where(draw.kept, 1.0 / np.where(draw.kept, draw.inclusion_prob, 1.0), 0.0)


def c_form(draw: Draw) -> FloatArray:
    """C/(1-P) of DPPO (arXiv 2603.04135, 4.1) with a mean over the kept, as weights on nominal denominators [n].

    Equals Horvitz-Thompson times E[count]/count, so the two agree when the size is fixed. Nothing kept: zeros.
    """
    count = int(draw.kept.sum())
    if count == 0:
        return np.zeros(len(draw.kept))
    expected = count if draw.fixed_size else float(draw.inclusion_prob.sum())
    return horvitz_thompson(draw) * (expected / count)


def hajek(draw: Draw) -> FloatArray:
    """Self-normalised weights [n] whose sum is the number of elements with support. Nothing kept: zeros."""
    weight = horvitz_thompson(draw)
    total = float(weight.sum())
    return weight * (float((draw.inclusion_prob > 0).sum()) / total) if total > 0 else weight


ESTIMATOR_WEIGHTS = {"ht": horvitz_thompson, "c_form": c_form, "hajek": hajek}


def weigh(draw: Draw, *, name: str, estimator: str = "ht", max_weight: float = 0.0, note: str = "") -> Selection:
    """Weights of a random draw by the estimator's name, capped at `max_weight` if that is not 0, with its ledger row.

    The caller vouches that pi = 0 only where there is no gradient.
    """
    weight = ESTIMATOR_WEIGHTS[estimator](draw)
    label, notes = _label(draw, estimator), [note] if note else []
    if max_weight > 0:
        supported = draw.inclusion_prob > 0
        expected = np.minimum(1.0, max_weight * draw.inclusion_prob[supported])
        weight = np.minimum(weight, max_weight)
        bound = int((expected < 1.0 - 1e-12).sum())
        if bound:
            label = "biased"
            lost = 1.0 - float(expected.mean())
            notes.append(
                f"max_weight {max_weight:g} binds for {bound} of {len(expected)}, losing {lost:.1%} of the weight"
            )
    return Selection(
        kept=draw.kept,
        inclusion_prob=draw.inclusion_prob,
        weight=weight,
        ledger=(LedgerRow(name, kept_fraction(draw), label, "; ".join(notes)),),
        metrics={},
    )


def weigh_biased(draw: Draw, *, name: str, scale: FloatArray | float, note: str) -> Selection:
    """A factor (scalar or [n]) on the kept elements of a draw that no weight can make unbiased."""
    weight = np.where(draw.kept, scale, 0.0)
    whole = bool(np.all(weight == 1.0))
    return Selection(
        kept=draw.kept,
        inclusion_prob=draw.inclusion_prob,
        weight=weight,
        ledger=(LedgerRow(name, kept_fraction(draw), "exact" if whole else "biased", "" if whole else note),),
        metrics={},
    )


def kept_fraction(draw: Draw) -> float:
    """Kept over offered; 1 if nothing was offered."""
    return float(draw.kept.mean()) if len(draw.kept) else 1.0


def _label(draw: Draw, estimator: str) -> Label:
    if bool(np.all(draw.inclusion_prob == 1.0)):
        return "exact"
    if estimator == "ht" or (estimator == "c_form" and draw.fixed_size):
        return "unbiased"
    return "ratio"
