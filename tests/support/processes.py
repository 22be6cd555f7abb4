"""A process beside the test that holds something until it is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def in_child(hold: Callable[[], object]) -> int:
    """A process that calls `hold` and then waits to be killed; returns its id once `hold` has returned."""
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            kept = hold()
            os.write(done, b"x")
            signal.pause()
            del kept
        finally:
            os._exit(1)
    os.close(done)
    assert os.read(ready, 1) == b"x", "it did not get what it was to hold"
    os.close(ready)
    return child


def kill(child: int) -> None:
    """SIGKILL."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@contextmanager
def holding(hold: Callable[[], object]) -> Iterator[int]:
    """Inside the block, another process holds what `hold` returns; yields its id."""
    child = in_child(hold)
    try:
        yield child
    finally:
        kill(child)
