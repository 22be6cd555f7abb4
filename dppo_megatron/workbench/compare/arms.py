"""The arms of a comparison, methods at a number of prompts a step as settings of a job; and what their runs have left.

`grpo@32` is GRPO with 32 prompts a step. A baseline whose batch was never tuned is easy to beat: above the batch that
still shortens the run, half the prompts give the same in half the time, and a pruned run would be credited for it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from dppo_megatron.config.schema import Config
from dppo_megatron.pruning.policies import levels, method_overrides
from dppo_megatron.types import UserError
from dppo_megatron.workbench.runs.trace import decoded

BASELINE = "grpo"
WITHOUT_ZEROS = "grpo_nonzero"
"""GRPO that does not train on completions without an advantage. They have no gradient, so it is GRPO, faster; what a
method is worth beyond it is what its draws are worth."""
_WITHOUT_ZEROS = (
    *method_overrides("grpo")[:1],
    "pruning.completion.method=dppo",
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
    """Overrides of the job."""

    @property
    def directory(self) -> str:
        """Its part of a path: a plugin's name has a colon."""
        return self.name.replace(":", ".")


def parse_arms(names: str, config: Config, steps_factor: float) -> list[Arm]:
    """Arms from a list such as `grpo@16,grpo,dppo`.

    All see equally many prompts: at half the prompts a step there are twice the steps, and the evaluations between them
    are as many. Pruned methods may be given more.

    Args:
        steps_factor: the methods other than GRPO run this many times the steps. A pruned step is cheaper, and times
            are compared: at 1, a method that needs more but cheaper steps could not show its advantage.

    Raises:
        UserError: an unknown or repeated name, or a number of prompts that is no whole number.
    """
    given = [name.strip() for name in names.split(",") if name.strip()]
    if not given or len(set(given)) < len(given):
        raise UserError(f"--methods '{names}': expected different names, separated by commas")
    return [_arm(name, config, steps_factor) for name in given]


def _arm(name: str, config: Config, steps_factor: float) -> Arm:
    method, at, prompts_text = name.partition("@")
    if method != WITHOUT_ZEROS:
        levels(method)
    nominal = config.rollout.prompts_per_step
    if at and not (prompts_text.isdecimal() and int(prompts_text) > 0):
        raise UserError(f"--methods {name}: after @ stands the number of prompts a step, such as {method}@{nominal}")
    prompts = int(prompts_text) if at else nominal
    factor = steps_factor if method not in (BASELINE, WITHOUT_ZEROS) else 1.0
    scale = nominal / prompts
    steps = max(1, round(config.steps * factor * scale))
    every = max(1, round((config.eval.every_steps or max(1, config.steps // 16)) * scale))
    pruning = _WITHOUT_ZEROS if method == WITHOUT_ZEROS else tuple(method_overrides(method))
    settings = (f"steps={steps}", f"eval.every_steps={every}", f"rollout.prompts_per_step={prompts}", *pruning)
    return Arm(name, method, steps, settings)


Cost: TypeAlias = Literal["step", "train_s", "train_cpu_s", "tokens_generated", "tokens_trained"]
_LABELS = ("exact", "unbiased", "ratio", "biased")
LAST = 2
"""Evaluations whose mean is a run's end, as the moving mean has it there."""


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation of a run and the cost up to it, evaluations not counted."""

    step: int
    accuracy: float
    """Mean pass@1 over the evaluation sets."""
    train_s: float
    train_cpu_s: float
    """Of the trainer's process."""
    tokens_generated: int
    tokens_trained: int


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
    """Seconds of each phase of the steps."""
    variance: float | None = None
    """Realised growth of the gradient's variance by pruning, mean over the steps; None for an older run."""


def read_method_run(arm: str, seed: int, run_dir: Path) -> MethodRun:
    """Read metrics.jsonl and summary.json of a finished run.

    Raises:
        UserError: a file that is missing or damaged, since a lost line would make the run look cheaper than it was; or
            no score at its start or its end, because every grading of an evaluation set failed.
    """
    try:
        curve, labels, solved, growth = _read_metrics(run_dir / "metrics.jsonl")
        path = run_dir / "summary.json"
        summary = decoded(_read(path), _SummaryFile, str(path))
    except UserError as error:
        raise UserError(f"{error}; remove this run's directory, and the same command runs it again") from None
    variance = statistics.mean(growth) if growth else None
    return MethodRun(arm, seed, curve, labels, _mean_of_last(solved), summary.phase_s, variance)


_Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
_Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class _MetricsRow(msgspec.Struct):
    step: Annotated[int, msgspec.Meta(ge=0)]
    problems: dict[str, list[_Share | None]] = msgspec.field(name="eval/problems", default_factory=dict)


class _LedgerEntry(msgspec.Struct):
    name: str
    label: Literal["exact", "unbiased", "ratio", "biased"]


class _StepRow(msgspec.Struct):
    seconds: _Amount = msgspec.field(name="time/step_s")
    cpu_seconds: _Amount = msgspec.field(name="time/step_cpu_s")
    generated: _Amount = msgspec.field(name="tokens/generated")
    trained: _Amount = msgspec.field(name="tokens/trained")
    ledger: list[_LedgerEntry] = msgspec.field(name="prune/ledger")
    growth: _Amount | None = msgspec.field(name="prune/realised_design_effect", default=None)


class _SummaryFile(msgspec.Struct):
    phase_s: dict[str, _Amount]


def _read_metrics(path: Path) -> tuple[list[Point], dict[str, str], list[dict[str, list[float | None]]], list[float]]:
    """The curve, the labels, what each evaluation has solved, and each step's growth of the variance."""
    total = Point(0, 0.0, 0.0, 0.0, 0, 0)
    curve, steps, labels, growth = list[Point](), list[int](), dict[str, str](), list[float]()
    solved: list[dict[str, list[float | None]]] = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        where = f"{path}:{number}"
        row = decoded(line, _MetricsRow, where)
        if steps and row.step != steps[-1] + 1:
            raise UserError(f"{where}: step {row.step} behind step {steps[-1]}")
        steps.append(row.step)
        if row.step:
            step = decoded(line, _StepRow, where)
            total = replace(
                total,
                train_s=total.train_s + step.seconds,
                train_cpu_s=total.train_cpu_s + step.cpu_seconds,
                tokens_generated=total.tokens_generated + int(step.generated),
                tokens_trained=total.tokens_trained + int(step.trained),
            )
            if step.growth is not None:
                growth.append(step.growth)
            for entry in step.ledger:
                labels[entry.name] = max(labels.get(entry.name, "exact"), entry.label, key=_LABELS.index)
        scores = _scores(line, where)
        if scores and None not in scores:  # null: every grading of a set failed
            accuracy = statistics.mean(score for score in scores if score is not None)
            curve.append(replace(total, step=row.step, accuracy=accuracy))
            solved.append(row.problems)
    if not curve or (curve[0].step, curve[-1].step) != (steps[0], steps[-1]):
        raise UserError(
            f"{path.parent}: every grading of an evaluation set failed at the start or the end of the run, so there is"
            " no score to compare by; mend the grader"
        )
    if any({k: len(v) for k, v in one.items()} != {k: len(v) for k, v in solved[0].items()} for one in solved):
        raise UserError(f"{path}: its evaluations are not of the same problems")
    return curve, labels, solved, growth


def _scores(line: bytes, where: str) -> list[float | None]:
    """pass@1 of each set."""
    row = decoded(line, dict[str, Any], where)
    found = {key: value for key, value in row.items() if key.startswith("eval/") and key.endswith("/pass@1")}
    try:
        return list(msgspec.convert(found, dict[str, _Share | None]).values())
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: pass@1: {error}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _mean_of_last(evaluations: list[dict[str, list[float | None]]]) -> dict[str, list[float | None]]:
    """Of each problem over the last evaluations, those in which its grading failed left out."""
    last = evaluations[-LAST:]
    found: dict[str, list[float | None]] = {}
    for name in last[-1] if last else {}:
        columns = zip(*(one[name] for one in last), strict=True)
        found[name] = [statistics.mean(known) if (known := [v for v in c if v is not None]) else None for c in columns]
    return found
