"""One grader process: reads chunks of samples from a pipe and answers through another one.

A plain program, neither a fork nor multiprocessing: a fork would copy locks that torch and the process group hold, and
spawning would import the trainer's main module again. It imports the grader's module, and torch only if that does.

Whatever a grader does must cost its own sample only. Its output goes to the trainer, which shows it; its stdin is
empty, and a child that it forks and forgets does not continue as a second grader. Memory is limited by RLIMIT_DATA and
not by RLIMIT_AS. The former counts what can be written; the latter also counts what is only reserved (64 MiB for each
thread's malloc, more for BLAS), so that whether a grader fails would depend on the number of cores. The limit is added
to what the process uses once the grader is imported. Beyond it Python raises MemoryError.
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
import types
from collections.abc import Coroutine, Generator
from typing import IO, Any

import msgspec

from dppo_megatron.children import die_with_parent
from dppo_megatron.frames import framed, read_frame
from dppo_megatron.rewards import messages
from dppo_megatron.rewards.calling import Sample
from dppo_megatron.rewards.functions import Rewards
from dppo_megatron.rewards.messages import AT, BEGUN, LIMIT, NONE, SINCE_NS, Answers, GraderReady, NoStart
from dppo_megatron.texts import LONGEST_ENTRY, shortened

_FLUSH_NS = 5_000_000  # for which answers are collected: writing them and waking the trainer costs 1 % of that


def main() -> None:
    """The first frame contains the graders and settings, each later one a chunk, until the pipe ends."""
    requests, answers = _take_over_streams()
    first = read_frame(requests.read)
    if first is None:
        return
    setup = pickle.loads(first)
    _limit_harm(setup)
    board = messages.map_board(setup["board"])
    os.close(setup["board"])
    sys.path[:] = setup["path"]
    try:
        rewards = Rewards(setup["functions"])
    except ValueError as error:
        _send(answers, NoStart(str(error)))
        return
    gc.freeze()  # imported objects stay for good, so the collector need not scan them again and again
    if setup["memory_mb"]:
        _limit_memory(setup["memory_mb"] << 20)
    _send(answers, GraderReady(rewards.wants_context, rewards.mode))
    if rewards.mode == "async":
        import asyncio

        asyncio.run(_grade_as_they_come(rewards, setup["timeout_s"], requests, board, answers))
    else:
        grade_chunk = _grade_chunk if rewards.mode == "each" else _grade_together
        while (payload := read_frame(requests.read)) is not None:
            grade_chunk(rewards, pickle.loads(payload), board, answers)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # this process and whatever graders have started


def _grade_chunk(rewards: Rewards, chunk: Any, board: memoryview[int], answers: IO[bytes]) -> None:
    ready: dict[int, dict[str, Any]] = {}
    process = os.getpid()
    began = now = flushed = time.monotonic_ns()
    first = position = chunk[0]
    while position < board[LIMIT]:
        board[SINCE_NS], board[BEGUN], board[AT] = now, position + 1, position
        result = rewards.grade(_sample(chunk, position - first))
        _tidy(process)
        _add(ready, position, result, answers)
        position += 1
        now = time.monotonic_ns()
        if now - flushed > _FLUSH_NS:
            board[AT] = NONE
            _answer(answers, ready)
            now = flushed = time.monotonic_ns()
    board[AT] = NONE
    _answer(answers, ready, seconds_each=(time.monotonic_ns() - began) / 1e9 / max(position - first, 1))


def _grade_together(rewards: Rewards, chunk: Any, board: memoryview[int], answers: IO[bytes]) -> None:
    """As `_grade_chunk`, in one call; if that hangs or crashes, the board names no sample."""
    began, process = time.monotonic_ns(), os.getpid()
    first, count = chunk[0], len(chunk[1])
    board[SINCE_NS], board[BEGUN] = began, first + count
    results = rewards.grade_together([_sample(chunk, place) for place in range(count)])
    _tidy(process)
    ready: dict[int, dict[str, Any]] = {}
    for place, result in enumerate(results):
        _add(ready, first + place, result, answers)
    _answer(answers, ready, seconds_each=(time.monotonic_ns() - began) / 1e9 / count)


async def _grade_as_they_come(
    rewards: Rewards, timeout_s: float, requests: IO[bytes], board: memoryview[int], answers: IO[bytes]
) -> None:
    """Begin every sample when it is read, and answer it when it is done or its time is over, until the pipe ends.

    A sample that takes too long is cancelled but not waited for: it may ignore that.
    """
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    loop, reader = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    ready: dict[int, dict[str, Any]] = {}

    async def grade(position: int, sample: Sample) -> None:
        attempt = asyncio.ensure_future(_observed(rewards.grade_async(sample), position, board))
        done, _ = await asyncio.wait({attempt}, timeout=timeout_s)
        result = attempt.result() if done else {"failure": f"timed out after {timeout_s:g} s"}
        attempt.cancel()
        _tidy(os.getpid())
        if not ready:
            loop.call_later(_FLUSH_NS / 1e9, _answer, answers, ready)
        _add(ready, position, result, answers)

    running: set[asyncio.Task[None]] = set()  # the loop itself keeps weak references only
    while (payload := await loop.run_in_executor(reader, read_frame, requests.read)) is not None:
        chunk = pickle.loads(payload)
        for position in range(len(chunk[1])):
            task = asyncio.create_task(grade(chunk[0] + position, _sample(chunk, position)))
            running.add(task)
            task.add_done_callback(running.discard)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # `asyncio.run` would wait for samples that are still running


@types.coroutine
def _observed(grading: Coroutine[Any, Any, Any], position: int, board: memoryview[int]) -> Generator[Any, Any, Any]:
    """`grading`, with its sample on the board while its own code runs, during which all others wait."""
    process = os.getpid()
    step, value = grading.send, None
    while True:
        board[SINCE_NS], board[AT] = time.monotonic_ns(), position
        try:
            waits_for = step(value)
        except StopIteration as end:
            return end.value
        finally:
            if os.getpid() != process:
                os._exit(0)  # this is a child that the grader has forked
            board[AT] = NONE
        try:
            value = yield waits_for
            step = grading.send
        except BaseException as error:  # it is being cancelled
            step, value = grading.throw, error  # type: ignore[assignment]


def _sample(chunk: Any, position: int) -> Sample:
    """The sample at `position` of a chunk, which is the position of its first sample among all that the process was
    given, and a list for each field; the lists of rows and prompts may be empty."""
    _, completions, references, tokens, reasons, rows, prompts = chunk
    # unpickled for each sample, so that no grader sees what another has changed in it
    row = pickle.loads(rows[position]) if rows and rows[position] else {}
    prompt = prompts[position] if prompts else ""
    return Sample(completions[position], references[position], row, prompt, tokens[position], reasons[position])


def _tidy(process: int) -> None:
    """After a grading, undo what it did to the process and what would affect the next one."""
    signal.alarm(0)  # an alarm that was left set would interrupt another sample
    if os.getpid() != process:
        os._exit(0)  # this is a child that the grader has forked, and that has returned
    if sys.stdout.closed or sys.stderr.closed:
        _open_streams()  # else the next grader that prints would fail


def _add(ready: dict[int, dict[str, Any]], position: int, result: Any, answers: IO[bytes]) -> None:
    """Add what `Rewards.grade` returned, as fields of `Grade`. If memory ran out, answer and end this process."""
    fields = result if type(result) is dict else {"reward": result}
    ready[position] = {"reward": math.nan} | fields  # a failure has no reward
    if "memory" in fields:
        _answer(answers, ready, out_of_memory=True)
        os._exit(0)


def _answer(
    answers: IO[bytes],
    ready: dict[int, dict[str, Any]],
    seconds_each: float | None = None,
    out_of_memory: bool = False,
) -> None:
    grades = msgspec.Raw(msgspec.msgpack.encode(list(ready.values())))
    _send(answers, Answers(grades, list(ready), seconds_each, out_of_memory))
    ready.clear()


def _take_over_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Move both pipes away from descriptors 0 and 1, which a grader may read, write and close."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _open_streams()
    return requests, answers


class _Printed(io.TextIOWrapper):
    """stdout and stderr for graders: each text is shortened, so that gigabytes are neither encoded nor sent."""

    def write(self, text: str) -> int:
        super().write(shortened(text, LONGEST_ENTRY))
        return len(text)


def _open_streams() -> None:
    """Open an empty stdin, and stdout and stderr on the pipe of output, or on nothing if a grader has closed that."""
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    for file in (1, 2):
        try:
            os.fstat(file)
        except OSError:
            os.dup2(devnull, file)
    if devnull > 2:
        os.close(devnull)
    for name, file in (("stdout", 1), ("stderr", 2)):
        # escaped where UTF-8 cannot encode it: no grading should fail because its text cannot be printed
        out = open(file, "wb", closefd=False)  # noqa: SIM115
        setattr(sys, name, _Printed(out, "utf-8", "backslashreplace", line_buffering=True))


def _limit_harm(setup: dict[str, Any]) -> None:
    """End with the trainer, be killed before the trainer when memory is short, and leave no core files."""
    die_with_parent(signal.SIGKILL, setup["parent"])  # SIGTERM would wait for a grader that hangs in C
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_memory(more: int) -> None:
    """Allow `more` bytes beyond what is in use; sets no limit if the system does not report how much that is."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/statm", encoding="ascii") as file:
            in_use = int(file.read().split()[5]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        wanted = in_use + more
        resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))


def _send(answers: IO[bytes], message: messages.Message) -> None:
    try:
        answers.write(framed(msgspec.msgpack.encode(message)))
        answers.flush()
    except OSError:  # the trainer has ended, or a grader has closed every file that it found
        os._exit(messages.CANNOT_ANSWER)


if __name__ == "__main__":
    main()
