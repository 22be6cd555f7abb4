"""Records spans, what a rank did from when to when, for `observe/timeline.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Span(NamedTuple):
    """One thing that one rank did, or waited for."""

    track: str
    """The row of the timeline that shows it: `phases`, `micro-batches`, `requests http://...`."""
    name: str
    start_s: float
    """On this process's clock, as `end_s`."""
    end_s: float
    ticket: int | None = None
    """Distinguishes spans of a track that may overlap; None: spans of this track nest."""


class Spans:
    """The recorder of one process. Any thread may add spans.

    Args:
        clock: monotonic seconds, the same for all processes of a machine.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.on = False
        self._spans: list[Span] = []

    def add(self, track: str, name: str, start_s: float, end_s: float, ticket: int | None = None) -> None:
        """Record a span that has ended, if recording is on."""
        if self.on:
            self._spans.append(Span(track, name, start_s, end_s, ticket))

    @contextmanager
    def span(self, track: str, name: str) -> Iterator[None]:
        """Record the block as a span, if recording is on when it ends."""
        start = self.clock()
        try:
            yield
        finally:
            self.add(track, name, start, self.clock())

    def drain(self) -> list[Span]:
        """Return and remove the spans recorded since the last call."""
        drained, self._spans = self._spans, []
        return drained


_RECORDER: ContextVar[Spans] = ContextVar("recorder")


def recorder() -> Spans:
    """The recorder of the run; outside of a run, one that records nothing.

    A new thread starts with an empty context and gets no recorder: what works in threads must call this before.
    """
    return _RECORDER.get(None) or Spans()


@contextmanager
def recorded_by(spans: Spans) -> Iterator[None]:
    token = _RECORDER.set(spans)
    try:
        yield
    finally:
        _RECORDER.reset(token)
