"""How many completions each prompt of a step gets, fixed before any of them is sampled.

The mean over a group's completions has the same expectation whatever their number, as long as advantages are linear in
rewards. So the number may follow from anything that is known before. A prompt of weight w, whose completions have an
expected squared gradient m and cost c tokens, adds w^2 m / n to the variance and n c to the cost: least together with n
in proportion to w sqrt(m / c) (Neyman's allocation).
"""

from __future__ import annotations

import math

import numpy as np

from dppo_megatron.pruning.designs import WaterFiller
from dppo_megatron.types import FloatArray, IntArray


def size_bounds(usual: int, factor: float) -> tuple[int, int]:
    """Smallest and largest group around groups of `usual`; a group of one has no baseline."""
    return max(2, math.ceil(usual / factor)), math.floor(usual * factor)


def group_sizes(worth: FloatArray, usual: int, factor: float) -> IntArray:
    """[n] whole numbers in proportion to `worth` [n], `usual` each in the mean, within `size_bounds`.

    Example: usual 8, factor 2, worth (4, 1, 1, 1): in proportion 18, 5, 5, 5, within bounds 16, 5.3, 5.3, 5.3, and
    whole 16, 6, 5, 5.
    """
    least, most = size_bounds(usual, factor)
    shares = WaterFiller(worth, least / most).solve(len(worth) * usual / most)
    exact = np.clip(shares * most, least, most)
    sizes = np.floor(exact + 1e-9).astype(np.int64)
    left = len(worth) * usual - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:left]] += 1
    return sizes
