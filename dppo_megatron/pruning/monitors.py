"""Metrics that show within a step whether pruning is unbiased: `prune/*`, never NaN (docs/pruning.md)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dppo_megatron.pruning.interface import CompletionBatch, LedgerRow, Selection
from dppo_megatron.types import BoolArray, FloatArray, IntArray, Label

_FALSE_ALARM = 1e-5
_BETS = np.outer([1.0, -1.0], 0.9 * 0.5 ** np.arange(6)).ravel()
"""A bet near 1 detects gross errors within some 40 draws; a bet of 0.03 detects a mean D of 3 % of `most`."""
_TESTED: tuple[Label, ...] = ("unbiased", "ratio")


def step_metrics(prompts: Selection, batch: CompletionBatch, completions: Selection) -> dict[str, float]:
    """Of the nominal prompts, and of the batch that was offered to the completion policy."""
    weight = batch.prompt_weight * completions.weight
    sums = np.bincount(batch.group, weights=weight * batch.advantages)
    return {
        **_of_level("prompt", prompts),
        **_of_level("completion", completions),
        **_tokens(batch, completions),
        "prune/weight_max": float(np.max(weight[completions.kept], initial=0.0)),
        **_totals(batch, completions),
        # max over groups of |sum_i W_i A_i|: how far the draw moved a group's weighted sum of advantages from 0
        "prune/group_imbalance": float(np.abs(sums).max(initial=0.0)),
    }


def _of_level(level: str, selection: Selection) -> dict[str, float]:
    kept, expected = float(selection.kept.sum()), float(selection.inclusion_prob.sum())
    figures = dict(selection.metrics)
    if selection.kept_cost is not None:
        figures["kept_cost"] = selection.kept_cost
    if (effect := selection.effect) is not None:
        figures |= {"predicted_effect": effect.predicted, "realised_effect": effect.realised}
        figures |= {"realised_error": effect.error, "uniform_effect": effect.uniform}
    return {f"prune/{level}_{name}": value for name, value in figures.items()} | {
        f"prune/{level}s_offered": float(len(selection.kept)),
        f"prune/{level}s_kept": kept,
        f"prune/{level}s_kept_over_expected": kept / expected if expected > 0 else 1.0,
    }


def biased_rows(ledger: tuple[LedgerRow, ...]) -> list[str]:
    """One warning line for each selection that changes the expected gradient."""
    return [f"{row.name} is biased: {row.note or 'no weight corrects it'}" for row in ledger if row.label == "biased"]


def _tokens(batch: CompletionBatch, selection: Selection) -> dict[str, float]:
    offered, kept = float(batch.lengths.sum()), float(batch.lengths[selection.kept].sum())
    expected = float(np.sum(selection.inclusion_prob * batch.lengths))
    return {
        "prune/tokens_offered": offered,
        "prune/tokens_kept": kept,
        "prune/tokens_kept_share": kept / offered if offered > 0 else 1.0,
        "prune/tokens_kept_over_expected": kept / expected if expected > 0 else 1.0,
    }


def _totals(batch: CompletionBatch, selection: Selection) -> dict[str, float]:
    """sum W / (N G) and sum W len / T, each near 1. T is weighted by prompt: lengths of pruned prompts are unknown. So
    an error in these weights, or in what makes up for missing or stopped completions, cancels there."""
    completion_weight = selection.weight
    if all(row.label != "biased" for row in selection.ledger):
        # Completions dropped for having no gradient have weight 0, but count towards these totals.
        completion_weight = np.where(selection.inclusion_prob > 0, completion_weight, 1.0)
    weights = batch.prompt_weight * completion_weight
    tokens = float(np.sum(batch.prompt_weight * batch.lengths))
    return {
        "prune/weight_total": float(weights.sum()) / batch.num_nominal if batch.num_nominal else 1.0,
        "prune/weight_total_tokens": float(np.sum(weights * batch.lengths)) / tokens if tokens > 0 else 1.0,
    }


def deviations(selection: Selection, known: Mapping[str, FloatArray | IntArray]) -> dict[str, float]:
    """`relative_deviation` along each direction, in [-1, 1]; empty if no label rests on probabilities below 1.

    `known`, each [n], by name: what the choice may depend on and the draw cannot change. Always pass the same names.
    """
    chance = (selection.inclusion_prob > 0) & (selection.inclusion_prob < 1)
    if not chance.any() or all(row.label not in _TESTED for row in selection.ledger):
        return {}
    pi, kept = selection.inclusion_prob[chance], selection.kept[chance]
    along = {"number": relative_deviation(np.ones(len(pi)), kept, pi)}
    for name, column in {"probability": selection.inclusion_prob, **known}.items():
        values = column[chance].astype(np.float64)
        along[name] = relative_deviation(np.sign(values - np.median(values)), kept, pi)
    return along


def relative_deviation(direction: FloatArray, kept: BoolArray, pi: FloatArray) -> float:
    """sum(direction (kept - pi)), all [n], over the largest value any draw could have; 0 if direction is all 0."""
    up, down = np.where(direction > 0, 1 - pi, pi), np.where(direction > 0, pi, 1 - pi)
    most = max(float(np.abs(direction) @ up), float(np.abs(direction) @ down))
    return float(direction @ (kept - pi)) / most if most > 0 else 0.0


@dataclass(slots=True)
class DeclaredTest:
    """Tests draw by draw whether one level's rows are kept as often as their probabilities say. In the checkpoint.

    If they are, then D = sum_i g_i (kept_i - pi_i) has mean 0 along any direction g that is known before the draw,
    however the rows of one draw depend on each other. With |D| <= most, the capital of a gambler who bets a fixed share
    of it on each draw is prod_t (1 + bet D_t / most_t), a non-negative martingale, and so is its mean over bets and
    directions. By Ville's inequality the chance that this mean ever reaches 1 / _FALSE_ALARM is at most _FALSE_ALARM,
    without any normal approximation. Its logarithm grows like z^2 / 2 with z = sum D / sqrt(sum D^2), so |z| of about
    5.6 refutes.

    A fixed-size design always keeps its declared number, so the directions also compare rows above and below the median
    of what a choice may depend on. A pattern over prompts (say, always every second one) shows in none of these, but
    it does in how often the same prompt was kept earlier, which the next draw cannot change either.
    """

    gains: dict[str, FloatArray] = field(default_factory=dict)
    """By direction: logarithm of the capital of each bet."""
    draws: int = 0
    refuted: str = ""
    """Why the probabilities are no longer believed, for the ledger; never reset."""
    earlier: FloatArray = field(default_factory=lambda: np.zeros(0))
    """[prompts] sum of (kept - pi) over all earlier rows of each prompt."""

    def remember(self, prompt_index: IntArray, drawn: Selection) -> None:
        """Record what was kept of the rows [n]; call after their `deviations` have been computed."""
        np.add.at(self.earlier, prompt_index, drawn.kept - drawn.inclusion_prob)

    def observe(self, along: Mapping[str, float]) -> None:
        """Count a draw with these `deviations`."""
        if not along or self.refuted:
            return
        self.gains = {name: self.gains.get(name, 0.0) + np.log1p(_BETS * value) for name, value in along.items()}
        self.draws += 1
        gains = np.stack(list(self.gains.values()))
        if np.logaddexp.reduce(gains, axis=None) >= math.log(gains.size / _FALSE_ALARM):
            name = max(self.gains, key=lambda name: float(self.gains[name].max()))
            self.refuted = (
                f"what was kept in {self.draws} draws refutes its probabilities, most clearly by {name}; with correct"
                f" ones this happens in at most one run of {1 / _FALSE_ALARM:,.0f}"
            )

    def judged(self, selection: Selection) -> Selection:
        """The selection, with ledger rows labelled biased if their probabilities were refuted by earlier draws."""
        if not self.refuted:
            return selection
        rows = selection.ledger
        noted = [replace(row, label="biased", note=f"{row.note}; {self.refuted}".lstrip("; ")) for row in rows]
        rows = tuple(new if row.label in _TESTED else row for row, new in zip(rows, noted, strict=True))
        return replace(selection, ledger=rows)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in copy.deepcopy(dict(state)).items():
            setattr(self, name, value)
