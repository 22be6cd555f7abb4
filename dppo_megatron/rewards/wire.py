"""What the trainer and a grader process share: frames on two pipes, and a board of numbers in shared memory.

Requests are pickled and answers are JSON, most of them as short lists: the names of fields and the same facts, a
thousand times over, were most of what an answer cost. A pickle can carry whatever a row holds (dates, arrays), but
reading one runs code, and a grader may write nonsense into any open file, which the trainer must survive.

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

_LENGTH = struct.Struct("<Q")
BOARD_BYTES = 32
NOBODY = -1
"""Stands for a sample's position where no sample is at hand."""
CANNOT_ANSWER = 74
"""Exit code of a process that cannot write its answers."""
MAX_ANSWER_BYTES = 64 << 20
"""A frame that claims more is none: something else was written into the pipe."""


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


_GRADE = ("reward", "extracted", "why", "facts")


def packed(answers: list[Any]) -> dict[str, Any]:
    """Answers as a message: those with all the fields of a plain grade as lists, each different `facts` once.

    Example:
        >>> packed([0.5, {"reward": 1.0, "extracted": "5", "why": "exact", "facts": {"boxed_share": 1.0}}])
        {'answers': [0.5, [1.0, '5', 'exact', 0]], 'facts': [{'boxed_share': 1.0}]}
    """
    facts: list[Any] = []
    short: list[Any] = []
    for answer in answers:
        if type(answer) is dict and tuple(answer) == _GRADE:
            reward, extracted, why, of = answer.values()
            if not facts or facts[-1] != of:
                facts.append(of)
            short.append([reward, extracted, why, len(facts) - 1])
        else:
            short.append(answer)
    return {"answers": short, "facts": facts}


def write_all(file: int, data: bytes) -> None:
    """Write all of `data`, however little the pipe takes at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
