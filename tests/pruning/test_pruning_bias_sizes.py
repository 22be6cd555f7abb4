"""What ledger rows give as their bias is about what it is, by enumeration of every draw.

The truth is the root of E|E[g'] - g|^2 / E|g|^2 over random directions of the completions' gradients (and of those of a
KL term), of lengths `logit_grad_norm`: a sum over completions of the squared differences of the coefficients. Over the
draws of a step the estimates are put together as the root of their mean square; within a factor 2 counts as right, and
below 0.001 any other that is below 0.002.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from label_cases import (
    Case,
    Expected,
    deterministic_levels,
    drawn_coefficients,
    expectation,
    full_coefficients,
    is_resampled,
    make_case,
    planned_prompts,
)
from label_configs import make_outcomes
from support.cases import Choose

from dppo_megatron.config.objective import ObjectiveConfig, zero_advantage_slope
from dppo_megatron.config.schema import Config
from dppo_megatron.data.order import PromptOrder
from dppo_megatron.pruning import StepCost
from dppo_megatron.selection import Rollouts, Selector, TrainSelection

_RUNS = 64
"""Of tie-breaks and draws together."""


def true_bias(case: Case, expected: Sequence[Expected]) -> float | None:
    """Of the mean over tie-breaks; without the chance that is left in it. None: no gradient."""
    nominal = expected[0].decisions[0].offered[: planned_prompts(case.config)]
    full, slope = full_coefficients(case, nominal), zero_advantage_slope(case.config.objective)
    squared = {key: case.outcomes.logit_grad_norm[key] ** 2 for key in full[0]}
    off = total = 0.0
    for which, scale in ((0, 1.0), (1, slope**2)):
        for key, one in full[which].items():
            found = np.array([(e.coefficient, e.inverse)[which].get(key, 0.0) for e in expected])
            chance = float(found.var(ddof=1)) / len(found) if len(found) > 1 else 0.0
            off += scale * squared[key] * ((float(found.mean()) - one) ** 2 - chance)
            total += scale * squared[key] * one**2
    return max(off / total, 0.0) ** 0.5 if total > 1e-30 else None


def estimate(expected: Sequence[Expected]) -> float | None:
    """Of the whole step; None if no draw of it has one."""
    pairs = [
        (decision.metrics["prune/bias_estimate"], chance)
        for one in expected
        for decision, chance in zip(one.decisions, one.chances, strict=True)
        if "prune/bias_estimate" in decision.metrics
    ]
    total = sum(chance for _, chance in pairs)
    return (sum(size**2 * chance for size, chance in pairs) / total) ** 0.5 if pairs else None


def is_right(size: float | None, truth: float, error: float = 0.0) -> bool:
    if size is None:
        return False
    low, high = max(truth - error, 0.0), truth + error
    return size < 0.002 + error if low < 0.001 else low / 2 <= size <= 2 * high


def sources(decision: TrainSelection) -> tuple[str, ...]:
    return tuple(row.name for row in decision.ledger if row.label in ("ratio", "biased"))


def verdicts(chosen: Iterable[int]) -> dict[tuple[str, ...], list[bool]]:
    """Whether the estimate is right, by what has put rows into the ledger."""
    found: dict[tuple[str, ...], list[bool]] = defaultdict(list)
    for index in chosen:
        case = make_case(index)
        names = sources(case.run())
        if not names or is_resampled(case):
            continue
        expected = [expectation(case)]
        runs = -(-_RUNS // len(expected[0].decisions)) if deterministic_levels(case.config) else 1
        expected += [expectation(case, ties=ties) for ties in range(1, runs)]
        truth = true_bias(case, expected)
        if truth is not None:
            found[names].append(is_right(estimate(expected), truth, 1.5 / _RUNS**0.5 if runs > 1 else 0.0))
    return found


def share(results: dict[tuple[str, ...], list[bool]], wanted: Sequence[str], *, alone: bool) -> tuple[float, int]:
    """Right ones of the configurations in which all sources (alone), or one of them, are as wanted."""
    some = all if alone else any
    right = [one for names, every in results.items() if some(name.startswith(tuple(wanted)) for name in names) for one in every]
    return float(np.mean(right)) if right else 1.0, len(right)


@pytest.mark.slow
def test_sizes_are_within_a_factor_of_two(cases: Choose) -> None:
    """In 90 % of all configurations. Steps of two prompts, of which one is rolled out, are among them: what the other
    would have been nobody knows, so where the unknown decides (the deviation and the tokens of skipped prompts) fewer
    are right."""
    chosen = cases("size", 400)
    results = verdicts(chosen)
    everything, count = share(results, [""], alone=True)
    by_completions, _ = share(results, ["completion/"], alone=True)
    if not chosen.are_few:
        assert count > 150 and everything > 0.88 and by_completions > 0.95, (everything, by_completions, count)
