"""What a call of the pool consists of: its samples, and the future that its last grade completes."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dppo_megatron.rewards.measures import log_failures
from dppo_megatron.types import Grade, GradeTask

_log = logging.getLogger("dppo_megatron.rewards.pool")


class Batch:
    """The samples of one call."""

    def __init__(self, tasks: Sequence[GradeTask]) -> None:
        self.tasks = tasks
        self.grades: list[Grade | None] = [None] * len(tasks)
        self.missing = len(tasks)
        self.future: Future[list[Grade]] = Future()
        self._rows: dict[int, bytes] = {}
        """Identity of a row -> as it is sent: the completions of a group share theirs."""

    def row(self, row: Mapping[str, Any]) -> bytes:
        """As it is sent, nothing for an empty one. Raises what pickle raises."""
        if row and id(row) not in self._rows:
            self._rows[id(row)] = pickle.dumps(dict(row), 5)
        return self._rows[id(row)] if row else b""

    def finish(self) -> None:
        if not self.future.done():
            grades = [grade for grade in self.grades if grade is not None]
            log_failures(_log, [task.label for task in self.tasks], grades)
            with suppress(InvalidStateError):  # cancelled meanwhile
                self.future.set_result(grades)


@dataclass(slots=True, eq=False)
class Queued:
    batch: Batch
    index: int
    task: GradeTask
    is_suspect: bool = False
    """It may have ended a process: it is graded alone, and the next process that ends with it was ended by it."""


def chunk_message(samples: Sequence[Queued], rows: Sequence[bytes], first: int = 0) -> bytes:
    """What a process is sent: the position of the first, and lists. What several share is in the pickle once.

    Args:
        rows: as `Batch.row` makes them; none for graders that ask for neither row nor prompt.
    """
    tasks = [one.task for one in samples]
    texts = [one.completion for one in tasks], [one.answer for one in tasks]
    facts = [one.completion_tokens for one in tasks], [one.finish_reason for one in tasks]
    prompts = [one.prompt for one in tasks] if rows else []
    return pickle.dumps((first, *texts, *facts, rows, prompts), 5)
