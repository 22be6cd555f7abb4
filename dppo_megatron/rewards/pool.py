"""Graders in processes that can be killed: one that hangs or crashes costs its sample, not the run.

Math graders parse what a model wrote, and some inputs make them run for ever or take their interpreter down. A hang
inside C code cannot be interrupted from within, so each sample has a deadline after which its process is killed and
replaced. Such a grading is a failure with a reason; it is never a reward of 0.

Samples go out in chunks, since most gradings cost less than a message: a chunk is as long as about 5 ms of work at the
speed seen so far. Each sample still has its own deadline, by the board that the process keeps (`wire.py`). Samples
queued after a slow one in its chunk are not charged with its time: they go to an idle process, or else to the process
that replaces the killed one. So k hangs over p processes cost about ceil(k / p) timeouts:

    four samples, two processes, timeout 1 s; h hangs, a to c do not
    chunks [h a] [b c]  ->  b, c done, a taken from behind h and done, h given up after 1 s

If it is unclear which sample ended a process (it could not write its answers, say), the candidates are graded again one
at a time, and a sample that then ends a process alone is the cause. So a sample costs at most two processes, and no
mix of behaviours can repeat for ever.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import pickle
import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dppo_megatron.rewards.functions import NamedFunction
from dppo_megatron.rewards.process import START_S, GraderProcess, NoAnswers
from dppo_megatron.rewards.wire import NOBODY
from dppo_megatron.types import Grade, UserError

_log = logging.getLogger(__name__)

_CHUNK_S = 0.005
"""Work in a chunk. A round trip costs some 0.1 ms, so 2 % of it."""
_CHUNK_BYTES = 4 << 20
_SLOW_S = 0.05
"""A sample that takes longer has those behind it taken away when another process is idle."""
_DYING_S = 0.5
"""Between the end of a process's pipe and its own."""
_STARTS = 3
"""Starts that may fail in one call, once one has succeeded, before a process is given up."""
_SHOWN = 5
"""Failures of one call that are logged one by one, if they differ."""


@dataclass(frozen=True, slots=True)
class GradeTask:
    """One completion to grade."""

    completion: str
    answer: str
    """The reference."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The other fields of the problem's row; sent only to graders that ask for it."""
    label: str = ""
    """Names it in the log."""


class GraderPool:
    """Processes that grade. They start when they are first needed.

    Several threads may call `grade`; calls take turns. After a fork the child has processes of its own.

    Args:
        functions: the grader, or several whose weighted sum is the reward.
        processes: how many grade at a time.
        timeout_s: of one sample, all functions together.
        memory_mb: that a process may take beyond what it starts with; 0: no limit.
    """

    def __init__(
        self,
        functions: Sequence[NamedFunction],
        *,
        processes: int = 1,
        timeout_s: float = 30.0,
        memory_mb: int = 0,
    ) -> None:
        self.functions = tuple(functions)
        self.num_processes = processes
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb
        self.sends_rows = True
        """Whether any of the functions asks for the row; as their processes say when they start."""
        self.has_started = False
        """Whether a process ever did."""
        self.seconds_each = 0.001
        """Of a grading, by the chunks so far."""
        self.processes: list[GraderProcess] = []
        """Those that have been started, at most `num_processes`."""
        self._lock = threading.Lock()
        self._owner, self._starter = os.getpid(), _starter()

    @property
    def key(self) -> str:
        """What the grader is called in messages: `reward.function = 'math'`."""
        return self.functions[0].key if len(self.functions) == 1 else "reward.functions"

    def grade(self, tasks: Sequence[GradeTask]) -> list[Grade]:
        """One grade a task, in their order; where grading failed its reward is NaN and `failure` says why.

        Raises:
            UserError: the first process does not start: an import error, or a function that is no grader.
        """
        with self._lock:
            self._leave_what_a_fork_copied()
            call = _Call(self, self.processes, tasks)
            try:
                call.run()
            finally:  # what still has samples of its own has them from a call that was broken off
                for process in [one for one in self.processes if one.owned > one.answered or not self.has_started]:
                    process.release()
                    self.processes.remove(process)
            grades = [grade for grade in call.outcomes if grade is not None]
            assert len(grades) == len(tasks)
        _log_failures(tasks, grades)
        return grades

    def close(self) -> None:
        """End the processes. Grading again starts others."""
        with self._lock:
            self._leave_what_a_fork_copied()
            for process in self.processes:
                process.release()
            self.processes.clear()

    def start(self, process: GraderProcess) -> None:
        """Start it in the thread of all starts: the kernel ends a process with the thread that has started it, and the
        one that grades may end before the pool. Raises OSError: the machine has no room for it."""
        self._starter.submit(process.start).result()

    def _leave_what_a_fork_copied(self) -> None:
        if self._owner != os.getpid():
            for process in self.processes:
                process.forget()
            self.processes, self._owner, self._starter = [], os.getpid(), _starter()


def _starter() -> ThreadPoolExecutor:
    """One thread, which lives as long as this process."""
    return ThreadPoolExecutor(1, thread_name_prefix="grader starts")


class _Call:
    """One call of `grade`: which samples wait, and what has become of the others."""

    def __init__(self, pool: GraderPool, processes: list[GraderProcess], tasks: Sequence[GradeTask]) -> None:
        self._pool = pool
        self._processes = processes
        self._tasks = tasks
        self.outcomes: list[Grade | None] = [None] * len(tasks)
        self._missing = len(tasks)
        self._waiting = deque(range(len(tasks)))
        self._alone: deque[int] = deque()
        """Samples that may have ended a process: graded one at a time."""
        self._suspects: set[int] = set()
        """All that ever were in `_alone`: the next process that ends with one of them was ended by it."""
        self._failed_starts = 0

    def run(self) -> None:
        """Fill `outcomes`."""
        pool = self._pool
        while self._missing:
            wanted = min(pool.num_processes, self._missing) if self._failed_starts < _STARTS else 0
            while len(self._processes) < wanted and self._start(GraderProcess(pool.functions, pool.memory_mb)):
                pass
            if not self._processes:
                for sample in range(len(self._tasks)):
                    self._settle(sample, _failed("died (its process does not start any more)"))
                return
            self._hand_out()
            for process in self._wait():
                self._receive(process)
            now = time.monotonic()
            for process in list(self._processes):
                if not process.idle and now >= process.deadline_s(pool.timeout_s):
                    self._give_up(process)

    # ------------------------------------------------------------------------------------------------ giving

    def _hand_out(self) -> None:
        for process in self._processes:
            if not process.idle:
                continue
            if not self._waiting and not self._alone:
                self._take_from_the_slow()
            if self._alone:
                self._give(process, [self._alone.popleft()])
            elif self._waiting:
                by_speed = int(_CHUNK_S / self._pool.seconds_each)
                fair = math.ceil(len(self._waiting) / len(self._processes))
                self._give(process, self._next_chunk(max(1, min(by_speed, fair))))

    def _next_chunk(self, most: int) -> list[int]:
        waiting, tasks = self._waiting, self._tasks
        chunk: list[int] = []
        left = _CHUNK_BYTES
        for _ in range(min(most, len(waiting))):
            sample = waiting.popleft()
            chunk.append(sample)
            left -= len(tasks[sample].completion)
            if left <= 0:
                break
        return chunk

    def _give(self, process: GraderProcess, samples: Sequence[int]) -> None:
        given, payloads = [], []
        for sample in samples:
            task = self._tasks[sample]
            row = dict(task.row) if self._pool.sends_rows else None
            try:
                # each by itself: what a grader does to a row is not seen by the next one
                payloads.append(pickle.dumps((task.completion, task.answer, row), 5))
                given.append(sample)
            except Exception as error:
                self._settle(sample, _failed(f"raised {type(error).__name__}: its row cannot be sent: {error}"))
        if given:
            process.give(given, payloads)

    def _take_from_the_slow(self) -> None:
        """Let samples that stand behind a slow one wait for the idle instead."""
        behind = [process for process in self._processes if self._slow_at(process) is not None]
        if behind:
            process = max(behind, key=lambda one: one.owned - one.at)
            self._waiting.extend(process.keep(process.at + 1))

    def _slow_at(self, process: GraderProcess) -> float | None:
        """When its sample became slow, if it has and others stand behind it."""
        at = process.at
        slow_s = process.since_s + _SLOW_S
        return slow_s if at != NOBODY and at + 1 < process.owned and time.monotonic() >= slow_s else None

    # ----------------------------------------------------------------------------------------------- waiting

    def _wait(self) -> list[GraderProcess]:
        """The processes of which something may be heard, or that have died; none where a deadline comes first."""
        timeouts = [process.deadline_s(self._pool.timeout_s) for process in self._processes if not process.idle]
        now = time.monotonic()
        if any(process.idle for process in self._processes):
            slow = [p.since_s + _SLOW_S for p in self._processes if p.owned - p.answered > 1]
            timeouts += [max(when, now + _SLOW_S / 5) for when in slow]
        with selectors.PollSelector() as selector:
            for process in self._processes:
                selector.register(process.answers, selectors.EVENT_READ, process)
                if process.wants_to_write:
                    selector.register(process.requests, selectors.EVENT_WRITE, process)
                if process.death is not None:
                    selector.register(process.death, selectors.EVENT_READ, process)
            left = min(timeouts, default=0.0) - now
            heard = {id(key.data): key.data for key, _ in selector.select(max(0.0, left))}
        return list(heard.values())

    def _receive(self, process: GraderProcess) -> None:
        process.pump()
        try:
            messages = process.receive()
            for message in messages or []:
                self._take(process, message)
        except (NoAnswers, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self._lost(process, f"died (it wrote something else than answers: {error})", at=NOBODY)
            return
        if messages is None:
            how = process.end(_DYING_S)
            # asked after its end: one whose pipe has closed may still be at work. What is killed for that is at a
            # sample that need not be the one that closed it.
            at = process.at if how else NOBODY
            self._lost(process, f"died ({how or 'its pipe was closed'})", at=at)

    def _take(self, process: GraderProcess, message: dict[str, Any]) -> None:
        """A message of a process."""
        pool = self._pool
        if "error" in message:
            self._start_failed(process, str(message["error"]))
            return
        if "ready" in message:
            process.ready = pool.has_started = True
            pool.sends_rows = bool(message["rows"])
            return
        chunk, owned, facts = process.chunk, process.owned, message.get("facts", [])
        for answer in message["answers"]:
            sample = chunk[process.answered]
            if type(answer) is dict and "memory" in answer:
                self._out_of_memory(process, sample, answer)
                return
            grade = _grade(answer, facts)
            if process.answered < owned:
                self._settle(sample, grade)
            process.answered += 1
            process.graded += 1
        if "took_s" in message:
            if process.answered == len(process.chunk):
                each = float(message["took_s"]) / len(process.chunk)
                # the geometric mean, for which one slow sample in a hundred fast ones is no revolution
                pool.seconds_each = max(1e-6, math.sqrt(pool.seconds_each * each))
            missing = process.chunk[process.answered : process.owned]
            process.chunk = []
            self._waiting.extendleft(reversed(missing))

    # -------------------------------------------------------------------------------------- what goes wrong

    def _give_up(self, process: GraderProcess) -> None:
        """Its sample, or its start, has taken too long."""
        if not process.ready:
            self._start_failed(process, f"{self._pool.key}: its process was not ready after {START_S:g} s")
            return
        at, since_s = process.at, process.since_s
        process.end()
        try:
            for message in process.receive() or []:  # what it said before it was killed
                self._take(process, message)
        except (NoAnswers, KeyError, TypeError, ValueError, AttributeError, IndexError):
            at = NOBODY
        if not process.ready:  # its last words were of its memory, and it has been replaced
            return
        moved = (process.at, process.since_s) != (at, since_s)
        self._lost(process, f"timed out after {self._pool.timeout_s:g} s", at=NOBODY if moved else at)

    def _lost(self, process: GraderProcess, why: str, *, at: int) -> None:
        """A process has died, was killed or is not understood: blame a sample, spare the others, start afresh.

        Args:
            at: position in its chunk of the sample that is to blame; NOBODY if that is not certain.
        """
        if not process.ready:
            self._start_failed(process, f"{self._pool.key}: its process {why} before it was ready")
            return
        process.end()
        first, end = process.answered, process.owned
        if at != NOBODY:  # at `end` it was at a sample that had been taken from it
            blamed = process.chunk[at : min(at + 1, end)]
            spared = process.chunk[first:at] + process.chunk[at + 1 : end]
        else:
            last = min(max(process.begun, first + 1), end)
            blamed = [sample for sample in process.chunk[first:last] if sample in self._suspects]
            suspects = [sample for sample in process.chunk[first:last] if sample not in self._suspects]
            spared = process.chunk[last:end]
            self._suspects.update(suspects)
            self._alone.extend(suspects)
        for sample in blamed:
            self._settle(sample, _failed(why))
        self._waiting.extendleft(reversed(spared))
        process.forget()
        self._start(process)

    def _out_of_memory(self, process: GraderProcess, sample: int, answer: dict[str, Any]) -> None:
        """A sample that has had a process to itself is to blame; else it is tried in a new one, since others may have
        filled this one's memory."""
        left = process.chunk[process.answered + 1 : process.owned]
        mine = process.answered < process.owned
        fresh = process.graded == 0
        process.release()
        self._waiting.extendleft(reversed(left))
        if mine and fresh:
            self._settle(sample, _failed(f"{answer['failure']}, above reward.memory_mb = {self._pool.memory_mb}"))
        started = self._start(process)
        if mine and not fresh and started:
            self._give(process, [sample])
        elif mine and not fresh:
            self._waiting.appendleft(sample)

    def _start_failed(self, process: GraderProcess, why: str) -> None:
        """Raises UserError if none has started before: then it is the grader, and not the machine."""
        process.end()
        if not self._pool.has_started:
            raise UserError(f"{why}; what it wrote, if anything, stands above")
        self._failed_starts += 1
        _log.error("%s; it has started before", why)
        self._waiting.extendleft(reversed(process.chunk[process.answered : process.owned]))
        process.forget()
        self._start(process)

    def _start(self, process: GraderProcess) -> bool:
        """Start it, for the first time or again; a process that cannot be started any more leaves the pool."""
        try:
            if self._failed_starts < _STARTS:
                self._pool.start(process)
                self._processes += [process] * (process not in self._processes)
                return True
        except OSError as error:  # no memory, no files or no processes left: the next call may find some
            if not self._pool.has_started:
                raise UserError(f"{self._pool.key}: no process can be started for it: {error}") from None
            self._failed_starts = _STARTS
            _log.error("no grader process can be started: %s", error)
        self._processes[:] = [one for one in self._processes if one is not process]
        return False

    def _settle(self, sample: int, grade: Grade) -> None:
        if self.outcomes[sample] is None:
            self.outcomes[sample] = grade
            self._missing -= 1


def _grade(answer: Any, facts: Sequence[Any]) -> Grade:
    """What a process says of a sample, as a Grade; `facts` are those of its message (`wire.packed`)."""
    if type(answer) is list:
        reward, extracted, why, place = answer
        if type(facts[place]) is not dict:
            raise TypeError("facts that are no mapping")
        return Grade(float(reward), extracted, why, facts[place])
    if type(answer) is not dict:
        return Grade(float(answer))
    if "failure" in answer:
        return _failed(str(answer["failure"]), str(answer.get("trace", "")))
    own, parts = answer.get("facts", {}), answer.get("parts", {})
    if type(own) is not dict or type(parts) is not dict:
        raise TypeError("facts that are no mapping")
    return Grade(float(answer["reward"]), answer.get("extracted"), answer.get("why", ""), own, parts)


def _failed(why: str, trace: str = "") -> Grade:
    return Grade(math.nan, why=trace, failure=why)


def _log_failures(tasks: Sequence[GradeTask], grades: Sequence[Grade]) -> None:
    """The first few that differ, each with a label and its traceback; the others as a count of each kind."""
    shown: set[str] = set()
    others: collections.Counter[str] = collections.Counter()
    for task, grade in zip(tasks, grades, strict=True):
        if not grade.failure:
            continue
        if grade.failure in shown or len(shown) == _SHOWN:
            others[grade.failure.split(":")[0]] += 1
            continue
        shown.add(grade.failure)
        _log.error("grading %s %s%s", task.label or "a sample", grade.failure, f"\n{grade.why}" if grade.why else "")
    if others:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in others.most_common(5))
        _log.error("and %d gradings more: %s", sum(others.values()), kinds)
