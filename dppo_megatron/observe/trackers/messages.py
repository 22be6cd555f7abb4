"""What the trainer sends to a tracker's process, and its answers: JSON objects in frames.

It is all that a tool ever sees of a run: numbers, the settings as config.yaml has them, and tables of samples.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dppo_megatron.files import write_text

Cell = str | float | int | bool | None


class Begin(msgspec.Struct, frozen=True, tag=True):
    run: str
    """Id of the run directory."""
    directory: str
    """`trackers/` in it, absolute."""
    project: str
    name: str
    tags: list[str]
    offline: bool
    config: dict[str, Cell]
    """Dotted key -> value, with references to the environment and not what they stand for."""
    resumed_step: int | None
    """The step that the run resumes from; None: it begins."""


class StepLine(msgspec.Struct, frozen=True, tag=True):
    """A finished step, or the evaluation before the first (step 0)."""

    step: int
    time_s: float
    """Since the epoch."""
    metrics: dict[str, float]
    """All finite."""
    columns: list[str] = []
    rows: list[list[Cell]] = []
    """A table of samples; empty: none with this step."""


class EndRun(msgspec.Struct, frozen=True, tag=True):
    finished: bool
    """As intended, and not by an error."""


class Answer(msgspec.Struct, frozen=True):
    """To each message, when the tool has taken it."""

    failure: str = ""


class Mark(msgspec.Struct):
    """How far a tool is, kept in the run directory."""

    begun: int = 0
    """How often the run has begun at its first step."""
    last_step: int = -1
    id: str = ""
    """The tool's own id of its run, where it gives one."""

    @staticmethod
    def read(path: Path) -> Mark:
        """An unreadable one counts as none."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=Mark)
        except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return Mark()

    def write(self, path: Path) -> None:
        """In one piece. Raises OSError."""
        write_text(path, msgspec.json.encode(self).decode() + "\n")


ToTracker = Begin | StepLine | EndRun
ENCODER = msgspec.json.Encoder()
TO_TRACKER = msgspec.json.Decoder(ToTracker)
ANSWER = msgspec.json.Decoder(Answer)
