"""Limits at which completions are stopped early by chance, and what those count that come to their end.

A completion's limit is drawn before its first token, with P(limit >= n) = S(n) = min(1, max(after / n, floor)). One of
n tokens comes to its end with probability S(n) whatever it says, and weighs 1 / S(n): in expectation every completion
is trained on once, and long ones cost less. A tail of lengths in which n or more tokens have a chance of about 1 / n,
as the longest of chains of thought often have, costs log(n) tokens where it cost n.

S knows nothing of the prompt on purpose. Guesses of each completion's length and reward would gain 1.2 times as much
on recorded runs (docs/choosing.md), but are fitted to whole lengths, of which a run that stops early sees few; and
settings need no state that is saved and restored.
"""

from __future__ import annotations

import numpy as np

from dppo_megatron.config.pruning import EarlyStopConfig
from dppo_megatron.randomness import uniforms
from dppo_megatron.types import FloatArray, IntArray

NAME = "rollout/early_stop"


def end_probability(config: EarlyStopConfig, lengths: IntArray) -> FloatArray:
    """S of completions of these lengths in tokens, any shape.

    Example: after 100 tokens with a floor of 0.1, lengths 50, 200, 4000 have 1, 1/2, 1/10.
    """
    if not config.after_tokens:
        return np.ones(lengths.shape)
    share: FloatArray = np.clip(config.after_tokens / np.maximum(lengths, 1), config.min_inclusion_prob, 1.0)
    return share


def draw_limits(
    config: EarlyStopConfig, seed: int, prompt_index: IntArray, step: int, width: int, longest: int
) -> IntArray:
    """[n, width] limit of each completion of the prompts [n] in a step, at most `longest`; [n, 0] where it is off.

    Each has a coin of its own: with one for a group, a completion's end would say something about its mates', and a
    baseline of theirs would no longer be independent of it.
    """
    if not config.after_tokens:
        return np.zeros((len(prompt_index), 0), dtype=np.int64)
    drawn = np.stack([uniforms(seed, "early stop", prompt_index, step, index) for index in range(width)], axis=1)
    return limits_of(config, drawn, longest)


def limits_of(config: EarlyStopConfig, uniform: FloatArray, longest: int) -> IntArray:
    """The limits by numbers in [0, 1), any shape: the largest n with S(n) >= u, at most `longest`."""
    most = np.minimum(np.floor(config.after_tokens / np.maximum(uniform, 1e-12)), float(longest))
    limits: IntArray = np.where(uniform <= config.min_inclusion_prob, longest, most).astype(np.int64)
    return limits
