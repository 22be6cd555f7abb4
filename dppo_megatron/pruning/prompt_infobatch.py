"""InfoBatch (arXiv 2303.04947) carried over from supervised samples to prompts.

Its two-class rule is a random design with known probabilities, so 1/pi on nominal denominators is exactly unbiased,
where the authors' mean over the kept is off by a factor. Ours also fixes two defects of their code: annealing ends the
pruning whatever the number of epochs, and the probability used is the one drawn with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from dppo_megatron.pruning.designs import design_effect
from dppo_megatron.pruning.interface import Selection, figures
from dppo_megatron.pruning.prompt_base import PromptPolicy
from dppo_megatron.types import BoolArray, FloatArray, IntArray

_SMALLEST_KEEP = 0.1
"""The authors' floor: keep ratio = min(1, max(0.1, 1 - r))."""


class InfoBatchPolicy(PromptPolicy):
    """Method `infobatch`: prompts scoring below the mean of all visited ones are skipped with probability `rate`.

    The score is the mean |advantage| of the last visit, in the place of the authors' last loss.
    """

    methods: ClassVar[tuple[str, ...]] = ("infobatch",)
    reads: ClassVar[tuple[str, ...]] = (
        "rate",
        "design",
        "estimator",
        "max_weight",
        "warmup_epochs",
        "anneal_fraction",
    )

    def _select_sorted(self, ids: IntArray, step: int, minibatch: int) -> Selection:
        arrays = self.history.arrays
        # Unvisited rows hold 0 and add nothing to the sum.
        num_seen = int(np.count_nonzero(arrays["visits"]))
        mean = float(arrays["mean_abs"].sum(dtype=np.float64)) / max(num_seen, 1)
        score = arrays["mean_abs"][ids].astype(np.float64)
        low = self.history.seen(ids) & (score < mean)
        pi = two_class(low, self.config.rate)
        order = np.lexsort((self._ties(ids, step, minibatch), score))
        selection = self._draw_and_weigh(ids, pi, order, step, minibatch)
        return replace(selection, metrics=figures(pi, design_effect(score, pi), low))


def two_class(low: BoolArray, rate: float) -> FloatArray:
    """Keep probability [n]: 1, or `keep_share` where `low`."""
    return np.where(low, keep_share(rate), 1.0)


def keep_share(rate: float) -> float:
    """max(0.1, 1 - rate): the keep probability of the lower class."""
    return max(_SMALLEST_KEEP, 1.0 - rate)
