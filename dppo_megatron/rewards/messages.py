"""What the trainer and a grader process share: messages on two pipes, and a board of four numbers in shared memory.

Requests are pickled, since a pickle can carry whatever a row holds (dates, arrays). Answers are msgpack: reading a
pickle runs code, and a grader may write nonsense into any open file, which the trainer must survive. It decodes answers
by their types, which takes a fifth of the time of JSON and dictionaries.

Because of the board, a chunk needs no message per sample. The process writes there which sample it is grading and since
when; the trainer reads it when a deadline is near or when the process has died. A message for each sample would cost
512 system calls and as many wake-ups of the trainer, which was most of what 512 cheap gradings cost.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import IO

import msgspec

from dppo_megatron.rewards.functions import Mode

AT, SINCE_NS, BEGUN, LIMIT = range(4)
"""The board's cells, eight aligned bytes each. The process writes the first three: the position (among all samples that
it was given) of the one being graded, or NONE; when that was begun, by the monotonic clock, which all processes share;
and how many were begun. The trainer writes the last: the position at which the process stops. It takes samples back by
lowering LIMIT; a sample that is begun at that moment is graded twice, and the first answer counts."""
NONE = -1
CANNOT_ANSWER = 74  # exit code of a process that cannot write its answers
_BOARD_BYTES = 32


class GraderReady(msgspec.Struct, frozen=True, tag=True):
    """A process has imported its graders."""

    wants_context: bool
    """Whether they need rows and prompts."""
    mode: Mode


class NoStart(msgspec.Struct, frozen=True, tag=True):
    """A process cannot import its graders; the text is for the user."""

    text: str


class Answers(msgspec.Struct, frozen=True, tag=True):
    """Grades of some samples."""

    grades: msgspec.Raw
    """A list of maps with the fields of a `Grade`, which grader processes do not import: `types` needs numpy."""
    positions: list[int]
    """Of the graded samples; in any order if the process grades many at a time."""
    seconds_each: float | None = None
    """Mean seconds of the chunk's samples; only in the last answers of a chunk."""
    out_of_memory: bool = False
    """The last of the grades failed because memory ran out, and the process has ended."""


Message = GraderReady | NoStart | Answers


def board_file() -> IO[bytes]:
    """An open file for a board, in memory on Linux: a full /tmp would let no process start. All its bytes are written:
    a page that a full disk lacks would kill its reader."""
    is_linux = hasattr(os, "memfd_create")
    file = os.fdopen(os.memfd_create("board"), "w+b") if is_linux else tempfile.TemporaryFile()  # noqa: SIM115
    file.write(bytes(_BOARD_BYTES))
    file.flush()
    return file


def map_board(file: int) -> memoryview[int]:
    """The cells of a board in an open file."""
    return memoryview(mmap.mmap(file, _BOARD_BYTES)).cast("q")
