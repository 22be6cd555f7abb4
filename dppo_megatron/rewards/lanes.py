"""A lane: a thread with a grader process, what it gives to it, and what becomes of a sample when that goes wrong.

What waits for what, and who is blamed: `pool.py`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

import msgspec

from dppo_megatron.rewards.grader_process import GraderProcess, NoAnswers
from dppo_megatron.rewards.measures import failed
from dppo_megatron.rewards.messages import NONE, Answers, GraderReady, Message, NoStart
from dppo_megatron.rewards.work import LOOK_S, GradingQueue, Queued, chunk_message
from dppo_megatron.types import Grade, UserError

_log = logging.getLogger(__name__)

_START_S = 120.0
"""How long a process may take to import the grader's module."""
_SLOW_S = 0.05
"""A sample that takes longer has those behind it taken away."""
_DYING_S = 0.5
"""Between the end of a process's pipe and its own."""
_STARTS = 3
"""Starts in a row that may fail, once one has succeeded, before a lane gives up."""
_LATE_S = 5.0
"""After twice the time limit, for the answer of a process that keeps deadlines itself: a busy machine is no fault."""
_GRADES = msgspec.msgpack.Decoder(list[Grade])
_NONSENSE = (NoAnswers, msgspec.MsgspecError, IndexError)
"""What a process that writes something else than answers can raise."""


class Lane:
    """A thread and its process, one after another: the kernel ends a process with the thread that has started it."""

    def __init__(self, pool: GradingQueue) -> None:
        self._pool = pool
        self.process: GraderProcess | None = None
        self.chunk: list[Queued] = []
        """What it has taken and neither settled nor put back; `GradingQueue.take` fills it."""
        self._open: dict[int, tuple[Queued, float]] = {}
        """Of an asynchronous process: position -> what it is grading there, and until when to wait for the answer."""
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
                    (self._grade_open if self._pool.mode == "async" else self._grade)(self.process)
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
        self.process = process = GraderProcess(pool.functions, pool.memory_mb, pool.timeout_s)
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
                    pool.has_started, pool.sends_context, pool.mode = True, message.wants_context, message.mode
                    return ""
        return f"{pool.key}: its process was not ready after {_START_S:g} s"

    def _discard(self) -> None:
        process, self.process = self.process, None
        self._open.clear()
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
        rows = self._rows(self.chunk)
        if not self.chunk:
            return False
        try:
            process.give(len(self.chunk), chunk_message(self.chunk, rows))
        except ValueError as error:  # too long, together or alone
            self._cannot_send(self.chunk, error)
            self.chunk = []
        return bool(self.chunk)

    def _rows(self, samples: list[Queued]) -> list[bytes]:
        """As they are sent. Samples whose rows cannot be have failed, and are taken out of the list."""
        rows = list[bytes]()
        for sample in samples.copy() if self._pool.sends_context else ():
            try:
                rows.append(sample.batch.row(sample.task.row))
            except Exception as error:
                samples.remove(sample)
                self._pool.settle([sample], [failed(f"raised {type(error).__name__}: its row cannot be sent: {error}")])
        return rows

    def _cannot_send(self, samples: Sequence[Queued], error: ValueError) -> None:
        """Too long: together, so that each is sent alone, or alone."""
        for sample in samples:
            sample.is_suspect = True
        if samples[1:]:
            self._pool.put_back(samples)
        else:
            self._pool.settle(samples, [failed(f"raised ValueError: it cannot be sent: {error}")])

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
        undone = self.chunk[process.answered :]
        doubtful = undone[: max(process.begun - process.answered, 1)] if at == NONE else [self.chunk[at]]
        self._blame(undone, doubtful, why, is_certain=at != NONE)

    def _blame(self, undone: Sequence[Queued], doubtful: Sequence[Queued], why: str, *, is_certain: bool) -> None:
        """Without its process: `doubtful` have failed, if that is certain or they had it to themselves; the rest of
        `undone` waits again."""
        self.chunk = []
        self._discard()
        if self._pool.is_closing:
            self._pool.put_back(undone)
            return
        blamed = [sample for sample in doubtful if is_certain or sample.is_suspect]
        for sample in doubtful:
            sample.is_suspect = True
        self._pool.settle(blamed, [failed(why)] * len(blamed))
        self._pool.put_back([sample for sample in undone if sample not in blamed])

    def _out_of_memory(self, process: GraderProcess, failure: str) -> None:
        """A sample that has had a process to itself is to blame; else it is tried in a new one, since others may have
        filled this one's memory."""
        mine, behind = self.chunk[process.answered :][:1], self.chunk[process.answered + 1 :]
        self.chunk = []
        self._discard()
        self._pool.put_back(behind)
        if process.is_fresh:
            self._pool.settle(mine, [failed(self._spent(failure))] * len(mine))
        else:
            self.chunk = mine

    def _spent(self, failure: str) -> str:
        return f"{failure}, above reward.memory_mb = {self._pool.memory_mb}"

    # ------------------------------------------------------------------------------- an asynchronous process

    def _grade_open(self, process: GraderProcess) -> None:
        """As `_grade`, and what else comes in while there is room, until nothing is open."""
        self._give_open(process, self.chunk)
        timeout_s = self._pool.timeout_s
        while self.chunk and self.process is process:
            self._give_open(process, self._pool.take_more(self))
            now, at = time.monotonic(), process.at
            if at in self._open and now >= process.since_s + timeout_s:
                self._lose_open(f"timed out after {timeout_s:g} s", at)
                return
            latest_s = min((until_s for _, until_s in self._open.values()), default=now)
            if now >= latest_s:
                self._lose_open(f"timed out after {timeout_s:g} s", NONE)
                return
            has_room = len(self.chunk) < self._pool.max_concurrent
            try:
                messages = process.wait(min(latest_s, now + (LOOK_S if has_room else 1.0)))
                for message in messages or []:
                    self._receive_open(message)
            except _NONSENSE as error:
                self._lose_open(f"died (it wrote something else than answers: {error})", NONE)
                return
            if messages is None:
                how = process.end(_DYING_S)
                self._lose_open(f"died ({how or 'its pipe was closed'})", process.at if how else NONE)

    def _give_open(self, process: GraderProcess, samples: Sequence[Queued]) -> None:
        sent, first = list(samples), process.given
        rows = self._rows(sent)
        try:
            if sent:
                process.add(len(sent), chunk_message(sent, rows, first))
                until_s = time.monotonic() + 2 * self._pool.timeout_s + _LATE_S
                self._open |= {first + place: (sample, until_s) for place, sample in enumerate(sent)}
        except ValueError as error:
            self._cannot_send(sent, error)
        self.chunk = [sample for sample, _ in self._open.values()]

    def _receive_open(self, message: Message) -> None:
        """Raises `_NONSENSE`."""
        if not isinstance(message, Answers) or message.positions is None:
            raise NoAnswers(f"{type(message).__name__} in place of answers")
        pairs = zip(message.positions, _GRADES.decode(message.grades), strict=False)
        graded = [(self._open.pop(place)[0], grade) for place, grade in pairs if place in self._open]
        spent = graded.pop() if message.out_of_memory and graded else None
        self._pool.settle([sample for sample, _ in graded], [grade for _, grade in graded])
        self.chunk = [sample for sample, _ in self._open.values()]
        if spent is not None:  # alone it is to blame; else others may have filled the memory
            sample, grade = spent
            self._blame([sample, *self.chunk], [sample], self._spent(grade.failure), is_certain=False)

    def _lose_open(self, why: str, at: int) -> None:
        """As `_lost`. Alone, hundreds of slow samples would take an hour: first they are tried together once more."""
        undone = [sample for sample, _ in self._open.values()]
        doubtful = [self._open[at][0]] if at in self._open else [sample for sample in undone if sample.was_lost]
        for sample in undone:
            sample.was_lost = True
        self._blame(undone, doubtful, why, is_certain=at in self._open)
