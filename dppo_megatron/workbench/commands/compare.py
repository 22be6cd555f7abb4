"""`dppo-megatron compare CONFIG`."""

from __future__ import annotations

import argparse
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dppo_megatron.config.paths import check_writable
from dppo_megatron.progress import progress
from dppo_megatron.pruning.policies import METHODS
from dppo_megatron.texts import logged, show
from dppo_megatron.workbench.commands.parser import add_config, check_number, read_config

if TYPE_CHECKING:
    from dppo_megatron.workbench.compare.arms import MethodRun

_METHODS = "grpo,grpo_nonzero,cppo,greso,dppo_paper,dppo,dppo_auto"
_SWEPT = "grpo,grpo_nonzero,dppo"
DESCRIPTION = f"""\
Train CONFIG's job under several pruning methods; report the speed-up of each over GRPO at equal accuracy, and its final
accuracy (docs/pruning.md):

  dppo-megatron compare configs/quickstart.yaml --methods grpo@16,grpo,grpo@64,grpo_nonzero,dppo --seeds 5

METHOD@N is a method with N prompts a step, and as many more or fewer steps. The baseline is the best of the GRPOs that
are listed. grpo_nonzero is GRPO that leaves out completions without gradient. One run after another on this machine,
from the same start; those that had finished in --out are kept. Writes results.json and report.html.

--sweep tunes each method first, over prompts a step, learning rate and schedule (by default around the config's own);
--sweep KEY=A,B gives the values of one of them, or of a further setting:

  dppo-megatron compare configs/quickstart.yaml --seeds 4 --sweep actor.optimizer.learning_rate=5e-4,7e-4,1e-3

All candidates run on one seed, the better half on a second, its better half on two more. The table is then of the best
of each, and sweep.json has every rung.

{textwrap.fill(f"Methods: {', '.join(METHODS)}, grpo_nonzero, or module:Class for a policy of your own.", 119)}
"""


def add_options(command: argparse.ArgumentParser) -> None:
    add_config(command)
    command.add_argument(
        "--methods", metavar="A,B@N,...", help=f"default: {_METHODS}; with --sweep: {_SWEPT}, without @N"
    )
    command.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds from the config's on (default: 1)")
    command.add_argument(
        "--steps-factor",
        type=float,
        default=1.0,
        metavar="F",
        help="methods other than GRPO run F times the steps, because pruned steps are cheaper (default: 1)",
    )
    command.add_argument(
        "--sweep", action="append", nargs="?", const="", metavar="KEY=A,B", help="tune each method first, as above"
    )
    command.add_argument("--out", type=Path, default=Path("compare"), help="where to write (default: compare/)")


def execute(arguments: argparse.Namespace) -> int:
    check_number("--seeds", arguments.seeds, "[1, 10000]")
    check_number("--steps-factor", arguments.steps_factor, "(0, 10000]")
    config = read_config(arguments.config, arguments.overrides, writes_run=False)
    with progress("loading libraries"):
        from dppo_megatron.workbench.compare.arms import parse_arms
        from dppo_megatron.workbench.compare.runs import in_a_process, run_all, shared_task
        from dppo_megatron.workbench.compare.sweep import (
            best_lines,
            candidates,
            halve,
            parse_grid,
            rung_table,
            sweep_results,
        )
        from dppo_megatron.workbench.compare.table import about, results, table, write_page, write_results
        from dppo_megatron.workbench.compare.verdict import judge

    factor, swept = arguments.steps_factor, arguments.sweep is not None
    grid = parse_grid(arguments.sweep, config) if swept else {}
    methods = arguments.methods or (_SWEPT if swept else _METHODS)
    arms = candidates(methods, grid, config, factor) if swept else parse_arms(methods, config, factor)
    out: Path = arguments.out
    for name in ("", "results.json", "report.html", *["sweep.json"] * swept):
        check_writable("--out", out / name, directory=not name)
    out.mkdir(parents=True, exist_ok=True)

    shared = shared_task(config)
    each = f"All seeds share one task: {shared}." if shared else "Each seed has a task, a model and a held-out set."
    notes = [each] if arguments.seeds > 1 else ["One seed: no interval over seeds."]
    ended: list[MethodRun] = []
    run = partial(run_all, config, arguments.config, arguments.overrides, out=out, launch=in_a_process, ended=ended)
    with logged(partial(show, file=sys.stderr)), _shown_if_ended_early(ended):
        if swept:
            rungs = []
            for rows, of_those_left in halve(arms, arguments.seeds, run):
                rungs.append(rows)
                runs = of_those_left
                write_results(out / "sweep.json", about() | sweep_results(rungs, grid))
                show(*rung_table(rows), "")
            arms = [row.arm for row in rows if row.goes_on]
            show(*best_lines(rows, grid), "")
            notes.append("The settings were chosen on these seeds, which flatters them: compare on others (seed=N).")
        else:
            runs = run(arms, seeds=arguments.seeds)
    with progress("comparing"):
        verdict = judge(runs, arms, same_problems=shared is not None)
        text, values = table(verdict), results(verdict, runs, notes)
    write_results(out / "results.json", values)
    write_page(out / "report.html", f"{arguments.config}: methods compared", text, values)
    show(*text.splitlines(), *notes, f"{out}/: results.json, report.html{', sweep.json' * swept}")
    return 0


@contextmanager
def _shown_if_ended_early(ended: list[MethodRun]) -> Iterator[None]:
    """SIGTERM, the time limit of a queue, raises SystemExit inside the block, which ends the run in progress too; the
    `ended` runs are then shown, and also after Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        from dppo_megatron.workbench.compare.sweep import so_far

        show(*so_far(ended))
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
