"""From a draw to weights, and the label that states what they estimate.

Horvitz-Thompson is the default because it is exactly unbiased for any design. Papers use the two ratio forms: C/(1-P)
equals Horvitz-Thompson if the size is fixed; Hajek accepts O(1/n) bias for a lower variance, which it does not achieve
with zero-sum advantages.

A label that depended on the draw would be `exact` whenever a random skip happened to skip nothing, which is no property
of the method. So a label is a function of what is known before the draw: at the prompt level, the nominal prompts'
inclusion probabilities, which depend on history alone; at the completion level, the settings alone, because there the
probabilities depend on which prompts were drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from dppo_megatron.pruning.designs import Draw, design_effect
from dppo_megatron.pruning.interface import LedgerRow, Policy, Selection, figures
from dppo_megatron.types import FloatArray, Label


def horvitz_thompson(draw: Draw) -> FloatArray:
    """Weights 1/pi of the kept [n]; E[weight] = 1 wherever pi > 0."""
    return np.where(draw.kept, 1.0 / np.where(draw.kept, draw.inclusion_prob, 1.0), 0.0)


def fixed_size_ht(draw: Draw) -> FloatArray:
    """C/(1-P) of DPPO (arXiv 2603.04135, 4.1) with a mean over the kept, as weights on nominal denominators [n].

    Equals Horvitz-Thompson times E[count]/count, so the two agree if the size is fixed. Zeros if nothing is kept.
    """
    count = np.maximum(draw.kept.sum(axis=-1, keepdims=True), 1)
    expected = count if draw.fixed_size else float(draw.inclusion_prob.sum())
    return np.asarray(horvitz_thompson(draw) * (expected / count))


def hajek(draw: Draw) -> FloatArray:
    """Self-normalised weights [n] whose sum is the number of elements with support. Zeros if nothing is kept."""
    weight = horvitz_thompson(draw)
    total = weight.sum(axis=-1, keepdims=True)
    return np.asarray(weight * (float((draw.inclusion_prob > 0).sum()) / np.where(total > 0, total, 1.0)))


ESTIMATOR_WEIGHTS = {"ht": horvitz_thompson, "fixed_size_ht": fixed_size_ht, "hajek": hajek}


def weigh(
    draw: Draw,
    *,
    name: str,
    estimator: str = "ht",
    max_weight: float = 0.0,
    note: str = "",
    label: Label | None = None,
    score: FloatArray | None = None,
    pairs_known: bool = True,
) -> Selection:
    """The selection of a random draw, weighted by the named estimator and capped at `max_weight` (0: no cap).

    Precondition, not checked here: pi = 0 only where there is no gradient.

    Args:
        label: derived from the settings, for probabilities that depend on an earlier draw; None: derived from the
            probabilities and the design. Never from what was kept.
        score: [n], for the growth of the variance; None: all equal.
        pairs_known: whether the draw can be repeated. It cannot for a user's own design, of which only each row's
            probability is known: a ratio form's mean depends on which rows are kept together. For one group that is
            kept or dropped as a whole, independent coins would give a bias of 0.06 where it is 0.51.
    """
    largest = largest_weight(draw, estimator)
    if _can_bind(max_weight, largest):
        cap = f"max_weight {max_weight:g} can bind: weights of {estimator} reach up to {largest:.3g} here"
        note = f"{note}; {cap}" if note else cap
    if label is None:
        keeps_all = bool(np.all(draw.inclusion_prob == 1.0))
        label = "exact" if keeps_all else _label(estimator, draw.fixed_size, max_weight, largest)
    selection = _selection(draw, name, _weights(draw, estimator, max_weight), label, note, score)
    mean: FloatArray | None = None
    if label not in ("exact", "unbiased"):
        known = pairs_known or _is_inverse(estimator, draw.fixed_size)
        mean = mean_weight(draw, estimator, max_weight) if known else np.full(len(draw.kept), np.nan)

    def redraw(rng: np.random.Generator, count: int) -> FloatArray:
        return _weights(draw.redraw(rng, count), estimator, max_weight)

    return replace(selection, mean_weight=mean, redraw=redraw if pairs_known else None)


def mean_weight(draw: Draw, estimator: str, max_weight: float) -> FloatArray:
    """[n] E[weight], or 1 if a row is never kept, by repeated draws: a delta method fails for two or three rows.

    Divides by the draws' own mean of 1/pi, whose expectation is 1, so that only the ratio forms' divisor adds noise.
    """
    many = draw.redraw(np.random.default_rng(0), draws_enough(len(draw.inclusion_prob)))
    plain = horvitz_thompson(many).mean(axis=0)
    mean = _weights(many, estimator, max_weight).mean(axis=0)
    return np.where(plain > 0, mean / np.where(plain > 0, plain, 1.0), 1.0)


def draws_enough(rows: int) -> int:
    """How many draws to repeat: a ratio's mean is then within 0.5 % for 8 rows, and within 0.2 % for 16,000."""
    return min(4096, (1 << 18) // max(rows, 1) + 32)


def _weights(draw: Draw, estimator: str, max_weight: float) -> FloatArray:
    """Capped weights of one draw [n] or of many [draws, n]."""
    return np.asarray(np.minimum(ESTIMATOR_WEIGHTS[estimator](draw), max_weight or np.inf))


def weigh_by(policy: Policy, draw: Draw, **more: Any) -> Selection:
    """`weigh` with the name, estimator and cap of a policy; `more` are its other arguments."""
    config = policy.config
    return weigh(draw, name=policy.name, estimator=config.estimator, max_weight=config.max_weight, **more)


def weigh_biased(
    draw: Draw,
    *,
    name: str,
    scale: FloatArray | float,
    note: str,
    label: Label | None = None,
    score: FloatArray | None = None,
) -> Selection:
    """The selection of a draw that no weight can make unbiased: its kept rows are weighted by `scale`, scalar or [n].

    Args:
        label, score: as for `weigh`; without a label, exact if the design keeps everything with factor 1, else biased.
    """
    everything = bool(np.all(draw.inclusion_prob == 1.0) and np.all(np.asarray(scale) == 1.0))
    label = label or ("exact" if everything else "biased")
    selection = _selection(draw, name, np.where(draw.kept, scale, 0.0), label, "" if label == "exact" else note, score)
    return replace(selection, mean_weight=draw.inclusion_prob * scale)


def _selection(
    draw: Draw, name: str, weight: FloatArray, label: Label, note: str, score: FloatArray | None
) -> Selection:
    pi, kept_fraction = draw.inclusion_prob, float(draw.kept.mean()) if len(draw.kept) else 1.0
    effect = design_effect(np.ones(len(pi)) if score is None else score, pi)
    ledger = (LedgerRow(name, kept_fraction, label, note),)
    return Selection(draw.kept, pi, weight, ledger, figures(pi), growth=effect)


LABELS: tuple[Label, ...] = ("exact", "unbiased", "ratio", "biased")
"""From best to worst."""


def worst(labels: Iterable[Label]) -> Label:
    """The worst of `labels`; `exact` if there are none."""
    return max(labels, key=LABELS.index, default="exact")


def label_of_settings(estimator: str, *, fixed_size: bool, least_prob: float, max_weight: float) -> Label:
    """The label of a random draw whose probabilities are not known yet.

    Args:
        estimator: ht, fixed_size_ht or hajek.
        fixed_size: every draw keeps the same number, whatever is offered.
        least_prob: smallest probability of a row with gradient, in (0, 1].
        max_weight: the cap; 0: none.

    Example: ht with min_inclusion_prob = 0.05 gives weights up to 20. A cap of 20 never binds: unbiased. A cap of 10
    can: biased.
    """
    # The ratio forms divide by what the draw kept. A single kept element has a weight of about n, so any cap can bind.
    largest = 1.0 / least_prob if _is_inverse(estimator, fixed_size) else np.inf
    return _label(estimator, fixed_size, max_weight, largest)


def _label(estimator: str, fixed_size: bool, max_weight: float, largest: float) -> Label:
    if _can_bind(max_weight, largest):
        return "biased"
    return "unbiased" if _is_inverse(estimator, fixed_size) else "ratio"


def _is_inverse(estimator: str, fixed_size: bool) -> bool:
    """Whether the estimator's weights are 1/pi, whatever was kept."""
    return estimator == "ht" or (estimator == "fixed_size_ht" and fixed_size)


def _can_bind(max_weight: float, largest: float) -> bool:
    """Whether a cap (0: none) is below the largest weight."""
    return 0 < max_weight < largest * (1.0 - 1e-12)


def largest_weight(draw: Draw, estimator: str) -> float:
    """An upper bound on the weights of any draw from this design; independent draws attain it.

    Reads the probabilities, `fixed_size` and `least_kept` of `draw`, not what was kept.

    Example: pi = (0.5, 0.5, 0.5, 0.5) with independent coins. ht: 2. Hajek: 4, when a single row is kept and stands for
    all. fixed_size_ht: 2 x 2 / 1 = 4 in the same case.
    """
    supported: FloatArray = draw.inclusion_prob[draw.inclusion_prob > 0]
    if not len(supported):
        return 0.0
    inverse = 1.0 / supported
    if _is_inverse(estimator, draw.fixed_size):
        return float(inverse.max())
    chance = supported < 1.0
    certain = int((~chance).sum())
    # fewest rows kept, given that this row is: the certain ones and itself, or what the design always keeps
    count = np.maximum(certain + chance, max(draw.least_kept, 1))
    if estimator == "fixed_size_ht":
        return float(np.max(float(supported.sum()) / count * inverse))
    lightest = np.concatenate([[0.0], np.cumsum(np.sort(inverse[chance]))])
    others = lightest[count - certain - chance] + certain - ~chance
    return float(np.max(len(supported) * inverse / (inverse + others)))
