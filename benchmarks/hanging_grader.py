"""A grader that hangs where it is told to, for grading_throughput.py; it imports nothing, so that its processes start
as fast as any."""

from __future__ import annotations

import time


def index_or_hang(completion: str, answer: str) -> float:
    """A seventh of the number in `completion`; every 100th never comes back if `answer` says so."""
    number = int(completion)
    while answer == "hang" and number % 100 == 50:
        time.sleep(60)
    return number / 7
