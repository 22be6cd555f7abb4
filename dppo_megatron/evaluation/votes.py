"""Which wrong answers of a problem are one answer in maj@k: 1/2 and 0.5 must not be two votes of one each.

Counted apart, wrong answers lose votes to the right one, whose spellings the grader has found equal already: maj@k
would be too high. Only the `math` graders can say whether two answers are equal; others' answers are compared as text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from dppo_megatron.evaluation.eval_scores import SampleOutcome
from dppo_megatron.rewards.math.grader import grade_math_boxed

MATH_GRADERS = ("math", "math_boxed")
_WHOLE = re.compile(r"-?\d{1,300}")
_MOST_COMPARISONS = 20_000
"""Of a set, the commonest spellings of each problem first: about five seconds, while the other ranks wait."""
Vote: TypeAlias = tuple[int, str]
"""A problem's place in its set, and how a wrong answer to it is written."""


def _equal(answer: str, other: str) -> bool:
    """Whole numbers, which most answers are, need no grader."""
    if _WHOLE.fullmatch(answer) and _WHOLE.fullmatch(other):
        return int(answer) == int(other)
    return grade_math_boxed(f"\\boxed{{{answer}}}", other, {}).reward == 1.0


def one_spelling(votes: Iterable[Vote], same: Callable[[str, str], bool] = _equal) -> Mapping[Vote, str]:
    """How each vote is to be counted: equal answers to a problem under the spelling that comes most often.

    Args:
        votes: of every wrong answer.
        same: whether an answer equals another.

    Example:
        one_spelling([(7, "0.5"), (7, "1/2"), (7, "1/2"), (7, "3")])[7, "0.5"] == "1/2"
    """
    counts: dict[int, Counter[str]] = {}
    for problem, spelling in votes:
        counts.setdefault(problem, Counter())[spelling] += 1
    found: dict[Vote, str] = {}
    left = _MOST_COMPARISONS
    for problem, of in counts.items():
        heads: list[str] = []
        for spelling, _ in sorted(of.items(), key=lambda item: (-item[1], item[0])):
            if left < len(heads):
                return found
            left -= len(heads)
            head = next((one for one in heads if same(spelling, one)), spelling)
            heads += [head] if head == spelling else []
            found[problem, spelling] = head
    return found


def spellings(outcomes: Iterable[SampleOutcome]) -> Mapping[Vote, str]:
    """`one_spelling` of a set's wrong answers."""
    return one_spelling((one.problem, one.vote) for one in outcomes if one.correct is False and one.vote is not None)


def counted_as(outcome: SampleOutcome, found: Mapping[Vote, str]) -> str | None:
    """The vote of an outcome under one spelling; right answers are one answer however they are written."""
    if outcome.correct is not False or outcome.vote is None:
        return outcome.vote
    return found.get((outcome.problem, outcome.vote), outcome.vote)
