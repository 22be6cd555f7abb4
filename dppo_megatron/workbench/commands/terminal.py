"""What commands print, and what libraries must not: rank 0 prints, and of each other machine its first rank what ends
the command there."""

from __future__ import annotations

import gc
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TextIO

from dppo_megatron.launcher_env import check_launcher_env, launched_local_rank, launched_rank
from dppo_megatron.progress import Advance, progress, unshown
from dppo_megatron.texts import show
from dppo_megatron.types import UserError


def say(line: str, why: Exception | None = None) -> None:
    """Print a line to stderr on rank 0, or on every rank if the environment does not name a rank.

    `why`: the error that ends a command. The first rank of each other machine prints it too, unless rank 0 does
    (`is_reported`); the ranks beside that one read the same files and would print the same line.
    """
    if not _speaks():
        if why is None or launched_local_rank() or getattr(why, "is_reported", False):
            return
        kind, _, text = line.partition(": ")
        line = f"{kind}: rank {launched_rank()} ({socket.gethostname()}): {text}"
    try:
        show(line, file=sys.stderr)
    except OSError:  # its reader has gone, or its disk is full; the exit code still tells
        drop(sys.stderr)


def drop(stream: TextIO) -> None:
    """Let `stream` take what is written from now on, and what it still holds, and write none of it: the interpreter
    would complain when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def show_progress(what: str, total: int, unit: str) -> AbstractContextManager[Advance]:
    """Progress on the terminal or log of the rank that prints (`say`); see `progress.Display`."""
    if not _speaks():
        return unshown(what, total, unit)
    from dppo_megatron.observe.progress_display import Progress

    return Progress(what, total, unit)


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Imports of some seconds, shown as progress, without Python's collector of garbage: it would walk through all that
    modules hold, 1,400 times, 0.9 of the 6.7 CPU seconds of a rank's imports, and find next to nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with progress(f"loading {what}"):
            yield
    finally:
        if collects:
            gc.enable()


def _speaks() -> bool:
    with suppress(UserError):  # a command that no launcher starts must not fail at what a launcher would have set
        check_launcher_env()
        return launched_rank() == 0
    return True


def quiet_libraries() -> None:
    """Silence notices of transformers and torch about missing extras; call before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch\.distributed|megatron\.core)")
