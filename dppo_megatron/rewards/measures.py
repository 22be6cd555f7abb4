"""What a step's gradings come to as metrics, and how many of them may fail before the run stops."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.types import Grade, Group, GuardStop

FACTS = ("parsed_share", "boxed_share", "disagreement")
"""Facts of the `math` grader: null in a step in which no grading has them, so that the columns are always there."""


def grading_metrics(groups: Sequence[Group], parts: Sequence[str] = ()) -> dict[str, float]:
    """`reward/timeouts`, and the means of facts and parts over the gradings that have them; NaN over none.

    Means are weighted by the prompts' inverse inclusion probabilities, as `reward/mean` is, so that the parts add up to
    it.

    Args:
        parts: names of the configured rewards.
    """
    graded = [(group.selected.weight, grade) for group in groups for grade in group.grades]
    timeouts = sum(grade.failure.startswith("timed out") for _, grade in graded)
    facts = {name: None for _, grade in graded for name in grade.facts}
    means = {name: _mean([(w, g.facts[name]) for w, g in graded if name in g.facts]) for name in {**facts} | _none()}
    # after the facts: a configured reward's name is the user's, and cannot be taken by a fact
    means |= {name: _mean([(w, g.parts[name]) for w, g in graded if name in g.parts]) for name in parts}
    return {"reward/timeouts": float(timeouts)} | {f"reward/{name}": mean for name, mean in means.items()}


class FailureGuard:
    """Stops the run in a step in which too many gradings failed.

    Too many is more than `reward.max_failed_share` of the step's gradings so far, but never a single one, unless the
    share is 0: in a step of four completions one failure is 25 %, and says nothing about the grader.
    """

    def __init__(self, reward: RewardConfig) -> None:
        self._reward = reward
        self._step = -1
        self._grades: list[Grade] = []

    def check(self, groups: Sequence[Group], step: int) -> None:
        """Account for groups of `step`, which may come in several rounds.

        Raises:
            GuardStop: too many have failed; it says how and how many.
        """
        if step != self._step:
            self._step, self._grades = step, []
        self._grades += [grade for group in groups for grade in group.grades]
        failures = [grade.failure for grade in self._grades if grade.failure]
        share = self._reward.max_failed_share
        allowed = max(share * len(self._grades), 1.0) if share else 0.0
        if len(failures) > allowed:
            common = collections.Counter(failures).most_common(3)
            reasons = "; ".join(f"{count} x {failure}" for failure, count in common)
            raise GuardStop(
                f"step {step}: {len(failures)} of {len(self._grades)} gradings failed, more than"
                f" reward.max_failed_share = {share:g} allows: {reasons}"
            )


def _none() -> dict[str, None]:
    return dict.fromkeys(FACTS)


def _mean(values: Sequence[tuple[float, float]]) -> float:
    weight = sum(w for w, _ in values)
    return sum(w * value for w, value in values) / weight if weight else math.nan
