"""What the trainer sends to a tracker's process, and its answers: JSON objects in frames.

It is all that a tool ever sees of a run: numbers, the settings as config.yaml has them, and tables of samples.
"""

from __future__ import annotations

import msgspec

Cell = str | float | int | bool | None


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The run, once."""

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


class End(msgspec.Struct, frozen=True, tag=True):
    """The run ends."""

    finished: bool
    """As intended, and not by an error."""


class Answer(msgspec.Struct, frozen=True):
    """To each message, when the tool has taken it."""

    failure: str = ""


ToTracker = Begin | StepLine | End
ENCODER = msgspec.json.Encoder()
TO_TRACKER = msgspec.json.Decoder(ToTracker)
ANSWER = msgspec.json.Decoder(Answer)
