"""Metrics of a step's gradings; the grade and the log lines of failed ones; the check that stops the run when too many
fail."""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.texts import entry
from dppo_megatron.types import UNSAMPLED, FloatArray, Grade, Group, IntArray, RunAborted

FACTS = ("parsed_share", "boxed_share")
"""Facts of the `math` grader. They are null in a step where no grading has them, so that the columns always exist."""
_SHOWN = 5  # different failures of one call that are logged one by one


@dataclass(frozen=True, slots=True)
class GradeTable:
    """What a step's metrics need of its gradings, as columns: 16,384 grades are sent between ranks as a few arrays."""

    prompt: IntArray
    """[n] index of each grading's prompt."""
    weight: FloatArray
    """[n] inverse inclusion probability of each grading's prompt, over the size of its group, times what the completion
    counts for those of its group that were stopped early, which have no grading."""
    reward: FloatArray
    """[n], NaN where grading failed."""
    facts: dict[str, FloatArray]
    """Name -> [n], NaN where a grading does not have the fact."""
    parts: dict[str, FloatArray]
    """Named reward -> [n], NaN likewise. Not merged with `facts`, since the user's names may be those of facts."""
    failures: dict[str, int]
    """Reason -> how often grading failed for it."""

    @staticmethod
    def of(groups: Iterable[Group]) -> GradeTable:
        """The gradings of `groups`, in their order."""
        shares = (
            (group, 1.0 / (group.selected.inclusion_prob * len(group.grades))) for group in groups if group.grades
        )
        graded = [
            (group.selected.prompt.index, share * count, grade)
            for group, share in shares
            for grade, count in zip(group.grades, _counts(group), strict=True)
            if count
        ]
        return GradeTable(
            np.array([index for index, _, _ in graded], dtype=np.int64),
            np.array([weight for _, weight, _ in graded], dtype=np.float64),
            np.array([grade.reward for *_, grade in graded], dtype=np.float64),
            _columns([grade.facts for *_, grade in graded]),
            _columns([grade.parts for *_, grade in graded]),
            dict(collections.Counter(grade.failure for *_, grade in graded if grade.failure)),
        )

    @staticmethod
    def join(tables: Sequence[GradeTable]) -> GradeTable:
        """The rows of all `tables`, one after another."""
        failures: collections.Counter[str] = collections.Counter()
        for table in tables:
            failures.update(table.failures)
        return GradeTable(
            np.concatenate([np.empty(0, np.int64), *(table.prompt for table in tables)]),
            np.concatenate([np.empty(0), *(table.weight for table in tables)]),
            np.concatenate([np.empty(0), *(table.reward for table in tables)]),
            _joined([table.facts for table in tables], [len(table.weight) for table in tables]),
            _joined([table.parts for table in tables], [len(table.weight) for table in tables]),
            dict(failures),
        )

    def reweighted(self, prompt: IntArray, factor: FloatArray) -> GradeTable:
        """Weights times `factor` [k], by which completions of the step's prompts [k] make up for missing ones."""
        order = np.argsort(prompt)
        return replace(self, weight=self.weight * factor[order[np.searchsorted(prompt, self.prompt, sorter=order)]])


def grading_metrics(table: GradeTable, parts: Sequence[str] = ()) -> dict[str, float]:
    """`reward/timeouts`, and the means of facts and parts over the gradings that have them; NaN if none has.

    Means have the table's weights, as `reward/mean` has: the `parts`, which are the configured rewards, add up to it.
    """
    timeouts = sum(count for failure, count in table.failures.items() if failure.startswith("timed out"))
    taken = ("mean", "mean_se", "failed_count", "timeouts")  # names of other metrics
    facts = [name for name in (*table.facts, *FACTS) if name not in taken]
    means = {name: _mean(table.weight, table.facts.get(name)) for name in facts}
    means |= {name: _mean(table.weight, table.parts.get(name)) for name in parts}
    return {"reward/timeouts": float(timeouts)} | {f"reward/{name}": mean for name, mean in means.items()}


def set_metrics(table: GradeTable, parts: Sequence[str], name: str) -> dict[str, float]:
    """`reward/<name>/...` of a set with rewards of its own: the metrics that all sets together have under `reward/`."""
    failures = sum(count for failure, count in table.failures.items() if not failure.startswith(UNSAMPLED))
    metrics = {"reward/mean": _mean(table.weight, table.reward), "reward/failed_count": float(failures)}
    metrics |= grading_metrics(table, parts)
    return {key.replace("reward/", f"reward/{name}/", 1): value for key, value in metrics.items()}


def check_failures(table: GradeTable, reward: RewardConfig, step: int, key: str = "reward") -> None:
    """Check the gradings of `step` so far that were made with the settings `reward`, from the section `key`.

    More failures than `reward.max_failed_share` are too many. A single one never is, unless the share is 0: in a step
    of four completions one failure is 25 %, and no sign of a broken grader. Completions that were not sampled to their
    end count as failures.

    Raises:
        RunAborted: too many failed; the message has their number and the most common reasons.
    """
    total, failed, share = len(table.weight), sum(table.failures.values()), reward.max_failed_share
    if failed > (max(share * total, 1.0) if share else 0):
        common = collections.Counter(table.failures).most_common(3)
        reasons = "; ".join(f"{count} x {failure}" for failure, count in common)
        raise RunAborted(
            f"step {step}: {failed} of {total} gradings failed, more than"
            f" {key}.max_failed_share = {share:g} allows: {reasons}"
        )


def _counts(group: Group) -> Sequence[float]:
    return [1.0] * len(group.grades) if group.stands_for is None else group.stands_for.tolist()


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, FloatArray]:
    """[n] mappings as columns: for each name in any of them an array [n].

    Example: [{"a": 1.0}, {}, {"a": 0.0}] -> {"a": [1, NaN, 0]}.
    """
    names = {name: None for row in rows for name in row}
    return {name: np.array([row.get(name, math.nan) for row in rows], dtype=np.float64) for name in names}


def _joined(tables: Sequence[Mapping[str, FloatArray]], sizes: Sequence[int]) -> dict[str, FloatArray]:
    names = {name: None for table in tables for name in table}
    blanks = [np.full(size, math.nan) for size in sizes]
    return {
        name: np.concatenate([table.get(name, blank) for table, blank in zip(tables, blanks, strict=True)])
        for name in names
    }


def _mean(weight: FloatArray, values: FloatArray | None) -> float:
    if values is None:
        return math.nan
    known = ~np.isnan(values)
    total = weight[known].sum()
    return float((weight[known] * values[known]).sum() / total) if total else math.nan


def failed(why: str) -> Grade:
    """The grade of a grading that failed: a NaN reward and the reason."""
    return Grade(math.nan, failure=why)


def log_failures(log: logging.Logger, labels: Sequence[str], grades: Sequence[Grade]) -> None:
    """Log the first few different failures, each with its label and traceback, and a count of each kind of the others:
    one bad grader can fail thousands of gradings."""
    shown: set[str] = set()
    others: collections.Counter[str] = collections.Counter()
    for label, grade in zip(labels, grades, strict=True):
        if not grade.failure:
            continue
        if grade.failure in shown or len(shown) == _SHOWN:
            others[grade.failure.split(":")[0]] += 1
            continue
        shown.add(grade.failure)
        why = f"\n{grade.why}" if grade.why else ""
        log.error("%s", entry(f"grading {label or 'a sample'} {grade.failure}{why}"))
    if others:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in others.most_common(5))
        log.error("and %d gradings more: %s", sum(others.values()), kinds)
