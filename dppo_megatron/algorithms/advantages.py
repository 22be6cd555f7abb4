"""Group-relative advantages.

Computed in float64 from the full group before anything is pruned: recomputing them on the survivors makes the
estimator nonlinear in the selection and breaks the unbiasedness that the weights buy.
"""

from __future__ import annotations

import numpy as np

from dppo_megatron.types import FloatArray


def group_advantages(rewards: FloatArray, *, divide_by_std: bool, eps: float) -> FloatArray:
    """Advantages of each group.

    `divide_by_std=True` is GRPO (arXiv 2402.03300, eq. 3 with the population standard deviation); False is
    Dr.GRPO (arXiv 2503.20783). A completion whose grader failed (NaN) is left out of the statistics and gets
    advantage 0. A group of one, or with equal rewards, has advantage exactly 0.

    Args:
        rewards: [groups, G] float64.
        eps: added to the standard deviation.

    Returns:
        [groups, G] float64.
    """
    graded = ~np.isnan(rewards)
    count = np.maximum(graded.sum(axis=1, keepdims=True), 1)
    values = np.where(graded, rewards, 0.0)
    centred = np.where(graded, values - values.sum(axis=1, keepdims=True) / count, 0.0)
    low = np.where(graded, rewards, np.inf).min(axis=1, keepdims=True)
    high = np.where(graded, rewards, -np.inf).max(axis=1, keepdims=True)
    centred = np.where(high > low, centred, 0.0)  # not a rounding error over eps where all rewards are equal
    if not divide_by_std:
        return centred
    std = np.sqrt(np.square(centred).sum(axis=1, keepdims=True) / count)
    scaled: FloatArray = centred / (std + eps)
    return scaled
