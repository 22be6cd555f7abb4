"""Steps that have begun but not finished, and finished steps that the prompt policy has not learned from yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dppo_megatron.pruning import Selection
from dppo_megatron.selection.arrays import PromptDraw, Rollouts
from dppo_megatron.selection.missing import Missing
from dppo_megatron.types import FloatArray, IntArray


class Place(NamedTuple):
    """A position in the order of the prompts."""

    position: int
    epochs: dict[int, Any]
    """Each set's epoch and its order, if they do not follow from the position; else empty."""


@dataclass
class OpenStep:
    """A step that has begun and had no feedback yet."""

    number: int
    place: Place
    """Before its first prompt."""
    rounds: int = 0
    offered: list[IntArray] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    """One for each mini-batch of the first round, then one for each refill."""
    chosen: list[PromptDraw] = field(default_factory=list)
    priors: list[FloatArray] = field(default_factory=list)
    """For each round, [n, 2] Beta parameters of the offered prompts' rewards before the step; empty if not needed."""
    kept_costs: tuple[float, ...] = (1.0, 1.0)
    """Of prompts and completions; see `StepCost.kept_cost`."""
    deviations: tuple[dict[str, float], ...] = field(default_factory=lambda: ({}, {}))
    """Of prompts and completions; see `monitors.deviations`."""
    drawn: tuple[tuple[IntArray, Selection], ...] = ()
    """Of prompts and completions: the prompt index of each row, and the selection."""
    outcome: tuple[PromptDraw, Rollouts, FloatArray] | None = None
    """Set by `Selector.finish`; the array is the second moments [K]."""
    missing: Missing | None = None
    size_growth: list[float] = field(default_factory=list)
    """For each selection, the growth of the variance by group sizes as the scores predict it."""
    before: dict[str, Any] | None = None
    """The prompt policy's state when this step began; None unless steps may overlap."""

    def prior(self) -> tuple[FloatArray | None, FloatArray | None]:
        """[n, 2] Beta parameters of rewards before the step, for all offered prompts and for those to roll out."""
        if not self.priors:
            return None, None
        offered = np.concatenate(self.priors)
        return offered, offered[np.concatenate([selection.kept for selection in self.selections])]


class FinishedStep(NamedTuple):
    """What the prompt policy learns from a finished step."""

    outcome: dict[str, Any]
    """Arguments of its `observe`."""
    cost: dict[str, Any]
    """Fields of a `StepCost`."""
