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

A grader that takes lists gets its chunk in one call, which has the time limit of one sample. One that is asynchronous
keeps up to `max_concurrent` samples open: its lane hands on what comes in meanwhile, looking 50 times a second, and the
process itself ends each at its deadline. The lane acts only if an event loop is blocked. Samples that a process has
taken with it are tried together once more before each is graded alone: a judge would make an hour of that.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

from dppo_megatron.rewards.grader_process import GraderProcess, NoAnswers
from dppo_megatron.rewards.measures import failed
from dppo_megatron.rewards.messages import NONE, Answers, GraderReady, Message, NoStart
from dppo_megatron.rewards.work import LOOK_S, Batch, GradingQueue, Queued, chunk_message
from dppo_megatron.types import Grade, GradeTask, UserError

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
        self._open: dict[int, Queued] = {}
        """Position in all that the process was given -> what it has not answered yet."""
        self._is_busy = False
        """Its chunk is not done: what was taken back may have been begun before."""
        self._heard_s = 0.0
        """When the process last sent something, or was given something while nothing was open."""
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
        self._is_busy = False
        if process is not None:
            process.end()
            process.close()

    # ------------------------------------------------------------------------------------------------- grading

    def _grade(self, process: GraderProcess) -> None:
        """Have it grade the chunk, and an asynchronous process what else comes in while there is room, until nothing is
        open: what it does not get done waits again, or has failed."""
        pool = self._pool
        self._give(process, self.chunk)
        while (self._open or self._is_busy) and self.process is process:
            if pool.mode == "async":
                self._give(process, pool.take_more(self))
            now, at, began_s = time.monotonic(), process.at, process.since_s
            is_certain = at in self._open
            until_s = (began_s if is_certain else max(began_s, self._heard_s)) + pool.timeout_s
            if pool.mode == "async" and not is_certain:  # it keeps the deadlines itself
                until_s += pool.timeout_s + _LATE_S
            if now >= until_s:
                self._time_out(process, at if is_certain else NONE, began_s)
                return
            if pool.mode == "each" and is_certain and now >= began_s + _SLOW_S:
                self._take_back_behind(process, at)
            self._hear(process, min(until_s, now + self._look_s()))

    def _look_s(self) -> float:
        """Until it should look at the board again, or for more to give."""
        if self._pool.mode == "async":
            return LOOK_S if len(self.chunk) < self._pool.max_concurrent else 1.0
        return _SLOW_S if self._pool.mode == "each" and len(self._open) > 1 else math.inf

    def _give(self, process: GraderProcess, samples: Sequence[Queued]) -> None:
        """Send samples. What cannot be sent has failed."""
        sent, first = list(samples), process.given
        rows = self._rows(sent)
        try:
            if sent:
                process.give(len(sent), chunk_message(sent, rows, first))
                self._heard_s = self._heard_s if self._open else time.monotonic()
                self._is_busy = self._pool.mode != "async"
                self._open |= {first + place: sample for place, sample in enumerate(sent)}
        except ValueError as error:
            self._cannot_send(sent, error)
        self.chunk = list(self._open.values())

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

    def _take_back_behind(self, process: GraderProcess, at: int) -> None:
        """What stands behind a slow sample is for whoever is idle."""
        behind = [position for position in self._open if position > at]
        if behind:
            process.stop_at(at + 1)
            self._pool.put_back([self._open.pop(position) for position in behind])
            self.chunk = list(self._open.values())

    def _hear(self, process: GraderProcess, until_s: float) -> None:
        try:
            messages = process.wait(until_s)
            for message in messages or []:
                self._receive(message)
        except _NONSENSE as error:
            self._lost(process, f"died (it wrote something else than answers: {error})", at=NONE)
            return
        if messages is None:
            how = process.end(_DYING_S)
            # asked after its end: one whose pipe has closed may still be at work. What is killed for that is at a
            # sample that need not be the one that closed it.
            self._lost(process, f"died ({how or 'its pipe was closed'})", at=process.at if how else NONE)

    def _receive(self, message: Message) -> None:
        """Raises `_NONSENSE`."""
        if not isinstance(message, Answers):
            raise NoAnswers(f"{type(message).__name__} in place of answers")
        self._heard_s = time.monotonic()
        pairs = zip(message.positions, _GRADES.decode(message.grades), strict=False)
        # what was begun as it was taken back is graded here too
        graded = [(self._open.pop(place), grade) for place, grade in pairs if place in self._open]
        spent = graded.pop() if message.out_of_memory and graded else None
        self._pool.settle([sample for sample, _ in graded], [grade for _, grade in graded])
        self.chunk = list(self._open.values())
        if message.seconds_each is not None:
            self._is_busy = False
            self._pool.seconds_each = max(1e-6, math.sqrt(self._pool.seconds_each * message.seconds_each))
        if spent is not None:  # alone it is to blame; else others may have filled the memory
            sample, grade = spent
            why = f"{grade.failure}, above reward.memory_mb = {self._pool.memory_mb}"
            self._blame([sample, *self.chunk], [sample], why, is_certain=False)

    # --------------------------------------------------------------------------------------- what goes wrong

    def _time_out(self, process: GraderProcess, at: int, began_s: float) -> None:
        process.end()
        try:
            for message in process.wait(0.0) or []:  # what it wrote before it was killed
                self._receive(message)
        except _NONSENSE:
            at = NONE
        if self.process is None:  # it ran out of memory at last
            return
        moved = (process.at, process.since_s) != (at, began_s)
        self._lost(process, f"timed out after {self._pool.timeout_s:g} s", at=NONE if moved else at)

    def _lost(self, process: GraderProcess, why: str, *, at: int) -> None:
        """The process has died, was killed or is not understood: blame the sample `at` this position, if that is
        certain, and let the others wait again. Alone, hundreds of slow samples that were open together would take an
        hour: first they are tried together once more."""
        undone = list(self._open.values())
        if is_certain := at in self._open:
            doubtful = [self._open[at]]
        elif self._pool.mode == "async":
            doubtful = [sample for sample in undone if sample.was_lost]
        else:
            doubtful = [one for position, one in self._open.items() if position < process.begun] or undone[:1]
        for sample in undone:
            sample.was_lost = True
        self._blame(undone, doubtful, why, is_certain=is_certain)

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


class Grader(GradingQueue):
    """Processes that grade. They start when they are first needed. Any thread may call it.

    Args:
        functions: the grader, or several whose weighted sum is the reward.
        processes: how many grade at a time.
        timeout_s: of one sample, all functions together.
        memory_mb: that a process may take beyond what it starts with; 0: no limit.
        max_concurrent: samples that a process has open at a time, or in one call, if the grader is made for that.
        max_failures_in_a_row: after which what waits has failed; 0: never.
        pace: of the samples that processes are given.
    """

    @property
    def processes(self) -> list[GraderProcess]:
        """Those that run, at most `num_processes`."""
        return [lane.process for lane in self._lanes if lane.process is not None]

    def submit(self, tasks: Sequence[GradeTask]) -> Future[list[Grade]]:
        """One grade a task, in their order; where grading failed its reward is NaN and `failure` is the reason.

        The future raises UserError if no process has ever started and one does not: an import error, or a function that
        is no grader. Cancelling it drops what still waits.
        """
        batch = Batch(tasks)
        with self._changed:
            self._waiting.extend(Queued(batch, index, task) for index, task in enumerate(tasks))
            free = sum(not lane.chunk for lane in self._lanes)
            for _ in range(min(self.num_processes - len(self._lanes), len(self._waiting) - free)):
                self._lanes.append(Lane(self))
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
        with self._changed:
            self.is_closing = True
            self._changed.notify_all()
        for lane in self._lanes:
            lane.kill()
        for lane in self._lanes:
            lane.thread.join()
        for sample in self._waiting:
            sample.batch.future.cancel()
        self.reset()
