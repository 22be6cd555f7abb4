"""Progress of work that may take more than two seconds, reported where the work is done.

The display is set by a command or a run (`observe/progress_display.py`) and reached through a context variable, so that
no signature carries it; without one nothing is shown. A new thread starts with an empty context and would show nothing:
work in a thread uses the `Advance` that its owner has opened, or runs in `contextvars.copy_context()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeAlias, TypeVar

T = TypeVar("T")


class Advance(Protocol):
    """Updates the display of a task."""

    def __call__(self, done: int, tokens: int = 0) -> None:
        """`done` of the total is done, with `tokens` tokens generated so far."""


Display: TypeAlias = Callable[[str, int, str], AbstractContextManager[Advance]]
"""Shows a task; called with the arguments of `progress`."""


@contextmanager
def unshown(what: str, total: int, unit: str) -> Iterator[Advance]:
    yield lambda done, tokens=0: None


_DISPLAY: ContextVar[Display] = ContextVar("display", default=unshown)


def progress(what: str, total: int = 0, unit: str = "") -> AbstractContextManager[Advance]:
    """Show a task while the block runs.

    Args:
        what: the task's name.
        total: number of `unit`s to do; 0: unknown.
        unit: in the plural; empty: show only how long it takes.

    Example:
        `with progress("evaluation", 200, "answers") as advance: advance(20)`; `with progress("loading libraries"): ...`
    """
    return _DISPLAY.get()(what, total, unit)


@contextmanager
def shown_by(display: Display) -> Iterator[None]:
    token = _DISPLAY.set(display)
    try:
        yield
    finally:
        _DISPLAY.reset(token)


def counted(items: Iterable[T], advance: Advance) -> Iterator[T]:
    """Yield `items`, and call `advance` with the number of items so far."""
    for done, item in enumerate(items, start=1):
        advance(done)
        yield item
