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

import os
from collections.abc import Sequence
from concurrent.futures import Future

from dppo_megatron.rewards.grader_process import GraderProcess
from dppo_megatron.rewards.lanes import Lane
from dppo_megatron.rewards.work import Batch, GradingQueue, Queued
from dppo_megatron.types import Grade, GradeTask


class Grader(GradingQueue):
    """Processes that grade. They start when they are first needed. Any thread may call it.

    After a fork the child starts other processes.

    Args:
        functions: the grader, or several whose weighted sum is the reward.
        processes: how many grade at a time.
        timeout_s: of one sample, all functions together.
        memory_mb: that a process may take beyond what it starts with; 0: no limit.
        max_concurrent: samples that a process has open at a time, or in one call, if the grader is made for that.
        max_failures_in_a_row: after which what waits has failed; 0: never.
        pace: of the samples that processes are given.
        shared_by: graders of the job like this one, among which the pace was divided.
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
        self._leave_what_a_fork_copied()
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
        self.reset()

    def _leave_what_a_fork_copied(self) -> None:
        if self._owner != os.getpid():
            for process in self.processes:
                process.close()
            self.reset()
