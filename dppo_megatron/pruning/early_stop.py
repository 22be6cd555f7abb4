"""Random limits at which completions are stopped early, and the weights of those that finish.

A completion's limit is drawn before its first token, with P(limit >= n) = S(n) = min(1, max(after / n, floor)). One of
n > after tokens takes about after (1 + log(n / after)) tokens on average, until the floor decides.

S deliberately ignores the prompt. Predicting each completion's length and reward would gain 1.2 times as much on
recorded runs (docs/choosing.md), but such predictions are fitted to full lengths, of which a run that stops early sees
few; and S, a function of settings alone, has no state to save and restore.
"""

from __future__ import annotations

import numpy as np

from dppo_megatron.config.pruning import EarlyStopConfig
from dppo_megatron.randomness import uniforms
from dppo_megatron.types import FloatArray, IntArray

NAME = "rollout/early_stop"


def end_probability(config: EarlyStopConfig, lengths: IntArray) -> FloatArray:
    """S(n) for completion lengths n in tokens, any shape.

    Example: after 100 tokens with a floor of 0.1, lengths 50, 200, 4000 have 1, 1/2, 1/10.
    """
    if not config.after_tokens:
        return np.ones(lengths.shape)
    return np.asarray(np.clip(config.after_tokens / np.maximum(lengths, 1), config.min_inclusion_prob, 1.0))


def draw_limits(
    config: EarlyStopConfig, seed: int, prompt_index: IntArray, step: int, width: int, longest: int
) -> IntArray:
    """[n, width] token limit of each completion of the prompts [n] in a step, at most `longest`; [n, 0] if disabled.

    Each completion has a random number of its own. With one per group, whether a completion finishes would be
    correlated with whether its group mates do, and a baseline made from the mates would not be independent of it.
    """
    if not config.after_tokens:
        return np.zeros((len(prompt_index), 0), dtype=np.int64)
    drawn = np.stack([uniforms(seed, "early stop", prompt_index, step, index) for index in range(width)], axis=1)
    return limits_of(config, drawn, longest)


def limits_of(config: EarlyStopConfig, uniform: FloatArray, longest: int) -> IntArray:
    """Limits from uniform numbers u in [0, 1), any shape: the largest n with S(n) >= u, at most `longest`."""
    most = np.minimum(np.floor(config.after_tokens / np.maximum(uniform, 1e-12)), float(longest))
    return np.where(uniform <= config.min_inclusion_prob, longest, most).astype(np.int64)
