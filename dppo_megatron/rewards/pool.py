"""Graders in processes that can be killed: one that hangs or crashes costs its sample, not the run.

Math graders parse what a model wrote, and some inputs make them run for ever or take their interpreter down. A hang
inside C code cannot be interrupted from within, so each grading has a deadline after which its process is killed and
replaced. Such a grading is a failure with a reason; it is never a reward of 0.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from dppo_megatron.types import UserError

_log = logging.getLogger(__name__)

_START_S = 120.0
"""How long a process may take to import the grader's module."""


@dataclass
class GraderPool:
    """Processes that grade.

    Args:
        function: `module:function` of the grader.
        processes: how many grade at a time.
        timeout_s: of one grading.
    """

    function: str
    processes: int = 1
    timeout_s: float = 30.0
    _workers: list[_Worker] = field(default_factory=list)

    def grade(self, pairs: Sequence[tuple[str, str]], labels: Sequence[str]) -> list[float]:
        """One reward a pair (completion, answer); NaN where the grader raised, hung, took its process down, or gave
        no finite number, which is logged under the pair's label.

        Raises:
            UserError: a grader process does not start.
        """
        rewards = [math.nan] * len(pairs)
        waiting = deque(range(len(pairs)))
        wanted = min(self.processes, len(pairs))
        self._workers += [_Worker(self.function) for _ in range(wanted - len(self._workers))]
        with selectors.DefaultSelector() as selector:
            for worker in self._workers[:wanted]:
                selector.register(worker.answers, selectors.EVENT_READ, worker)
                worker.give(waiting.popleft(), pairs)
            while busy := [worker for worker in self._workers if worker.sample is not None]:
                nearest = min(worker.deadline(self.timeout_s) for worker in busy)
                ready = {key.data for key, _ in selector.select(max(0.0, nearest - time.monotonic()))}
                for worker in busy:
                    late = time.monotonic() >= worker.deadline(self.timeout_s)
                    if worker not in ready and not late:
                        continue
                    sample = worker.sample
                    assert sample is not None
                    rewards[sample] = self._outcome(worker, selector, labels[sample], hung=worker not in ready)
                    if waiting:
                        worker.give(waiting.popleft(), pairs)
        return rewards

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _outcome(self, worker: _Worker, selector: selectors.BaseSelector, label: str, *, hung: bool) -> float:
        worker.sample = None
        answer = None if hung else worker.read()
        if answer is not None:
            if "error" in answer:
                _log.error("the grader raised on %s:\n%s", label, answer["error"])
                return math.nan
            reward = float(answer["reward"])
            if not math.isfinite(reward):
                _log.error("the grader returned %r for %s", reward, label)
            return reward if math.isfinite(reward) else math.nan
        why = f"took more than {self.timeout_s:g} s" if hung else f"took its process down ({worker.exit_status()})"
        _log.error("grading %s %s", label, why)
        selector.unregister(worker.answers)
        worker.restart()
        selector.register(worker.answers, selectors.EVENT_READ, worker)
        return math.nan


class _Worker:
    """One process and the sample that it has at hand."""

    def __init__(self, function: str) -> None:
        self._function = function
        self.sample: int | None = None
        self._since = 0.0
        self.restart()

    def restart(self) -> None:
        """A fresh process in place of whatever is there."""
        self.end()
        # -c and not -m: the program's own directory must not stand before the user's on the path
        command = [sys.executable, "-c", "from dppo_megatron.rewards.worker import main; main()"]
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            bufsize=1,
            env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # so that what a grader started ends with it
        )
        # what ties the process's life to ours goes by the thread that starts it, and another thread may end earlier
        tied = threading.current_thread() is threading.main_thread()
        self._send(json.dumps({"path": sys.path, "function": self._function, "dies_with_parent": tied}))
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            started = selector.select(_START_S) and self.answers.readline() == "ready\n"
        if not started:
            self.end()
            raise UserError(
                f"reward.function = '{self._function}': its process did not start ({self.exit_status()});"
                " what it wrote stands above"
            )

    @property
    def answers(self) -> IO[str]:
        """Where its answers come from."""
        assert self._process.stdout is not None
        return self._process.stdout

    def give(self, sample: int, pairs: Sequence[tuple[str, str]]) -> None:
        """Have it grade `pairs[sample]`."""
        self.sample, self._since = sample, time.monotonic()
        self._send(json.dumps(pairs[sample]))

    def deadline(self, timeout_s: float) -> float:
        """When the grading at hand is given up, by the monotonic clock."""
        return self._since + timeout_s

    def read(self) -> dict[str, float | str] | None:
        """Its answer; None if it has died."""
        line = self.answers.readline()
        if not line.endswith("\n"):
            return None
        answer: dict[str, float | str] = json.loads(line)
        return answer

    def exit_status(self) -> str:
        """How it ended."""
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def end(self) -> None:
        """Kill it and what it started."""
        process = getattr(self, "_process", None)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, 9)
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                stream.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: reading its answer will say so
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
