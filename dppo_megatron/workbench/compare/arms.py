"""The arms of a comparison, each a method and a number of prompts a step, as settings of a job; and reading their runs.

A baseline whose batch was never tuned is easy to beat: if the batch is larger than helps, half the prompts give the
same result in half the time, and a pruned run would be credited for that.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from dppo_megatron.config.schema import Config
from dppo_megatron.pruning.policies import levels, method_overrides
from dppo_megatron.pruning.weights import LABELS
from dppo_megatron.texts import reason
from dppo_megatron.types import UserError
from dppo_megatron.workbench.runs.run_record import RunRecord, read_metrics

BASELINE = "grpo"
WITHOUT_ZEROS = "grpo_nonzero"
"""GRPO that does not train on completions without an advantage. They have no gradient, so it is the same GRPO, faster;
what another method gains over it is the gain of its draws."""
_WITHOUT_ZEROS = (
    *method_overrides("grpo")[:1],
    "pruning.early_stop.after_tokens=0",
    "pruning.completion.method=dppo",
    "pruning.completion.warmup_steps=0",
    "pruning.completion.anneal_fraction=1",
    "pruning.completion.allocation=false",
    "pruning.completion.max_design_effect=1",  # no growth of the variance: all that has gradient is kept
    "pruning.completion.fill_slack=false",
)


@dataclass(frozen=True, slots=True)
class Arm:
    """One row of the comparison."""

    name: str
    """As the user wrote it: `dppo`, `grpo@32`."""
    method: str
    steps: int
    settings: tuple[str, ...]

    @property
    def directory(self) -> str:
        """Name of its runs' directories, without the colon of a plugin's name."""
        return self.name.replace(":", ".")


def parse_arms(names: str, config: Config, steps_factor: float) -> list[Arm]:
    """Arms from a list such as `grpo@16,grpo,dppo`.

    All see equally many prompts: at half the prompts a step there are twice the steps, and the same number of
    evaluations. Pruned methods may be given more.

    Args:
        steps_factor: the methods other than GRPO run this many times the steps. A pruned step is cheaper, and times
            are compared: at 1, a method that needs more but cheaper steps could not show its advantage.

    Raises:
        UserError: an unknown or repeated name, or a number of prompts that is no whole number.
    """
    arms = [name.strip() for name in names.split(",") if name.strip()]
    if not arms or len(set(arms)) < len(arms):
        raise UserError(f"--methods '{names}': expected different names, separated by commas")
    return [_arm(name, config, steps_factor) for name in arms]


def _arm(name: str, config: Config, steps_factor: float) -> Arm:
    method, at, prompts_text = name.partition("@")
    if method != WITHOUT_ZEROS:
        levels(method)
    nominal = config.rollout.prompts_per_step
    if at and not (prompts_text.isdecimal() and int(prompts_text) > 0):
        raise UserError(f"--methods {name}: after @ comes the number of prompts a step, such as {method}@{nominal}")
    prompts = int(prompts_text) if at else nominal
    factor = steps_factor if method not in (BASELINE, WITHOUT_ZEROS) else 1.0
    scale = nominal / prompts
    steps = max(1, round(config.steps * factor * scale))
    every = max(1, round((config.eval.every_steps or max(1, config.steps // 16)) * scale))
    sizes = (f"steps={steps}", f"eval.every_steps={every}", f"rollout.prompts_per_step={prompts}")
    return Arm(name, method, steps, (*sizes, *method_settings(method)))


def method_settings(method: str) -> tuple[str, ...]:
    """The settings of a method of `levels`, or of `grpo_nonzero`."""
    return _WITHOUT_ZEROS if method == WITHOUT_ZEROS else tuple(method_overrides(method))


def with_zeros(arm: Arm) -> Arm:
    """The arm of GRPO with the settings of an arm of `grpo_nonzero`, which makes the same updates."""
    settings = (one for one in arm.settings if one not in _WITHOUT_ZEROS)
    name = arm.name.replace(WITHOUT_ZEROS, BASELINE, 1)
    return Arm(name, BASELINE, arm.steps, (*settings, *method_overrides(BASELINE)))


Cost: TypeAlias = Literal["step", "train_s", "train_cpu_s", "tokens_generated", "tokens_trained"]
LAST = 2
"""How many evaluations are averaged for a run's end, as in the moving mean there; never that of the start."""


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation of a run and the cost up to it, evaluations not counted."""

    step: int
    accuracy: float
    """Mean pass@1 over the evaluation sets."""
    train_s: float
    train_cpu_s: float
    """CPU seconds of the trainer's process."""
    tokens_generated: float
    tokens_trained: float


@dataclass(frozen=True, slots=True)
class MethodRun:
    arm: str
    seed: int
    curve: list[Point]
    labels: dict[str, str]
    """Selection name to its worst label over the run."""
    solved: dict[str, list[float | None]]
    """Evaluation set to the share of correct answers of each problem, over the last evaluations; null where every
    grading failed."""
    phase_s: dict[str, float]
    variance: float | None = None
    """Realised growth of the gradient's variance by pruning, mean over the steps; None for an older run."""


def read_method_run(arm: str, seed: int, run_dir: Path) -> MethodRun:
    """Read metrics.jsonl and summary.json of a finished run.

    Raises:
        UserError: a file that is missing or damaged, since a lost line would make the run look cheaper than it was; or
            no score at its start or its end, because every grading of an evaluation set failed.
    """
    again = "remove this run's directory, and the same command runs it again"
    try:
        run = read_metrics(run_dir)
        phase_s = msgspec.convert(run.summary.get("phase_s"), dict[str, _Amount])
        costs = {name: _totals(run, key) for name, key in _COLUMNS.items()}
        solved = {step: msgspec.convert(one, _Solved) for step, one in run.solved.items()}
        known_labels = {row["name"]: [one for one in row["label"] if one is not None] for row in run.ledger}
        labels = {name: max(known, key=LABELS.index) for name, known in known_labels.items()}
        if run.notes or run.steps != list(range(run.steps[0], run.steps[-1] + 1)):
            raise ValueError((run.notes or ["steps are missing"])[0])
        if len({tuple(sorted((name, len(one)) for name, one in each.items())) for each in solved.values()}) > 1:
            raise ValueError("its evaluations are not of the same problems")
    except UserError as error:
        raise UserError(f"{error}; {again}") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise UserError(f"{run_dir}: its record is damaged: {reason(error)}; {again}") from None
    scores = [run.columns[key] for key in run.columns if key.startswith("eval/") and key.endswith("/pass@1")]
    curve = list[Point]()
    for at, step in enumerate(run.steps):
        known = [column[at] for column in scores]
        if step in solved and known and None not in known:  # null: every grading of a set failed
            totals = {name: column[at] for name, column in costs.items()}
            curve.append(Point(step, statistics.mean(one for one in known if one is not None), **totals))
    if not curve or (curve[0].step, curve[-1].step) != (run.steps[0], run.steps[-1]):
        raise UserError(
            f"{run_dir}: every grading of an evaluation set failed at the start or the end of the run, so there is"
            f" no score to compare by; mend the grader, then {again}"
        )
    growth = [one for one in run.columns.get("prune/realised_design_effect", []) if one is not None]
    variance = statistics.mean(growth) if growth else None
    last = [solved[point.step] for point in (curve[1:] or curve)[-LAST:]]
    return MethodRun(arm, seed, curve, labels, _mean_of(last), phase_s, variance)


_Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
_Solved: TypeAlias = dict[str, list[Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None]]
_COLUMNS = {
    "train_s": "time/step_s",
    "train_cpu_s": "time/step_cpu_s",
    "tokens_generated": "tokens/generated",
    "tokens_trained": "tokens/trained",
}


def _totals(run: RunRecord, key: str) -> list[Any]:
    """Running total of a metric up to each step. Raises ValueError if a step after 0 has no value."""
    column = run.columns.get(key, [None] * len(run.steps))
    known = [value if step else 0.0 for step, value in zip(run.steps, column, strict=True)]
    if None in known:
        raise ValueError(f"a step has no {key}")
    return list(accumulate(msgspec.convert(known, list[_Amount])))


def _mean_of(evaluations: Sequence[_Solved]) -> _Solved:
    """The mean of each problem over evaluations, without those in which its grading failed."""
    means: _Solved = {}
    for name in evaluations[-1]:
        columns = zip(*(one[name] for one in evaluations), strict=True)
        means[name] = [statistics.mean(known) if (known := [v for v in c if v is not None]) else None for c in columns]
    return means
