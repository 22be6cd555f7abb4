"""Completions without a reward: weights that make up for them, and what that does to the estimate (docs/pruning.md).

If m of a group's G completions are left, G / m times the sum over the m has the expectation of the sum over all G, if
which ones are missing does not depend on their content: with a baseline over the m it is a sum over pairs, and all
pairs are equally likely to be left. It fails for what is not a sum over pairs: fewer rewards have a smaller deviation,
by an amount that depends on the pass rate; a clip depends on the sign of what it multiplies; with a bounded ratio the
mean of the baseline matters, and `posterior_loo`'s depends on the number of rewards. (All this applies to groups
requested in another size, `group_sizes`, with nothing missing.)

A label is a promise about every draw, so it is made before the draw: by the settings, and by what earlier steps of the
run have lost. The first step that loses something could not foresee it; its record has the row all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from dppo_megatron.pruning import LedgerRow
from dppo_megatron.pruning.monitors import relative_deviation
from dppo_megatron.selection.arrays import PromptDraw, Rollouts, was_requested
from dppo_megatron.selection.bias import BiasSource
from dppo_megatron.types import BoolArray, FloatArray, IntArray, mean_of_sums

NAME = "rollout/missing"
MOST_LOST = 0.5
"""A larger lost share of groups is treated as this, or a judge's outage would blow up the weights of later steps."""
LossLabel: TypeAlias = Literal["", "ratio", "biased"]
"""For the worst loss: nothing lost; lost by chance only; lost for a reason that may depend on the answer."""
LOSS_LABELS: tuple[LossLabel, ...] = ("", "ratio", "biased")
_DECAY = 0.9


@dataclass(frozen=True, slots=True)
class PastLosses:
    """What earlier steps have lost. Saved with the selection."""

    lost_share: tuple[float, ...]
    """For each training set, the running mean of the share of its groups with fewer than two rewards. Separate, because
    if one set's judge is down, other sets' groups cannot replace its own."""
    known: LossLabel = ""

    def after(self, missing: Missing, prompt_weight: FloatArray, set_of: IntArray) -> PastLosses:
        """With one more step, whose prompts [K] had these weights (so rarely drawn ones count in full) and sets."""
        lost = self.shares_of_step(~missing.usable, prompt_weight, set_of)
        shares = tuple(_DECAY * old + (1.0 - _DECAY) * new for old, new in zip(self.lost_share, lost, strict=True))
        return PastLosses(shares, max(self.known, missing.observed, key=LOSS_LABELS.index))

    def shares_of_step(self, lost: BoolArray, prompt_weight: FloatArray, set_of: IntArray) -> list[float]:
        """For each set, the weighted share of a step's groups [K] that is lost; the past share if it had no groups."""
        of_sets = [prompt_weight * (set_of == index) for index in range(len(self.lost_share))]
        pairs = zip(of_sets, self.lost_share, strict=True)
        return [float(weight @ lost) / float(weight.sum()) if weight.sum() > 0 else share for weight, share in pairs]


@dataclass(frozen=True, slots=True)
class Missing:
    """Which completions of a step [K, G] have a reward, and the weights that make up for the others."""

    present: BoolArray
    """[K, G] has a reward, in a usable group."""
    usable: BoolArray
    """[K] not lost: two or more have a reward or were stopped early."""
    weight: FloatArray
    """[K] weight of present completions that makes up for the rest of the full group and for lost groups."""
    in_group: FloatArray
    """[K] weight of completions with a reward that makes up for the others requested in their group, lost or not."""
    in_mean: FloatArray
    """[K] `in_group`, making up too for the groups of the same training set of which nothing is left in this step."""
    source: BiasSource
    foreseen: LossLabel
    """The row's label before the draw."""
    observed: LossLabel
    """The label for what this step has lost."""
    deviations: dict[str, float]
    """Input of the `DeclaredTest` of losses that are declared to be by chance."""
    metrics: dict[str, float]

    def estimated(self, values: FloatArray) -> FloatArray:
        """[K, G] `values`; those of missing completions are the mean over their group, or over all if it has none."""
        return np.where(self.present, values, _mean_of_mates(values, self.present))


def with_lengths(rollouts: Rollouts, usual: float) -> Rollouts:
    """Gives unfinished completions the mean length of their group mates, for divisors and the history.

    Args:
        usual: tokens to assume if no completion of the step finished; 0: unknown.
    """
    if rollouts.unfinished is None:
        unfinished = np.isnan(rollouts.rewards) & (rollouts.lengths == 0)
    else:
        unfinished = rollouts.unfinished
    if not unfinished.any():
        return rollouts
    mates = np.nan_to_num(_mean_of_mates(rollouts.lengths.astype(np.float64), ~unfinished), nan=usual)
    lengths = np.where(unfinished, np.maximum(np.maximum(np.rint(mates), rollouts.lengths), 1.0), rollouts.lengths)
    return replace(rollouts, lengths=lengths.astype(np.int64))


def missing_of(
    rollouts: Rollouts,
    prompts: PromptDraw,
    set_of: IntArray,
    past: PastLosses,
    usual: int,
    *,
    same_at_any_size: bool,
    stands_for_lost: bool,
    refuted: str,
) -> Missing:
    """What is missing in a step's rollouts, which have gone through `with_lengths`.

    Args:
        set_of: [K] the training set of each prompt.
        past: what earlier steps have lost.
        usual: G, the group size that every group is weighted to represent.
        same_at_any_size: groups of all sizes have the same expected gradient; if not, losses by chance change it too.
        stands_for_lost: make up for groups without a baseline; False if groups are refilled until there are enough.
        refuted: why losses declared to be by chance are not believed, from earlier steps; empty if they are.
    """
    graded, sizes = ~np.isnan(rollouts.rewards), prompts.size
    stopped = rollouts.stopped
    lost = ~graded & ~stopped & was_requested(rollouts, sizes)
    left, count = (graded | stopped).sum(axis=1), int(sizes.sum())
    usable = left >= 2
    share_lost = np.array(past.lost_share)[set_of] if stands_for_lost else np.zeros(len(left))
    lost_weight = 1.0 / (1.0 - np.minimum(share_lost, MOST_LOST))
    weight = np.where(usable, usual / np.maximum(left, 1), 1.0) * lost_weight
    in_group = sizes / np.maximum(left, 1)
    share_gone = np.array(past.shares_of_step(left == 0, 1.0 / prompts.inclusion_prob, set_of))[set_of]
    in_mean = in_group / np.where(left > 0, 1.0 - share_gone, 1.0)
    declared = lost & (np.False_ if rollouts.by_chance is None else rollouts.by_chance)
    by_chance = declared & (not refuted)
    by_content = lost & ~by_chance
    share = np.where(by_content, 1.0 / prompts.inclusion_prob[:, None], 0.0)
    mates = np.nan_to_num(_mean_of_mates(rollouts.rewards, graded))
    figures = {
        "missing_count": float(lost.sum()),
        "missing_biased_count": float(by_content.sum()),
        "missing_groups": float((~usable).sum()),
        "missing_reward_mean": mean_of_sums(float((share * mates).sum()), float(share.sum())),
        "missing_tokens_mean": mean_of_sums(float((share * rollouts.lengths).sum()), float(share.sum())),
    }
    capped = stands_for_lost and max(past.lost_share) > MOST_LOST
    mixed = bool((sizes != usual).any())  # small groups are lost more often, but all groups are weighted up equally
    uneven = mixed and stands_for_lost and max(past.lost_share) > 0
    least: LossLabel = "ratio" if same_at_any_size else "biased"
    from_past: LossLabel = max(past.known, least, key=LOSS_LABELS.index) if past.known else ""
    foreseen: LossLabel = "biased" if refuted or capped or uneven else from_past
    observed: LossLabel = "biased" if by_content.any() or (mixed and not usable.all()) else least if lost.any() else ""
    label = max(foreseen, observed, key=LOSS_LABELS.index)
    source = BiasSource(())
    if label:
        note = _note(figures, count, refuted, mixed=mixed, same_at_any_size=same_at_any_size)
        row = LedgerRow(NAME, float(left.sum()) / max(count, 1), label, note)
        by_chance_alone = ~usable & ~by_content.any(axis=1)
        share_now = np.array(past.shares_of_step(by_chance_alone, 1.0 / prompts.inclusion_prob, set_of))[set_of]
        mean = np.where(stands_for_lost & (share_now > 0), lost_weight * (1.0 - share_now), 1.0)
        source = _source(row, by_content, by_chance, left, mean, same_at_any_size=same_at_any_size)
    metrics = {f"rollout/{name}": value for name, value in figures.items()}
    deviations = _length_deviation(rollouts.lengths, graded, declared)
    present = graded & usable[:, None]
    return Missing(present, usable, weight, in_group, in_mean, source, foreseen, observed, deviations, metrics)


def _source(
    row: LedgerRow, lost: BoolArray, by_chance: BoolArray, left: IntArray, mean: FloatArray, *, same_at_any_size: bool
) -> BiasSource:
    """[K, G] `lost`, for a reason that may depend on content, and lost `by_chance`; [K] completions `left`; [K] `mean`
    factor over losses by chance: below 1 if earlier steps lost fewer groups than this one, 1 if this one lost none."""
    if by_chance.any() and not same_at_any_size:
        return BiasSource((row,), unknown="how fewer rewards change a gradient depends on their chances")
    stands_in = 1.0 + lost.sum(axis=1, keepdims=True) / np.maximum(left, 1)[:, None]
    gone = lost | (lost.any(axis=1) & (left < 2))[:, None]
    return BiasSource((row,), np.where(gone, 0.0, np.where(by_chance, 1.0, stands_in) * mean[:, None]))


def as_foreseen(ledger: tuple[LedgerRow, ...], missing: Missing) -> tuple[tuple[LedgerRow, ...], tuple[LedgerRow, ...]]:
    """The ledger with the label that was known before the draw, and the row as observed if that label is worse."""
    known, worse = missing.foreseen, LOSS_LABELS.index(missing.observed) > LOSS_LABELS.index(missing.foreseen)
    rows = [row for row in ledger if known or row.name != NAME]
    foreseen = tuple(replace(row, label=known) if known and row.name == NAME else row for row in rows)
    return foreseen, tuple(row for row in ledger if worse and row.name == NAME)


def _length_deviation(lengths: IntArray, graded: BoolArray, declared: BoolArray) -> dict[str, float]:
    """How much longer than their mates the completions are that are `declared` missing by chance: if it is chance, all
    of a group are equally likely to be missing. Arguments [K, G]."""
    offered = graded | declared
    pi = declared.sum(axis=1) / np.maximum(offered.sum(axis=1), 1)
    mixed = (pi > 0) & (pi < 1)
    if not mixed.any():
        return {}
    among, known = offered[mixed], np.where(offered, lengths, np.nan)[mixed]
    direction = np.sign(known - np.nanmedian(known, axis=1, keepdims=True))
    each = np.broadcast_to(pi[mixed, None], among.shape)
    return {"tokens": relative_deviation(direction[among], declared[mixed][among], each[among])}


def _note(figures: Mapping[str, float], count: int, refuted: str, *, mixed: bool, same_at_any_size: bool) -> str:
    note = f"of {count} completions {figures['missing_count']:.0f} are missing; others of their groups stand for them"
    note += f"; not by chance: {refuted}" if refuted else ""
    note += "; small groups are lost more often" if mixed and figures["missing_groups"] else ""
    note += "" if same_at_any_size else "; with this objective fewer completions change the expected gradient"
    if not figures["missing_biased_count"]:
        return note
    return (
        f"{note}; {figures['missing_biased_count']:.0f} may be missing because of their content, on average of"
        f" {figures['missing_tokens_mean']:.0f} tokens and, by group mates, reward {figures['missing_reward_mean']:.3g}"
    )


def _mean_of_mates(values: FloatArray, present: BoolArray) -> FloatArray:
    """[K, 1] mean of each group's present `values` [K, G]; of all groups' if it has none, NaN if none is present."""
    count = present.sum(axis=1, keepdims=True)
    total = np.where(present, values, 0.0).sum(axis=1, keepdims=True)
    everywhere = float(total.sum()) / int(count.sum()) if count.any() else math.nan
    return np.where(count > 0, total / np.maximum(count, 1), everywhere)
