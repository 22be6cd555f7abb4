"""Graders in processes that can be killed: a grader that hangs or crashes costs one sample, not the run. A hang inside
C code cannot be interrupted from within a process, so each sample has a deadline, after which its process is replaced.
Such a grading is a failure with a reason, and never a reward of 0.

Samples of all calls wait in one queue. A lane is a thread with a process. It takes samples in chunks of about 20 ms of
work at the speed measured so far, since most gradings cost less than a message. Each sample still has its own deadline,
by the board that the process keeps (`messages.py`). Samples behind a slow one of their chunk are put back at the front
of the queue, so that k hangs over p processes cost about ceil(k / p) timeouts:

    caller: submit ──▶ queue ──▶ lane ──▶ process     a lane waits for the queue, then for its process or a deadline
    caller: waits for the batch's future ◀── lane     the last grade of a batch completes it

    four samples, two lanes, timeout 1 s; h hangs, a to c do not
    chunks [h a] [b c]  ->  b, c done, a put back and done by the other lane, h has failed after 1 s

If it is unclear which sample ended a process (because its answers could not be written, for example), the candidates
are graded again one at a time, and one that then ends its process is the cause. So a sample costs at most two
processes, and no mix of behaviours can repeat for ever.

A grader that takes lists gets its chunk in one call, with the time limit of one sample. An asynchronous grader keeps up
to `max_concurrent` samples open. Its lane checks 50 times a second for new samples, and the process itself cancels each
at its deadline; the lane kills it only if the event loop is blocked. Samples that were open when a process ended are
tried together once more before each is graded alone, which would take an hour with a slow judge.
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

_START_S = 120.0  # for a process to import the grader's module
_SLOW_S = 0.05  # when a sample takes longer, those behind it are put back for other lanes
_EXIT_S = 0.5  # for a process to end after its pipe was closed
_MAX_STARTS = 3  # failed starts in a row of a lane; if no process has ever started, the first failure raises
_LATE_S = 5.0  # beyond twice the time limit, for a process that keeps deadlines itself: the machine may be busy
_GRADES = msgspec.msgpack.Decoder(list[Grade])
_NONSENSE = (NoAnswers, msgspec.MsgspecError, IndexError)  # a process writes something other than answers


class Lane:
    """A thread and its processes, one at a time: the kernel ends a process with the thread that started it."""

    def __init__(self, pool: Grader) -> None:
        self._pool = pool
        self.process: GraderProcess | None = None
        self.chunk: list[Queued] = []  # samples taken by `GradingQueue.take`, neither settled nor put back
        self._open: dict[int, Queued] = {}  # position among all that it was given -> a sample without an answer
        self._is_busy = False
        """The process has not finished its chunk, perhaps with none open: samples may be put back once begun."""
        self._active_s = 0.0  # when the process last sent a message, or was given samples while none was open
        self.thread = threading.Thread(target=self._run, name="grades", daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """End the process, whatever it is doing. May be called from another thread."""
        if (process := self.process) is not None:
            process.kill()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._start():
                while self.process is not None and self._pool.take(self):
                    self._grade(self.process)
        except BaseException as raised:  # reported to the callers, which would wait for ever
            error = raised
        self._discard()
        self._pool.leave(self, error)

    def _start(self) -> bool:
        """Start a process; returns whether one is ready. Raises UserError if that fails and none has started before:
        then the grader is at fault, and not the machine."""
        pool = self._pool
        for _ in range(_MAX_STARTS):
            self._discard()
            try:
                problem = self._wait_ready()
            except OSError as error:  # out of memory, files or processes, perhaps not for long
                if not pool.has_started:
                    raise UserError(f"{pool.key}: no process can be started for it: {error}") from None
                _log.error("no grader process can be started: %s", error)
                return False
            if pool.is_closing or not problem:
                return not pool.is_closing
            if not pool.has_started:
                raise UserError(f"{problem}; its output, if any, is above")
            remedy = "; reward.processes=1 if only one can run at a time" if pool.num_processes > 1 else ""
            _log.error("%s; it has started before%s", problem, remedy)
        return False

    def _wait_ready(self) -> str:
        """Start a process and wait until it is ready. Returns what went wrong, or "". Raises OSError."""
        pool = self._pool
        self.process = process = GraderProcess(pool.functions, pool.memory_mb, pool.timeout_s)
        if pool.is_closing:  # `kill` was called before there was a process
            process.kill()
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            how = ""
            try:
                messages = process.wait(deadline)
            except NoAnswers as error:
                messages, how = None, f"it wrote something other than answers: {error}"
            if messages is None:
                how = how or process.end(_EXIT_S) or "its pipe was closed"
                return f"{pool.key}: its process died ({how}) before it was ready"
            for message in messages:
                if isinstance(message, NoStart):
                    return message.text
                if isinstance(message, GraderReady):
                    pool.started(message)
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
        """Have the process grade the chunk, or an asynchronous one also new samples while there is room, until none is
        open. Samples that it does not finish are put back, or have failed."""
        pool = self._pool
        self._give(process, self.chunk)
        while (self._open or self._is_busy) and self.process is process:
            if pool.mode == "async":
                self._give(process, pool.take_more(self))
            now, at, began_s = time.monotonic(), process.at, process.since_s
            is_certain = at in self._open
            until_s = (began_s if is_certain else max(began_s, self._active_s)) + pool.timeout_s
            if pool.mode == "async" and not is_certain:  # the process keeps the deadlines itself
                until_s += pool.timeout_s + _LATE_S
            if now >= until_s:
                self._time_out(process, at if is_certain else NONE, began_s)
                return
            if pool.mode == "each" and is_certain and now >= began_s + _SLOW_S:
                self._put_back_behind(process, at)
            self._wait(process, min(until_s, now + self._poll_s()))

    def _poll_s(self) -> float:
        """Seconds until the board, or the queue for more samples, should be checked again."""
        if self._pool.mode == "async":
            return LOOK_S if len(self.chunk) < self._pool.max_concurrent else 1.0
        return _SLOW_S if self._pool.mode == "each" and len(self._open) > 1 else math.inf

    def _give(self, process: GraderProcess, samples: Sequence[Queued]) -> None:
        """Send samples. Those that cannot be sent have failed."""
        sent, first = list(samples), process.num_given
        rows = self._rows(sent)
        try:
            if sent:
                process.give(len(sent), chunk_message(sent, rows, first))
                self._active_s = self._active_s if self._open else time.monotonic()
                self._is_busy = self._pool.mode != "async"
                self._open |= dict(enumerate(sent, start=first))
        except ValueError as error:
            self._cannot_send(sent, error)
        self.chunk = list(self._open.values())

    def _rows(self, samples: list[Queued]) -> list[bytes]:
        """The samples' rows as they are sent. A sample whose row cannot be pickled has failed and is removed."""
        rows = list[bytes]()
        for sample in samples.copy() if self._pool.sends_context else ():
            try:
                rows.append(sample.batch.row(sample.task.row))
            except Exception as error:
                samples.remove(sample)
                self._pool.settle([sample], [failed(f"raised {type(error).__name__}: its row cannot be sent: {error}")])
        return rows

    def _cannot_send(self, samples: Sequence[Queued], error: ValueError) -> None:
        """The message is too long. Several samples are put back, to be sent one by one; a single one has failed."""
        for sample in samples:
            sample.is_suspect = True
        if samples[1:]:
            self._pool.put_back(samples)
        else:
            self._pool.settle(samples, [failed(f"raised ValueError: it cannot be sent: {error}")])

    def _put_back_behind(self, process: GraderProcess, at: int) -> None:
        """Put back the samples behind a slow one, for lanes that are idle."""
        behind = [position for position in self._open if position > at]
        if behind:
            process.stop_at(at + 1)
            self._pool.put_back([self._open.pop(position) for position in behind])
            self.chunk = list(self._open.values())

    def _wait(self, process: GraderProcess, until_s: float) -> None:
        try:
            messages = process.wait(until_s)
            for message in messages or []:
                self._receive(message)
        except _NONSENSE as error:
            self._lost(process, f"died (it wrote something other than answers: {error})", at=NONE)
            return
        if messages is None:
            how = process.end(_EXIT_S)
            # The board is read after the end, since a process whose pipe is closed may still be working. One that had
            # to be killed may have been at a later sample than the one that closed the pipe.
            self._lost(process, f"died ({how or 'its pipe was closed'})", at=process.at if how else NONE)

    def _receive(self, message: Message) -> None:
        """Raises `_NONSENSE`."""
        if not isinstance(message, Answers):
            raise NoAnswers(f"{type(message).__name__} in place of answers")
        self._active_s = time.monotonic()
        pairs = zip(message.positions, _GRADES.decode(message.grades), strict=False)
        # not in `_open`: samples that were put back just after they were begun
        graded = [(self._open.pop(position), grade) for position, grade in pairs if position in self._open]
        spent = graded.pop() if message.out_of_memory and graded else None
        self._pool.settle([sample for sample, _ in graded], [grade for _, grade in graded])
        self.chunk = list(self._open.values())
        if message.seconds_each is not None:
            self._is_busy = False
            self._pool.seconds_each = max(1e-6, math.sqrt(self._pool.seconds_each * message.seconds_each))
        if spent is not None:  # it is to blame if it was graded alone; else others may have filled the memory
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
        if self.process is None:  # the last message was that it ran out of memory
            return
        moved = (process.at, process.since_s) != (at, began_s)  # it has begun another sample meanwhile
        self._lost(process, f"timed out after {self._pool.timeout_s:g} s", at=NONE if moved else at)

    def _lost(self, process: GraderProcess, why: str, *, at: int) -> None:
        """The process has died, was killed or sent nonsense. Blame the sample at position `at`, if that is certain, and
        put the others back. Samples that were open together in an asynchronous process are tried together once more:
        one at a time, hundreds of slow ones would take an hour."""
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
        """End the process. The samples `doubtful` have failed if `is_certain`, or if they were graded alone; the rest
        of `undone` is put back."""
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
        processes: how many run at a time.
        one_if_many: a grader that takes many samples at a time (lists, `async`) has one; others start once it is known.
        timeout_s: for one sample, all functions together.
        memory_mb: that a process may use beyond what it starts with; 0: no limit.
        max_concurrent: samples that an asynchronous process has open at a time, or that one call with lists gets.
        max_failures_in_a_row: after this many, all waiting samples have failed; 0: no limit.
        pace: limits how fast samples are given to the processes.
    """

    @property
    def processes(self) -> list[GraderProcess]:
        """The running processes, at most `num_processes`."""
        return [lane.process for lane in self._lanes if lane.process is not None]

    def submit(self, tasks: Sequence[GradeTask]) -> Future[list[Grade]]:
        """One grade per task, in their order. If grading failed, its reward is NaN and `failure` is the reason.

        The future raises UserError if the first process cannot start (an import error, or a function that is no
        grader). Cancelling it drops the samples that still wait.
        """
        batch = Batch(tasks)
        with self._changed:
            self._waiting.extend(Queued(batch, index, task) for index, task in enumerate(tasks))
            self._grow()
            self._changed.notify_all()
        if not tasks:
            batch.finish()
        return batch.future

    def started(self, ready: GraderReady) -> None:
        """A process is ready, and knows what kind of grader this is."""
        self.sends_context, self.mode = ready.wants_context, ready.mode
        if self._one_if_many and ready.mode != "each":
            self.num_processes = 1
        self.has_started = True
        with self._changed:
            self._grow()

    def _grow(self) -> None:
        """Start lanes for what waits; called with the lock held."""
        most = 1 if self._one_if_many and not self.has_started else self.num_processes
        free = sum(not lane.chunk for lane in self._lanes)
        for _ in range(0 if self.is_closing else min(most - len(self._lanes), len(self._waiting) - free)):
            self._lanes.append(Lane(self))

    def grade(self, tasks: Sequence[GradeTask]) -> list[Grade]:
        """As `submit`, but waits for the grades."""
        future = self.submit(tasks)
        try:
            return future.result()
        finally:
            future.cancel()  # if the call is interrupted, by Control-C for example

    def close(self) -> None:
        """End the processes and cancel what is not graded. The next grading starts new ones."""
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
