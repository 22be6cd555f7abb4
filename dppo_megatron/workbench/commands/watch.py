"""Show a run in the terminal while it trains: progress and time left, curves, where the seconds go, the last samples,
the servers and what deserves a second look:

  dppo-megatron watch runs/quickstart

It reads only the run's files, so it works over SSH and beside any trainer. Control-C leaves it and does not affect
the run. If the run has ended, or the output is not a terminal, it prints one picture.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from dppo_megatron.progress import progress
from dppo_megatron.workbench.commands.parser import check_numbers


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("watched", metavar="RUN", type=Path, help="run directory")
    command.add_argument("--once", action="store_true", help="print one picture and exit")
    command.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between looks (default: 2)")


def execute(arguments: argparse.Namespace) -> int:
    check_numbers(arguments, every="[0.1, 3600]")
    from rich.console import Console, RenderableType
    from rich.live import Live

    from dppo_megatron.workbench.watch.frame import Latest, frame

    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # its encoding may lack blocks
    latest, console = Latest(arguments.watched), Console()

    def picture(members: int = 4) -> RenderableType:
        latest.look()
        return frame(latest, console.width, members)

    with progress(f"reading {arguments.watched}"):
        shown, until = picture(), time.monotonic() + 6.0
        while latest.record.status == "crashed" and time.monotonic() < until:
            time.sleep(0.5)  # its clock may differ: if it lives, the next heartbeat comes within 5 s
            shown = picture()
    is_over = arguments.once or latest.record.status != "running"
    if is_over or not console.is_terminal or console.is_dumb_terminal:
        console.print(shown)
        return 0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while latest.record.status == "running":
            # the curves, the time and the head take some 25 lines
            live.update(picture(max(1, min(8, console.height - 27))), refresh=True)
            time.sleep(arguments.every)
    console.print(picture())
    return 0
