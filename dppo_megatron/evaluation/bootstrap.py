"""Paired bootstrap: is the difference between two evaluations (`eval --compare A B`), or between runs over several
seeds, more than noise?

Pairing is essential, because problems differ in difficulty far more than two models differ in what they solve. Problems
are resampled instead of samples, because the samples of one problem are not independent of each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron.config.paths import in_short
from dppo_megatron.data.rows import listed
from dppo_megatron.evaluation.eval_samples import (
    COMPARISON,
    RESULTS,
    Problems,
    by_problem,
    check_out,
    deciding,
    read_results,
    read_samples,
    share_correct,
    write_text,
)
from dppo_megatron.randomness import generator
from dppo_megatron.texts import aligned
from dppo_megatron.types import FloatArray, UserError

RESAMPLES = 10_000
_OF_ALL = ("engine", "dtype", "quantization", "server_args")
_OF_EACH = ("temperature", "top_p", "top_k", "max_completion_tokens")


@dataclass(frozen=True, slots=True)
class Difference:
    """B minus A."""

    name: str
    problems: int
    a: float
    b: float
    difference: float
    low: float | None
    """2.5 % quantile of the resampled difference; None with fewer than two problems in a set."""
    high: float | None
    """97.5 % quantile."""
    p: float | None
    """Two-sided p-value: twice the smaller share of resampled differences at or beyond 0, counting one resample more,
    so that it is never 0."""

    @property
    def within_noise(self) -> bool:
        """Whether the interval contains 0, or there is no interval."""
        return self.low is None or self.high is None or self.low <= 0.0 <= self.high

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"within_noise": self.within_noise}


def paired_bootstrap(
    sets: Mapping[str, tuple[FloatArray, FloatArray]], *, resamples: int = RESAMPLES
) -> list[Difference]:
    """The difference on each set and, if there are several sets, of the mean over sets.

    Args:
        sets: for each set the share of correct samples of every problem [P], under A and under B, in the same order.

    Returns:
        One row per set, then `all`: sets are resampled independently and have equal weight.
    """
    drawn = {name: _resampled(b - a, name, resamples) for name, (a, b) in sets.items()}
    rows = [_difference(name, [pair], drawn[name]) for name, pair in sets.items()]
    if len(sets) > 1:
        rows.append(_difference("all", list(sets.values()), np.mean(list(drawn.values()), axis=0)))
    return rows


def bootstrap_over_seeds(pairs: Sequence[tuple[FloatArray, FloatArray]], *, same_problems: bool = False) -> Difference:
    """The difference of runs on several seeds: seeds are drawn with replacement, then the problems of each drawn seed.

    Resampling problems alone would give too narrow an interval: two runs of one method on one seed can differ by more
    than their problems explain. With one seed, this is the bootstrap over problems.

    Args:
        pairs: for each seed the share of correct samples of every problem [P], under A and under B; at least one seed.
        same_problems: all seeds have the same problems, in the same order. Then one draw of problems serves all seeds:
            an advantage that a method has on these particular problems does not average out over seeds.
    """
    draw = generator(0, "bootstrap over seeds and problems", len(pairs))
    # with the same problems, seeds share one stream of draws, so that row r has the same problems for every seed
    names = ["the problems" if same_problems else f"seed {index}" for index in range(len(pairs))]
    means = np.stack([_resampled(b - a, name, RESAMPLES) for name, (a, b) in zip(names, pairs, strict=True)])
    chosen = draw.integers(len(pairs), size=(RESAMPLES, len(pairs)))
    # rows are drawn too, so that a seed that is drawn twice gets two different resamples of its problems
    rows = draw.integers(RESAMPLES, size=(RESAMPLES, 1 if same_problems else len(pairs)))
    return _difference("all", pairs, means[chosen, rows].mean(axis=1))


def _resampled(differences: FloatArray, name: str, resamples: int) -> FloatArray:
    """[resamples] mean difference over equally many problems drawn with replacement; deterministic."""
    draw = generator(0, f"bootstrap {name}")
    count = len(differences)
    slice_size = max(1, 2_000_000 // count)  # at once, 10,000 draws of 5,000 problems would need 400 MB
    parts = [
        differences[draw.integers(count, size=(min(slice_size, resamples - start), count))].mean(axis=1)
        for start in range(0, resamples, slice_size)
    ]
    return np.concatenate(parts)


def _difference(name: str, pairs: Sequence[tuple[FloatArray, FloatArray]], drawn: FloatArray) -> Difference:
    """The difference of the means over `pairs`, with equal weight; `drawn`: its resampled values."""
    problems = sum(len(a) for a, _ in pairs)
    a, b = (float(np.mean([pair[which].mean() for pair in pairs])) for which in (0, 1))
    if any(len(a) < 2 for a, _ in pairs):
        return Difference(name, problems, a, b, b - a, None, None, None)
    low, high = (float(value) for value in np.quantile(drawn, (0.025, 0.975)))
    rounding = 1e-12  # sums of thirds and the like have rounding errors where the true difference is 0
    beyond = min(int((drawn <= rounding).sum()), int((drawn >= -rounding).sum()))
    return Difference(name, problems, a, b, b - a, low, high, min(1.0, 2 * (beyond + 1) / (len(drawn) + 1)))


def compare_evaluations(a: Path, b: Path, *, out: Path | None = None) -> list[str]:
    """Compare two evaluations; returns lines to print.

    Sets that only one evaluation has are left out and named. A set that both have must contain the same problems: one
    that only one of them has would distort the comparison, however it is treated.

    Args:
        a, b: directories of evaluations, or their samples.jsonl.
        out: directory for comparison.json.

    Raises:
        UserError: a file cannot be read, there is no common set, or a set has different problems.
    """
    if out is not None:
        check_out(out, COMPARISON)
    ours, theirs = by_problem(read_samples(a)), by_problem(read_samples(b))
    common = [name for name in ours if name in theirs]
    if not common:
        raise UserError(f"'{a}' and '{b}' have no set in common: {listed(ours)} and {listed(theirs)}")
    notes = [
        f"left out: {in_short(name)}, which only {who} has"
        for who, mine, other in (("A", ours, theirs), ("B", theirs, ours))
        for name in mine
        if name not in other
    ]
    files = [(one if one.is_dir() else one.parent) / RESULTS for one in (a, b)]
    if all(path.is_file() for path in files):
        notes += _different_protocols(*(_protocol(read_results(path), common) for path in files))
    pairs: dict[str, tuple[FloatArray, FloatArray]] = {}
    for name in common:
        _check_same(name, ours[name], theirs[name])
        both = [(share_correct(ours[name][key]), share_correct(theirs[name][key])) for key in ours[name]]
        kept = [(x, y) for x, y in both if x is not None and y is not None]
        if len(kept) < len(both):
            lost = len(both) - len(kept)
            notes.append(f"{in_short(name)}: {lost} problems left out, whose gradings all failed in A or B")
        if kept:
            pairs[name] = np.array([x for x, _ in kept]), np.array([y for _, y in kept])
    if not pairs:
        raise UserError(f"'{a}' and '{b}': no problem has a grading that did not fail in both")
    rows = paired_bootstrap(pairs)
    if out is not None:
        figures = {"a": str(a), "b": str(b), "resamples": RESAMPLES, "sets": [row.as_json() for row in rows]}
        write_text(out / COMPARISON, [json.dumps(figures, indent=2) + "\n"])
    return [f"A: {a}", f"B: {b}", *notes, "", *_table(rows)]


def _protocol(results: Mapping[str, Any], names: Sequence[str]) -> dict[tuple[str, str], Any]:
    """What must agree for scores to be comparable: (set, or "" for all; setting) -> value, of those that are recorded.
    After `--rescore`, no template is."""
    found = {("", key): results.get(key) for key in _OF_ALL}
    found |= {("", f"code of {name}"): str(digest)[:12] for name, digest in results.get("graders", {}).items()}
    for name in names:
        one = results["sets"].get(name, {})
        own = {key: value for key, value in (one.get("reward") or {}).items() if value not in (None, {})}
        values = {key: one.get(key) for key in _OF_EACH} | (one.get("template") or {})
        values |= {f"reward.{key}": value for key, value in deciding(results["reward"] | own).items()}
        found |= {(name, key): value for key, value in values.items()}
    return {key: value for key, value in found.items() if value is not None}


def _different_protocols(ours: Mapping[tuple[str, str], Any], theirs: Mapping[tuple[str, str], Any]) -> list[str]:
    different: dict[str, list[str]] = {}
    for (name, key), value in ours.items():
        if (other := theirs.get((name, key), value)) != value:
            line = f"{key} is {in_short(value, 80)} in A, {in_short(other, 80)} in B"
            different.setdefault(line, []).append(in_short(name) if name else "all sets")
    return [f"warning: not evaluated alike: {line} ({listed(sets)})" for line, sets in different.items()]


def _check_same(name: str, ours: Problems, theirs: Problems) -> None:
    wrong = []
    for who, mine, other in (("A", ours, theirs), ("B", theirs, ours)):
        alone = [key for key in mine if key not in other]
        if alone:
            wrong.append(f"{len(alone)} problems are in {who} only ({listed(alone)})")
    differ = [key for key in ours if key in theirs and ours[key][0].reference != theirs[key][0].reference]
    if differ:
        wrong.append(f"{len(differ)} have another reference answer ({listed(differ)})")
    if wrong:
        raise UserError(
            f"set {in_short(name)} does not have the same problems in both evaluations: {'; '.join(wrong)}."
            " Evaluate both on the same file and limit"
        )


def _table(rows: Sequence[Difference]) -> list[str]:
    lines = [["set", "problems", "A", "B", "B - A", "95 % interval", "p", ""]]
    for row in rows:
        interval, p = "-", "-"
        if row.low is not None and row.high is not None and row.p is not None:
            interval, p = f"{100 * row.low:+.1f} .. {100 * row.high:+.1f}", f"{row.p:.4f}"
        verdict = "within noise" if row.within_noise else "B is better" if row.difference > 0 else "A is better"
        shares = f"{100 * row.a:.1f}", f"{100 * row.b:.1f}", f"{100 * row.difference:+.1f}"
        lines.append([row.name, str(row.problems), *shares, interval, p, verdict])
    return [*aligned(lines), "", f"Points of pass@1; paired bootstrap over problems, {RESAMPLES:,} resamples."]
