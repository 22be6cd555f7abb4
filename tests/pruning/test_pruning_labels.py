"""Labels are true and the same in every draw, for whatever the configuration admits.

Each case is a random configuration somewhere in a run (`label_cases`). All draws of the step are run through
`Selector.begin`, `refill` and `finish`; DPPO_LABEL_CONFIGS=5000 runs more cases than the suite does.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from label_cases import Case, drawn_coefficients, expectation, full_coefficients, make_case, make_outcomes

COUNT = int(os.environ.get("DPPO_LABEL_CONFIGS", os.environ.get("DPPO_FUZZ", "500")))
FAST = min(COUNT, 150)
ORDER = ("exact", "unbiased", "ratio", "biased")


def check(case: Case) -> str:
    """All that must hold of one case; its label, the worst of the ledger."""
    expected = expectation(case)
    assert len(expected.labels) == 1, f"the label depends on the draw: {expected.labels}"
    [ledger] = expected.labels
    updates = case.config.objective.updates_per_step
    assert expected.total == pytest.approx(updates, abs=1e-7), "the draws were not all found"
    rng = np.random.default_rng(case.step)
    for _ in range(3):
        other = make_outcomes(rng, *case.outcomes.rewards.shape, binary=True)
        found = tuple((row.name, row.label) for row in case.run(other).ledger)
        assert found == ledger, f"the label depends on the outcome: {found} and {ledger}"
    label = max((name for _, name in ledger), key=ORDER.index)
    if label in ("exact", "unbiased"):
        nominal = expected.decisions[0].offered[: case.selector.prompts_per_step]
        coefficient, inverse = full_coefficients(case, nominal)
        carries_zero = case.config.objective.kl.coef + case.config.objective.entropy_coef > 0
        scale = max(abs(value) for value in [*coefficient.values(), max(inverse.values())])
        compared = [(coefficient, expected.coefficient, 0)] + ([(inverse, expected.inverse, 1)] if carries_zero else [])
        for full, mean, which in compared:
            for key in full.keys() | mean.keys():
                assert mean.get(key, 0.0) == pytest.approx(full.get(key, 0.0), rel=3e-6, abs=1e-6 * scale), key
            if label == "exact":
                for decision in expected.decisions:
                    drawn = drawn_coefficients(decision)[which]
                    for key in full:
                        assert drawn.get(key, 0.0) == pytest.approx(full[key], rel=1e-9, abs=1e-12 * scale), key
    return label


def check_all(indices: range) -> Counter[str]:
    """Labels of the cases; the first that fails is named, so that it can be run alone."""
    labels: Counter[str] = Counter()
    for index in indices:
        case = make_case(index)
        try:
            labels[check(case)] += 1
        except AssertionError as error:
            raise AssertionError(f"case {index}, step {case.step}: {error}\n{case.config.pruning}\n"
                                 f"{case.config.objective}\n{case.config.rollout.prompts_per_step} x"
                                 f" {case.config.rollout.completions_per_prompt}") from error  # fmt: skip
    return labels


def test_labels_are_true_in_every_draw() -> None:
    """The first cases of the generator, and it is not idle: every label comes up often."""
    labels = check_all(range(FAST))
    if FAST >= 150:
        assert all(labels[name] > 5 for name in ORDER), labels


@pytest.mark.slow
def test_labels_are_true_in_every_draw_of_many_more() -> None:
    """The rest."""
    labels = check_all(range(FAST, COUNT))
    assert sum(labels.values()) == COUNT - FAST
