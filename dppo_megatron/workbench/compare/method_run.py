"""What a finished run left in its directory, as far as a comparison reads it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from dppo_megatron.types import UserError
from dppo_megatron.workbench.runs.trace import decoded

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


_Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0)]
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
