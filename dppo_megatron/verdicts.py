"""Which groups of a step are recorded, and what was decided about each of their completions, for people to read.

Rank 0 has the decision, the ranks have the texts: what is here travels from the one to the others with the plan, and
each rank puts it to the groups that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dppo_megatron.config.schema import Config
from dppo_megatron.observe.samples import RecordedGroup
from dppo_megatron.randomness import uniforms
from dppo_megatron.selection import Decision, Rollouts
from dppo_megatron.types import BoolArray, FloatArray, Group, IntArray

_BYTES_A_TOKEN = 16
"""Id, the engine's and the actor's log-probability in four bytes each, and about as many characters of text."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Of the R groups of a step that are recorded; arrays are [R, G] but for `position`."""

    position: IntArray
    """[R] which groups of the step."""
    advantages: FloatArray
    completion_prob: FloatArray
    weights: FloatArray
    kept: BoolArray
    why: list[tuple[str, ...]]

    @staticmethod
    def of(config: Config, step: int, decision: Decision, rollouts: Rollouts) -> Verdicts:
        """What is to be recorded of `step`."""
        position = recorded_positions(config, step, decision.prompts.prompt_index, rollouts)
        reasons = reasons_of(config, decision, rollouts)
        shape = rollouts.rewards.shape

        def part(flat: FloatArray) -> FloatArray:
            return flat.reshape(shape)[position]

        return Verdicts(
            position=position,
            advantages=part(decision.advantages),
            completion_prob=part(decision.completion_prob),
            weights=part(decision.weight),
            kept=decision.kept.reshape(shape)[position],
            why=[tuple(row) for row in reasons.reshape(shape)[position].tolist()],
        )

    def join(self, groups: Mapping[int, Group]) -> list[RecordedGroup]:
        """With those of the recorded groups that this rank holds, by their position in the step."""
        columns = (self.advantages, self.completion_prob, self.weights, self.kept, self.why)
        return [
            RecordedGroup(position, groups[position], *row)
            for position, *row in zip(self.position.tolist(), *columns, strict=True)
            if position in groups
        ]


def recorded_positions(config: Config, step: int, prompt_index: IntArray, rollouts: Rollouts) -> IntArray:
    """[R] positions of the groups that are recorded, sorted: the fixed prompts first, then in the order of the draw, as
    long as they fit.

    Args:
        prompt_index: [K].

    Example: share 0.5, prompts [7, 9, 4], their draws [0.8, 0.1, 0.3] -> positions [1, 2]; with room for one -> [1].
    """
    settings = config.observe.samples
    fixed = uniforms(config.seed, "samples/fixed", prompt_index) < settings.fixed_share
    drawn = uniforms(config.seed, "samples", prompt_index, step)
    order = np.lexsort((drawn, ~fixed))
    order = order[(fixed | (drawn < settings.share))[order]]
    sizes = _BYTES_A_TOKEN * rollouts.lengths.sum(axis=1)
    if rollouts.prompt_tokens is not None:
        sizes = sizes + _BYTES_A_TOKEN * rollouts.prompt_tokens
    fits = np.cumsum(sizes[order]) <= settings.max_mb_per_step * 1e6
    positions: IntArray = np.sort(order[fits])
    return positions


def reasons_of(config: Config, decision: Decision, rollouts: Rollouts) -> np.ndarray[tuple[int], np.dtype[np.str_]]:
    """[K * G] why each completion was kept or not, in a word (docs/run_directory.md lists them).

    A policy says with what probability it keeps a completion, not how it came to it. So a probability between floor and
    1 is put down to the score, and one of 0 to a rank: what no draw could have kept was cut by a fixed rule.
    """
    truncated: BoolArray = np.zeros(decision.kept.shape, dtype=np.bool_)
    if config.objective.overlong.filter:
        limit = config.rollout.sampling.max_completion_tokens
        truncated = (rollouts.lengths >= limit if rollouts.truncated is None else rollouts.truncated).ravel()
    prob = decision.completion_prob
    not_drawn = np.isnan(prob)
    failed = np.isnan(rollouts.rewards.ravel()) & ~decision.kept
    floor = config.pruning.completion.p_min
    conditions = [
        (failed, "failed"),
        (not_drawn & truncated, "overlong"),
        (not_drawn, "group"),
        (~decision.kept & (decision.advantages == 0), "zero advantage"),
        (prob >= 1, "certain"),
        (prob <= 0, "rank"),
        (prob <= floor * (1 + 1e-9), "floor"),
    ]
    return np.select([mask for mask, _ in conditions], [word for _, word in conditions], "score")
