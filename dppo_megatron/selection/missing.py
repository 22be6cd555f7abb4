"""Completions of which no reward came: what the others of their group count for, and what that does to the estimate.

A missing completion costs itself. Of a group of G with m left, G / m times the sum over the m is the sum over the G in
the mean, if which ones are missing is no matter of what they say: the baseline over the m is a mean over their pairs,
and all pairs are left equally often. Groups with fewer than two left have no baseline; the others stand for them. So
failures by chance need no known rate, and nothing is sampled again for them: 5 % of them cost 5 % of the rollouts.

What can depend on the answer (a time-out, a grader that fails on what it reads) is weighted likewise, which mends the
gradient's length, and labelled biased: no weight makes long answers out of short ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dppo_megatron.pruning import LedgerRow
from dppo_megatron.selection.arrays import Rollouts
from dppo_megatron.selection.bias import BiasSource
from dppo_megatron.types import BoolArray, FloatArray, Label, mean_of_sums

NAME = "rollout/missing"


@dataclass(frozen=True, slots=True)
class Missing:
    """Which completions of a step [K, G] have a reward, and what they stand for."""

    there: BoolArray
    """[K, G]; none of a group with fewer than two."""
    weight: FloatArray
    """[K] of what is there, in place of the full group and of the groups without any."""
    source: BiasSource
    metrics: dict[str, float]

    def estimated(self, values: FloatArray) -> FloatArray:
        """[K, G] `values` with those that are not there as the mean of their group's, or of all."""
        return np.where(self.there, values, _of_mates(values, self.there))


def with_lengths(rollouts: Rollouts, usual: float) -> Rollouts:
    """What was never sampled to its end with the length of its group mates, where divisors and the history read one.

    Args:
        usual: tokens, where nothing of the step is known; 0: not known either.
    """
    if rollouts.unfinished is None:
        open_ones = np.isnan(rollouts.rewards) & (rollouts.lengths == 0)
    else:
        open_ones = rollouts.unfinished
    if not open_ones.any():
        return rollouts
    mates = np.nan_to_num(_of_mates(rollouts.lengths.astype(np.float64), ~open_ones), nan=usual)
    lengths = np.where(open_ones, np.maximum(np.maximum(np.rint(mates), rollouts.lengths), 1.0), rollouts.lengths)
    return replace(rollouts, lengths=lengths.astype(np.int64))


def missing_of(rollouts: Rollouts, prompt_prob: FloatArray, *, stands_for_lost: bool, may_end_early: bool) -> Missing:
    """Of a step's rollouts, `with_lengths`.

    Args:
        stands_for_lost: groups without a baseline are made up for here; not where groups are asked for until there are
            enough.
        may_end_early: a setting ends completions by how long they take. Every step is then biased, whether or not one
            was: a label must not depend on the outcome.
    """
    graded = ~np.isnan(rollouts.rewards)
    left, size = graded.sum(axis=1), rollouts.rewards.shape[1]
    usable = left >= 2
    lost_weight = len(left) / int(usable.sum()) if stands_for_lost and usable.any() else 1.0
    weight = np.where(usable, size / np.maximum(left, 1), 1.0) * lost_weight
    by_chance = ~graded & (np.False_ if rollouts.by_chance is None else rollouts.by_chance)
    chosen = ~graded & ~by_chance
    share = np.where(chosen, 1.0 / prompt_prob[:, None], 0.0)
    mates = np.nan_to_num(_of_mates(rollouts.rewards, graded))
    figures = {
        "missing_count": float((~graded).sum()),
        "missing_biased_count": float(chosen.sum()),
        "missing_groups": float((~usable).sum()),
        "missing_reward_mean": mean_of_sums(float((share * mates).sum()), float(share.sum())),
        "missing_tokens_mean": mean_of_sums(float((share * rollouts.lengths).sum()), float(share.sum())),
    }
    source = BiasSource(())
    if not graded.all() or may_end_early:
        label: Label = "biased" if chosen.any() or may_end_early else "ratio"
        row = LedgerRow(NAME, float(graded.sum()) / max(graded.size, 1), label, _note(figures, graded.size))
        stands_in = 1.0 + chosen.sum(axis=1, keepdims=True) / np.maximum(left, 1)[:, None]
        gone = chosen | (chosen.any(axis=1) & ~usable)[:, None]
        source = BiasSource((row,), np.where(gone, 0.0, np.where(by_chance, 1.0, stands_in)))
    metrics = {f"rollout/{name}": value for name, value in figures.items()}
    return Missing(graded & usable[:, None], weight, source, metrics)


def _note(figures: Mapping[str, float], count: int) -> str:
    note = f"of {count} completions {figures['missing_count']:.0f} are missing; others of their groups stand for them"
    if not figures["missing_biased_count"]:
        return note
    return (
        f"{note}; {figures['missing_biased_count']:.0f} may be missing because of what they are: by their mates of"
        f" reward {figures['missing_reward_mean']:.3g} and {figures['missing_tokens_mean']:.0f} tokens in the mean"
    )


def _of_mates(values: FloatArray, there: BoolArray) -> FloatArray:
    """[K, 1] mean of each group's `values` [K, G] that are `there`; of all where a group has none, NaN without any."""
    count = there.sum(axis=1, keepdims=True)
    total = np.where(there, values, 0.0).sum(axis=1, keepdims=True)
    everywhere = float(total.sum()) / int(count.sum()) if count.any() else math.nan
    return np.where(count > 0, total / np.maximum(count, 1), everywhere)
