"""Steps that the selector has begun and not ended, and those that are done and not yet learned from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dppo_megatron.pruning import Selection
from dppo_megatron.selection.arrays import PromptDraw, Rollouts
from dppo_megatron.selection.missing import Missing
from dppo_megatron.types import FloatArray, IntArray


class Place(NamedTuple):
    """Where the order of the prompts is."""

    position: int
    epochs: dict[int, Any]
    """Each set's epoch and its order, where no function of the position; else empty."""


@dataclass
class OpenStep:
    """A step that has begun and has had no feedback yet."""

    number: int
    place: Place
    """Before its first prompt."""
    rounds: int = 0
    offered: list[IntArray] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    """Those of the first round's mini-batches, then one for each refill."""
    chosen: list[PromptDraw] = field(default_factory=list)
    priors: list[FloatArray] = field(default_factory=list)
    """[n, 2] of those offered in each round, what was known of their rewards before; empty where nothing reads it."""
    kept_costs: tuple[float, ...] = (1.0, 1.0)
    """Of prompts and completions; see `StepCost.kept_cost`."""
    deviations: tuple[dict[str, float], ...] = field(default_factory=lambda: ({}, {}))
    """Of what was kept of prompts and of completions from the probabilities."""
    drawn: tuple[tuple[IntArray, Selection], ...] = ()
    """The prompts of all rows of these two levels, and what was kept."""
    outcome: tuple[PromptDraw, Rollouts, FloatArray] | None = None
    """What was finished, with second moments [K]."""
    missing: Missing | None = None
    size_growth: list[float] = field(default_factory=list)
    """Of the variance by the sizes of groups, as the scores predict it; of each choice."""
    before: dict[str, Any] | None = None
    """The prompt policy's state that it was chosen with, if steps before it were still open."""

    def prior(self) -> tuple[FloatArray | None, FloatArray | None]:
        """What was known of the prompts' rewards before: of all offered and of those to roll out."""
        if not self.priors:
            return None, None
        every = np.concatenate(self.priors)
        return every, every[np.concatenate([selection.kept for selection in self.selections])]


class FinishedStep(NamedTuple):
    """What the prompt policy learns of a step that is done."""

    outcome: dict[str, Any]
    """Arguments of its `observe`."""
    cost: dict[str, Any]
    """Of a `StepCost`."""
