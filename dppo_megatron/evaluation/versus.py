"""`dppo-megatron eval --compare A B`: compares two evaluations problem by problem."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dppo_megatron.config.paths import in_short
from dppo_megatron.evaluation.bootstrap import RESAMPLES, Difference, paired_bootstrap
from dppo_megatron.evaluation.eval_samples import COMPARISON, EvalSample, check_out, read_samples, write_text
from dppo_megatron.types import FloatArray, UserError


@dataclass(frozen=True, slots=True)
class _Problem:
    reference: str
    share: float | None
    """Share of its graded samples that are correct; None if every grading failed."""


def compare_evaluations(a: Path, b: Path, *, out: Path | None = None) -> list[str]:
    """Compare two evaluations; returns lines for people.

    Sets that only one of them has are left out and named. A set that both have must contain the same problems in both:
    a problem in only one of them would distort the comparison however it is treated.

    Args:
        a, b: directories of evaluations, or their samples.jsonl.
        out: directory for comparison.json.

    Raises:
        UserError: a file that cannot be read, no set in common, or a set of different problems.
    """
    if out is not None:
        check_out(out, COMPARISON)
    ours, theirs = _problems(read_samples(a)), _problems(read_samples(b))
    common = [name for name in ours if name in theirs]
    if not common:
        raise UserError(f"'{a}' and '{b}' have no set in common: {_some(list(ours))} and {_some(list(theirs))}")
    said = [
        f"left out: {in_short(name)}, which only {who} has"
        for who, mine, other in (("A", ours, theirs), ("B", theirs, ours))
        for name in mine
        if name not in other
    ]
    pairs: dict[str, tuple[FloatArray, FloatArray]] = {}
    for name in common:
        _check_same(name, ours[name], theirs[name])
        both = [(ours[name][key].share, theirs[name][key].share) for key in ours[name]]
        kept = [(x, y) for x, y in both if x is not None and y is not None]
        if len(kept) < len(both):
            lost = len(both) - len(kept)
            said.append(f"{in_short(name)}: {lost} problems left out, whose gradings all failed in A or B")
        if kept:
            pairs[name] = np.array([x for x, _ in kept]), np.array([y for _, y in kept])
    if not pairs:
        raise UserError(f"'{a}' and '{b}': no problem has a grading that did not fail in both")
    rows = paired_bootstrap(pairs)
    if out is not None:
        figures = {"a": str(a), "b": str(b), "resamples": RESAMPLES, "sets": [row.as_json() for row in rows]}
        write_text(out / COMPARISON, [json.dumps(figures, indent=2) + "\n"])
    return [f"A: {a}", f"B: {b}", *said, "", *_table(rows)]


def _problems(samples: Sequence[EvalSample]) -> dict[str, dict[str, _Problem]]:
    """By set and id."""
    grades: dict[str, dict[str, list[EvalSample]]] = {}
    for sample in samples:
        grades.setdefault(sample.set, {}).setdefault(sample.problem, []).append(sample)
    return {name: {key: _problem(of) for key, of in problems.items()} for name, problems in grades.items()}


def _problem(samples: Sequence[EvalSample]) -> _Problem:
    graded = [one.correct for one in samples if one.correct is not None]
    return _Problem(samples[0].reference, sum(graded) / len(graded) if graded else None)


def _check_same(name: str, ours: Mapping[str, _Problem], theirs: Mapping[str, _Problem]) -> None:
    wrong = []
    for who, mine, other in (("A", ours, theirs), ("B", theirs, ours)):
        alone = [key for key in mine if key not in other]
        if alone:
            wrong.append(f"{len(alone)} problems are in {who} only ({_some(alone)})")
    differ = [key for key in ours if key in theirs and ours[key].reference != theirs[key].reference]
    if differ:
        wrong.append(f"{len(differ)} have another reference answer ({_some(differ)})")
    if wrong:
        raise UserError(
            f"set {in_short(name)} is not the same problems in both evaluations: {'; '.join(wrong)}."
            " Evaluate both on the same file and limit"
        )


def _some(keys: Sequence[str]) -> str:
    return ", ".join(key if len(key) <= 60 else f"{key[:60]}..." for key in keys[:5]) + (
        ", ..." if len(keys) > 5 else ""
    )


def _table(rows: Sequence[Difference]) -> list[str]:
    width = max(3, *(len(row.name) for row in rows))
    head = f"{'set':<{width}} {'problems':>9} {'A':>7} {'B':>7} {'B - A':>7}  {'95 % interval':<17} {'p':>7}"
    lines = [head]
    for row in rows:
        interval, p = "-", "-"
        if row.low is not None and row.high is not None and row.p is not None:
            interval, p = f"{100 * row.low:+.1f} .. {100 * row.high:+.1f}", f"{row.p:.4f}"
        verdict = "within noise" if row.within_noise else "B is better" if row.difference > 0 else "A is better"
        lines.append(
            f"{row.name:<{width}} {row.problems:>9} {100 * row.a:>7.1f} {100 * row.b:>7.1f}"
            f" {100 * row.difference:>+7.1f}  {interval:<17} {p:>7}  {verdict}"
        )
    return [*lines, "", f"Points of pass@1; paired bootstrap over problems, {RESAMPLES:,} resamples."]
