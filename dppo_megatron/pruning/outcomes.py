"""The last look at what came back from rollout and grading, before anything is chosen by it.

One absurd number is enough to make every probability of a step NaN, and the message would then name an array and not
who sent it. So the prompt is named here, by whom it concerns: the engine (the run stops with a checkpoint) or the
user's grader.
"""

from __future__ import annotations

import numpy as np

from dppo_megatron.types import FloatArray, GuardStop, IntArray, UserError

LARGEST_REWARD = 1e15
"""Sums of squared rewards times lengths are kept as float32, which ends at 3e38."""


def check_outcomes(prompt_index: IntArray, rewards: FloatArray, lengths: IntArray, surprisal: FloatArray) -> None:
    """Check groups [K, G] of the prompts [K]; a NaN reward is a failed grading and allowed.

    Raises:
        GuardStop: a completion without tokens, or with log-probabilities that are no numbers: a bad answer of the
            engine, which a graded zero must not hide.
        UserError: a reward that is infinite or too large to be squared: a mistake of the grader.
    """
    if rewards.shape != lengths.shape or rewards.shape != surprisal.shape or len(prompt_index) != len(rewards):
        raise ValueError(
            f"rewards {rewards.shape}, lengths {lengths.shape} and surprisal {surprisal.shape} of"
            f" {len(prompt_index)} prompts: shapes differ"
        )
    no_surprisal = ~(np.isfinite(surprisal) & (surprisal >= 0))
    bad = (lengths < 1) | no_surprisal
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        why = f"has {lengths[row, column]} tokens; every completion has at least one, its stop token"
        if no_surprisal[row, column]:
            why = f"has log-probabilities that are none (their surprisal is {surprisal[row, column]})"
        raise GuardStop(
            f"rollout: completion {column} of prompt {prompt_index[row]} {why}. The engine's answer is bad, and nothing"
            " of this step was trained on"
        )
    large = ~np.isnan(rewards) & ~(np.abs(rewards) <= LARGEST_REWARD)
    if large.any():
        row, column = (int(i) for i in np.argwhere(large)[0])
        raise UserError(
            f"reward of prompt {prompt_index[row]}, completion {column} is {rewards[row, column]:g}: must be within"
            f" -{LARGEST_REWARD:g} and {LARGEST_REWARD:g} (it is squared), or NaN for a failed grading; mend the grader"
            " of reward.function"
        )
