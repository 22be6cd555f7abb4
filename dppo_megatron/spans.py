"""What happened from when to when, for the timelines of `observe.timeline`.

Off, which it is unless a step is being recorded, a span costs the reading of a flag. On, it is a tuple in a list: who
turns them into a file is `observe/timeline.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Span(NamedTuple):
    """One thing that one rank did, or waited for."""

    track: str
    """What it is shown beside: `phases`, `micro-batches`, `requests http://...`."""
    name: str
    start_s: float
    """On this process's clock."""
    end_s: float
    ticket: int | None = None
    """Tells apart spans of a track that may overlap; None: those of the track nest."""


class Spans:
    """The recorder of one process. Any thread may add.

    Args:
        clock: seconds that only grow, the same for all processes of a machine.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.on = False
        self._spans: list[Span] = []

    def add(self, track: str, name: str, start_s: float, end_s: float, ticket: int | None = None) -> None:
        """Keep a span that has ended, if on."""
        if self.on:
            self._spans.append(Span(track, name, start_s, end_s, ticket))

    @contextmanager
    def span(self, track: str, name: str) -> Iterator[None]:
        """Keep the time of the block, if on at its end."""
        start = self.clock()
        try:
            yield
        finally:
            self.add(track, name, start, self.clock())

    def drain(self) -> list[Span]:
        """Those kept since the last call."""
        taken, self._spans = self._spans, []
        return taken


_RECORDER: ContextVar[Spans] = ContextVar("recorder")


def recorder() -> Spans:
    """That of the run; outside of a run, one that keeps nothing.

    A new thread begins with an empty context and finds none: what works in threads takes it when it is built.
    """
    return _RECORDER.get(None) or Spans()


@contextmanager
def recorded_by(spans: Spans) -> Iterator[None]:
    """`spans` is the recorder in the block."""
    token = _RECORDER.set(spans)
    try:
        yield
    finally:
        _RECORDER.reset(token)
