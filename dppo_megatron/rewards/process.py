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

from dppo_megatron.rewards.functions import NamedFunction
from dppo_megatron.rewards.wire import CANNOT_ANSWER, NOBODY, Board, Message, board_file, frame, take_frames

START_S = 120.0
"""How long a process may take to import the grader's module."""
_READ_BYTES = 1 << 16
"""What a pipe holds, unless it is told to hold more."""
_READS = 256
_REQUEST_BYTES = 1 << 18
"""That the pipe of requests is to hold: most chunks whole, so that the trainer need not wait until half is read."""
_DECODER = msgspec.msgpack.Decoder(Message)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class NoAnswers(Exception):
    """The process has written something else than answers."""


class GraderProcess:
    """One process and the chunk of samples that it has at hand.

    Nothing here blocks: `pump` writes what the pipe takes, `receive` reads what is there.
    """

    def __init__(self, functions: Sequence[NamedFunction], memory_mb: int) -> None:
        self._functions = list(functions)
        self._memory_mb = memory_mb
        self.successor: GraderProcess | None = None
        """Started while a sample was slow, to take this one's place if it has to be killed."""
        self.slow_since_s = 0.0
        """When the sample was begun for which a successor was last started, or tried to be."""

    def start(self) -> None:
        """A fresh process; what it is given from now on, it gets when it is ready. To be called first, in a thread that
        lives as long as the process shall: it ends with that thread.

        Raises:
            OSError: the machine has no room for it.
        """
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        # one thread for each: there are as many processes as there should be threads
        threads = {name: os.environ.get(name, "1") for name in _THREADS}
        with board_file() as board:
            self._board = Board(board.fileno())
            self._process = subprocess.Popen(
                # -P and not -m: a `json.py` in the working directory is none of ours
                [sys.executable, "-P", "-c", "from dppo_megatron.rewards.worker import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(board.fileno(),),
                env=os.environ | threads | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # so that what a grader started ends with it
            )
            setup = {
                "path": _import_path(),
                "functions": self._functions,
                "memory_mb": self._memory_mb,
                "board": board.fileno(),
                "parent": os.getpid(),
            }
        assert self._process.stdin is not None and self._process.stdout is not None
        self.requests, self.answers = self._process.stdin, self._process.stdout
        for pipe in (self.requests, self.answers):
            os.set_blocking(pipe.fileno(), False)
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or the user's share of such memory is used up
            fcntl.fcntl(self.requests, fcntl.F_SETPIPE_SZ, _REQUEST_BYTES)
        self.death = _watch(self._process.pid)
        """Readable once the process has died, whoever else holds its pipe open; None where that is not to be had."""
        self._received = bytearray()
        self._outgoing = memoryview(frame(pickle.dumps(setup)))
        self.ready = False
        self.graded = 0
        """Samples since it started."""
        self.chunk: list[int] = []
        """Samples given to it, in the order in which it grades them."""
        self.answered = 0
        """How many of them have come back."""
        self.owned = 0
        """How many of them are still its own; the last ones may have been given to another process."""
        self.progress_s = time.monotonic()
        """When it last gave a sign of life, was given a chunk or was started."""
        self.pump()

    def give(self, samples: Sequence[int], payload: bytes) -> None:
        """Have it grade `samples`; `payload` is what it is sent."""
        self.chunk, self.answered, self.owned = list(samples), 0, len(samples)
        self.progress_s = time.monotonic()
        self._board.reset(len(samples))
        self._outgoing = memoryview(b"".join([self._outgoing, frame(payload)]))
        self.pump()

    def pump(self) -> None:
        """Write as much as the pipe takes."""
        try:
            while self._outgoing:
                written = self.requests.write(self._outgoing)
                if not written:
                    return
                self._outgoing = self._outgoing[written:]
        except BrokenPipeError:  # it has died, which its answers' end will say
            self._outgoing = memoryview(b"")

    def receive(self) -> list[Message] | None:
        """The messages that have come; None once it has died and all that it wrote has been read.

        Raises:
            NoAnswers: what has come is no message.
        """
        got, ended = self._read()
        if not got and not ended and self._process.poll() is not None:
            self._read()  # asked before this: what it wrote is then all there
            ended = True
        try:
            messages = [_DECODER.decode(payload) for payload in take_frames(self._received)]
        except (ValueError, msgspec.MsgspecError) as error:
            raise NoAnswers(str(error)) from None
        if messages:
            self.progress_s = time.monotonic()
        return messages if messages or not ended else None

    def _read(self) -> tuple[bool, bool]:
        """Take what is in the pipe; whether there was something, and whether it has been closed."""
        before = len(self._received)
        try:
            for _ in range(_READS):  # not for ever: something that writes without end must not hold the trainer
                data = self.answers.read(_READ_BYTES)
                self._received += data or b""
                if not data or len(data) < _READ_BYTES:
                    break
        except OSError as error:
            raise NoAnswers(str(error)) from None
        return len(self._received) > before, data == b""

    @property
    def pid(self) -> int:
        """Of the process that runs now; another one after `start`."""
        return self._process.pid

    @property
    def watched(self) -> list[tuple[int, int]]:
        """Files by which it is heard, with the events to wait for: answers, its death, room in its pipe."""
        found = [(self.answers.fileno(), select.POLLIN)]
        if self.death is not None:
            found.append((self.death, select.POLLIN))
        if self._outgoing:
            found.append((self.requests.fileno(), select.POLLOUT))
        return found

    @property
    def idle(self) -> bool:
        """Ready for a chunk."""
        return self.ready and not self.chunk

    @property
    def at(self) -> int:
        """Position in its chunk of the sample at hand; NOBODY if that is not certain."""
        position = self._board.at
        return position if self.answered <= position < len(self.chunk) else NOBODY

    @property
    def begun(self) -> int:
        """How many of its chunk it has begun, at least."""
        return max(self.answered, min(self._board.begun, len(self.chunk)))

    @property
    def since_s(self) -> float:
        """When the sample at hand was begun, or else the last sign of life."""
        return max(self._board.since_s, self.progress_s) if self.at == NOBODY else self._board.since_s

    def deadline_s(self, timeout_s: float) -> float:
        """When what it does now is given up, by the monotonic clock."""
        return self.since_s + timeout_s if self.ready else self.progress_s + START_S

    def needs_successor_s(self, timeout_s: float) -> float:
        """When it has used half of the time for the sample at hand, by the monotonic clock; never for one that has a
        successor, or for which none could be started."""
        since_s = self.since_s
        known = self.successor is not None or self.slow_since_s == since_s or not self.ready
        return math.inf if known else since_s + timeout_s / 2

    def keep(self, count: int) -> list[int]:
        """Leave it only the first `count` samples of its chunk; returns those taken from it."""
        taken = self.chunk[count : self.owned]
        self.owned = count
        self._board.limit = count
        return taken

    def end(self, patience_s: float = 0.0) -> str:
        """Kill it and what it started; says how it had ended, if it had. What it wrote before can still be received.

        Args:
            patience_s: before it is killed; one whose pipe has just closed may be about to end by itself.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        code = self._process.poll()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        if code is None:
            return ""
        if code == CANNOT_ANSWER:
            return "could not write its answers"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def release(self) -> None:
        """Kill it and its successor and close their files."""
        if self.successor is not None:
            self.successor.end()
        self.end()
        self.forget()

    def forget(self) -> None:
        """Close its files and its successor's and leave them to themselves: another process's children, copied by a
        fork."""
        if self.successor is not None:
            self.successor.forget()
            self.successor = None
        for pipe in (self.requests, self.answers):
            with contextlib.suppress(OSError):
                pipe.close()
        if self.death is not None:
            os.close(self.death)
            self.death = None


def _import_path() -> list[str]:
    """The trainer's, and the working directory: an installed command does not look there by itself."""
    here = os.getcwd()
    return list(sys.path) if {"", here} & set(sys.path) else [*sys.path, here]


def _watch(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or a sandbox: its pipe's end must do
        return None
