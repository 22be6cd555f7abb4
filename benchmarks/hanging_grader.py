"""A grader that hangs on request, for grading_throughput.py; it imports only `time`, so that its processes start
fast."""

from __future__ import annotations

import time


def index_or_hang(completion: str, answer: str) -> float:
    """A seventh of the number in `completion`; if `answer` is "hang", every 100th call never returns."""
    number = int(completion)
    while answer == "hang" and number % 100 == 50:
        time.sleep(60)
    return number / 7
