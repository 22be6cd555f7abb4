"""What a finished run left in its directory, as far as a comparison reads it."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from dppo_megatron.compare.statistics import Curve
from dppo_megatron.types import UserError

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
    """One arm on one seed."""

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

    def against(self, cost: Cost) -> Curve:
        """Its accuracies against one kind of cost."""
        costs = np.array([getattr(point, cost) for point in self.curve], dtype=np.float64)
        return Curve(costs, np.array([point.accuracy for point in self.curve]))


def read_method_run(arm: str, seed: int, run_dir: Path) -> MethodRun:
    """Read metrics.jsonl and summary.json of a finished run.

    Raises:
        UserError: it has no score at its start or its end, because every grading of an evaluation set failed; or its
            files are damaged.
    """
    try:
        return _read(arm, seed, run_dir)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{run_dir}: its record cannot be read ({type(error).__name__}: {error}); remove this directory, and the"
            " same command runs it again"
        ) from None


def _read(arm: str, seed: int, run_dir: Path) -> MethodRun:
    costs = {"train_s": 0.0, "train_cpu_s": 0.0, "tokens_generated": 0, "tokens_trained": 0}
    curve: list[Point] = []
    first, last = None, None
    labels: dict[str, str] = {}
    solved: list[dict[str, list[float | None]]] = []
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        first, last = row["step"] if first is None else first, row["step"]
        if row["step"]:
            _add_step(row, costs, labels)
        scores = [value for key, value in row.items() if key.startswith("eval/") and key.endswith("/pass@1")]
        if scores and None not in scores:  # null: every grading of a set failed
            curve.append(Point(row["step"], statistics.mean(scores), **costs))  # type: ignore[arg-type]
            solved.append(row["eval/problems"])
    if not curve or (curve[0].step, curve[-1].step) != (first, last):
        raise UserError(
            f"{run_dir}: every grading of an evaluation set failed at the start or the end of the run, so there is no"
            " score to compare by; mend the grader and remove this directory"
        )
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return MethodRun(arm, seed, curve, labels, _mean_of_last(solved), summary["phase_s"])


def _add_step(row: dict[str, Any], costs: dict[str, Any], labels: dict[str, str]) -> None:
    costs["train_s"] += row["time/step_s"]
    costs["train_cpu_s"] += row["time/step_cpu_s"]
    costs["tokens_generated"] += int(row["tokens/generated"])
    costs["tokens_trained"] += int(row["tokens/trained"])
    for entry in row["prune/ledger"]:
        before = labels.get(entry["name"], "exact")
        labels[entry["name"]] = max(before, entry["label"], key=_LABELS.index)


def _mean_of_last(evaluations: list[dict[str, list[float | None]]]) -> dict[str, list[float | None]]:
    """Of each problem over the last evaluations, those in which its grading failed left out."""
    last = evaluations[-LAST:]
    found: dict[str, list[float | None]] = {}
    for name in last[-1] if last else {}:
        columns = zip(*(one[name] for one in last), strict=True)
        found[name] = [statistics.mean(known) if (known := [v for v in c if v is not None]) else None for c in columns]
    return found
