"""What others have said (servers, graders, models, file names, settings) on its way to a terminal or a log.

A terminal obeys escape sequences, and a reader believes a line that begins like one of ours. So all that is printed is
an `entry`: what is not printable is escaped, there is an end, and only the first line starts at the margin. Tables of
text are here too.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

LONGEST_ENTRY = 10_000
_LOGS: list[Callable[[str], object]] = [lambda line: show(line)]
"""The last one takes the lines of `log`. Not a logger: a plug-in that sets up `logging` would silence a run, and not a
context variable: a new thread has none."""


def plain(text: str) -> str:
    """`text` with what a terminal would obey or hide escaped (`\\x1b` for the character); line ends stay."""
    kept = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)
    return text if text.isprintable() else "".join(kept)


def shortened(text: str, longest: int) -> str:
    """`text`, or its beginning and its end."""
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


def one_line(text: object, longest: int = 300) -> str:
    """`text` on one line of at most so many characters, for use inside a message."""
    return plain(" ".join(shortened(str(text), 20 * longest).split()))[:longest]


def reason(error: BaseException) -> str:
    """The first line of what an exception says, else its type."""
    return one_line((str(error).strip() or type(error).__name__).splitlines()[0])


def entry(text: str) -> str:
    """`text` as one entry of a terminal or log."""
    return shortened(plain(shortened(text, LONGEST_ENTRY)), LONGEST_ENTRY).replace("\n", "\n    ")


def show(*texts: str, file: TextIO | None = None) -> None:
    """Print entries, to stdout unless `file` is given, at once: nobody would see what waits in the buffer of a log."""
    print("\n".join(map(entry, texts)), file=file or sys.stdout, flush=True)


def log(*lines: str) -> None:
    """Log lines of a run or command, from any thread: `logged` decides on each rank where they go."""
    for line in lines:
        _LOGS[-1](line)


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A line for each row, all of as many cells: the first `left` columns begin at one place, the others end at one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        placed = [cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in enumerate(cells)]
        lines.append("  ".join(placed).rstrip())
    return lines


@contextmanager
def logged(write: Callable[[str], object]) -> Iterator[None]:
    """In the block `write` takes the lines of `log`, and nothing else that took them before it."""
    _LOGS.append(write)
    try:
        yield
    finally:
        _LOGS.remove(write)


def guard_errors() -> None:
    """Have tracebacks and what libraries log printed as entries too: they quote whatever was at hand."""

    def crashed(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        show(*map(str.rstrip, traceback.format_exception(kind, error, trace)), file=sys.stderr)

    sys.excepthook, threading.excepthook = crashed, lambda failed: crashed(*failed[:3])
    if last := logging.lastResort:
        last.format = lambda record: entry(logging.Formatter().format(record))  # type: ignore[method-assign]
