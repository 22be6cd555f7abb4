"""How long completions are: a log-normal population that ends at the cap, or what a run recorded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dppo_megatron.randomness import generator
from dppo_megatron.types import FloatArray, IntArray

SPREAD = 0.6
"""Sigma of the logarithm between prompts, and again within a prompt's completions. An assumption; `--trace` takes those
of a run."""
_GROUPS = 512


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts and completions."""

    prompt: float
    """Mean."""
    completion: float
    """Mean."""
    drawn: IntArray
    """[groups, G] lengths of completions, a population to draw from."""

    @property
    def sequence(self) -> float:
        """Mean of both."""
        return self.prompt + self.completion

    @staticmethod
    def assumed(prompt: float, completion: float, cap: int, size: int) -> Lengths:
        """Groups of `size` completions whose mean is `completion` and none of which is above `cap`."""
        random = generator(0, "lengths")
        shape = np.exp(random.normal(0.0, SPREAD, (_GROUPS, 1)) + random.normal(0.0, SPREAD, (_GROUPS, size)))
        return Lengths(prompt, completion, capped(shape, completion, cap))


def capped(shape: FloatArray, mean: float, cap: int) -> IntArray:
    """`shape` times the factor at which its mean is `mean` once nothing is above `cap`; at least 1 each."""
    low, high = 0.0, cap / float(shape.min())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(shape * middle, cap).mean() < mean else (low, middle)
    return np.clip(np.round(shape * high), 1, cap).astype(np.int64)
