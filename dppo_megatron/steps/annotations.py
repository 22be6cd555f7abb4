"""Which groups of a step are recorded, and what was decided about each of their completions.

Rank 0 decides, and the texts are on the ranks that generated them. Rank 0 therefore sends these verdicts with the plan,
and each rank attaches them to the groups that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dppo_megatron.config.schema import Config
from dppo_megatron.observe.samples import RecordedGroup
from dppo_megatron.randomness import uniforms
from dppo_megatron.selection import Rollouts, TrainSelection
from dppo_megatron.types import BoolArray, FloatArray, Group, IntArray

_BYTES_A_TOKEN = 16
"""Token id and two log-probabilities (engine, actor) at 4 bytes each, and about 4 characters of text."""


@dataclass(frozen=True, slots=True)
class SampleAnnotations:
    """The decisions about the R recorded groups of a step; arrays are [R, G] except `position`."""

    position: IntArray
    """[R] their positions among the groups of the step."""
    advantages: FloatArray
    completion_prob: FloatArray
    weights: FloatArray
    kept: BoolArray
    why: list[tuple[str, ...]]

    @staticmethod
    def of(config: Config, step: int, decision: TrainSelection, rollouts: Rollouts) -> SampleAnnotations:
        """Collect what is recorded of `step`."""
        position = recorded_positions(config, step, decision.prompts.prompt_index, rollouts)
        reasons = reasons_of(config, decision, rollouts)
        shape = rollouts.rewards.shape

        def part(flat: FloatArray) -> FloatArray:
            return flat.reshape(shape)[position]

        return SampleAnnotations(
            position=position,
            advantages=part(decision.advantages),
            completion_prob=part(decision.completion_prob),
            weights=part(decision.weight),
            kept=decision.kept.reshape(shape)[position],
            why=[tuple(row) for row in reasons.reshape(shape)[position].tolist()],
        )

    def join(self, groups: Mapping[int, Group]) -> list[RecordedGroup]:
        """Combine with the recorded groups that this rank holds, given by their position in the step."""
        columns = (self.advantages, self.completion_prob, self.weights, self.kept, self.why)
        return [
            RecordedGroup(position, groups[position], *row)
            for position, *row in zip(self.position.tolist(), *columns, strict=True)
            if position in groups
        ]


def recorded_positions(config: Config, step: int, prompt_index: IntArray, rollouts: Rollouts) -> IntArray:
    """[R] sorted positions of the recorded groups. Fixed prompts go first, then the others in the order of their draws,
    until the step's size limit is reached.

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


def reasons_of(
    config: Config, decision: TrainSelection, rollouts: Rollouts
) -> np.ndarray[tuple[int], np.dtype[np.str_]]:
    """[K * G] one word for why each completion was kept or not (docs/run_directory.md lists them).

    A policy reports the probability with which it keeps a completion, not the reason. A probability between the floor
    and 1 is attributed to the score, and one of 0 to the rank: what no draw can keep was dropped by a fixed rule.
    """
    truncated: BoolArray = np.zeros(decision.kept.shape, dtype=np.bool_)
    if config.objective.overlong.filter:
        limit = config.rollout.sampling.max_completion_tokens
        truncated = (rollouts.lengths >= limit if rollouts.truncated is None else rollouts.truncated).ravel()
    prob = decision.completion_prob
    not_drawn = np.isnan(prob)
    failed = np.isnan(rollouts.rewards.ravel()) & ~decision.kept
    floor = config.pruning.completion.min_inclusion_prob
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
