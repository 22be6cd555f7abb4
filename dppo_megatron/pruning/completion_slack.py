"""Inclusion probabilities raised into the room that the micro-batches of a step leave.

A rate names how much may be dropped; a step trains in whole rounds of micro-batches. Where the kept completions do not
fill the last round, keeping more of them lowers the variance and starts no further micro-batch. The new
probabilities are a function of the full batch alone, so weights of 1/pi stay exactly unbiased.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dppo_megatron.pruning.designs import WaterFiller
from dppo_megatron.types import FloatArray


def fill_slack(filler: WaterFiller, pi: FloatArray, holds: Callable[[FloatArray], bool], *, whole: bool) -> FloatArray:
    """Probabilities [n] >= pi of the largest budget that `holds`; pi itself if nothing above it does.

    Args:
        filler: the one that gave pi; every probability grows with its budget.
        pi: [n].
        holds: whether the step has room for a draw with given probabilities [n]; must not depend on any draw.
        whole: add a whole number to the budget, so that systematic draws keep a fixed size.

    Example: sizes (4, 2, 1, 1) at a budget of 2 have pi = (1, 0.5, 0.25, 0.25). Each has 10 tokens and the micro-batch
    that runs anyway has room for 30, so 3 can be kept: (1, 1, 0.5, 0.5), with weights of 2 where they were 4.
    """
    spent, full = float(np.sum(filler.cost * pi)), float(np.sum(filler.cost[filler.support]))
    if whole and abs(spent - round(spent)) < 1e-6:
        spent = float(round(spent))
    least_step = 1.0 if whole else 1e-3 * full
    if full - spent < least_step or not holds(pi):
        return pi
    everything = filler.solve(full)
    if holds(everything):
        return everything
    low, high = 0.0, full - spent
    filled = pi
    while high - low > least_step:
        middle = low + (max(round((high - low) / 2), 1) if whole else (high - low) / 2)
        raised = filler.solve(spent + middle)
        if holds(raised):
            low, filled = middle, raised
        else:
            high = middle
    return filled
