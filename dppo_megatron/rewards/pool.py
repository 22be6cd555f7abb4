"""Graders in processes that can be killed: one that hangs or crashes costs its sample, not the run.

Math graders parse what a model wrote, and some inputs make them run for ever or take their interpreter down. A hang
inside C code cannot be interrupted from within, so each sample has a deadline after which its process is killed and
replaced. Such a grading is a failure with a reason; it is never a reward of 0.

Samples go out in chunks, since most gradings cost less than a message: a chunk is as long as about 20 ms of work at the
speed seen so far. Each sample still has its own deadline, by the board that the process keeps (`wire.py`). Samples
queued after a slow one in its chunk are not charged with its time: they go to an idle process, or else to the process
that replaces the killed one. So k hangs over p processes cost about ceil(k / p) timeouts:

    four samples, two processes, timeout 1 s; h hangs, a to c do not
    chunks [h a] [b c]  ->  b, c done, a taken from behind h and done, h given up after 1 s

When a sample has used half of its time a second process is started beside its own, so that whoever comes after it need
not wait for a start.

If it is unclear which sample ended a process (it could not write its answers, say), the candidates are graded again one
at a time, and a sample that then ends a process alone is the cause. So a sample costs at most two processes, and no
mix of behaviours can repeat for ever.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import select
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dppo_megatron.rewards.failures import failed, log_failures
from dppo_megatron.rewards.functions import NamedFunction
from dppo_megatron.rewards.process import START_S, GraderProcess, NoAnswers
from dppo_megatron.rewards.wire import NOBODY, Answers, Message, NoStart, Ready
from dppo_megatron.types import Grade, UserError

_log = logging.getLogger(__name__)

_CHUNK_S = 0.02
"""Work in a chunk. Between two chunks a process waits for some 0.2 ms, 1 % of it."""
_CHUNK_BYTES = 4 << 20
_WORTH_TAKING_S = 0.002
"""Work that one process has before it, of which an idle one takes half."""
_SLOW_S = 0.05
"""A sample that takes longer has those behind it taken away when another process is idle."""
_DYING_S = 0.5
"""Between the end of a process's pipe and its own."""
_STARTS = 3
"""Starts that may fail in one call, once one has succeeded, before a process is given up."""
_GRADES = msgspec.msgpack.Decoder(list[Grade])
_NONSENSE = (NoAnswers, msgspec.MsgspecError, IndexError)
"""What a process that writes something else than answers can raise."""


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
        log_failures(_log, [task.label for task in tasks], grades)
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
        self._rows: dict[int, bytes] = {}
        """Identity of a row -> as it is sent: the completions of a group share theirs."""

    def run(self) -> None:
        """Fill `outcomes`."""
        pool = self._pool
        while self._missing:
            wanted = min(pool.num_processes, self._missing) if self._failed_starts < _STARTS else 0
            while len(self._processes) < wanted and self._start(GraderProcess(pool.functions, pool.memory_mb)):
                pass
            if not self._processes:
                for sample in range(len(self._tasks)):
                    self._settle(sample, failed("died (its process does not start any more)"))
                return
            self._hand_out()
            for process in self._wait():
                self._receive(process)
            now = time.monotonic()
            for process in [one for one in self._processes if not one.idle]:
                if now >= process.deadline_s(pool.timeout_s):
                    self._give_up(process)
                elif now >= process.needs_successor_s(pool.timeout_s):
                    self._prepare_successor(process)

    # ------------------------------------------------------------------------------------------------ giving

    def _hand_out(self) -> None:
        idle = [process for process in self._processes if process.idle]
        for number, process in enumerate(idle):
            if not self._waiting and not self._alone:
                self._take_from_the_busy()
            if self._alone:
                self._give(process, [self._alone.popleft()])
            elif self._waiting:
                self._give(process, self._next_chunk(len(idle) - number))

    def _next_chunk(self, sharers: int) -> list[int]:
        """For one of `sharers` idle processes."""
        waiting, tasks = self._waiting, self._tasks
        most = math.ceil(len(waiting) / sharers)
        if len(self._processes) > 1:  # who has no neighbour may have it all
            most = max(1, min(most, int(_CHUNK_S / self._pool.seconds_each)))
        chunk: list[int] = []
        left = _CHUNK_BYTES
        for _ in range(most):
            sample = waiting.popleft()
            chunk.append(sample)
            left -= len(tasks[sample].completion)
            if left <= 0:
                break
        return chunk

    def _give(self, process: GraderProcess, samples: Sequence[int]) -> None:
        tasks, rows = self._tasks, None
        if self._pool.sends_rows:
            found = [(sample, self._row(sample)) for sample in samples]
            samples = [sample for sample, row in found if row is not None]
            rows = [row for _, row in found if row is not None]
        if samples:
            # what several samples share, a row or a reference, is in the pickle once
            texts = [tasks[sample].completion for sample in samples], [tasks[sample].answer for sample in samples]
            process.give(samples, pickle.dumps((*texts, rows), 5))

    def _row(self, sample: int) -> bytes | None:
        """A sample's row as it is sent, nothing for an empty one; None if it cannot be, and the sample has failed."""
        row = self._tasks[sample].row
        if not row:
            return b""
        if id(row) not in self._rows:
            try:
                self._rows[id(row)] = pickle.dumps(dict(row), 5)
            except Exception as error:
                self._settle(sample, failed(f"raised {type(error).__name__}: its row cannot be sent: {error}"))
                return None
        return self._rows[id(row)]

    def _take_from_the_busy(self) -> None:
        """Let samples that stand behind a slow one wait for the idle instead, or half of those that another process has
        before it, if they are worth the messages."""
        busy = [process for process in self._processes if process.ready and process.owned > process.begun]
        if not busy:
            return
        process = max(busy, key=lambda one: (self._slow_at(one) is not None, one.owned - one.begun))
        left, at = process.owned - process.begun, self._slow_at(process)
        if at is not None:
            self._waiting.extend(process.keep(at + 1))
        elif left * self._pool.seconds_each > _WORTH_TAKING_S:
            self._waiting.extend(process.keep(process.owned - left // 2))

    def _slow_at(self, process: GraderProcess) -> int | None:
        """Position of its sample, if that is slow and others stand behind it. Read once: the process moves on."""
        at = process.at
        is_slow = at != NOBODY and at + 1 < process.owned and time.monotonic() >= process.since_s + _SLOW_S
        return at if is_slow else None

    # ----------------------------------------------------------------------------------------------- waiting

    def _wait(self) -> list[GraderProcess]:
        """The processes of which something may be heard, or that have died; none where a deadline comes first."""
        limit_s = self._pool.timeout_s
        busy = [process for process in self._processes if not process.idle]
        timeouts = [min(one.deadline_s(limit_s), one.needs_successor_s(limit_s)) for one in busy]
        now = time.monotonic()
        if len(busy) < len(self._processes):
            slow = [p.since_s + _SLOW_S for p in busy if p.owned - p.answered > 1]
            timeouts += [max(when, now + _SLOW_S / 5) for when in slow]
        poll = select.poll()
        of_file: dict[int, GraderProcess] = {}
        for process in self._processes:
            for file, events in process.watched:
                poll.register(file, events)
                of_file[file] = process
        left_s = max(0.0, min(timeouts, default=0.0) - now)
        heard = {of_file[file] for file, _ in poll.poll(math.ceil(1e3 * left_s))}
        return [process for process in self._processes if process in heard]

    def _receive(self, process: GraderProcess) -> None:
        process.pump()
        try:
            messages = process.receive()
            for message in messages or []:
                self._take(process, message)
        except _NONSENSE as error:
            self._lost(process, f"died (it wrote something else than answers: {error})", at=NOBODY)
            return
        if messages is None:
            how = process.end(_DYING_S)
            # asked after its end: one whose pipe has closed may still be at work. What is killed for that is at a
            # sample that need not be the one that closed it.
            at = process.at if how else NOBODY
            self._lost(process, f"died ({how or 'its pipe was closed'})", at=at)

    def _take(self, process: GraderProcess, message: Message) -> None:
        """A message of a process."""
        pool = self._pool
        if isinstance(message, NoStart):
            self._start_failed(process, message.text)
        elif isinstance(message, Ready):
            process.ready = pool.has_started = True
            pool.sends_rows = message.wants_row
        else:
            self._take_answers(process, message)

    def _take_answers(self, process: GraderProcess, message: Answers) -> None:
        grades = _GRADES.decode(message.grades)
        if process.answered + len(grades) > len(process.chunk):
            raise NoAnswers("more answers than samples")
        spent = grades.pop() if message.out_of_memory else None
        for sample, grade in zip(process.chunk[process.answered : process.owned], grades, strict=False):
            self._settle(sample, grade)
        process.answered += len(grades)
        process.graded += len(grades)
        if spent is not None:
            self._out_of_memory(process, process.chunk[process.answered], spent.failure)
        elif message.took_s is not None:
            if process.answered:
                each = message.took_s / process.answered
                # the geometric mean, for which one slow sample in a hundred fast ones is no revolution
                self._pool.seconds_each = max(1e-6, math.sqrt(self._pool.seconds_each * each))
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
        except _NONSENSE:
            at = NOBODY
        if process not in self._processes or not process.ready:  # its last words were of its memory: it is replaced
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
            self._settle(sample, failed(why))
        self._waiting.extendleft(reversed(spared))
        self._replace(process)

    def _out_of_memory(self, process: GraderProcess, sample: int, failure: str) -> None:
        """A sample that has had a process to itself is to blame; else it is tried in a new one, since others may have
        filled this one's memory."""
        left = process.chunk[process.answered + 1 : process.owned]
        mine = process.answered < process.owned
        fresh = process.graded == 0
        process.end()
        self._waiting.extendleft(reversed(left))
        if mine and fresh:
            self._settle(sample, failed(f"{failure}, above reward.memory_mb = {self._pool.memory_mb}"))
        successor = self._replace(process)
        if mine and not fresh and successor is not None:
            self._give(successor, [sample])
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
        self._replace(process)

    def _prepare_successor(self, process: GraderProcess) -> None:
        """It may have to be killed soon."""
        process.slow_since_s = process.since_s
        successor = GraderProcess(self._pool.functions, self._pool.memory_mb)
        with contextlib.suppress(OSError):  # no room for it: then it is started when it is needed, if there is room
            self._pool.start(successor)
            process.successor = successor

    def _replace(self, process: GraderProcess) -> GraderProcess | None:
        """Another one for a process that has ended, if there can be one."""
        successor, process.successor = process.successor, None
        process.forget()
        if successor is None:
            return process if self._start(process) else None
        successor.progress_s = time.monotonic()  # its word that it is ready may have lain unread since it was started
        self._processes[self._processes.index(process)] = successor
        return successor

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
