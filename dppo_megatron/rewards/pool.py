"""Graders in processes that can be killed: one that hangs or crashes costs its sample, not the run.

Math graders parse what a model wrote, and some inputs make them run for ever or take their interpreter down. A hang
inside C code cannot be interrupted from within, so each sample has a deadline after which its process is killed and
replaced. Such a grading is a failure with a reason; it is never a reward of 0.

Samples of all calls wait in one queue. A lane is a thread with a process; it takes a chunk of samples, since most
gradings cost less than a message: as many as are about 20 ms of work at the speed seen so far. Each sample still has
its own deadline, by the board that the process keeps (`messages.py`). Those behind a slow sample of their chunk go back
to the front of the queue, so k hangs over p processes cost about ceil(k / p) timeouts:

    caller: submit ──▶ queue ──▶ lane ──▶ process     a lane waits for the queue, then for its process or a deadline
    caller: waits for the batch's future ◀── lane     the last grade of a batch completes it

    four samples, two lanes, timeout 1 s; h hangs, a to c do not
    chunks [h a] [b c]  ->  b, c done, a given back and done by the other lane, h given up after 1 s

If it is unclear which sample ended a process (it could not write its answers, say), the candidates are graded again one
at a time, and a sample that then ends a process alone is the cause. So a sample costs at most two processes, and no
mix of behaviours can repeat for ever.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from dppo_megatron.rewards.functions import NamedFunction
from dppo_megatron.rewards.grader_process import GraderProcess, NoAnswers
from dppo_megatron.rewards.measures import failed, log_failures
from dppo_megatron.rewards.messages import NONE, Answers, GraderReady, Message, NoStart
from dppo_megatron.types import Grade, GradeTask, UserError

_log = logging.getLogger(__name__)

_START_S = 120.0
"""How long a process may take to import the grader's module."""
_CHUNK_S = 0.02
"""Work in a chunk. Between two chunks a process waits for some 0.2 ms, 1 % of it."""
_CHUNK_BYTES = 4 << 20
"""Characters of the completions in a chunk, which is pickled and sent as a whole."""
_SLOW_S = 0.05
"""A sample that takes longer has those behind it taken away."""
_DYING_S = 0.5
"""Between the end of a process's pipe and its own."""
_STARTS = 3
"""Starts in a row that may fail, once one has succeeded, before a lane gives up."""
_GRADES = msgspec.msgpack.Decoder(list[Grade])
_NONSENSE = (NoAnswers, msgspec.MsgspecError, IndexError)
"""What a process that writes something else than answers can raise."""


class _Batch:
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
class _Sample:
    batch: _Batch
    index: int
    task: GradeTask
    is_suspect: bool = False
    """It may have ended a process: it is graded alone, and the next process that ends with it was ended by it."""


class Grader:
    """Processes that grade. They start when they are first needed. Any thread may call it.

    After a fork the child starts other processes.

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
        """Whether any of the functions asks for the row, as their processes report when they start."""
        self.has_started = False
        """Whether a process ever did."""
        self.seconds_each = 0.001
        """Of a grading: a running geometric mean over the chunks, which one slow sample in a hundred barely moves."""
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[_Sample] = deque()
        self._lanes: list[_Lane] = []
        self.is_closing = False

    @property
    def key(self) -> str:
        """What the grader is called in messages: `reward.function = 'math'`."""
        return self.functions[0].key if len(self.functions) == 1 else "reward.functions"

    @property
    def processes(self) -> list[GraderProcess]:
        """Those that run, at most `num_processes`."""
        return [lane.process for lane in self._lanes if lane.process is not None]

    def submit(self, tasks: Sequence[GradeTask]) -> Future[list[Grade]]:
        """One grade a task, in their order; where grading failed its reward is NaN and `failure` is the reason.

        The future raises UserError if no process has ever started and one does not: an import error, or a function that
        is no grader. Cancelling it drops what still waits.
        """
        self._leave_what_a_fork_copied()
        batch = _Batch(tasks)
        with self._changed:
            self._waiting.extend(_Sample(batch, index, task) for index, task in enumerate(tasks))
            free = sum(not lane.chunk for lane in self._lanes)
            for _ in range(min(self.num_processes - len(self._lanes), len(self._waiting) - free)):
                self._lanes.append(_Lane(self))
            self._changed.notify_all()
        if not tasks:
            batch.finish()
        return batch.future

    def grade(self, tasks: Sequence[GradeTask]) -> list[Grade]:
        """As `submit`, and waits."""
        future = self.submit(tasks)
        try:
            return future.result()
        finally:
            future.cancel()  # of a call that is broken off, by Control-C say

    def close(self) -> None:
        """End the processes and cancel what is not graded. Grading again starts others."""
        self._leave_what_a_fork_copied()
        with self._changed:
            self.is_closing = True
            self._changed.notify_all()
        for lane in self._lanes:
            lane.kill()
        for lane in self._lanes:
            lane.thread.join()
        for sample in self._waiting:
            sample.batch.future.cancel()
        self._reset()

    # ------------------------------------------------------------------------------------------- called by lanes

    def take(self, lane: _Lane) -> bool:
        """Wait for the next chunk, and give it to `lane`. False if the pool is being closed."""
        with self._changed:
            while not lane.chunk:
                self._changed.wait_for(lambda: self._waiting or self.is_closing)
                if self.is_closing:
                    return False
                chunk = self._next_chunk()
                over = {batch for batch in {sample.batch for sample in chunk} if batch.future.done()}  # cancelled
                lane.chunk = [sample for sample in chunk if sample.batch not in over]
        return True

    def _next_chunk(self) -> list[_Sample]:
        waiting, free = self._waiting, sum(not lane.chunk for lane in self._lanes)
        most = max(1, min(math.ceil(len(waiting) / free), int(_CHUNK_S / self.seconds_each)))
        chunk, size = [waiting.popleft()], 0
        while waiting and len(chunk) < most and not (chunk[0].is_suspect or waiting[0].is_suspect):
            size += len(waiting[0].task.completion)
            if size > _CHUNK_BYTES:
                break
            chunk.append(waiting.popleft())
        return chunk

    def put_back(self, samples: Sequence[_Sample]) -> None:
        """They are graded next."""
        with self._changed:
            self._waiting.extendleft(reversed(samples))
            self._changed.notify_all()

    def settle(self, samples: Sequence[_Sample], grades: Sequence[Grade]) -> None:
        """What came of each; the first grade of a sample counts."""
        finished = []
        with self._changed:
            for sample, grade in zip(samples, grades, strict=True):
                batch = sample.batch
                if batch.grades[sample.index] is None:
                    batch.grades[sample.index] = grade
                    batch.missing -= 1
                    if not batch.missing:
                        finished.append(batch)
        for batch in finished:
            batch.finish()

    def leave(self, lane: _Lane, error: BaseException | None) -> None:
        """A lane ends: its process cannot be started any more. With the last one all that waits has failed; with an
        error too, which the callers get."""
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

    def _leave_what_a_fork_copied(self) -> None:
        if self._owner != os.getpid():
            for process in self.processes:
                process.close()
            self._reset()


class _Lane:
    """A thread and its process, one after another: the kernel ends a process with the thread that has started it."""

    def __init__(self, pool: Grader) -> None:
        self._pool = pool
        self.process: GraderProcess | None = None
        self.chunk: list[_Sample] = []
        """What it has taken and neither settled nor put back; `Grader.take` fills it."""
        self.thread = threading.Thread(target=self._run, name="grades", daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """From another thread: end its process, whatever that is doing."""
        if (process := self.process) is not None:
            process.kill()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._start():
                while self.process is not None and self._pool.take(self):
                    self._grade(self.process)
        except BaseException as raised:  # else the callers would wait for ever
            error = raised
        self._discard()
        self._pool.leave(self, error)

    def _start(self) -> bool:
        """Whether a process is ready. Raises UserError if none has started before: then it is the grader, and not the
        machine."""
        pool = self._pool
        for _ in range(_STARTS):
            self._discard()
            try:
                problem = self._wait_ready()
            except OSError as error:  # no memory, no files or no processes left: the next call may find some
                if not pool.has_started:
                    raise UserError(f"{pool.key}: no process can be started for it: {error}") from None
                _log.error("no grader process can be started: %s", error)
                return False
            if pool.is_closing or not problem:
                return not pool.is_closing
            if not pool.has_started:
                raise UserError(f"{problem}; its output, if any, is above")
            _log.error("%s; it has started before", problem)
        return False

    def _wait_ready(self) -> str:
        """Start it; what went wrong, or nothing. Raises OSError."""
        pool = self._pool
        self.process = process = GraderProcess(pool.functions, pool.memory_mb)
        if pool.is_closing:  # `kill` came before there was a process
            process.kill()
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            how = ""
            try:
                messages = process.wait(deadline)
            except NoAnswers as error:
                messages, how = None, f"it wrote something else than answers: {error}"
            if messages is None:
                how = how or process.end(_DYING_S) or "its pipe was closed"
                return f"{pool.key}: its process died ({how}) before it was ready"
            for message in messages:
                if isinstance(message, NoStart):
                    return message.text
                if isinstance(message, GraderReady):
                    pool.has_started, pool.sends_rows = True, message.wants_row
                    return ""
        return f"{pool.key}: its process was not ready after {_START_S:g} s"

    def _discard(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.end()
            process.close()

    # --------------------------------------------------------------------------------------------- one chunk

    def _grade(self, process: GraderProcess) -> None:
        """Have it grade the chunk; what it does not get done waits again, or has failed."""
        if not self._give(process):
            return
        timeout_s = self._pool.timeout_s
        while self.chunk and self.process is process:
            now, at, since_s = time.monotonic(), process.at, process.since_s
            if now >= since_s + timeout_s:
                self._time_out(process, at, since_s)
                return
            if at != NONE and at + 1 < len(self.chunk) and now >= since_s + _SLOW_S:
                process.keep(at + 1)
                self._pool.put_back(self.chunk[at + 1 :])
                del self.chunk[at + 1 :]
            until_s = since_s + timeout_s
            if len(self.chunk) > process.answered + 1:
                until_s = min(until_s, now + _SLOW_S)
            try:
                messages = process.wait(until_s)
                for message in messages or []:
                    self._receive(process, message)
            except _NONSENSE as error:
                self._lost(process, f"died (it wrote something else than answers: {error})", at=NONE)
                return
            if messages is None:
                how = process.end(_DYING_S)
                # asked after its end: one whose pipe has closed may still be at work. What is killed for that is at a
                # sample that need not be the one that closed it.
                self._lost(process, f"died ({how or 'its pipe was closed'})", at=process.at if how else NONE)

    def _give(self, process: GraderProcess) -> bool:
        """Send the chunk; whether anything was sent. What cannot be has failed."""
        pool, rows = self._pool, list[bytes]()
        if pool.sends_rows:
            for sample in self.chunk.copy():
                try:
                    rows.append(sample.batch.row(sample.task.row))
                except Exception as error:
                    self.chunk.remove(sample)
                    pool.settle([sample], [failed(f"raised {type(error).__name__}: its row cannot be sent: {error}")])
        # what several samples share, a row or a reference, is in the pickle once
        texts = [one.task.completion for one in self.chunk], [one.task.answer for one in self.chunk]
        try:
            process.give(len(self.chunk), pickle.dumps((*texts, rows), 5))
        except ValueError as error:  # too long, together or alone
            chunk, self.chunk = self.chunk, []
            for sample in chunk:
                sample.is_suspect = True  # so each is sent alone
            if chunk[1:]:
                pool.put_back(chunk)
            else:
                pool.settle(chunk, [failed(f"raised ValueError: it cannot be sent: {error}")])
        return bool(self.chunk)

    def _receive(self, process: GraderProcess, message: Message) -> None:
        """Raises `_NONSENSE`."""
        if not isinstance(message, Answers):
            raise NoAnswers(f"{type(message).__name__} in place of answers")
        grades = _GRADES.decode(message.grades)
        spent = grades.pop() if message.out_of_memory else None
        samples = self.chunk[process.answered : process.answered + len(grades)]
        self._pool.settle(samples, grades[: len(samples)])  # a sample begun as it was put back may be among them
        process.answered += len(samples)
        process.is_fresh = process.is_fresh and not grades
        if spent is not None:
            self._out_of_memory(process, spent.failure)
        elif message.took_s is not None:
            if process.answered < len(self.chunk):
                raise NoAnswers("fewer answers than samples")
            each_s = message.took_s / len(self.chunk)
            self._pool.seconds_each = max(1e-6, math.sqrt(self._pool.seconds_each * each_s))
            self.chunk = []

    # --------------------------------------------------------------------------------------- what goes wrong

    def _time_out(self, process: GraderProcess, at: int, since_s: float) -> None:
        process.end()
        try:
            for message in process.wait(0.0) or []:  # what it wrote before it was killed
                self._receive(process, message)
        except _NONSENSE:
            at = NONE
        if self.process is None:  # it ran out of memory at last
            return
        moved = (process.at, process.since_s) != (at, since_s)
        self._lost(process, f"timed out after {self._pool.timeout_s:g} s", at=NONE if moved else at)

    def _lost(self, process: GraderProcess, why: str, *, at: int) -> None:
        """The process has died, was killed or is not understood: blame the sample `at` this position, if that is
        certain, and let the others wait again."""
        chunk, first, self.chunk = self.chunk, process.answered, []
        self._discard()
        if self._pool.is_closing:
            self._pool.put_back(chunk)
            return
        doubtful = chunk[first : max(process.begun, first + 1)] if at == NONE else []
        blamed = [sample for sample in doubtful if sample.is_suspect] if at == NONE else [chunk[at]]
        for sample in doubtful:
            sample.is_suspect = True
        self._pool.settle(blamed, [failed(why)] * len(blamed))
        self._pool.put_back([sample for sample in chunk[first:] if sample not in blamed])

    def _out_of_memory(self, process: GraderProcess, failure: str) -> None:
        """A sample that has had a process to itself is to blame; else it is tried in a new one, since others may have
        filled this one's memory."""
        mine, behind = self.chunk[process.answered :][:1], self.chunk[process.answered + 1 :]
        self.chunk = []
        self._discard()
        self._pool.put_back(behind)
        if process.is_fresh:
            reason = f"{failure}, above reward.memory_mb = {self._pool.memory_mb}"
            self._pool.settle(mine, [failed(reason)] * len(mine))
        else:
            self.chunk = mine
