"""What others have said (servers, graders, models, file names, settings) on its way to a terminal or a log.

A terminal obeys escape sequences, and a reader believes a line that begins like one of ours. So everything that is
printed goes through `entry`: what is not printable is escaped, a text has an end, and only its first line starts at the
margin, where our own lines start.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from types import TracebackType
from typing import TextIO

_LONGEST_ENTRY = 10_000


def plain(text: str) -> str:
    """`text` with what a terminal would obey or hide escaped (`\\x1b` for the character); line ends stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def shortened(text: str, longest: int) -> str:
    """`text`, or its beginning and its end."""
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


def one_line(text: object, longest: int = 300) -> str:
    """`text` on one line of at most so many characters, for use inside a message."""
    return plain(" ".join(shortened(str(text), 20 * longest).split()))[:longest]


def reason(error: BaseException, longest: int = 300) -> str:
    """The first line of what an exception says, else its type."""
    return plain((str(error).strip() or type(error).__name__).splitlines()[0][:longest])[:longest]


def entry(text: str) -> str:
    """`text` as one entry of a terminal or log."""
    return plain(shortened(text, _LONGEST_ENTRY)).replace("\n", "\n    ")


def guard_errors() -> None:
    """Have tracebacks and what libraries log printed as entries too: their last line quotes whatever was at hand."""

    def crashed(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        show(*(part.rstrip() for part in traceback.format_exception(kind, error, trace)), file=sys.stderr)

    class Entries(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return entry(super().format(record))

    sys.excepthook = crashed
    threading.excepthook = lambda failed: crashed(failed.exc_type, failed.exc_value, failed.exc_traceback)
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Entries())


def show(*texts: str, file: TextIO | None = None) -> None:
    """Print entries, to stdout unless `file` is given, at once: nobody would see what waits in the buffer of a log."""
    print("\n".join(map(entry, texts)), file=file or sys.stdout, flush=True)
