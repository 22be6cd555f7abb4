"""Grading in evaluations: each set's grader, what counts as correct, and which answers count as equal.

The only file of `evaluation/` that calls graders.
"""

from __future__ import annotations

import re
from typing import Any

from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.rewards.grading import Grader, deciding_reward, make_grader
from dppo_megatron.types import Grade


class SetGraders:
    """The graders of an evaluation: the run's own, and those that sets name.

    Args:
        reward: the run's.
        own: the run's grader; its owner closes it.
    """

    def __init__(self, reward: RewardConfig, own: Grader) -> None:
        self._reward, self._own = reward, own
        self._others: dict[str, Grader] = {}

    def of(self, function: str) -> Grader:
        """The grader of a built-in name or `module:function`; empty: the run's own."""
        if not function:
            return self._own
        if function not in self._others:
            self._others[function] = make_grader(self._reward, function)
        return self._others[function]

    def verdict(self, grade: Grade) -> dict[str, Any]:
        """The fields of an `EvalSample` that a grade decides. Of several named rewards the first says what is correct;
        where grading failed there is neither a reward nor a verdict."""
        failed = bool(grade.failure)
        return {
            "reward": None if failed else grade.reward,
            "correct": None if failed else deciding_reward(grade) >= self._reward.correct_from,
            "extracted": grade.extracted,
            "vote": _vote_of(grade),
            "unparsed": _unparsed(grade),
            "why": grade.why,
            "failure": grade.failure,
        }

    def close(self) -> None:
        """End the processes of the sets' own graders."""
        for grader in self._others.values():
            grader.close()
        self._others.clear()


def _unparsed(grade: Grade) -> bool | None:
    """Whether no final answer could be read; None if grading failed or the grader does not report it."""
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


def _vote_of(grade: Grade) -> str | None:
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
