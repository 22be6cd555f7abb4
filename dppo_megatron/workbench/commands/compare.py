"""Train CONFIG's job under several pruning methods; report the speed-up of each over GRPO at equal accuracy, and its
final accuracy (docs/pruning.md):

  dppo-megatron compare configs/quickstart.yaml --methods grpo@16,grpo,grpo@64,grpo_nonzero,dppo --seeds 5

METHOD@N is a method with N prompts a step, and in proportion fewer or more steps. The baseline is the best of the grpo
and grpo@N listed; grpo_nonzero, GRPO without the completions that have no gradient, is an arm like the others.
module:Class is a policy of your own. The runs train one after another on this machine, from the same start; runs that
are finished in --out are kept. Writes results.json and report.html.

--sweep tunes each method first, over prompts a step, learning rate and schedule (by default around the config's own);
--sweep KEY=A,B gives the values of one of them, or of another setting:

  dppo-megatron compare configs/quickstart.yaml --seeds 4 --sweep actor.optimizer.learning_rate=5e-4,7e-4,1e-3

All candidates run on one seed, the better half on a second, its better half on two more. The table then compares the
best of each method; sweep.json has every rung. Their scores on these seeds flatter them, so judge them on others:

  dppo-megatron compare configs/quickstart.yaml seed=100 --seeds 10 --tuned compare/sweep.json --out judged

--arm 'METHOD KEY=VALUE ...' is a method with settings of its own, steps among them, alone or beside --methods or
--tuned.
"""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial
from pathlib import Path

from dppo_megatron.config.paths import check_writable
from dppo_megatron.progress import progress
from dppo_megatron.pruning.policies import METHODS
from dppo_megatron.texts import logged, show
from dppo_megatron.types import UserError
from dppo_megatron.workbench.commands.parser import add_config, check_numbers, read_config
from dppo_megatron.workbench.commands.terminal import loading

_METHODS = "grpo,grpo_nonzero,cppo,greso,dppo_paper,dppo,dppo_auto"
_SWEPT = "grpo,grpo_nonzero,dppo"


def add_options(command: argparse.ArgumentParser) -> None:
    add_config(command)
    methods = f"from {', '.join(METHODS)}; default: {_METHODS}; with --sweep: {_SWEPT}, without @N"
    command.add_argument("--methods", metavar="A,B@N,...", help=methods)
    command.add_argument("--seeds", type=int, default=1, metavar="N", help="N seeds from the config's on (default: 1)")
    factor = "methods other than GRPO run F times the steps, because pruned steps are cheaper (default: 1)"
    command.add_argument("--steps-factor", type=float, default=1.0, metavar="F", help=factor)
    sweep = "tune each method first, as above"
    command.add_argument("--sweep", action="append", nargs="?", const="", metavar="KEY=A,B", help=sweep)
    tuned = "the methods and settings that a sweep found best, instead of --methods"
    command.add_argument("--tuned", type=Path, metavar="SWEEP.json", help=tuned)
    own = "also compare METHOD with these settings; can be repeated"
    command.add_argument("--arm", action="append", default=[], metavar="'METHOD KEY=VALUE ...'", help=own)
    command.add_argument("--out", type=Path, default=Path("compare"), help="where to write (default: compare/)")


def execute(arguments: argparse.Namespace) -> int:
    check_numbers(arguments, seeds="[1, 10000]", steps_factor="(0, 10000]")
    config = read_config(arguments.config, arguments.overrides, writes_run=False)
    with loading("libraries"):
        from dppo_megatron.workbench.compare import arms as compared
        from dppo_megatron.workbench.compare import runs as trained
        from dppo_megatron.workbench.compare import sweep, table
        from dppo_megatron.workbench.compare.verdict import judge

    factor, swept = arguments.steps_factor, arguments.sweep is not None
    grid = sweep.parse_grid(arguments.sweep, config) if swept else {}
    methods = arguments.methods or (_SWEPT if swept else "" if arguments.arm else _METHODS)
    if arguments.tuned and (swept or arguments.methods or factor != 1):
        raise UserError("--tuned names methods and settings: leave out --methods, --sweep and --steps-factor")
    if arguments.arm and swept:
        raise UserError("--arm is for --methods or --tuned; --sweep has its own settings")
    arms = sweep.best_of(arguments.tuned, config) if arguments.tuned else []
    if methods and not arguments.tuned:
        arms = compared.parse_arms(methods, config, factor)
    arms += [sweep.arm_with_settings(text, config, factor) for text in arguments.arm]
    if len({arm.name for arm in arms}) < len(arms):
        names = ", ".join(arm.name for arm in arms)
        raise UserError(f"--arm: {names}: two are the same")
    if swept:
        arms = sweep.candidates(methods, grid, config, factor)
    out: Path = arguments.out
    for name in ("", "results.json", "report.html", *["sweep.json"] * swept):
        check_writable("--out", out / name, directory=not name)
    out.mkdir(parents=True, exist_ok=True)

    shared = trained.shared_task(config)
    each = f"All seeds share one task: {shared}." if shared else "Each seed has its own task, model and held-out set."
    notes = [each] if arguments.seeds > 1 else ["One seed: no interval over seeds."]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a scheduler's time limit: ends the run in progress too
    run = partial(trained.run_all, config, arguments.config, arguments.overrides, out=out, launch=trained.in_a_process)
    with logged(partial(show, file=sys.stderr)):
        if swept:
            rungs = []
            for rows, remaining_runs in sweep.halve(arms, arguments.seeds, run):
                rungs.append(rows)
                runs = remaining_runs
                table.write_results(out / "sweep.json", table.about() | sweep.sweep_results(rungs, grid, config))
                show(*sweep.rung_table(rows), "")
            arms = [row.arm for row in rungs[-1] if row.goes_on]
            show(*sweep.best_lines(rungs[-1], grid), "")
            notes.append("Chosen on these seeds, which flatters the settings: compare on others (seed=N, --tuned).")
        else:
            runs = run(arms, seeds=arguments.seeds)
    with progress("comparing"):
        verdict = judge(runs, arms, same_problems=shared is not None)
        text, values = table.table(verdict), table.results(verdict, runs, notes)
    table.write_results(out / "results.json", values)
    table.write_page(out / "report.html", f"{arguments.config}: methods compared", text, values)
    show(*text.splitlines(), *notes, f"{out}/: results.json, report.html{', sweep.json' * swept}")
    return 0
