"""Grades the embedded engine's completions while it samples the rest of the batch.

The graders work in processes of their own, so on an idle core their time is hidden. What is graded together depends on
when completions end; a grade does not, as each is a function of its own completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from dppo_megatron.rollout.client.grading import ToGrade
from dppo_megatron.types import Grade


class GradingAhead:
    """One thread that calls `grade`, for a chunk of completions at a time.

    Args:
        grade: one grade a task, in their order. What it raises is raised by `take`.
        chunk: completions of a call; the last call has what is left.
    """

    def __init__(self, grade: Callable[[Sequence[ToGrade]], list[Grade]], chunk: int = 32) -> None:
        self._grade, self._chunk = grade, chunk
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grades")
        self._waiting: dict[int, ToGrade] = {}
        self._given: list[tuple[list[int], Future[list[Grade]]]] = []

    def put(self, position: int, task: ToGrade) -> None:
        """Grade `task` before long; `position` is its name for `take`."""
        self._waiting[position] = task
        if len(self._waiting) >= self._chunk:
            self._hand_over()

    def take(self) -> dict[int, Grade]:
        """Position -> grade of everything since the last call; waits for the last of them."""
        self._hand_over()
        given, self._given = self._given, []
        grades: dict[int, Grade] = {}
        for positions, graded in given:
            grades |= zip(positions, graded.result(), strict=True)
        return grades

    def forget(self) -> None:
        """Nothing of what was put is wanted any more."""
        self._waiting = {}
        for _, graded in self._given:
            graded.cancel()
        self._given = []

    def close(self) -> None:
        """End the thread; what it is grading ends first."""
        self.forget()
        self._thread.shutdown()

    def _hand_over(self) -> None:
        if self._waiting:
            tasks, self._waiting = self._waiting, {}
            self._given.append((list(tasks), self._thread.submit(self._grade, list(tasks.values()))))
