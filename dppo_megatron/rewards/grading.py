"""From completions to rewards. A grader that raises is counted, not scored 0: a broken grader must not look like a
weak model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np

from dppo_megatron.types import Completion, FloatArray, Prompt

_log = logging.getLogger(__name__)


def grade_group(grade: Callable[[str, str], float], prompt: Prompt, completions: Sequence[Completion]) -> FloatArray:
    """Rewards of one group, [G] float64; NaN where the grader raised or returned no finite number."""
    return np.array([_grade(grade, prompt, completion) for completion in completions], dtype=np.float64)


def _grade(grade: Callable[[str, str], float], prompt: Prompt, completion: Completion) -> float:
    try:
        reward = float(grade(completion.text, prompt.answer))
    except Exception:
        _log.exception("the grader failed on a completion of prompt %d", prompt.index)
        return math.nan
    if not math.isfinite(reward):
        _log.error("the grader returned %r for a completion of prompt %d", reward, prompt.index)
        return math.nan
    return reward
