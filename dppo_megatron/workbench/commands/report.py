"""Write one HTML file about one run or several, which needs no network: rewards, evaluations, where time and tokens go,
what was pruned and what it cost, warnings, settings, and a browser for the samples:

  dppo-megatron report runs/quickstart
  dppo-megatron report runs/quickstart runs/quickstart_grpo --out both.html

A run may be finished, running or crashed (docs/report.md); of several, one without a step yet is left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dppo_megatron.config.paths import check_writable
from dppo_megatron.progress import counted, progress
from dppo_megatron.texts import show
from dppo_megatron.types import UserError
from dppo_megatron.workbench.commands.terminal import loading


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directory")
    where = "where to write (default: RUN/report.html; of several: ./report.html)"
    command.add_argument("--out", type=Path, metavar="FILE", help=where)


def execute(arguments: argparse.Namespace) -> int:
    with loading("libraries"):
        from dppo_megatron.workbench.report.page import write_page
        from dppo_megatron.workbench.runs.run_record import NoStep, read_run
    runs: list[Path] = arguments.runs
    out: Path = arguments.out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    check_writable("--out", out, directory=False)
    records, without_step = [], list[NoStep]()
    with progress("reading", len(runs), "runs") as advance:
        for run in counted(runs, advance):
            try:
                records.append(read_run(run))
            except NoStep as error:
                without_step.append(error)
    if not records:
        raise UserError(f"{without_step[0]}; dppo-megatron watch RUN shows what a run is doing")
    for one in without_step:
        show(f"warning: {one}; it is left out", file=sys.stderr)
    with progress(f"writing {out}"):
        write_page(out, records)
    show(f"{out} ({out.stat().st_size / 1e6:.1f} MB): open it in a browser")
    return 0
