"""Prints and logs text from elsewhere (servers, graders, models, file names, settings) safely; also, tables of text.

A terminal executes escape sequences, and a reader trusts a line that begins like one of ours. So everything is printed
as an `entry`: unprintable characters are escaped, the length is bounded, and all lines but the first are indented.
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
"""The last one gets the lines of `log`. It is not a logger, because a plug-in that configures `logging` would silence a
run, and not a context variable, because a new thread has none."""


def plain(text: str) -> str:
    """`text` with control and invisible characters escaped (`\\x1b`); line breaks stay."""
    escaped = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)
    return text if text.isprintable() else "".join(escaped)


def shortened(text: str, longest: int) -> str:
    """`text`, or its beginning and its end if it has more than `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


def one_line(text: object, longest: int = 300) -> str:
    """`text` on one line of at most `longest` characters, for use inside a message."""
    return plain(" ".join(shortened(str(text), 20 * longest).split()))[:longest]


def reason(error: BaseException) -> str:
    """The first line of an exception's message, else its type."""
    return one_line((str(error).strip() or type(error).__name__).splitlines()[0])


def entry(text: str) -> str:
    """`text` as one entry of a terminal or log."""
    return shortened(plain(shortened(text, LONGEST_ENTRY)), LONGEST_ENTRY).replace("\n", "\n    ")


def show(*texts: str, file: TextIO | None = None) -> None:
    """Print entries to `file` (None: stdout) and flush, so that a log file never lags behind."""
    print("\n".join(map(entry, texts)), file=file or sys.stdout, flush=True)


def log(*lines: str) -> None:
    """Log lines of a run or command, from any thread. `logged` decides where they are written on each rank."""
    for line in lines:
        _LOGS[-1](line)


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A line for each row; all rows have as many cells. The first `left` columns are left-aligned, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        padded = [cell.ljust(width) if column < left else cell.rjust(width) for column, (cell, width) in cells]
        lines.append("  ".join(padded).rstrip())
    return lines


@contextmanager
def logged(write: Callable[[str], object]) -> Iterator[None]:
    """In the block, send the lines of `log` to `write` only."""
    _LOGS.append(write)
    try:
        yield
    finally:
        _LOGS.remove(write)


def guard_errors() -> None:
    """Print tracebacks and the log of libraries as entries too, because they may quote any text."""

    def crashed(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        show(*map(str.rstrip, traceback.format_exception(kind, error, trace)), file=sys.stderr)

    sys.excepthook, threading.excepthook = crashed, lambda failed: crashed(*failed[:3])
    if last := logging.lastResort:
        last.format = lambda record: entry(logging.Formatter().format(record))  # type: ignore[method-assign]
