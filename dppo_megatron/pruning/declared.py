"""Whether rows are kept as often as their probabilities say, tested while the run goes on.

A design of a user's own is taken at its word when it is drawn, and so is every built-in one. If the words are true,
then along any direction g that is known before the draw D = sum_i g_i (kept_i - pi_i) has mean 0, however the rows of
one draw depend on each other. With |D| <= most, a gambler who bets a share `bet` of what he has on every draw has
prod_t (1 + bet D_t / most_t): a martingale that is never negative, and so is the mean over several bets and directions.
By Ville's inequality it ever reaches 1 / _FALSE_ALARM with a chance of at most _FALSE_ALARM: looking after every step
costs nothing, and no normal approximation or independence within a draw is needed.

Its logarithm grows like z^2 / 2, z = sum D / sqrt(sum D^2), so what refutes is about |z| = 5.6. The count alone says
nothing of a design of fixed size, hence the directions: above or below the median of what a choice may have gone by.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from dppo_megatron.pruning.interface import Selection
from dppo_megatron.types import BoolArray, FloatArray, IntArray, Label

_FALSE_ALARM = 1e-5
_BETS = np.outer([1.0, -1.0], 0.9 * 0.5 ** np.arange(6)).ravel()
"""A bet near 1 finds a gross lie within some 40 draws; 0.03 one whose mean is 3 % of what a draw can differ by."""
_TESTED: tuple[Label, ...] = ("unbiased", "ratio")


@dataclass(frozen=True, slots=True)
class Deviation:
    """Of what one draw kept from what its probabilities say."""

    along: dict[str, float]
    """D / most along each direction, in [-1, 1]."""
    kept: int
    """Of the rows that chance decides."""
    expected: float


def deviation(selection: Selection, known: Mapping[str, FloatArray | IntArray]) -> Deviation | None:
    """None where nothing is left to chance, or the label does not rest on the probabilities.

    Args:
        known: [n] each, by name: what the choice may have gone by and the draw does not decide. Always the same names.
    """
    chance = (selection.inclusion_prob > 0) & (selection.inclusion_prob < 1)
    if not chance.any() or all(row.label not in _TESTED for row in selection.ledger):
        return None
    pi, kept = selection.inclusion_prob[chance], selection.kept[chance]
    along = {"number": _relative(np.ones(len(pi)), kept, pi)}
    for name, column in {"probability": selection.inclusion_prob, **known}.items():
        values = column[chance].astype(np.float64)
        along[name] = _relative(np.sign(values - np.median(values)), kept, pi)
    return Deviation(along, int(kept.sum()), float(pi.sum()))


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
    kept: int = 0
    expected: float = 0.0
    refuted: str = ""
    """Why the probabilities are not believed any more, for the ledger; it stays."""

    def observe(self, found: Deviation | None) -> None:
        """Count a draw."""
        if found is None or self.refuted:
            return
        for name, value in found.along.items():
            self.gains[name] = self.gains.get(name, 0.0) + np.log1p(_BETS * value)
        self.draws, self.kept, self.expected = self.draws + 1, self.kept + found.kept, self.expected + found.expected
        gains = np.stack(list(self.gains.values()))
        if np.logaddexp.reduce(gains, axis=None) - math.log(gains.size) >= -math.log(_FALSE_ALARM):
            worst = max(self.gains, key=lambda name: float(self.gains[name].max()))
            self.refuted = (
                f"its draws are not those of its probabilities, which is seen by their {worst}: over {self.draws} draws"
                f" {self.kept} were kept where {self.expected:.0f} are expected; true ones come to this in one run of"
                f" {1 / _FALSE_ALARM:,.0f}"
            )

    def judged(self, selection: Selection) -> Selection:
        """The selection, with rows that rest on refuted probabilities labelled biased. Knows earlier draws only."""
        if not self.refuted:
            return selection
        rows = [
            replace(row, label="biased", note="; ".join(filter(None, (row.note, self.refuted))))
            if row.label in _TESTED
            else row
            for row in selection.ledger
        ]
        return replace(selection, ledger=tuple(rows))

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for item in fields(self):
            setattr(self, item.name, copy.deepcopy(state[item.name]))
