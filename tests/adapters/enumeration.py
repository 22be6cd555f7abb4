"""All draws of a step with their probabilities, played into an adapter in place of its policies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dppo_megatron.config.pruning import PromptPruningConfig
from dppo_megatron.pruning import CompletionBatch, LedgerRow, Selection, StepCost

PROMPTS, GROUP = 2, 4
PROMPT_PROB = np.array([0.5, 0.7])
COMPLETION_PROB = np.array([0.3, 0.9, 0.5, 0.6, 0.2, 0.8, 1.0, 0.4])


@dataclass
class Played:
    """Both policies: keeps what it is told, and weighs as Horvitz and Thompson do."""

    skips: bool = True
    """Prompts are skipped too."""
    prompts: np.ndarray = field(default_factory=lambda: np.ones(PROMPTS, dtype=bool))
    completions: np.ndarray = field(default_factory=lambda: np.ones(PROMPTS * GROUP, dtype=bool))
    weighs: bool = True

    def in_unit(self, _: PromptPruningConfig) -> str:
        """Takes any reward."""
        return ""

    @property
    def prompt_prob(self) -> np.ndarray:
        return PROMPT_PROB if self.skips else np.ones(PROMPTS)

    def select(self, prompt_index: np.ndarray, *, step: int) -> Selection:
        """Of all prompts."""
        return self._selection(self.prompts, self.prompt_prob)

    def prune(self, batch: CompletionBatch, **_: Any) -> Selection:
        """Of the completions of the prompts that were kept."""
        rows = np.repeat(self.prompts, GROUP)
        return self._selection(self.completions[rows], COMPLETION_PROB[rows])

    def observe(self, *_: Any, **__: Any) -> None:
        """Learns nothing."""

    def feedback(self, _: StepCost) -> list[str]:
        """Says nothing."""
        return []

    def draws(self) -> Iterator[float]:
        """The probability of each draw, after setting it; they sum to 1."""
        for prompts in itertools.product([False, True], repeat=PROMPTS):
            if not self.skips and not all(prompts):
                continue
            self.prompts = np.array(prompts)
            of_prompts = np.prod(np.where(self.prompts, self.prompt_prob, 1 - self.prompt_prob))
            offered = np.repeat(self.prompts, GROUP)
            for kept in itertools.product([False, True], repeat=int(offered.sum())):
                self.completions = np.zeros(PROMPTS * GROUP, dtype=bool)
                self.completions[offered] = kept
                pi = np.where(self.completions, COMPLETION_PROB, 1 - COMPLETION_PROB)[offered]
                if probability := float(of_prompts * np.prod(pi)):
                    yield probability

    def _selection(self, kept: np.ndarray, pi: np.ndarray) -> Selection:
        weight = np.where(kept, 1.0 / pi if self.weighs else 1.0, 0.0)
        row = LedgerRow("played", float(kept.mean()) if len(kept) else 1.0, "unbiased", "")
        return Selection(kept, pi, weight, (row,), {})
