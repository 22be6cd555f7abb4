"""Progress of what may take more than two seconds, opened where the work is done.

What shows it is put up by a command or a run (`observe/progress_display.py`) and reached through a context variable, so
that no signature carries it; elsewhere nothing is shown. A new thread begins with an empty context and would show
nothing: work in a thread takes the `Advance` that its owner has opened, or runs in `contextvars.copy_context()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeAlias, TypeVar

T = TypeVar("T")


class Advance(Protocol):
    """Tells a display how far a task is."""

    def __call__(self, done: int, tokens: int = 0) -> None:
        """So much of the total is done, with so many tokens."""


Display: TypeAlias = Callable[[str, int, str], AbstractContextManager[Advance]]
"""Shows a task by the arguments of `progress`."""


@contextmanager
def unshown(what: str, total: int, unit: str) -> Iterator[Advance]:
    """A `Display` that shows nothing."""
    yield lambda done, tokens=0: None


_DISPLAY: ContextVar[Display] = ContextVar("display", default=unshown)


def progress(what: str, total: int = 0, unit: str = "") -> AbstractContextManager[Advance]:
    """A task, shown while the block lasts.

    Args:
        total: 0: not known.
        unit: in the plural; empty: nothing to count, only how long it takes.

    Example:
        `with progress("evaluation", 200, "answers") as advance: advance(20)`; `with progress("loading libraries"): ...`
    """
    return _DISPLAY.get()(what, total, unit)


@contextmanager
def shown_by(display: Display) -> Iterator[None]:
    """`display` shows the tasks of the block."""
    token = _DISPLAY.set(display)
    try:
        yield
    finally:
        _DISPLAY.reset(token)


def counted(items: Iterable[T], advance: Advance) -> Iterator[T]:
    """`items`, one by one; `advance` is told how many there have been."""
    for done, item in enumerate(items, start=1):
        advance(done)
        yield item
