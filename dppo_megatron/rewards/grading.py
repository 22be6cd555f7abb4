"""From completions to rewards. A grader that fails is counted, not scored 0: a broken grader must not look like a weak
model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dppo_megatron.types import Completion, FloatArray, Prompt


class Grader(Protocol):
    """Rewards for completions (`pool.GraderPool`)."""

    def grade(self, pairs: Sequence[tuple[str, str]], labels: Sequence[str]) -> list[float]:
        """One reward a pair of completion text and reference answer, NaN where grading failed; labels are for logs."""


def grade_group(grader: Grader, prompt: Prompt, completions: Sequence[Completion]) -> FloatArray:
    """Rewards of one group, [G] float64; NaN where grading failed."""
    labels = [f"prompt {prompt.index}, completion {index}" for index in range(len(completions))]
    pairs = [(completion.text, prompt.answer) for completion in completions]
    return np.array(grader.grade(pairs, labels), dtype=np.float64)
