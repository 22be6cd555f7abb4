"""`dppo-megatron watch RUN`."""

from __future__ import annotations

import argparse
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dppo_megatron.progress import progress
from dppo_megatron.workbench.commands.parser import check_number

DESCRIPTION = """\
Show a run in the terminal while it goes on: progress and time left, curves, where the seconds go, the last samples, the
servers and what deserves a second look:

  dppo-megatron watch runs/quickstart

It reads the run's files and nothing else, so it works over SSH and beside any trainer. `q` or Control-C leaves it; the
run does not notice. Of a run that has ended, and where the output is no terminal, it prints one picture.
"""


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("watched", metavar="RUN", type=Path, help="run directory")
    command.add_argument("--once", action="store_true", help="print one picture and exit")
    command.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between looks (default: 2)")


def execute(arguments: argparse.Namespace) -> int:
    check_number("--every", arguments.every, "[0.1, 3600]")
    from rich.console import Console, RenderableType
    from rich.live import Live

    from dppo_megatron.workbench.watch.frame import Latest, frame

    latest, console = Latest(arguments.watched), Console()

    def picture(height: int | None) -> RenderableType:
        latest.look()
        # the curves, the time and the head take some 25 lines
        members = 4 if height is None else max(1, min(8, height - 27))
        return frame(latest, console, members)

    with progress(f"reading {arguments.watched}"):
        shown = picture(None)
    if arguments.once or not console.is_terminal or console.is_dumb_terminal or latest.record.status != "running":
        console.print(shown)
        return 0
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while latest.record.status == "running":
            live.update(picture(console.height), refresh=True)
            if pressed(arguments.every):
                break
    console.print(picture(None))
    return 0


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits for so many seconds and returns whether `q` was pressed."""
    descriptor = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = termios.tcgetattr(descriptor) if descriptor is not None else None

    def pressed(timeout_s: float) -> bool:
        if descriptor is None:
            select.select([], [], [], timeout_s)
            return False
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
        if not ready:
            return False
        try:
            typed = os.read(descriptor, 1024)  # all of it: a buffer of Python's would keep the second key from `select`
        except OSError:  # the terminal has gone
            return True
        return not typed or b"q" in typed.lower()

    try:
        if descriptor is not None:
            tty.setcbreak(descriptor)
        yield pressed
    finally:
        if descriptor is not None and before is not None:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
