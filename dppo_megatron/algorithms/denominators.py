"""Frozen divisors of token sums: counts of the planned full mini-batch, never of what survived a selection.

A divisor that counted survivors would depend on the draw, and the estimate would no longer be linear in the weights.
"""

from __future__ import annotations

import numpy as np

from dppo_megatron.types import FloatArray, IntArray


def denominators(
    normalization: str, lengths: IntArray, tokens: FloatArray, *, nominal: int, max_completion_tokens: int
) -> FloatArray:
    """What each completion's token sum is divided by, [K, G] float64.

    Args:
        normalization: `objective.normalization`.
        lengths: [K, G] completion tokens.
        tokens: [K] completion tokens of the mini-batch that each group belongs to; read by token_mean only.
        nominal: completions of one planned mini-batch, skipped prompts included.
        max_completion_tokens: read by constant only.

    Example: 2 prompts of 2 completions with lengths 3, 5 and 4, 8 in one mini-batch. sequence_mean: 4 x length = 12,
    20, 16, 32. token_mean: 20 for each. constant with a limit of 10: 40 for each.
    """
    if normalization == "constant":
        return np.full(lengths.shape, float(nominal * max_completion_tokens))
    if normalization == "token_mean":
        counts: FloatArray = np.maximum(tokens, 1.0)[:, None] * np.ones(lengths.shape)
        return counts
    by_length: FloatArray = nominal * lengths.astype(np.float64)
    return by_length


def token_sums(lengths: IntArray | FloatArray, minibatch: IntArray, count: int) -> FloatArray:
    """[count] tokens of each mini-batch, from lengths [K, G] and the mini-batch [K] of each group."""
    sums: FloatArray = np.bincount(minibatch, weights=lengths.sum(axis=1), minlength=count).astype(np.float64)
    return sums
