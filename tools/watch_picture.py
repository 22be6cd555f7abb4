"""Write docs/watch.svg: what `dppo-megatron watch` shows of a run.

    python tools/watch_picture.py runs/quickstart [docs/watch.svg] [--step 48]

With --step, the run as it was after that step, as if it were still running. The picture loads nothing from the network:
rich's web fonts are replaced by the viewer's own.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from os import utime
from pathlib import Path

from rich.console import Console

from dppo_megatron.observe.lock import FILE as LOCK
from dppo_megatron.observe.samples import SAMPLES, rewind_samples
from dppo_megatron.workbench.watch.frame import Latest, frame


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("watched", metavar="RUN", type=Path)
    parser.add_argument("out", metavar="FILE", type=Path, nargs="?", default=Path("docs/watch.svg"))
    parser.add_argument("--step", type=int, metavar="N", help="the last step to show")
    parser.add_argument("--width", type=int, default=100, metavar="N", help="characters (default: 100)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        run = arguments.watched
        if arguments.step is not None:
            run = as_it_was(run, arguments.step, Path(scratch) / run.resolve().name)
        arguments.out.write_text(picture(run, arguments.width), encoding="utf-8")
    print(arguments.out)
    return 0


def picture(run: Path, width: int) -> str:
    """The picture as SVG."""
    console = Console(record=True, width=width, file=io.StringIO(), color_system="truecolor")
    latest = Latest(run)
    latest.look()
    console.print(frame(latest, width))
    drawn = console.export_svg(title=f"dppo-megatron watch {run.name}", unique_id="watch")
    drawn = re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    return re.sub(r"Fira Code", "ui-monospace, Menlo, Consolas, monospace", drawn)


def as_it_was(run: Path, step: int, to: Path) -> Path:
    """A copy of the run's files as they were after `step`, with a fresh lock, so that it counts as running."""
    to.mkdir()
    shutil.copy(run / "config.yaml", to)
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (to / "metrics.jsonl").write_text("".join(lines[: step + 1]), encoding="utf-8")
    shutil.copytree(run / SAMPLES, to / SAMPLES)
    rewind_samples(to / SAMPLES, step, to / "old")
    (to / LOCK).write_text("{}", encoding="utf-8")
    utime(to / LOCK, (time.time(), time.time()))
    return to


if __name__ == "__main__":
    sys.exit(main())
