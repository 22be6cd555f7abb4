"""From a draw to weights; what they estimate is told by `labels`.

Horvitz-Thompson is the default because it is exactly unbiased for any design. The two ratio forms are here since papers
use them: C/(1-P) equals Horvitz-Thompson when the size is fixed and is a ratio estimator otherwise; Hajek pays
O(1/n) bias for a lower variance that zero-sum advantages do not give it. The cap trades bias for variance.
"""

from __future__ import annotations

import numpy as np

from dppo_megatron.pruning.designs import Draw
from dppo_megatron.pruning.interface import LedgerRow, Selection
from dppo_megatron.pruning.labels import can_bind, label_of_draw, largest_weight
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


def weigh(
    draw: Draw,
    *,
    name: str,
    estimator: str = "ht",
    max_weight: float = 0.0,
    note: str = "",
    label: Label | None = None,
) -> Selection:
    """Weights of a random draw by the estimator's name, capped at `max_weight` if that is not 0, with its ledger row.

    The caller vouches that pi = 0 only where there is no gradient.

    Args:
        label: of the settings, where the probabilities are themselves the outcome of an earlier draw; None: from the
            probabilities and the design. Never from what was kept.
    """
    weight = ESTIMATOR_WEIGHTS[estimator](draw)
    notes = [note] if note else []
    if max_weight > 0:
        weight = np.minimum(weight, max_weight)
        notes += _cap_notes(draw, estimator, max_weight)
    return Selection(
        kept=draw.kept,
        inclusion_prob=draw.inclusion_prob,
        weight=weight,
        ledger=(
            LedgerRow(name, kept_fraction(draw), label or label_of_draw(draw, estimator, max_weight), "; ".join(notes)),
        ),
        metrics={},
    )


def weigh_biased(
    draw: Draw, *, name: str, scale: FloatArray | float, note: str, label: Label | None = None
) -> Selection:
    """A factor (scalar or [n]) on the kept elements of a draw that no weight can make unbiased.

    Args:
        label: of the settings, as for `weigh`; None: exact where the design keeps everything with factor 1.
    """
    everything = bool(np.all(draw.inclusion_prob == 1.0) and np.all(np.asarray(scale) == 1.0))
    given: Label = label or ("exact" if everything else "biased")
    return Selection(
        kept=draw.kept,
        inclusion_prob=draw.inclusion_prob,
        weight=np.where(draw.kept, scale, 0.0),
        ledger=(LedgerRow(name, kept_fraction(draw), given, "" if given == "exact" else note),),
        metrics={},
    )


def kept_fraction(draw: Draw) -> float:
    """Kept over offered; 1 if nothing was offered."""
    return float(draw.kept.mean()) if len(draw.kept) else 1.0


def _cap_notes(draw: Draw, estimator: str, max_weight: float) -> list[str]:
    """What the cap can do to this draw, from the probabilities."""
    largest = largest_weight(draw, estimator)
    if not can_bind(max_weight, largest):
        return []
    if estimator != "ht" and not draw.fixed_size:
        return [f"max_weight {max_weight:g} can bind: weights of {estimator} reach up to {largest:.3g} here"]
    expected = np.minimum(1.0, max_weight * draw.inclusion_prob[draw.inclusion_prob > 0])
    bound = int((expected < 1.0 - 1e-12).sum())
    lost = 1.0 - float(expected.mean())
    return [f"max_weight {max_weight:g} binds for {bound} of {len(expected)}, losing {lost:.1%} of the weight"]
