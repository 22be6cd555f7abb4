"""Scores by the level that a set's rows state (`level`, `difficulty`): a mean over all problems hides that a model has
become better at the easy ones only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dppo_megatron.evaluation.samples import EvalSample, scores_of
from dppo_megatron.evaluation.statistics import Estimate, percent

_MOST = 20
"""A column of more values is a measure, not a level."""
Levels = Mapping[str, Mapping[str, Estimate]]
"""Set to level to pass@1; levels rise."""


def by_level(samples: Sequence[EvalSample]) -> Levels:
    """pass@1 of each level, for sets whose rows state between two and 20 of them; the others are left out.

    Example:
        {"math500": {"1": Estimate(0.9, 0.04, 43), "2": Estimate(0.7, 0.05, 90)}}
    """
    members: dict[str, dict[float, list[EvalSample]]] = {}
    for sample in samples:
        if sample.level is not None:
            members.setdefault(sample.set, {}).setdefault(sample.level, []).append(sample)
    return {
        name: {f"{level:.15g}": scores_of(of)[0].avg for level, of in sorted(levels.items())}
        for name, levels in members.items()
        if 1 < len(levels) <= _MOST
    }


def level_lines(levels: Levels) -> list[str]:
    """A line a set: `math500 by level: 1 90.0 % ± 4.0 (43), 2 70.0 % ± 5.0 (90)`."""
    return [
        f"{name} by level: " + ", ".join(f"{level} {percent(of)} ({of.problems})" for level, of in each.items())
        for name, each in levels.items()
    ]
