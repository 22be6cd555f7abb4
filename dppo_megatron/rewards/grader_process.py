"""The trainer's end of one grader process: start it, feed it without blocking, and know which sample it is grading."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pickle
import select
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from dppo_megatron.children import start_python
from dppo_megatron.frames import FrameBuffer, framed
from dppo_megatron.rewards.functions import NamedFunction
from dppo_megatron.rewards.messages import (
    AT,
    BEGUN,
    CANNOT_ANSWER,
    LIMIT,
    NONE,
    SINCE_NS,
    Message,
    board_file,
    map_board,
)
from dppo_megatron.texts import LONGEST_ENTRY, entry, show

_READ_BYTES = 1 << 16
"""What a pipe holds on Linux by default."""
_READS = 256  # of 64 KiB: at most 16 MiB in one look
_REQUEST_BYTES = 1 << 18
"""That the pipe of requests is to hold: most chunks whole, so that the trainer need not wait until half is read."""
_LONGEST_LINE = 4 * LONGEST_ENTRY + 400
"""Bytes that are kept of a printed line, in UTF-8 more than are shown."""
_MOST_SHOWN = 64 << 20
"""Characters that a process may print, of which a line takes this many beside its own: it costs some microseconds."""
_LINE_COSTS = 64
_DECODER = msgspec.msgpack.Decoder(Message)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class NoAnswers(Exception):
    """The process has written something else than answers."""


class GraderProcess:
    """One process. Samples are called by their positions in all that it was given. Only `kill` may be called from
    another thread than the one that made it, with which the process ends.

    What it and its own children print, by whatever means, comes through a pipe and is shown line by line as a grader's,
    at the latest with the next messages or at its end.

    Raises:
        OSError: the machine has no room for it.
    """

    def __init__(self, functions: Sequence[NamedFunction], memory_mb: int, timeout_s: float) -> None:
        # one thread for each: there are as many processes as there should be threads
        threads = {name: os.environ.get(name, "1") for name in _THREADS}
        with board_file() as board:
            self._board = map_board(board.fileno())
            self._board[AT] = NONE
            self._process = start_python(
                "dppo_megatron.rewards.worker",
                variables=threads | {"CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(board.fileno(),),
                start_new_session=True,  # so that what a grader started ends with it
            )
            setup = {
                "path": _import_path(),
                "functions": list(functions),
                "memory_mb": memory_mb,
                "timeout_s": timeout_s,
                "board": board.fileno(),
                "parent": os.getpid(),
            }
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._requests, self._answers, self._output = self._process.stdin, self._process.stdout, self._process.stderr
        for pipe in (self._requests, self._answers, self._output):
            os.set_blocking(pipe.fileno(), False)
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or the user's share of such memory is used up
            fcntl.fcntl(self._requests, fcntl.F_SETPIPE_SZ, _REQUEST_BYTES)
        self._death = _open_pidfd(self._process.pid)
        """Readable once the process has died, even while its own children hold its pipes open; None where that is not
        to be had."""
        self._received = FrameBuffer()
        self._outgoing = memoryview(framed(pickle.dumps(setup)))
        self._line, self._left = b"", _MOST_SHOWN
        """Of what it prints: the line that has not ended, and how many characters more are shown."""
        self._prints = True
        """Somebody holds the other end of that pipe."""
        self.given = 0
        """Samples so far."""

    def give(self, count: int, payload: bytes) -> None:
        """Have it grade `count` more samples; `payload` is what it is sent. Raises ValueError if that is too long."""
        self._outgoing = memoryview(bytes(self._outgoing) + framed(payload))
        self.given += count
        self.stop_at(self.given)

    def stop_at(self, position: int) -> None:
        """Have it leave what stands there and behind it."""
        self._board[LIMIT] = position

    def wait(self, until_s: float) -> list[Message] | None:
        """The messages that come before `until_s` (monotonic), perhaps none. None once it has died and all that it
        wrote has been read. Raises NoAnswers: what has come is no message."""
        self._write()
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        if self._prints:
            poll.register(self._output, select.POLLIN)
        if self._death is not None:
            poll.register(self._death, select.POLLIN)
        if self._outgoing:
            poll.register(self._requests, select.POLLOUT)
        if not poll.poll(max(0, math.ceil(1e3 * (until_s - time.monotonic())))):
            return []
        self._write()
        self._show_output()  # first: what it said before it answered
        messages, ended = self._read()
        if not messages and not ended and self._process.poll() is not None:
            messages, _ = self._read()  # asked before this: what it wrote is then all there
            ended = True
        return messages if messages or not ended else None

    def _write(self) -> None:
        """As much as the pipe takes."""
        try:
            while self._outgoing and (written := self._requests.write(self._outgoing)):
                self._outgoing = self._outgoing[written:]
        except BrokenPipeError:  # it has died, which the end of its answers shows
            self._outgoing = memoryview(b"")

    def _read(self) -> tuple[list[Message], bool]:
        """What is in the pipe, and whether it has been closed."""
        messages: list[Message] = []
        data: bytes | None = None
        try:
            for _ in range(_READS):  # not for ever: a process that writes without end must not hold the trainer
                data = self._answers.read(_READ_BYTES)
                messages += map(_DECODER.decode, self._received.feed(data or b""))
                if not data or len(data) < _READ_BYTES:
                    break
        except (OSError, msgspec.MsgspecError) as error:
            raise NoAnswers(str(error)) from None
        return messages, data == b""

    def _show_output(self) -> None:
        """Show what is in the pipe of its output; no end is waited for, as what it has started may write on. Beyond the
        limit it is read for nothing: no grading should fail because its text is not shown."""
        data = self._output.read(_READ_BYTES)
        self._prints = data != b""
        if data and self._left > 0:
            *lines, self._line = (self._line + data).split(b"\n")
            self._line = self._line[:_LONGEST_LINE]
            self._show_lines(lines)

    def _show_lines(self, lines: Sequence[bytes]) -> None:
        if not lines or self._left <= 0:
            return
        texts = [entry(f"grader: {line[:_LONGEST_LINE].decode(errors='backslashreplace')}") for line in lines]
        self._left -= sum(len(text) + _LINE_COSTS for text in texts)
        if self._left <= 0:
            texts.append("grader: (no more is shown of what this process prints)")
        with contextlib.suppress(OSError, ValueError):  # nobody reads the trainer's stderr any more
            show(*texts, file=sys.stderr)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def at(self) -> int:
        """Position of the sample that it is grading; NONE if that is not certain."""
        return self._board[AT]

    @property
    def begun(self) -> int:
        """How many it has begun, at least."""
        return self._board[BEGUN]

    @property
    def since_s(self) -> float:
        """When the last one was begun, by the monotonic clock."""
        return self._board[SINCE_NS] / 1e9

    def kill(self) -> None:
        """It and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, 9)

    def end(self, patience_s: float = 0.0) -> str:
        """Kill it; returns how it had ended, if it had. What it wrote before can still be waited for. One whose pipe
        has just closed may be about to end by itself, and is given `patience_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        code = self._process.poll()
        self.kill()
        self._process.wait()
        self._show_output()
        self._show_lines([self._line] if self._line else [])
        self._line = b""
        if code is None:
            return ""
        if code == CANNOT_ANSWER:
            return "could not write its answers"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Close its files. Of a process that has ended."""
        for pipe in (self._requests, self._answers, self._output):
            with contextlib.suppress(OSError):
                pipe.close()
        if self._death is not None:
            os.close(self._death)
            self._death = None


def _import_path() -> list[str]:
    """The trainer's, and the working directory: an installed command does not look there by itself."""
    here = os.getcwd()
    return list(sys.path) if {"", here} & set(sys.path) else [*sys.path, here]


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or a sandbox: its pipe's end must do
        return None
