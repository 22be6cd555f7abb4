"""Custom graders: the last number of a completion against the reference, and a small reward for being short.

    dppo-megatron train configs/quickstart.yaml reward.function=examples.custom_grader:last_number

    dppo-megatron train configs/quickstart.yaml reward.functions.right.function=examples.custom_grader:last_number \\
        reward.functions.short.function=examples.custom_grader:brevity reward.functions.short.weight=0.1

Graders run in processes of their own that import this file, so it imports no torch and starts fast.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from dppo_megatron.types import Grade

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(completion: str, answer: str, row: Mapping[str, Any]) -> Grade:
    """1 if the last number is the reference, else 0. Every text gets a grade: truncated, empty or hostile.

    `row` holds the other fields of the problem's row; a grader with two arguments does not get it.
    """
    numbers = _NUMBER.findall(completion.replace(",", ""))
    if not numbers:
        return Grade(0.0, why="no number", facts={"parsed_share": 0.0})
    right = Decimal(numbers[-1]) == Decimal(answer.replace(",", ""))
    return Grade(float(right), numbers[-1], "equal" if right else "another number", {"parsed_share": 1.0})


def brevity(completion: str, answer: str) -> float:
    """1 for an empty text, 1/2 for 200 characters, towards 0."""
    return 200 / (200 + len(completion))
