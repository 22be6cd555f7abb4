"""Gradings that failed, as grades and in the log. One bad grader can fail thousands: the log names a few and counts the
others."""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Sequence

from dppo_megatron.texts import entry
from dppo_megatron.types import Grade

_SHOWN = 5
"""Failures of one call that are logged one by one, if they differ."""


def failed(why: str) -> Grade:
    """What a grading comes to that has failed."""
    return Grade(math.nan, failure=why)


def log_failures(log: logging.Logger, labels: Sequence[str], grades: Sequence[Grade]) -> None:
    """The first few that differ, each with a label and its traceback; the others as a count of each kind."""
    shown: set[str] = set()
    others: collections.Counter[str] = collections.Counter()
    for label, grade in zip(labels, grades, strict=True):
        if not grade.failure:
            continue
        if grade.failure in shown or len(shown) == _SHOWN:
            others[grade.failure.split(":")[0]] += 1
            continue
        shown.add(grade.failure)
        why = f"\n{grade.why}" if grade.why else ""
        log.error("%s", entry(f"grading {label or 'a sample'} {grade.failure}{why}"))
    if others:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in others.most_common(5))
        log.error("and %d gradings more: %s", sum(others.values()), kinds)
