"""Tunes every method before it is compared, on one grid, by successive halving (docs/pruning.md).

A baseline with only one setting tuned is still easy to beat: at a learning rate of 1e-3, GRPO on the quickstart does
best with 64 prompts a step, yet 32 prompts at 7e-4 end 2.8 points higher. So prompts a step, learning rate and schedule
are always swept together. A rung adds seeds instead of steps: with a falling learning rate, half a run is another
schedule, and runs differ as much between seeds as between neighbours on the grid.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dppo_megatron.config.schema import Config
from dppo_megatron.evaluation.eval_scores import doublings
from dppo_megatron.texts import aligned, reason
from dppo_megatron.types import RunAborted, UserError
from dppo_megatron.workbench.compare.arms import BASELINE, WITHOUT_ZEROS, Arm, MethodRun, parse_arms, with_zeros
from dppo_megatron.workbench.compare.verdict import smoothed_end

PROMPTS, RATE, SCHEDULE = "rollout.prompts_per_step", "actor.optimizer.learning_rate", "actor.optimizer.lr_schedule"
GROUP = "rollout.completions_per_prompt"
_PROMPT_FACTORS = (0.5, 1, 2)
_RATE_FACTORS = (0.5, 0.7, 1, 1.4)
"""Half a power of 2 apart: about as much as the best rate changes when the prompts a step halve."""
_VALUE = re.compile(r"[\w.+-]+")
"""A value on the grid, which becomes part of a directory's name."""
Grid = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class RungRow:
    """A candidate on a rung."""

    arm: Arm
    ends: dict[int, float]
    """Seed to the smoothed accuracy at the end; the seeds of earlier rungs are among them."""
    was_stopped: bool
    """A guard stopped one of its runs."""
    goes_on: bool

    @property
    def mean(self) -> float:
        """Mean end over the seeds."""
        return statistics.mean(self.ends.values()) if self.ends else 0.0


def parse_grid(given: Sequence[str], config: Config) -> dict[str, list[str]]:
    """The grid from the texts of `--sweep`, each `KEY=A,B` or empty. Prompts a step, learning rate and schedule get
    values around the config's if they are not given. Raises UserError for a text that is no setting with values."""
    prompts, optimizer = config.rollout.prompts_per_step, config.actor.optimizer
    falling = "linear" if optimizer.lr_schedule == "constant" else optimizer.lr_schedule
    grid = {
        PROMPTS: list(dict.fromkeys(str(max(1, round(factor * prompts))) for factor in _PROMPT_FACTORS)),
        RATE: [f"{factor * optimizer.learning_rate:.3g}" for factor in _RATE_FACTORS],
        SCHEDULE: ["constant", falling],
    }
    for text in filter(None, given):
        key, _, listed = text.partition("=")
        values = [value.strip() for value in listed.split(",")]
        if not key or not all(map(_VALUE.fullmatch, values)):
            raise UserError(f"--sweep '{text}': expected a setting and its values, such as {RATE}=5e-4,1e-3")
        grid[key] = list({_number(value): value for value in values}.values())
    return grid


def candidates(methods: str, grid: Grid, config: Config, steps_factor: float) -> list[Arm]:
    """Every method at every point of the grid, such as `grpo@32,7e-4,linear`. Raises UserError for an unknown method,
    one with a number of prompts, or a setting that a comparison sets by itself."""
    if "@" in methods:
        raise UserError(f"--methods '{methods}': with --sweep the grid has the prompts of a step: {PROMPTS}=A,B")
    return [
        _with_values(method, dict(zip(grid, point, strict=True)), config, steps_factor, "--sweep")
        for method in (arm.name for arm in parse_arms(methods, config, steps_factor))
        for point in itertools.product(*grid.values())
    ]


def arm_with_settings(text: str, config: Config, steps_factor: float = 1.0) -> Arm:
    """The arm of `--arm`, evaluated after as many completions as the others. Raises UserError as `candidates` does.

    Example: `dppo rollout.prompts_per_step=32 actor.optimizer.learning_rate=5e-4 steps=160`, named
    `dppo@32,learning_rate=5e-4,steps=160`: arms may differ in any key.
    """
    method, *settings = text.split() or [""]
    values = {key: value for key, _, value in (setting.partition("=") for setting in settings)}
    known = bool(method) and not re.search("[@,]", method) and all(map(_VALUE.fullmatch, values.values()))
    steps = values.pop("steps", "")
    if not known or (steps and not (steps.isdecimal() and int(steps))):
        raise UserError(f"--arm '{text}': expected a method and settings, such as 'grpo {PROMPTS}=32 steps=160'")
    arm = _with_values(method, {PROMPTS: str(config.rollout.prompts_per_step), **values}, config, steps_factor, "--arm")
    named = [setting.rpartition(".")[2] for setting in settings if not setting.startswith(f"{PROMPTS}=")]
    arm = replace(arm, name=",".join([arm.name.partition(",")[0], *named]))
    return replace(arm, steps=int(steps), settings=(*arm.settings, f"steps={steps}")) if steps else arm


def _with_values(method: str, values: Mapping[str, str], config: Config, steps_factor: float, option: str) -> Arm:
    """`method` with these settings, the prompts of a step among them. They are in its name: the usual ones by their
    values alone, others with their keys, as a directory that has the name of another setting would be replaced."""
    prompts, others = values[PROMPTS], {key: value for key, value in values.items() if key != PROMPTS}
    (arm,) = parse_arms(f"{method}@{prompts}", _of_group_size(config, others), steps_factor)
    reserved = {"seed", "run_dir", *(setting.partition("=")[0] for setting in arm.settings)}
    if taken := reserved & others.keys():
        raise UserError(f"{option} {taken.pop()}: compare sets it itself for {method}")
    settings = *arm.settings, *(f"{key}={value}" for key, value in others.items())
    named = [one if key in (GROUP, RATE, SCHEDULE) else f"{key}={one}" for key, one in others.items()]
    return replace(arm, name=",".join([arm.name, *named]), settings=settings)


def _of_group_size(config: Config, values: Mapping[str, str]) -> Config:
    """`config` with as many times more steps as groups are smaller. A wrong size is refused with the run's settings."""
    size, every = values.get(GROUP, ""), config.eval.every_steps
    if not size.isdecimal() or not int(size):
        return config
    factor = config.rollout.completions_per_prompt / int(size)
    spaced = replace(config.eval, every_steps=max(int(every > 0), round(every * factor)))
    return replace(config, steps=max(1, round(config.steps * factor)), eval=spaced)


def halve(
    arms: Sequence[Arm], seeds: int, run: Callable[..., list[MethodRun]]
) -> Iterator[tuple[list[RungRow], list[MethodRun]]]:
    """Run rung after rung with `run`, a job's `run_all`. After each, yield its rows, and all runs so far of the
    candidates that go on. Raises RunAborted if all candidates of a method were stopped."""
    runs: list[MethodRun] = []
    first = 0
    for until in doublings(seeds):
        runs += run(arms, first_seed=first, seeds=until, stops_are_left_out=True)
        rows: list[RungRow] = []
        for method in dict.fromkeys(arm.method for arm in arms):
            rows += _ranked([arm for arm in arms if arm.method == method], runs, until, last=until == seeds)
        arms = [row.arm for row in rows if row.goes_on]
        first = until
        yield rows, [one for arm in arms for one in runs if one.arm == arm.name]


def _ranked(arms: Sequence[Arm], runs: Sequence[MethodRun], seeds: int, *, last: bool) -> list[RungRow]:
    """The rows of a method, best first; the better half goes on, after the last rung only the best."""
    rows = []
    for arm in arms:
        ends = {run.seed: smoothed_end(run) for run in runs if run.arm == arm.name}
        rows.append(RungRow(arm, ends, was_stopped=len(ends) < seeds, goes_on=False))
    rows.sort(key=lambda row: (row.was_stopped, -row.mean))
    whole = sum(not row.was_stopped for row in rows)
    if not whole:
        raise RunAborted(f"every candidate of {arms[0].method} was stopped; the log has the reasons")
    num_kept = 1 if last else (whole + 1) // 2
    return [replace(row, goes_on=place < num_kept) for place, row in enumerate(rows)]


def rung_table(rows: Sequence[RungRow]) -> list[str]:
    """The candidates of a rung as a table, with those marked that go on."""
    lines = [["candidate", "steps", "end", "of each seed"]]
    for row in rows:
        ends = ", ".join(f"{100 * end:.1f}" for end in row.ends.values()) + " *" * row.goes_on
        mean = f"{100 * row.mean:.1f}%"
        cells = ["", "stopped by a guard"] if row.was_stopped else [mean, ends]
        lines.append([row.arm.name, str(row.arm.steps), *cells])
    return [f"seeds: {max(len(row.ends) for row in rows)}; * goes on", *aligned(lines)]


def best_lines(rows: Sequence[RungRow], grid: Grid) -> list[str]:
    """The best candidate of each method as settings to paste, and where its grid may be too narrow."""
    lines = []
    for row in rows:
        if row.goes_on:
            settings = dict(setting.split("=", 1) for setting in row.arm.settings)
            values = {key: _number(settings[key]) for key in grid}
            known = {key: sorted(n for n in map(_number, grid[key]) if isinstance(n, float)) for key in grid}
            edges = [key for key in grid if len(known[key]) > 1 and values[key] in (known[key][0], known[key][-1])]
            lines.append(f"{row.arm.method}: {' '.join(row.arm.settings)}")
            lines += [f"  {key} is at the edge of its grid; a value beyond may be better" for key in edges]
    return lines


def sweep_results(rungs: Sequence[Sequence[RungRow]], grid: Grid, config: Config) -> dict[str, Any]:
    """What sweep.json holds; `config`: the swept job's."""
    best = {row.arm.method: row.arm.settings for row in rungs[-1] if row.goes_on}
    rows = [[asdict(row) for row in rows] for rows in rungs]
    return {"grid": grid, "rungs": rows, "best": best, "length": _length(config)}


def _length(config: Config) -> dict[str, int]:
    """The settings from which the steps and evaluations of every candidate are computed."""
    return {
        "steps": config.steps,
        "eval.every_steps": config.eval.every_steps,
        PROMPTS: config.rollout.prompts_per_step,
    }


def best_of(path: Path, config: Config) -> list[Arm]:
    """The best of each method in a sweep.json, with their settings in their names. If only `grpo_nonzero` was swept,
    `grpo`, which costs more and learns the same, gets its settings. Raises UserError if it cannot be read, or is of a
    job of another length than `config`'s: its numbers of steps would be wrong."""
    try:
        sweep = msgspec.json.decode(path.read_bytes(), type=_Sweep)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"--tuned {path}: is no sweep.json of compare --sweep: {reason(error)}") from None
    if not (arms := [row.arm for row in sweep.rungs[-1] if row.goes_on]):
        raise UserError(f"--tuned {path}: no candidate of its last rung goes on")
    for key, value in _length(config).items():
        if (swept := sweep.length.get(key)) != value:
            raise UserError(
                f"--tuned {path}: was swept with {key}={swept}, but this job has {value}; sweep again, or set it back"
            )
    has_baseline = any(arm.method == BASELINE for arm in arms)
    return [*([] if has_baseline else [with_zeros(arm) for arm in arms if arm.method == WITHOUT_ZEROS]), *arms]


class _Sweep(msgspec.Struct):
    rungs: Annotated[list[list[RungRow]], msgspec.Meta(min_length=1)]
    length: dict[str, int]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
