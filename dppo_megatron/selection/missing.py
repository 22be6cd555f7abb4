"""Completions of which no reward came: what the others of their group count for, and what that does to the estimate.

A missing completion costs itself. Of a group of G with m left, G / m times the sum over the m is the sum over the G in
the mean, if which ones are missing is no matter of what they say: the baseline over the m is a mean over their pairs,
and all pairs are left equally often. That needs no rate and looks at nothing beyond the group, so it holds whatever is
pruned. It does not hold for what is no sum over pairs: fewer rewards have a smaller deviation, by how much depends on
the pass rate; a clip goes by the sign of what it multiplies; under a bounded ratio the mean of a baseline counts, and
`posterior_loo`'s goes by how many there are. (A group that was asked for in another size, `group_sizes`, is of the same
kind with nothing missing.) Groups with fewer than two left have no baseline and are lost;
the others stand for them by the share of groups that was lost in *earlier* steps, which no draw of this step can move.
Nothing is sampled again.

What can depend on the answer (a time-out, a grader that fails on what it reads) is weighted likewise, which mends the
gradient's length, and labelled biased: no weight makes long answers out of short ones. What is said to be by chance is
tested against its length (`Missing.along`): a judge that goes down late in a step fails those that took longest.

A label is a promise about every draw, so it is made before the draw: by the settings, and by what earlier steps have
lost, to the end of the run. The first step that loses something cannot have known; its record has the row all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from dppo_megatron.pruning import LedgerRow
from dppo_megatron.pruning.monitors import relative_deviation
from dppo_megatron.selection.arrays import PromptDraw, Rollouts, was_asked
from dppo_megatron.selection.bias import BiasSource
from dppo_megatron.types import BoolArray, FloatArray, IntArray, mean_of_sums

NAME = "rollout/missing"
MOST_LOST = 0.5
"""Of the groups: a share above it is made up for as if it were this, or a judge's outage would blow up the steps after
it."""
Known: TypeAlias = Literal["", "ratio", "biased"]
"""Worst that has been lost: nothing; by chance only; by what may depend on the answer."""
KNOWN: tuple[Known, ...] = ("", "ratio", "biased")
_DECAY = 0.9


@dataclass(frozen=True, slots=True)
class Past:
    """What earlier steps have lost, saved with the selection."""

    lost_share: tuple[float, ...]
    """For each training set, the running mean of the share of its groups with fewer than two rewards: where one set's
    judge is down, others' groups cannot stand for its own."""
    known: Known = ""

    def then(self, missing: Missing, prompt_weight: FloatArray, set_of: IntArray) -> Past:
        """After a step whose prompts, of the sets [K], had weights [K]: those that are rarely drawn count in full."""
        lost = self.now(~missing.usable, prompt_weight, set_of)
        shares = tuple(_DECAY * old + (1.0 - _DECAY) * new for old, new in zip(self.lost_share, lost, strict=True))
        return Past(shares, max(self.known, missing.now, key=KNOWN.index))

    def now(self, lost: BoolArray, prompt_weight: FloatArray, set_of: IntArray) -> list[float]:
        """For each set the share of a step's groups [K] that is lost; where it has none, that of before."""
        of_sets = [prompt_weight * (set_of == index) for index in range(len(self.lost_share))]
        totals = zip(of_sets, self.lost_share, strict=True)
        return [float(mine @ lost) / float(mine.sum()) if mine.sum() > 0 else share for mine, share in totals]


@dataclass(frozen=True, slots=True)
class Missing:
    """Which completions of a step [K, G] have a reward, and what they stand for."""

    there: BoolArray
    """[K, G]; none of a group with fewer than two."""
    usable: BoolArray
    """[K] not lost: two or more have a reward, or were stopped early."""
    weight: FloatArray
    """[K] of what is there, in place of the full group and of the groups without any."""
    in_group: FloatArray
    """[K] of what is there, in place of what was asked for of its group."""
    source: BiasSource
    known: Known
    """The row's label before the draw."""
    now: Known
    """The label of what this step has lost."""
    along: dict[str, float]
    """For the test of what is said to be by chance, see `DeclaredTest`."""
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


def missing_of(
    rollouts: Rollouts,
    prompts: PromptDraw,
    set_of: IntArray,
    past: Past,
    usual: int,
    *,
    same_at_any_size: bool,
    stands_for_lost: bool,
    refuted: str,
) -> Missing:
    """Of a step's rollouts, `with_lengths`.

    Args:
        set_of: [K] the training set of each prompt.
        past: what the steps before this one have lost.
        usual: G, in whose place each group stands.
        same_at_any_size: groups of all sizes have the same expected gradient; else what is left of one has another,
            though it is missing by chance.
        stands_for_lost: groups without a baseline are made up for here; not where groups are asked for until there are
            enough.
        refuted: why earlier steps' by chance is not believed; empty if it is.
    """
    graded, asked = ~np.isnan(rollouts.rewards), prompts.size
    stopped = rollouts.stopped
    lost = ~graded & ~stopped & was_asked(rollouts, asked)
    left, count = (graded | stopped).sum(axis=1), int(asked.sum())
    usable = left >= 2
    share_lost = np.array(past.lost_share)[set_of] if stands_for_lost else np.zeros(len(left))
    lost_weight = 1.0 / (1.0 - np.minimum(share_lost, MOST_LOST))
    weight = np.where(usable, usual / np.maximum(left, 1), 1.0) * lost_weight
    in_group = np.where(usable, asked / np.maximum(left, 1), 1.0)
    said = lost & (np.False_ if rollouts.by_chance is None else rollouts.by_chance)
    by_chance = said & (not refuted)
    chosen = lost & ~by_chance
    share = np.where(chosen, 1.0 / prompts.inclusion_prob[:, None], 0.0)
    mates = np.nan_to_num(_of_mates(rollouts.rewards, graded))
    figures = {
        "missing_count": float(lost.sum()),
        "missing_biased_count": float(chosen.sum()),
        "missing_groups": float((~usable).sum()),
        "missing_reward_mean": mean_of_sums(float((share * mates).sum()), float(share.sum())),
        "missing_tokens_mean": mean_of_sums(float((share * rollouts.lengths).sum()), float(share.sum())),
    }
    capped = stands_for_lost and max(past.lost_share) > MOST_LOST
    mixed = bool((asked != usual).any())  # small groups are lost more often, and all stand for them alike
    uneven = mixed and stands_for_lost and max(past.lost_share) > 0
    least: Known = "ratio" if same_at_any_size else "biased"
    seen: Known = max(past.known, least, key=KNOWN.index) if past.known else ""
    known: Known = "biased" if refuted or capped or uneven else seen
    now: Known = "biased" if chosen.any() or (mixed and not usable.all()) else least if lost.any() else ""
    label = max(known, now, key=KNOWN.index)
    source = BiasSource(())
    if label:
        note = _note(figures, count, refuted, mixed=mixed, same_at_any_size=same_at_any_size)
        row = LedgerRow(NAME, float(left.sum()) / max(count, 1), label, note)
        by_chance_alone = ~usable & ~chosen.any(axis=1)
        share_now = np.array(past.now(by_chance_alone, 1.0 / prompts.inclusion_prob, set_of))[set_of]
        mean = np.where(stands_for_lost & (share_now > 0), lost_weight * (1.0 - share_now), 1.0)
        source = _source(row, chosen, by_chance, left, mean, same_at_any_size=same_at_any_size)
    metrics = {f"rollout/{name}": value for name, value in figures.items()}
    along = _against_length(rollouts.lengths, graded, said)
    return Missing(graded & usable[:, None], usable, weight, in_group, source, known, now, along, metrics)


def _source(
    row: LedgerRow, chosen: BoolArray, by_chance: BoolArray, left: IntArray, mean: FloatArray, *, same_at_any_size: bool
) -> BiasSource:
    """`chosen` and `by_chance` [K, G]; `left` [K] of each group; `mean` [K] what a group counts over what is lost by
    chance, for which the share of earlier steps stands: less than 1 where those lost fewer, 1 where this lost none."""
    if by_chance.any() and not same_at_any_size:
        return BiasSource((row,), unknown="how fewer rewards change a gradient depends on their chances")
    stands_in = 1.0 + chosen.sum(axis=1, keepdims=True) / np.maximum(left, 1)[:, None]
    gone = chosen | (chosen.any(axis=1) & (left < 2))[:, None]
    return BiasSource((row,), np.where(gone, 0.0, np.where(by_chance, 1.0, stands_in) * mean[:, None]))


def as_foreseen(ledger: tuple[LedgerRow, ...], missing: Missing) -> tuple[tuple[LedgerRow, ...], tuple[LedgerRow, ...]]:
    """The ledger with the label that was known before the draw, and the row as it turned out, if that is worse."""
    foreseen: list[LedgerRow] = []
    for row in ledger:
        if row.name != NAME:
            foreseen.append(row)
        elif missing.known:
            foreseen.append(replace(row, label=missing.known))
    worse = KNOWN.index(missing.now) > KNOWN.index(missing.known)
    return tuple(foreseen), tuple(row for row in ledger if worse and row.name == NAME)


def _against_length(lengths: IntArray, graded: BoolArray, said: BoolArray) -> dict[str, float]:
    """How much longer than their mates those are that are `said` to be missing by chance: within each group any of
    them is as likely to be missing as another, which is what makes it chance. Arguments [K, G]."""
    offered = graded | said
    pi = said.sum(axis=1) / np.maximum(offered.sum(axis=1), 1)
    mixed = (pi > 0) & (pi < 1)
    if not mixed.any():
        return {}
    among, known = offered[mixed], np.where(offered, lengths, np.nan)[mixed]
    direction = np.sign(known - np.nanmedian(known, axis=1, keepdims=True))
    each = np.broadcast_to(pi[mixed, None], among.shape)
    return {"tokens": relative_deviation(direction[among], said[mixed][among], each[among])}


def _note(figures: Mapping[str, float], count: int, refuted: str, *, mixed: bool, same_at_any_size: bool) -> str:
    note = f"of {count} completions {figures['missing_count']:.0f} are missing; others of their groups stand for them"
    note += f"; not by chance: {refuted}" if refuted else ""
    note += "; small groups are lost more often" if mixed and figures["missing_groups"] else ""
    note += "" if same_at_any_size else "; with this objective fewer have another expected gradient"
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
