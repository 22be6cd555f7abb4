"""What a selection does to the expected gradient, decided before anything is drawn.

A label that looked at the draw would say `exact` whenever a random skip happened to skip nothing, and nobody could tell
what the method does. So a label is a function of what is known before the draw: at the prompt level the nominal
prompts' inclusion probabilities, which follow from history alone; at the completion level the settings alone, because
there the probabilities depend on which prompts were drawn. The price: a step whose probabilities all happen to be
harmless carries the label of the worst batch that its settings admit.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dppo_megatron.pruning.designs import Draw
from dppo_megatron.types import FloatArray, Label

LABELS: tuple[Label, ...] = ("exact", "unbiased", "ratio", "biased")
"""From the best to the worst."""


def worst(labels: Iterable[Label]) -> Label:
    """The last of `labels` in the order of `LABELS`; `exact` without any."""
    return max(labels, key=LABELS.index, default="exact")


def label_of_settings(estimator: str, *, fixed_size: bool, least_prob: float, max_weight: float) -> Label:
    """The label of a random draw whose probabilities are not known yet.

    Args:
        estimator: ht, c_form or hajek.
        fixed_size: every draw keeps the same number, whatever is offered.
        least_prob: no probability is below this where there is gradient, in (0, 1].
        max_weight: the cap; 0 for none.

    Example: ht with p_min = 0.05 makes weights up to 20. A cap of 20 never acts: unbiased. A cap of 10 can: biased.
    """
    inverse = estimator == "ht" or (estimator == "c_form" and fixed_size)
    # The ratio forms divide by what the draw kept; with one element kept its weight is about n, so any cap can act.
    largest = 1.0 / least_prob if inverse else np.inf
    if can_bind(max_weight, largest):
        return "biased"
    return "unbiased" if inverse else "ratio"


def label_of_draw(draw: Draw, estimator: str, max_weight: float) -> Label:
    """The label of a design whose probabilities are known: the same for every draw from it."""
    if bool(np.all(draw.inclusion_prob == 1.0)):
        return "exact"
    if can_bind(max_weight, largest_weight(draw, estimator)):
        return "biased"
    return "unbiased" if estimator == "ht" or (estimator == "c_form" and draw.fixed_size) else "ratio"


def can_bind(max_weight: float, largest: float) -> bool:
    """Whether a cap (0 for none) is below a weight that can occur."""
    return 0 < max_weight < largest * (1.0 - 1e-12)


def largest_weight(draw: Draw, estimator: str) -> float:
    """An upper bound of the weights that any draw from this design can give, attained by independent draws.

    Reads the probabilities, `fixed_size` and `least_kept` of `draw`, not what was kept.

    Example: pi = (0.5, 0.5, 0.5, 0.5) by independent coins. ht: 2. Hajek: 4, where one alone is kept and stands for
    all. c_form: 2 x 2 / 1 = 4 likewise.
    """
    supported: FloatArray = draw.inclusion_prob[draw.inclusion_prob > 0]
    if not len(supported):
        return 0.0
    inverse = 1.0 / supported
    if estimator == "ht" or (estimator == "c_form" and draw.fixed_size):
        return float(inverse.max())
    chance = supported < 1.0
    certain = int((~chance).sum())
    # given that a row is kept, so many are: the certain ones, itself, and what the design always keeps beside them
    count = np.maximum(certain + chance, max(draw.least_kept, 1))
    if estimator == "c_form":
        return float(np.max(float(supported.sum()) / count * inverse))
    lightest = np.concatenate([[0.0], np.cumsum(np.sort(inverse[chance]))])
    others = lightest[count - certain - chance] + certain - ~chance
    return float(np.max(len(supported) * inverse / (inverse + others)))
