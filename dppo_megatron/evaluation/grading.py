"""How an evaluation grades: which grader a set has, what counts as correct, and which answers count as equal.

The one place of this room that knows how a grader is called.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.rewards.graders import BUILT_IN
from dppo_megatron.rewards.grading import Grader
from dppo_megatron.rewards.pool import GraderPool
from dppo_megatron.types import Grade


@dataclass(frozen=True, slots=True)
class GradeTask:
    """One completion to grade."""

    completion: str
    answer: str
    row: Mapping[str, Any]
    label: str


class SetGraders:
    """The graders of an evaluation: the run's own, and one for each other that a set names.

    Args:
        reward: the run's.
        own: the run's grader, which stays its owner's to close.
    """

    def __init__(self, reward: RewardConfig, own: Grader) -> None:
        self._reward, self._own = reward, own
        self._others: dict[str, GraderPool] = {}

    def grade(self, function: str, tasks: Sequence[GradeTask]) -> list[Grade]:
        """One grade a task.

        Args:
            function: a built-in name or `module:function`; empty: the run's own.
        """
        if not function:
            return _call(self._own, tasks)
        if function not in self._others:
            self._others[function] = open_grader(self._reward, function)
        return _call(self._others[function], tasks)

    def correct(self, grade: Grade) -> bool | None:
        """Whether it counts as correct; None where grading failed. Of several named rewards the first decides."""
        if grade.failure:
            return None
        reward = grade.reward
        if grade.parts:
            first = next(iter(self._reward.functions), "")
            reward = grade.parts.get(first, next(iter(grade.parts.values())))
        return None if math.isnan(reward) else reward >= self._reward.correct_from

    def close(self) -> None:
        """End the processes of the sets' own graders."""
        for grader in self._others.values():
            grader.close()
        self._others.clear()


def open_grader(reward: RewardConfig, function: str = "") -> GraderPool:
    """Processes that grade by `function`, or by the configured grader. Once there is one: `make_grader(...)`."""
    name = function or reward.function
    return GraderPool(BUILT_IN.get(name, name), reward.processes, reward.timeout_s)


def _call(grader: Grader, tasks: Sequence[GradeTask]) -> list[Grade]:
    """Once `Grader.grade` takes tasks and gives grades: `return grader.grade(tasks)`."""
    rewards = grader.grade([(task.completion, task.answer) for task in tasks], [task.label for task in tasks])
    return [Grade(reward, failure="failed; the log says how" if math.isnan(reward) else "") for reward in rewards]


def unparsed(grade: Grade) -> bool | None:
    """Whether no final answer could be read; None where grading failed, or the grader says nothing of answers."""
    if grade.failure:
        return None
    if "parsed_share" in grade.facts:
        return grade.facts["parsed_share"] == 0
    return grade.extracted is None if grade.extracted is not None or grade.why else None


_SPELLINGS = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle|[!,;:> ])|\\text\s*(?=\{)|[\s$]"), ""),
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
    (re.compile(r"^\{(.*)\}$"), r"\1"),
)


def vote_of(grade: Grade) -> str | None:
    """The answer that a sample votes for in maj@k, in a plain form; None if it gave none.

    Wrong answers are equal if they read the same without spaces, `\\left`, `$`, thousands separators and the like; two
    wrong answers of the same value in different forms (1/2 and 0.5) stay apart, which can only help the correct one.
    """
    if grade.extracted is None:
        return None
    plain = grade.extracted.strip().rstrip(".")
    for pattern, replacement in _SPELLINGS:
        plain = pattern.sub(replacement, plain)
    return plain or grade.extracted
