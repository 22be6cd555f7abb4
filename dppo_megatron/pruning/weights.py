"""From a draw to weights, and the label that says what they estimate.

Horvitz-Thompson is the default because it is exactly unbiased for any design. The two ratio forms are here since papers
use them: C/(1-P) equals Horvitz-Thompson when the size is fixed and is a ratio estimator otherwise; Hajek pays
O(1/n) bias for a lower variance that zero-sum advantages do not give it. The cap trades bias for variance.

A label that looked at the draw would say `exact` whenever a random skip happened to skip nothing, which is no property
of the method. So a label is a function of what is known before the draw: at the prompt level the nominal prompts'
inclusion probabilities, which follow from history alone; at the completion level the settings alone, because there the
probabilities depend on which prompts were drawn. The price: a step whose probabilities all happen to be harmless has
the label of the worst batch that its settings admit.
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

    Equals Horvitz-Thompson times E[count]/count, so the two agree when the size is fixed. Nothing kept: zeros.
    """
    count = np.maximum(draw.kept.sum(axis=-1, keepdims=True), 1)
    expected = count if draw.fixed_size else float(draw.inclusion_prob.sum())
    weight: FloatArray = horvitz_thompson(draw) * (expected / count)
    return weight


def hajek(draw: Draw) -> FloatArray:
    """Self-normalised weights [n] whose sum is the number of elements with support. Nothing kept: zeros."""
    weight = horvitz_thompson(draw)
    total = weight.sum(axis=-1, keepdims=True)
    scaled: FloatArray = weight * (float((draw.inclusion_prob > 0).sum()) / np.where(total > 0, total, 1.0))
    return scaled


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
    """Weights of a random draw by the estimator's name, capped at `max_weight` if that is not 0, with its ledger row.

    Precondition, not checked here: pi = 0 only where there is no gradient.

    Args:
        label: of the settings, where the probabilities are themselves the outcome of an earlier draw; None: from the
            probabilities and the design. Never from what was kept.
        score: [n], for the growth of the variance; None: all alike.
        pairs_known: the draw can be made again; not a user's own, of which only single rows' probabilities are known.
            A ratio form's mean rests on which rows are kept together: of one group, kept or not as a whole, independent
            coins say 0.06 of bias where it is 0.51.
    """
    note = "; ".join(filter(None, (note, _cap_note(draw, estimator, max_weight))))
    label = label or label_of_draw(draw, estimator, max_weight)
    selection = _selection(draw, name, _weights(draw, estimator, max_weight), label, note, score)
    mean: FloatArray | None = None
    if label not in ("exact", "unbiased"):
        known = pairs_known or _is_inverse(estimator, draw.fixed_size)
        mean = mean_weight(draw, estimator, max_weight) if known else np.full(len(draw.kept), np.nan)

    def again(rng: np.random.Generator, count: int) -> FloatArray:
        return _weights(draw.again(rng, count), estimator, max_weight)

    return replace(selection, mean_weight=mean, again=again if pairs_known else None)


def mean_weight(draw: Draw, estimator: str, max_weight: float) -> FloatArray:
    """[n] E[weight], 1 where a row is never kept, by drawing again: no delta method holds for two or three rows.

    E[1/pi; kept] = 1 is known, so what remains of chance is that of the ratio forms' divisor alone.
    """
    many = draw.again(np.random.default_rng(0), draws_enough(len(draw.inclusion_prob)))
    plain = horvitz_thompson(many).mean(axis=0)
    mean = _weights(many, estimator, max_weight).mean(axis=0)
    relative: FloatArray = np.where(plain > 0, mean / np.where(plain > 0, plain, 1.0), 1.0)
    return relative


def draws_enough(rows: int) -> int:
    """Further draws to make of so many rows: with 8 the mean of a ratio is within 0.5 %, with 16,000 within 0.2 %."""
    return min(4096, (1 << 18) // max(rows, 1) + 32)


def _weights(draw: Draw, estimator: str, max_weight: float) -> FloatArray:
    """Of one draw [n] or many [draws, n], capped."""
    capped: FloatArray = np.minimum(ESTIMATOR_WEIGHTS[estimator](draw), max_weight or np.inf)
    return capped


def weigh_by(policy: Policy, draw: Draw, **more: Any) -> Selection:
    """`weigh` with the estimator and the cap of a policy's settings; `more` are its other arguments."""
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
    """A factor (scalar or [n]) on the kept elements of a draw that no weight can make unbiased.

    Args:
        label, score: as for `weigh`; without a label, exact where the design keeps everything with factor 1.
    """
    everything = bool(np.all(draw.inclusion_prob == 1.0) and np.all(np.asarray(scale) == 1.0))
    given: Label = label or ("exact" if everything else "biased")
    selection = _selection(draw, name, np.where(draw.kept, scale, 0.0), given, "" if given == "exact" else note, score)
    return replace(selection, mean_weight=draw.inclusion_prob * scale)


def _selection(
    draw: Draw, name: str, weight: FloatArray, label: Label, note: str, score: FloatArray | None
) -> Selection:
    pi, kept_fraction = draw.inclusion_prob, float(draw.kept.mean()) if len(draw.kept) else 1.0
    effect = design_effect(np.ones(len(pi)) if score is None else score, pi)
    ledger = (LedgerRow(name, kept_fraction, label, note),)
    return Selection(draw.kept, pi, weight, ledger, figures(pi), growth=effect)


def _cap_note(draw: Draw, estimator: str, max_weight: float) -> str:
    """What the cap can do to this draw, from the probabilities."""
    if not _can_bind(max_weight, largest := largest_weight(draw, estimator)):
        return ""
    return f"max_weight {max_weight:g} can bind: weights of {estimator} reach up to {largest:.3g} here"


LABELS: tuple[Label, ...] = ("exact", "unbiased", "ratio", "biased")
"""From the best to the worst."""


def worst(labels: Iterable[Label]) -> Label:
    """The last of `labels` in the order of `LABELS`; `exact` without any."""
    return max(labels, key=LABELS.index, default="exact")


def label_of_settings(estimator: str, *, fixed_size: bool, least_prob: float, max_weight: float) -> Label:
    """The label of a random draw whose probabilities are not known yet.

    Args:
        estimator: ht, fixed_size_ht or hajek.
        fixed_size: every draw keeps the same number, whatever is offered.
        least_prob: no probability is below this where there is gradient, in (0, 1].
        max_weight: the cap; 0 for none.

    Example: ht with min_inclusion_prob = 0.05 makes weights up to 20. A cap of 20 never acts: unbiased. A cap of 10
    can: biased.
    """
    # The ratio forms divide by what the draw kept; with one element kept its weight is about n, so any cap can act.
    largest = 1.0 / least_prob if _is_inverse(estimator, fixed_size) else np.inf
    return _label(estimator, fixed_size, max_weight, largest)


def label_of_draw(draw: Draw, estimator: str, max_weight: float) -> Label:
    """The label of a design whose probabilities are known: the same for every draw from it."""
    if bool(np.all(draw.inclusion_prob == 1.0)):
        return "exact"
    return _label(estimator, draw.fixed_size, max_weight, largest_weight(draw, estimator))


def _label(estimator: str, fixed_size: bool, max_weight: float, largest: float) -> Label:
    if _can_bind(max_weight, largest):
        return "biased"
    return "unbiased" if _is_inverse(estimator, fixed_size) else "ratio"


def _is_inverse(estimator: str, fixed_size: bool) -> bool:
    """Its weights are 1/pi, whatever was kept."""
    return estimator == "ht" or (estimator == "fixed_size_ht" and fixed_size)


def _can_bind(max_weight: float, largest: float) -> bool:
    """Whether a cap (0 for none) is below a weight that can occur."""
    return 0 < max_weight < largest * (1.0 - 1e-12)


def largest_weight(draw: Draw, estimator: str) -> float:
    """An upper bound of the weights that any draw from this design can give, attained by independent draws.

    Reads the probabilities, `fixed_size` and `least_kept` of `draw`, not what was kept.

    Example: pi = (0.5, 0.5, 0.5, 0.5) by independent coins. ht: 2. Hajek: 4, where one alone is kept and stands for
    all. fixed_size_ht: 2 x 2 / 1 = 4 likewise.
    """
    supported: FloatArray = draw.inclusion_prob[draw.inclusion_prob > 0]
    if not len(supported):
        return 0.0
    inverse = 1.0 / supported
    if _is_inverse(estimator, draw.fixed_size):
        return float(inverse.max())
    chance = supported < 1.0
    certain = int((~chance).sum())
    # given that a row is kept, so many are: the certain ones, itself, and what the design always keeps beside them
    count = np.maximum(certain + chance, max(draw.least_kept, 1))
    if estimator == "fixed_size_ht":
        return float(np.max(float(supported.sum()) / count * inverse))
    lightest = np.concatenate([[0.0], np.cumsum(np.sort(inverse[chance]))])
    others = lightest[count - certain - chance] + certain - ~chance
    return float(np.max(len(supported) * inverse / (inverse + others)))
