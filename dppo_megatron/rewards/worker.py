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
import gc
import io
import math
import os
import pickle
import resource
import signal
import sys
import time
from typing import IO, Any

import msgspec

from dppo_megatron.children import die_with_parent
from dppo_megatron.frames import framed, read_frame
from dppo_megatron.rewards.functions import Rewards
from dppo_megatron.rewards.messages import (
    AT,
    BEGUN,
    CANNOT_ANSWER,
    LIMIT,
    NONE,
    SINCE_NS,
    Answers,
    GraderReady,
    Message,
    NoStart,
    map_board,
)
from dppo_megatron.texts import entry

_FLUSH_NS = 5_000_000
"""Answers wait about 5 ms for others to go with: writing them and waking the trainer costs a hundredth of that."""


def main() -> None:
    """The first frame names the graders; then each frame is a chunk, until the pipe ends."""
    requests, answers = _take_over_streams()
    first = read_frame(requests.read)
    if first is None:
        return
    setup = pickle.loads(first)
    _limit_harm(setup)
    board = map_board(setup["board"])
    os.close(setup["board"])
    sys.path[:] = setup["path"]
    try:
        rewards = Rewards(setup["functions"])
    except ValueError as error:
        _send(answers, NoStart(str(error)))
        return
    gc.freeze()  # what was imported stays, and need not be looked through again and again
    if setup["memory_mb"]:
        _limit_memory(setup["memory_mb"] << 20)
    _send(answers, GraderReady(rewards.wants_row))
    while (payload := read_frame(requests.read)) is not None:
        if not _grade_chunk(rewards, pickle.loads(payload), board, answers):
            return
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # with it whatever graders have started


def _grade_chunk(rewards: Rewards, chunk: Any, board: memoryview[int], answers: IO[bytes]) -> bool:
    """Answer a chunk; whether this process can go on: not after it has run out of memory."""
    completions, references, rows = chunk
    ready: list[dict[str, Any]] = []
    process = os.getpid()
    began = now = flushed = time.monotonic_ns()
    position = 0
    while position < board[LIMIT]:
        board[SINCE_NS], board[BEGUN], board[AT] = now, position + 1, position
        row = None
        if rows:  # unpickled for each sample: what a grader does to a row is not seen by the next one
            row = pickle.loads(rows[position]) if rows[position] else {}
        result = rewards.grade(completions[position], references[position], row)
        signal.alarm(0)  # one that was set and forgotten would strike in another sample
        if os.getpid() != process:
            os._exit(0)  # a child that the grader has forked and that has come back here
        if sys.stdout.closed or sys.stderr.closed:
            _open_streams()  # or the next grader that prints would raise
        position += 1
        spent = type(result) is dict and "memory" in result
        ready.append(_fields_of_grade(result))
        now = time.monotonic_ns()
        if now - flushed > _FLUSH_NS or spent:
            board[AT] = NONE
            _send(answers, Answers(_raw(ready), out_of_memory=spent))
            ready = []
            now = flushed = time.monotonic_ns()
        if spent:
            return False
    board[AT] = NONE
    _send(answers, Answers(_raw(ready), (time.monotonic_ns() - began) / 1e9))
    return True


def _fields_of_grade(result: Any) -> dict[str, Any]:
    """What `Rewards.grade` returned, as a `Grade`'s fields."""
    if type(result) is not dict:
        return {"reward": result}
    if "failure" in result:
        return {"reward": math.nan, "failure": result["failure"], "why": result.get("trace", "")}
    return result


def _raw(grades: list[dict[str, Any]]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(grades))


def _take_over_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Both pipes at other numbers than 0 and 1, which a grader may read, write and close."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _open_streams()
    return requests, answers


class _Printed(io.TextIOWrapper):
    """What graders print, for the trainer's terminal or log: nothing that a terminal obeys, and not without end."""

    left = 64 << 20  # characters, over the life of the process

    def write(self, text: str) -> int:
        kept = entry(text.removesuffix("\n")[: max(0, self.left)]) + "\n" * text.endswith("\n")
        self.left -= len(kept)
        super().write(kept if self.left > 0 or not kept else f"{kept}\n(no more is shown of what this grader prints)\n")
        return len(text)


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
        out = open(file, "wb", closefd=False)  # noqa: SIM115
        setattr(sys, name, _Printed(out, "utf-8", "backslashreplace", line_buffering=True))


def _limit_harm(setup: dict[str, Any]) -> None:
    """Let it end with the trainer, die before the trainer where memory is short, and leave no core files."""
    die_with_parent(signal.SIGKILL, setup["parent"])  # SIGTERM would wait for a grader that hangs in C
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


def _send(answers: IO[bytes], message: Message) -> None:
    try:
        answers.write(framed(msgspec.msgpack.encode(message)))
        answers.flush()
    except OSError:  # the trainer has gone, or a grader has closed every file that it found
        os._exit(CANNOT_ANSWER)


if __name__ == "__main__":
    main()
