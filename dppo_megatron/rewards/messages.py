"""What the trainer and a grader process share: messages on two pipes, and a board of four numbers in shared memory.

Requests are pickled and answers are msgpack. A pickle can carry whatever a row holds (dates, arrays), but reading one
runs code, and a grader may write nonsense into any open file, which the trainer must survive: it decodes answers as
what they must be. Typed, that takes a fifth of the time of JSON and dictionaries.

Thanks to the board a chunk needs no message per sample. The process writes there which sample it is grading and since
when; the trainer reads it when a deadline is near, or when the process has died. A message for each sample would cost
512 system calls and as many wake-ups of the trainer, which was most of what 512 cheap gradings cost.
"""

from __future__ import annotations

import mmap
import tempfile
from typing import IO

import msgspec

from dppo_megatron.rewards.functions import Mode

AT, SINCE_NS, BEGUN, LIMIT = range(4)
"""The board's cells, of which the process writes three and the trainer the last: position, among all that the process
was given, of the sample that is being graded, or NONE; when it was begun, by the monotonic clock, which is one for all
processes; how many were begun; and where it is to stop. The trainer takes samples back by lowering LIMIT; one that is
begun at that moment is graded twice, and the first answer counts. Each cell is eight bytes, aligned."""
NONE = -1
CANNOT_ANSWER = 74
"""Exit code of a process that cannot write its answers."""
_BOARD_BYTES = 32


class GraderReady(msgspec.Struct, frozen=True, tag=True):
    """A process has imported its graders."""

    wants_context: bool
    """Whether rows and prompts are to be sent."""
    mode: Mode


class NoStart(msgspec.Struct, frozen=True, tag=True):
    """It cannot; the text is for the user."""

    text: str


class Answers(msgspec.Struct, frozen=True, tag=True):
    """Grades of some samples."""

    grades: msgspec.Raw
    """A list of maps with the fields of a `Grade`: this file is read where numpy, which `types` needs, is not."""
    positions: list[int]
    """Of a process that grades many at a time, what was asked for last need not come last."""
    seconds_each: float | None = None
    """That the samples of a chunk took in the mean, with its last answers."""
    out_of_memory: bool = False
    """The last of the grades failed for that, and the process has ended."""


Message = GraderReady | NoStart | Answers


def board_file() -> IO[bytes]:
    """An open file for a board. Written, not only made longer: a page that a full disk lacks would kill its reader."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(bytes(_BOARD_BYTES))
    file.flush()
    return file


def map_board(file: int) -> memoryview[int]:
    """The cells of a board in an open file."""
    return memoryview(mmap.mmap(file, _BOARD_BYTES)).cast("q")
