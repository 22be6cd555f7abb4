"""One grader process: reads chunks of samples from a pipe and answers through another one.

A plain program, neither a fork nor multiprocessing: a fork would copy held locks of torch and of the process group, and
spawning would import the trainer's main module again. It imports the grader's module and nothing of torch.

Whatever a grader does must cost its own sample only. Its output goes to the trainer's stderr, its stdin is empty, and
a child that it forks and forgets does not continue as a second grader. Memory is limited by
RLIMIT_DATA and not by RLIMIT_AS: it counts what can be written, where the address space also counts what is only
reserved (64 MiB for each thread's malloc, more for BLAS), so that a limit in it would fail graders by the number of the
machine's cores. What runs out of it is a MemoryError that Python reports; a limit is set beyond what the process has
when the grader is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import resource
import signal
import sys
import time
from typing import IO, Any

from dppo_megatron.rewards.functions import Rewards
from dppo_megatron.rewards.wire import CANNOT_ANSWER, Board, frame, packed, read_frame, write_all

_PR_SET_PDEATHSIG = 1
_FLUSH_NS = 1_000_000
"""Answers wait at most about 1 ms for others to go with: 512 of them are a few writes."""


def main() -> None:
    """The first frame says what to grade with; then each frame is a chunk, until the pipe ends."""
    requests, answers = _take_over_streams()
    first = read_frame(requests)
    if first is None:
        return
    setup = pickle.loads(first)
    _limit_harm(setup)
    board = Board(setup["board"])
    os.close(setup["board"])
    sys.path[:] = setup["path"]
    try:
        rewards = Rewards(setup["functions"])
    except ValueError as error:
        _send(answers, {"error": str(error)})
        return
    if setup["memory_mb"]:
        _limit_memory(setup["memory_mb"] << 20)
    _send(answers, {"ready": True, "rows": rewards.wants_row})
    while (payload := read_frame(requests)) is not None:
        if not _grade_chunk(rewards, pickle.loads(payload), board, answers):
            return
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # with it whatever graders have started


def _grade_chunk(rewards: Rewards, samples: list[bytes], board: Board, answers: int) -> bool:
    """Answer a chunk; whether this process can go on: not after it has run out of memory."""
    ready: list[Any] = []
    process = os.getpid()
    began = now = flushed = time.monotonic_ns()
    position = 0
    while position < board.limit:
        board.begin(position, now)
        completion, answer, row = pickle.loads(samples[position])
        ready.append(rewards.grade(completion, answer, row))
        signal.alarm(0)  # one that was set and forgotten would strike in another sample
        if os.getpid() != process:
            os._exit(0)  # a child that the grader has forked and that has come back here
        if sys.stdout.closed or sys.stderr.closed:
            _open_streams()  # or the next grader that prints would raise
        position += 1
        spent = isinstance(ready[-1], dict) and "memory" in ready[-1]
        now = time.monotonic_ns()
        if now - flushed > _FLUSH_NS or spent:
            board.pause()
            _send(answers, packed(ready))
            ready = []
            now = flushed = time.monotonic_ns()
        if spent:
            return False
    board.pause()
    _send(answers, packed(ready) | {"took_s": (time.monotonic_ns() - began) / 1e9})
    return True


def _take_over_streams() -> tuple[IO[bytes], int]:
    """Both pipes at other numbers than 0 and 1, which a grader may read, write and close."""
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    _open_streams()
    return os.fdopen(requests, "rb"), answers


def _open_streams() -> None:
    """Nothing to read, and the trainer's stderr to print to; where that has been closed, nothing either."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    for file in (1, 2):
        try:
            os.fstat(file)
        except OSError:
            os.dup2(nothing, file)
    if nothing > 2:
        os.close(nothing)
    for name, file in (("stdout", 1), ("stderr", 2)):
        # no grading should fail because its text cannot be printed
        stream = open(file, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)


def _limit_harm(setup: dict[str, Any]) -> None:
    """Let it end with the trainer, die before the trainer where memory is short, and leave no core files."""
    with contextlib.suppress(AttributeError, OSError):  # Linux: a hanging grader must not outlive a killed trainer
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != setup["parent"]:
        os._exit(0)  # it died before the line above
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm's warning to all processes of a step is the trainer's concern
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_memory(more: int) -> None:
    """Allow `more` bytes beyond what is in use; nothing where the system does not say how much that is."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/statm", encoding="ascii") as file:
            in_use = int(file.read().split()[5]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        wanted = in_use + more
        resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))


def _send(answers: int, message: dict[str, Any]) -> None:
    try:
        write_all(answers, frame(json.dumps(message).encode()))
    except OSError:  # the trainer has gone, or a grader has closed every file that it found
        os._exit(CANNOT_ANSWER)
