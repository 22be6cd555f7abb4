"""Printing for commands, and silence for libraries: rank 0 prints; the first rank of every other machine prints only
the error that ends the command there."""

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


def say(line: str, error: Exception | None = None) -> None:
    """Print a line to stderr on rank 0, or on every rank if the environment does not name a rank.

    `error`: what ends the command. The first rank of each other machine prints the line too, unless rank 0 reports the
    error (`is_reported`). The other ranks of a machine read the same files and would print the same line again.
    """
    if not _is_printing_rank():
        if error is None or launched_local_rank() or getattr(error, "is_reported", False):
            return
        kind, _, text = line.partition(": ")
        line = f"{kind}: rank {launched_rank()} ({socket.gethostname()}): {text}"
    try:
        show(line, file=sys.stderr)
    except OSError:  # the reader has closed the pipe or the disk is full; the exit code still reports the error
        drop(sys.stderr)


def drop(stream: TextIO) -> None:
    """Redirect `stream` to /dev/null, with what its buffer still holds. Otherwise the interpreter's flush at exit would
    fail and print an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def show_progress(what: str, total: int, unit: str) -> AbstractContextManager[Advance]:
    """Progress on the terminal or log of the rank that prints (`say`); see `progress.Display`."""
    if not _is_printing_rank():
        return unshown(what, total, unit)
    from dppo_megatron.observe.progress_display import Progress

    return Progress(what, total, unit)


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Show imports that take seconds as progress, and turn Python's garbage collector off meanwhile: it would run 1,350
    times over all that modules hold (1 of the 5.5 CPU seconds of a rank's imports) and find next to nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with progress(f"loading {what}"):
            yield
    finally:
        if collects:
            gc.enable()


def _is_printing_rank() -> bool:
    with suppress(UserError):  # without a launcher, wrong launcher variables must not make a command fail
        check_launcher_env()
        return launched_rank() == 0
    return True


def quiet_libraries() -> None:
    """Silence notices of transformers and torch, as of a config.json that names its `torch_dtype`, which nearly every
    published one does; call before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch\.distributed|megatron\.core)")
