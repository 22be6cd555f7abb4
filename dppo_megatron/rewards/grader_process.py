"""The trainer's side of one grader process: starts it, feeds it without blocking, knows which sample it is grading."""

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
from dppo_megatron.rewards import messages
from dppo_megatron.rewards.functions import NamedFunction
from dppo_megatron.rewards.messages import AT, BEGUN, LIMIT, NONE, SINCE_NS, Message
from dppo_megatron.texts import LONGEST_ENTRY, entry, show

_READ_BYTES = 1 << 16  # default capacity of a pipe on Linux
_READS = 256  # of 64 KiB: at most 16 MiB at a time
_REQUEST_BYTES = 1 << 18  # the pipe of requests takes most chunks whole: the trainer need not wait until half is read
_LONGEST_LINE = 4 * LONGEST_ENTRY + 400  # bytes kept of a printed line: all that is shown of it, in UTF-8
_MOST_SHOWN = 64 << 20  # characters of a process's output
_LINE_COSTS = 64  # each line counts as this many characters more, since showing it takes some microseconds
_DECODER = msgspec.msgpack.Decoder(Message)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class NoAnswers(Exception):
    """The process has written something other than answers."""


class GraderProcess:
    """One process. A sample's position is that among all samples that the process was given. The process ends with the
    thread that started it; other threads may call only `kill`.

    What it and its own children print, by whatever means, is read from a pipe and shown line by line as a grader's, at
    the latest with the next messages or at its end.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, functions: Sequence[NamedFunction], memory_mb: int, timeout_s: float) -> None:
        # one thread per process: there are as many processes as there should be threads
        threads = {name: os.environ.get(name, "1") for name in _THREADS}
        here = os.getcwd()  # which Python does not add to the import path of an installed command
        with messages.board_file() as board:
            self._board = messages.map_board(board.fileno())
            self._board[AT] = NONE
            self._process = start_python(
                "dppo_megatron.rewards.worker",
                variables=threads | {"CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(board.fileno(),),
                start_new_session=True,  # so that `kill` also ends the processes that a grader started
            )
            setup = {
                "path": sys.path if {"", here} & set(sys.path) else [*sys.path, here],
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
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or the user's limit of pipe memory is reached
            fcntl.fcntl(self._requests, fcntl.F_SETPIPE_SZ, _REQUEST_BYTES)
        self._death: int | None = None
        """Readable once the process has died, even if its own children hold its pipes open."""
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or a sandbox: its pipe's end shows its death
            self._death = os.pidfd_open(self._process.pid)
        self._received = FrameBuffer()
        self._outgoing = memoryview(framed(pickle.dumps(setup)))
        self._line = b""  # the end of the output, if that is no whole line
        self._num_left = _MOST_SHOWN  # characters of output that are still shown
        self._is_output_open = True
        self.num_given = 0  # samples so far

    def give(self, count: int, payload: bytes) -> None:
        """Send `payload`, a chunk of `count` samples. Raises ValueError if it is too long."""
        self._outgoing = memoryview(bytes(self._outgoing) + framed(payload))
        self.num_given += count
        self.stop_at(self.num_given)

    def stop_at(self, position: int) -> None:
        """Have the process grade no samples from `position` on."""
        self._board[LIMIT] = position

    def wait(self, until_s: float) -> list[Message] | None:
        """The messages that arrive until `until_s` (monotonic), perhaps none. None once the process has died and all
        that it wrote has been read. Raises NoAnswers if something else arrives."""
        self._write()
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        if self._is_output_open:
            poll.register(self._output, select.POLLIN)
        if self._death is not None:
            poll.register(self._death, select.POLLIN)
        if self._outgoing:
            poll.register(self._requests, select.POLLOUT)
        if not poll.poll(max(0, math.ceil(1e3 * (until_s - time.monotonic())))):
            return []
        self._write()
        self._show_output()  # before the answers, as it was printed
        messages, ended = self._read()
        if not messages and not ended and self._process.poll() is not None:
            messages, _ = self._read()  # once more, now that nothing can be added
            ended = True
        return messages if messages or not ended else None

    def _write(self) -> None:
        """Write as much as fits into the pipe."""
        try:
            while self._outgoing and (written := self._requests.write(self._outgoing)):
                self._outgoing = self._outgoing[written:]
        except BrokenPipeError:  # the process has died; `_read` will see that
            self._outgoing = memoryview(b"")

    def _read(self) -> tuple[list[Message], bool]:
        """The messages in the pipe, and whether it has been closed."""
        messages: list[Message] = []
        data: bytes | None = None
        try:
            for _ in range(_READS):  # bounded: a process that writes without end must not block the trainer
                data = self._answers.read(_READ_BYTES)
                messages += map(_DECODER.decode, self._received.feed(data or b""))
                if not data or len(data) < _READ_BYTES:
                    break
        except (OSError, msgspec.MsgspecError) as error:
            raise NoAnswers(str(error)) from None
        return messages, data == b""

    def _show_output(self) -> None:
        """Show what is in the pipe of output, without waiting for its end: children may hold it open. Beyond the limit
        it is read and dropped, since a full pipe would block the grader."""
        data = self._output.read(_READ_BYTES)
        self._is_output_open = data != b""
        if data and self._num_left > 0:
            *lines, self._line = (self._line + data).split(b"\n")
            self._line = self._line[:_LONGEST_LINE]
            self._show_lines(lines)

    def _show_lines(self, lines: Sequence[bytes]) -> None:
        if not lines or self._num_left <= 0:
            return
        texts = [entry(f"grader: {line[:_LONGEST_LINE].decode(errors='backslashreplace')}") for line in lines]
        self._num_left -= sum(len(text) + _LINE_COSTS for text in texts)
        if self._num_left <= 0:
            texts.append("grader: (no more is shown of what this process prints)")
        with contextlib.suppress(OSError, ValueError):  # the trainer's stderr has been closed
            show(*texts, file=sys.stderr)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def at(self) -> int:
        """Position of the sample that is being graded; NONE if that is not certain."""
        return self._board[AT]

    @property
    def begun(self) -> int:
        """How many samples have been begun, at least."""
        return self._board[BEGUN]

    @property
    def since_s(self) -> float:
        """When the last sample was begun, by the monotonic clock."""
        return self._board[SINCE_NS] / 1e9

    def kill(self) -> None:
        """Kill the process and those that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, 9)

    def end(self, patience_s: float = 0.0) -> str:
        """Kill the process, after `patience_s` for it to end by itself. Returns how it ended; "" if it was killed. Its
        messages can still be read with `wait`."""
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
        if code == messages.CANNOT_ANSWER:
            return "could not write its answers"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Close the files of a process that has ended."""
        for pipe in (self._requests, self._answers, self._output):
            with contextlib.suppress(OSError):
                pipe.close()
        if self._death is not None:
            os.close(self._death)
            self._death = None
