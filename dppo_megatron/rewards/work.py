"""The queue of samples to grade, which all calls and lanes of a pool share.

It also holds the pool's settings and what it has learned about its graders, which lanes read (`pool.py`).
"""

from __future__ import annotations

import logging
import math
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dppo_megatron.rewards.functions import Mode, NamedFunction
from dppo_megatron.rewards.measures import failed, log_failures
from dppo_megatron.types import Grade, GradeTask

_log = logging.getLogger(__name__)

_CHUNK_S = 0.02  # of work in a chunk: between two chunks a process is idle for some 0.2 ms, 1 % of this
LOOK_S = 0.02  # between checks for samples that may be graded now, if a process or the pace had no room for all
_CHUNK_CHARACTERS = 4 << 20  # most of the completions in a chunk, which is pickled and sent as a whole


class Batch:
    """The samples of one call."""

    def __init__(self, tasks: Sequence[GradeTask]) -> None:
        self.tasks = tasks
        self.grades: list[Grade | None] = [None] * len(tasks)
        self.missing = len(tasks)
        self.future: Future[list[Grade]] = Future()
        self._rows: dict[int, bytes] = {}  # `id` of a row, which the completions of a group share -> its pickle

    def row(self, row: Mapping[str, Any]) -> bytes:
        """The row's pickle; empty for an empty row. Raises what pickle raises."""
        if row and id(row) not in self._rows:
            self._rows[id(row)] = pickle.dumps(dict(row), 5)
        return self._rows[id(row)] if row else b""

    def finish(self) -> None:
        """Log failures and set the future's result, unless it is done or cancelled."""
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
    """It may have ended a process. From now on it is graded alone, so that if a process ends again, it is the cause."""
    was_lost: bool = False
    """It was open in an asynchronous process that has ended."""


def chunk_message(samples: Sequence[Queued], rows: Sequence[bytes], first: int = 0) -> bytes:
    """A chunk as it is sent to a process: the first sample's position and a list per field. Shared objects are in once.

    Args:
        rows: results of `Batch.row`; empty if the graders need neither row nor prompt.
    """
    tasks = [one.task for one in samples]
    texts = [one.completion for one in tasks], [one.answer for one in tasks]
    facts = [one.completion_tokens for one in tasks], [one.finish_reason for one in tasks]
    prompts = [one.prompt for one in tasks] if rows else []
    return pickle.dumps((first, *texts, *facts, rows, prompts), 5)


class Pace:
    """Limits gradings to `per_minute` in any 60 s, evenly spread, for judges that refuse or bill more. After a pause it
    allows at most a second's share at once, since judges also limit the rate per second.

    Args:
        per_minute: 0: no limit.
        clock: monotonic, in seconds.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = per_minute > 0, clock
        self._burst = max(1, int(per_minute / 60))
        # a burst, and then one every `_every_s`: `per_minute` in any minute
        self._every_s = 60 / (per_minute - self._burst + 1) if self._limits else 0.0
        self._full_at_s = clock()  # when a full burst is allowed again

    def free(self) -> int:
        """How many may begin now."""
        if not self._limits:
            return sys.maxsize
        taken_s = max(0.0, self._full_at_s - self._clock())
        return int(self._burst - taken_s / self._every_s + 1e-9)

    def take(self, count: int) -> None:
        """Count `count` gradings as begun; at most `free()`."""
        if self._limits:
            self._full_at_s = max(self._full_at_s, self._clock()) + count * self._every_s


class GradingQueue:
    """The queue of one pool. Lanes and callers share it."""

    def __init__(
        self,
        functions: Sequence[NamedFunction],
        *,
        processes: int = 1,
        one_if_many: bool = False,
        timeout_s: float = 30.0,
        memory_mb: int = 0,
        max_concurrent: int = 256,
        max_failures_in_a_row: int = 0,
        pace: Pace | None = None,
    ) -> None:
        self.functions = tuple(functions)
        self.num_processes, self._one_if_many = processes, one_if_many
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb
        self.max_concurrent = max_concurrent
        self._max_failures_in_a_row, self._failures_in_a_row = max_failures_in_a_row, 0
        self._pace = pace or Pace(0)
        self.sends_context = True
        """Whether any of the functions needs the row or the prompt; their processes report it when they start."""
        self.mode: Mode = "each"  # reported too
        self.has_started = False
        self.seconds_each = 0.001
        """Of a grading: a running geometric mean over the chunks, which one slow sample in a hundred barely moves."""
        self.reset()

    def reset(self) -> None:
        """Empty the queue and forget the lanes."""
        self._changed = threading.Condition()
        self._waiting: deque[Queued] = deque()
        self._lanes: list[Any] = []  # of `Lane`, whose module imports this one
        self.is_closing = False

    @property
    def key(self) -> str:
        """What the grader is called in messages: `reward.function = 'math'`."""
        first = self.functions[0].key
        return first if len(self.functions) == 1 else f"{first.rpartition('.functions.')[0]}.functions"

    def take(self, lane: Any) -> bool:
        """Wait for the next chunk, and store it in `lane.chunk`. False if the pool is being closed."""
        with self._changed:
            while not lane.chunk:
                self._changed.wait_for(lambda: self._waiting or self.is_closing)
                if self.is_closing:
                    return False
                if not self._pace.free():
                    self._changed.wait(LOOK_S)
                    continue
                chunk = self._next_chunk()
                cancelled = {batch for batch in {sample.batch for sample in chunk} if batch.future.done()}
                lane.chunk = [sample for sample in chunk if sample.batch not in cancelled]
        return True

    def take_more(self, lane: Any) -> list[Queued]:
        """More samples, as many as the lane has room for; none beside a suspect. Does not wait."""
        with self._changed:
            room = min(self.max_concurrent - len(lane.chunk), self._pace.free())
            if room <= 0 or not self._waiting or self._waiting[0].is_suspect or lane.chunk[0].is_suspect:
                return []
            more = [sample for sample in self._next_chunk(room) if not sample.batch.future.done()]
            lane.chunk += more
        return more

    def _next_chunk(self, room: int = 0) -> list[Queued]:
        waiting, free = self._waiting, 1 if room else sum(not lane.chunk for lane in self._lanes)
        if self.mode == "each":
            allowed = int(_CHUNK_S / self.seconds_each)
        elif self.mode == "batch":  # one call has the time limit of a single sample: a quarter of that
            allowed = min(self.max_concurrent, int(self.timeout_s / 4 / self.seconds_each))
        else:
            allowed = room or self.max_concurrent
        most = max(1, min(math.ceil(len(waiting) / free), allowed, self._pace.free()))
        chunk, size = [waiting.popleft()], 0
        while waiting and len(chunk) < most and not (chunk[0].is_suspect or waiting[0].is_suspect):
            size += len(waiting[0].task.completion)
            if size > _CHUNK_CHARACTERS:
                break
            chunk.append(waiting.popleft())
        self._pace.take(len(chunk))
        return chunk

    def put_back(self, samples: Sequence[Queued]) -> None:
        """Put samples back at the front of the queue."""
        with self._changed:
            self._waiting.extendleft(reversed(samples))
            self._changed.notify_all()

    def settle(self, samples: Sequence[Queued], grades: Sequence[Grade]) -> None:
        """Report grades. The first grade of a sample counts. After too many failures, all waiting samples fail too."""
        finished = list[Batch]()

        def keep(sample: Queued, grade: Grade) -> None:
            batch = sample.batch
            if batch.grades[sample.index] is None:
                batch.grades[sample.index] = grade
                batch.missing -= 1
                if not batch.missing:
                    finished.append(batch)

        with self._changed:
            for sample, grade in zip(samples, grades, strict=True):
                keep(sample, grade)
                self._failures_in_a_row = self._failures_in_a_row + 1 if grade.failure else 0
            # only with grades: lanes report none too, and what waits then may have come after the failures
            if grades and self._waiting and 0 < self._max_failures_in_a_row <= self._failures_in_a_row:
                why = f"was not tried after {self._failures_in_a_row} failures in a row (reward.max_failures_in_a_row)"
                while self._waiting:
                    keep(self._waiting.popleft(), failed(why))
                self._failures_in_a_row = 0
        for batch in finished:
            batch.finish()

    def leave(self, lane: Any, error: BaseException | None) -> None:
        """Remove a lane whose process cannot be started any more. If it was the last one, all waiting samples have
        failed; on an `error`, which the callers get, they have in any case."""
        with self._changed:
            if self.is_closing:
                return
            self._lanes.remove(lane)
            self._waiting.extendleft(reversed(lane.chunk))
            left = [] if self._lanes and not error else list(self._waiting)
            if left:
                self._waiting.clear()
        if error is None:
            self.settle(left, [failed("died (its process does not start any more)")] * len(left))
        for batch in {sample.batch for sample in left}:
            with suppress(InvalidStateError):
                batch.future.set_exception(error)
