"""Whether rows are kept as often as their probabilities say, tested while the run goes on.

A design of a user's own is taken at its word when it is drawn, and so is a built-in one. If the word is true, along any
direction g that is known before the draw D = sum_i g_i (kept_i - pi_i) has mean 0, however the rows of one draw
depend on each other. With |D| <= most, who bets a share `bet` of what he has on every draw has prod_t (1 + bet D_t /
most_t), a martingale that is never negative, and so is the mean over bets and directions. By Ville's inequality the
chance that it ever reaches 1 / _FALSE_ALARM is at most _FALSE_ALARM: it may be looked at after every draw, and rests on
no normal approximation. Its logarithm grows like z^2 / 2 with z = sum D / sqrt(sum D^2), so |z| = 5.6 or so refutes.

The number kept says nothing of a design of fixed size; hence the directions, above or below the median of what a choice
may have gone by.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dppo_megatron.pruning.interface import Selection
from dppo_megatron.types import BoolArray, FloatArray, IntArray, Label

_FALSE_ALARM = 1e-5
_BETS = np.outer([1.0, -1.0], 0.9 * 0.5 ** np.arange(6)).ravel()
"""A bet near 1 finds a gross lie within some 40 draws; 0.03 one whose mean is 3 % of what a draw can differ by."""
_TESTED: tuple[Label, ...] = ("unbiased", "ratio")


def deviations(selection: Selection, known: Mapping[str, FloatArray | IntArray]) -> dict[str, float]:
    """D / most along each direction, in [-1, 1]; nothing where a label does not rest on probabilities below 1.

    Args:
        known: [n] each, by name: what the choice may have gone by and the draw does not decide. Always the same names.
    """
    chance = (selection.inclusion_prob > 0) & (selection.inclusion_prob < 1)
    if not chance.any() or all(row.label not in _TESTED for row in selection.ledger):
        return {}
    pi, kept = selection.inclusion_prob[chance], selection.kept[chance]
    along = {"number": _relative(np.ones(len(pi)), kept, pi)}
    for name, column in {"probability": selection.inclusion_prob, **known}.items():
        values = column[chance].astype(np.float64)
        along[name] = _relative(np.sign(values - np.median(values)), kept, pi)
    return along


def _relative(direction: FloatArray, kept: BoolArray, pi: FloatArray) -> float:
    """D over the largest |D| that any draw could have; 0 without a direction."""
    up, down = np.where(direction > 0, 1 - pi, pi), np.where(direction > 0, pi, 1 - pi)
    most = max(float(np.abs(direction) @ up), float(np.abs(direction) @ down))
    return float(direction @ (kept - pi)) / most if most > 0 else 0.0


@dataclass(slots=True)
class DeclaredTest:
    """The test of one level's draws, in their order. Part of the checkpoint."""

    gains: dict[str, FloatArray] = field(default_factory=dict)
    """By direction: logarithm of what each bet has come to."""
    draws: int = 0
    refuted: str = ""
    """Why the probabilities are not believed any more, for the ledger; it stays."""

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
                f"what was kept in {self.draws} draws refutes its probabilities, most plainly by {name}; true ones come"
                f" to this in one run of {1 / _FALSE_ALARM:,.0f}"
            )

    def judged(self, selection: Selection) -> Selection:
        """The selection, with rows that rest on refuted probabilities labelled biased. Knows earlier draws only."""
        rows = selection.ledger
        if self.refuted:
            noted = [replace(row, label="biased", note=f"{row.note}; {self.refuted}".lstrip("; ")) for row in rows]
            rows = tuple(new if row.label in _TESTED else row for row, new in zip(rows, noted, strict=True))
        return replace(selection, ledger=rows)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved `asdict`."""
        for name, value in copy.deepcopy(dict(state)).items():
            setattr(self, name, value)
