"""Tunes every method before it is compared: a grid over the settings that interact, thinned out by successive halving.

A baseline with one setting tuned, and the others left where another value of it had put them, is still easy to beat: at
a learning rate of 1e-3 64 prompts a step are GRPO's best on the quickstart, yet 32 at 7e-4 end 2.8 points higher. So
prompts a step, learning rate and schedule are always swept together, over one grid for all methods.

    all on one seed ─▶ the better half on a second ─▶ its better half on two more ─▶ ...

A rung adds seeds instead of steps: half of a run whose learning rate falls is another schedule, and between seeds runs
differ by as much as neighbours on the grid do. All candidates of a method see equally many prompts, and are ranked by
their end there: the smoothed accuracy that `verdict.py` calls so, as a mean over the rung's seeds.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dppo_megatron.config.schema import Config
from dppo_megatron.types import RunAborted, UserError
from dppo_megatron.workbench.compare.arms import Arm, parse_arms
from dppo_megatron.workbench.compare.method_run import MethodRun
from dppo_megatron.workbench.compare.table import difference_text
from dppo_megatron.workbench.compare.verdict import ArmVerdict, Curve, judge

PROMPTS, RATE, SCHEDULE = "rollout.prompts_per_step", "actor.optimizer.learning_rate", "actor.optimizer.lr_schedule"
_PROMPT_FACTORS = (0.5, 1, 2)
_RATE_FACTORS = (0.5, 0.7, 1, 1.4)
"""By half a power of 2: about what the best rate changes by where the prompts a step halve."""
_VALUE = re.compile(r"[\w.+-]+")
"""It becomes part of a directory's name."""
Grid = Mapping[str, Sequence[str]]
"""Setting to its values."""


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate on a rung."""

    arm: Arm
    ends: dict[int, float]
    """Seed to the smoothed accuracy at the end; the seeds of earlier rungs are among them."""
    verdict: ArmVerdict | None
    """Against the best candidate of its method on this rung; None where a guard has stopped one of its runs."""
    goes_on: bool

    @property
    def end(self) -> float:
        """Mean over seeds; -1 if it was stopped."""
        return statistics.mean(self.ends.values()) if self.verdict else -1.0


def parse_grid(given: Sequence[str], config: Config) -> dict[str, list[str]]:
    """The grid of `--sweep`, each `KEY=A,B`, or empty.

    Prompts a step, learning rate and schedule that are not given have values around the config's.

    Raises:
        UserError: no setting with values, one that is given twice, or a value that is.
    """
    prompts, optimizer = config.rollout.prompts_per_step, config.actor.optimizer
    falling = "linear" if optimizer.lr_schedule == "constant" else optimizer.lr_schedule
    grid = {
        PROMPTS: list(dict.fromkeys(str(max(1, round(factor * prompts))) for factor in _PROMPT_FACTORS)),
        RATE: [f"{factor * optimizer.learning_rate:.3g}" for factor in _RATE_FACTORS],
        SCHEDULE: ["constant", falling],
    }
    seen = set[str]()
    for text in filter(None, given):
        key, _, listed = text.partition("=")
        values = [value.strip() for value in listed.split(",")]
        if not key or not all(map(_VALUE.fullmatch, values)):
            raise UserError(f"--sweep '{text}': expected a setting and its values, such as {RATE}=5e-4,1e-3")
        if key in seen or len({_number(value) for value in values}) < len(values):
            raise UserError(f"--sweep '{text}': the setting, or one of its values, is given twice")
        if key == PROMPTS and not all(value.isdecimal() and int(value) > 0 for value in values):
            raise UserError(f"--sweep '{text}': the prompts of a step are whole numbers from 1 on")
        seen.add(key)
        grid[key] = values
    return grid


def candidates(methods: str, grid: Grid, config: Config, steps_factor: float) -> list[Arm]:
    """Every method at every point of the grid, such as `grpo@32,7e-4,linear`.

    Raises:
        UserError: an unknown method, one with a number of prompts, or a setting that a comparison sets by itself.
    """
    if "@" in methods:
        raise UserError(f"--methods '{methods}': with --sweep the grid has the prompts of a step: {PROMPTS}=A,B")
    arms = []
    for method in (arm.name for arm in parse_arms(methods, config, steps_factor)):
        for point in itertools.product(*grid.values()):
            values = dict(zip(grid, point, strict=True))
            (arm,) = parse_arms(f"{method}@{values.pop(PROMPTS)}", config, steps_factor)
            own = {"seed", "run_dir", *(setting.partition("=")[0] for setting in arm.settings)}
            if taken := own & values.keys():
                raise UserError(f"--sweep {taken.pop()}: compare sets it itself for {method}")
            settings = *arm.settings, *(f"{key}={value}" for key, value in values.items())
            arms.append(replace(arm, name=",".join([arm.name, *values.values()]), settings=settings))
    return arms


def rung_seeds(seeds: int) -> list[int]:
    """Seeds after each rung. Example: 5 -> [1, 2, 4, 5]"""
    return [*itertools.takewhile(lambda n: n < seeds, (2**i for i in itertools.count())), seeds]


def halve(
    arms: Sequence[Arm],
    seeds: int,
    run: Callable[[Sequence[Arm], int, int], list[MethodRun]],
    report: Callable[[list[list[Row]]], None],
    *,
    same_problems: bool,
) -> tuple[list[Row], list[MethodRun]]:
    """Run rung after rung; returns the best candidate of each method and their runs on all seeds.

    Args:
        run: runs arms on the seeds from one number to before another; leaves out what a guard has stopped.
        report: takes the rungs so far, after each.

    Raises:
        RunAborted: all candidates of a method were stopped.
    """
    runs: list[MethodRun] = []
    rungs: list[list[Row]] = []
    first, left = 0, list(arms)
    best: list[Row] = []
    for until in rung_seeds(seeds):
        runs += run(left, first, until)
        rungs.append([])
        for method in dict.fromkeys(arm.method for arm in left):
            of_method = [arm for arm in left if arm.method == method]
            rungs[-1] += _ranked(of_method, runs, until, last=until == seeds, same_problems=same_problems)
        best = [row for row in rungs[-1] if row.goes_on]
        left = [row.arm for row in best]
        report(rungs)
        first = until
    return best, [one for arm in left for one in runs if one.arm == arm.name]


def _ranked(
    arms: Sequence[Arm], runs: Sequence[MethodRun], seeds: int, *, last: bool, same_problems: bool
) -> list[Row]:
    """The rows of a method, best first; the better half goes on, from the last rung only the best."""
    ends = {arm.name: {run.seed: _end(run) for run in runs if run.arm == arm.name} for arm in arms}
    whole = [arm for arm in arms if len(ends[arm.name]) == seeds]
    if not whole:
        raise RunAborted(f"every candidate of {arms[0].method} was stopped; their directories have the reasons")
    whole.sort(key=lambda arm: -statistics.mean(ends[arm.name].values()))
    # without a GRPO among them the first is what the others are compared with: here the best, not the soonest
    verdict = judge(runs, [replace(arm, method="") for arm in whole], same_problems=same_problems)
    kept = 1 if last else (len(whole) + 1) // 2
    rows = [
        Row(arm, ends[arm.name], one, i < kept) for i, (arm, one) in enumerate(zip(whole, verdict.arms, strict=True))
    ]
    return rows + [Row(arm, ends[arm.name], None, goes_on=False) for arm in arms if arm not in whole]


def rung_table(rows: Sequence[Row]) -> list[str]:
    """For people: what was compared on a rung, and which go on."""
    width = max(len(row.arm.name) for row in rows) + 2
    seeds = max(len(row.ends) for row in rows)
    lines = [f"{'candidate':<{width}}{'steps':>6} {'end':>7} {'end - best':>28} {'CPU s':>7} {'tokens':>11}"]
    for row in rows:
        told = f"{row.arm.name:<{width}}{row.arm.steps:>6}"
        if row.verdict is None:
            lines.append(f"{told} stopped by a guard")
            continue
        costs = row.verdict.costs
        told += f" {100 * row.end:>6.1f}% {difference_text(row.verdict):>28}"
        lines.append(f"{told} {costs['train_cpu_s']:>7.1f} {costs['tokens_generated']:>11,.0f}{' *' * row.goes_on}")
    return [f"seeds: {seeds}; * goes on", *lines]


def best_lines(best: Sequence[Row], grid: Grid) -> list[str]:
    """The best of each method as settings to paste, and where the grid ends too soon."""
    lines = []
    for row in best:
        lines.append(f"{row.arm.method}: {' '.join(row.arm.settings)}")
        settings = dict(setting.split("=", 1) for setting in row.arm.settings)
        numbers = {key: [n for v in values if isinstance(n := _number(v), float)] for key, values in grid.items()}
        lines += [
            f"  {key} = {settings[key]} is at the edge of the grid; a wider one may have a better"
            for key, known in numbers.items()
            if len(known) > 1 and _number(settings[key]) in (min(known), max(known))
        ]
    return lines


def sweep_results(rungs: Sequence[Sequence[Row]], grid: Grid) -> dict[str, Any]:
    """For sweep.json."""
    return {
        "grid": dict(grid),
        "rungs": [[_row_values(row) for row in rows] for rows in rungs],
        "best": {row.arm.method: list(row.arm.settings) for row in rungs[-1] if row.goes_on},
    }


def _row_values(row: Row) -> dict[str, Any]:
    found = row.verdict.end_difference if row.verdict else None
    return {
        "arm": asdict(row.arm),
        "ends": row.ends,
        "end_minus_best": found.as_json() if found else None,
        "costs": row.verdict.costs if row.verdict else None,
        "goes_on": row.goes_on,
    }


def _end(run: MethodRun) -> float:
    return float(Curve.of(run, "step").smoothed().accuracy[-1])


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
