"""What the trainer and a grader process share: frames on two pipes, and a board of numbers in shared memory.

Requests are pickled and answers are msgpack. A pickle can carry whatever a row holds (dates, arrays), but reading one
runs code, and a grader may write nonsense into any open file, which the trainer must survive: it decodes answers as
what they must be. Typed, that takes a fifth of the time of JSON and dictionaries.

Thanks to the board a chunk needs no message per sample. The process writes there which sample it is grading and since
when; the trainer reads it when a deadline is near, or when the process has died. A message for each sample would cost
512 system calls and as many wake-ups of the trainer, which was most of what 512 cheap gradings cost.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import IO, Any

import msgspec

_LENGTH = struct.Struct("<Q")
BOARD_BYTES = 32
NOBODY = -1
"""Stands for a sample's position where no sample is at hand."""
CANNOT_ANSWER = 74
"""Exit code of a process that cannot write its answers."""
MAX_ANSWER_BYTES = 64 << 20
"""A frame that claims more is none: something else was written into the pipe."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A process has imported its graders."""

    wants_row: bool


class NoStart(msgspec.Struct, frozen=True, tag=True):
    """It cannot; the text is for the user."""

    text: str


class Answers(msgspec.Struct, frozen=True, tag=True):
    """Grades of the next samples of its chunk, in order."""

    grades: msgspec.Raw
    """A list of maps with the fields of a `Grade`: this file is read where numpy, which `types` needs, is not."""
    took_s: float | None = None
    """For the whole chunk, with its last answers."""
    out_of_memory: bool = False
    """The last of the grades failed for that, and the process has ended."""


Message = Ready | NoStart | Answers


def encode(value: Any) -> bytes:
    """As msgpack. A lone surrogate, which UTF-8 does not have, becomes a text like `\\ud800`."""
    try:
        return msgspec.msgpack.encode(value)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(_printable(msgspec.to_builtins(value)))


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


class Board:
    """Four numbers: the sample at hand, since when, how many were begun, and how many of the chunk are to be done.

    The process writes the first three, the trainer the last: it takes samples back by lowering it. Each is eight bytes,
    aligned, so neither side reads half of one. A sample begun just when it was taken back is graded twice, and the
    first answer counts.
    """

    def __init__(self, file: int) -> None:
        self._cells = memoryview(mmap.mmap(file, BOARD_BYTES)).cast("q")

    @property
    def at(self) -> int:
        """Position in the chunk of the sample at hand; NOBODY between two."""
        return self._cells[0]

    @property
    def since_s(self) -> float:
        """When it was begun, by the monotonic clock, which is one for all processes."""
        return self._cells[1] / 1e9

    @property
    def begun(self) -> int:
        """Samples of the chunk begun so far."""
        return self._cells[2]

    @property
    def limit(self) -> int:
        """Positions below this one are to be graded."""
        return self._cells[3]

    @limit.setter
    def limit(self, value: int) -> None:
        self._cells[3] = value

    def begin(self, position: int, now_ns: int) -> None:
        """The sample at `position` is at hand from now on."""
        self._cells[1] = now_ns
        self._cells[2] = position + 1
        self._cells[0] = position

    def pause(self) -> None:
        """No sample is at hand."""
        self._cells[0] = NOBODY

    def reset(self, limit: int) -> None:
        """For a new chunk; by the trainer, while the process waits for one."""
        self._cells[0], self._cells[2], self._cells[3] = NOBODY, 0, limit


def board_file() -> IO[bytes]:
    """An open file for a board. Written, not only made longer: a page that a full disk lacks would kill its reader."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(bytes(BOARD_BYTES))
    file.flush()
    return file


def frame(payload: bytes) -> bytes:
    """With its length before it."""
    return _LENGTH.pack(len(payload)) + payload


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame's payload; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    payload = stream.read(length)
    return payload if len(payload) == length else None


def take_frames(received: bytearray) -> list[bytes]:
    """Remove the whole frames from the front of `received`.

    Raises:
        ValueError: what stands there is no frame.
    """
    frames, start = [], 0
    while len(received) - start >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received, start)
        if length > MAX_ANSWER_BYTES:
            raise ValueError(f"a frame of {length} bytes")
        end = start + _LENGTH.size + length
        if end > len(received):
            break
        frames.append(bytes(received[start + _LENGTH.size : end]))
        start = end
    del received[:start]
    return frames


def write_all(file: int, data: bytes) -> None:
    """Write all of `data`, however little the pipe takes at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
