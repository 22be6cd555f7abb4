"""The subset of a group with the largest reward variance, for all groups at once.

The best m of G always are the i lowest and the m - i highest for some i, so G log G work replaces a search over
subsets (PODS, arXiv 2504.13818). Groups of equal size are handled together; failed gradings can make sizes
differ.
"""

from __future__ import annotations

import numpy as np

from dppo_megatron.pruning.designs import Draw, count_kept
from dppo_megatron.types import BoolArray, FloatArray, IntArray


def max_variance_draw(rewards: FloatArray, group: IntArray, rate: float, uniform: FloatArray) -> Draw:
    """Keeps, of each group, the count_kept(G, rate) rewards with the largest variance; ties at random.

    Args:
        rewards: [n], NaN where grading failed: such rows are never kept.
        group: [n] labels 0..groups-1.
        rate: share to drop, of the group's size with failed gradings included.
        uniform: [n] for the ties.

    Returns:
        A draw with exact inclusion probabilities under the random ties.
    """
    n = len(rewards)
    kept, pi = np.zeros(n, dtype=np.bool_), np.zeros(n)
    graded = ~np.isnan(rewards)
    num_groups = int(group.max(initial=-1)) + 1
    sizes = np.bincount(group, minlength=num_groups)
    valid = np.bincount(group[graded], minlength=num_groups)
    order = np.lexsort((uniform, rewards, group))
    # NaN sorts last within its group, so the graded rows of a group are a run at its start.
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    for size, num_valid in np.unique(np.stack([sizes, valid], axis=1), axis=0):
        if num_valid == 0:
            continue
        members = np.flatnonzero((sizes == size) & (valid == num_valid))
        rows = order[starts[members][:, None] + np.arange(num_valid)]
        wanted = min(count_kept(int(size), rate), int(num_valid))
        chosen, probability = _widest(rewards[rows], wanted)
        kept[rows], pi[rows] = chosen, probability
    return Draw(kept, pi, fixed_size=True)


def _widest(ascending: FloatArray, wanted: int) -> tuple[BoolArray, FloatArray]:
    """Kept mask and inclusion probabilities, both [groups, G], of rows sorted by reward."""
    num_groups, size = ascending.shape
    zero = np.zeros((num_groups, 1))
    # Centred first: variances as differences of large sums would lose their digits.
    centred = ascending - ascending.mean(axis=1, keepdims=True)
    # In units of the largest, so that what counts as equal below does not depend on the scale of the rewards.
    largest = np.abs(centred).max(axis=1, keepdims=True, initial=0.0)
    centred = centred / np.where(largest > 0, largest, 1.0)
    sums = np.concatenate([zero, np.cumsum(centred, axis=1)], axis=1)
    squares = np.concatenate([zero, np.cumsum(np.square(centred), axis=1)], axis=1)
    low = np.arange(wanted + 1)
    first_high = size - wanted + low
    total = sums[:, low] + sums[:, [size]] - sums[:, first_high]
    total_squares = squares[:, low] + squares[:, [size]] - squares[:, first_high]
    variance = total_squares / max(wanted, 1) - np.square(total / max(wanted, 1))
    num_low = np.argmax(np.round(variance, 12), axis=1)[:, None]

    position = np.arange(size)[None, :]
    chosen = (position < num_low) | (position >= size - wanted + num_low)
    # Rows of equal reward are in random order, so each has the mean of its run.
    run = np.cumsum(np.concatenate([zero, np.diff(ascending, axis=1) > 0], axis=1), axis=1).astype(np.int64)
    flat = (np.arange(num_groups)[:, None] * size + run).ravel()
    counts = np.bincount(flat, minlength=num_groups * size)
    hits = np.bincount(flat, weights=chosen.ravel().astype(np.float64), minlength=num_groups * size)
    return chosen, (hits / np.maximum(counts, 1))[flat].reshape(chosen.shape)
