"""Tables of answers to the `math` grader: for each reference what is right and what is not.

None of these is taken from a data set.
"""

from __future__ import annotations

from typing import Any

from dppo_megatron.rewards.math.grader import grade_math

Case = tuple[str, str, float, dict[str, Any]]
"""Reference, answer, reward, row."""


def case(gold: str, right: list[str], wrong: list[str], row: dict[str, Any] | None = None) -> list[Case]:
    """One reference with answers to it."""
    return [(gold, answer, 1.0, row or {}) for answer in right] + [(gold, answer, 0.0, row or {}) for answer in wrong]


def check(cases: list[Case]) -> None:
    """Grade each answer in a box."""
    graded = {
        (gold, answer): (grade_math(f"so \\boxed{{ {answer} }}.", gold, row).reward, reward)
        for gold, answer, reward, row in cases
    }
    assert not {pair: rewards for pair, rewards in graded.items() if rewards[0] != rewards[1]}
