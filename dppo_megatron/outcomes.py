"""What a step's rollouts came to, as arrays: all that rank 0 needs in order to select, and nothing that it does not.

Each rank makes the rows of the groups that it holds; rank 0 puts them together. 25 bytes a completion travel, where the
completions themselves would be 24 bytes a *token*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dppo_megatron.pruning import surprisal
from dppo_megatron.rewards.measures import GradeTable
from dppo_megatron.selection import Rollouts
from dppo_megatron.types import BoolArray, FloatArray, Group, IntArray, SelectedPrompt


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes of k groups."""

    position: IntArray
    """[k] which group of the step each row is."""
    holder: IntArray
    """[k] the rank that holds its completions."""
    rewards: FloatArray
    """[k, G], NaN where grading failed."""
    lengths: IntArray
    """[k, G] completion tokens."""
    surprisal: FloatArray
    """[k, G], see `pruning.surprisal`."""
    truncated: BoolArray
    """[k, G] ended by the limit of tokens."""
    grades: GradeTable

    @staticmethod
    def of(groups: Mapping[int, Group], group_size: int, rank: int) -> Outcomes:
        """Of the groups that `rank` holds, by their position in the step."""
        completions = [completion for group in groups.values() for completion in group.completions]
        shape = (len(groups), group_size)
        return Outcomes(
            position=np.array(list(groups), dtype=np.int64),
            holder=np.full(len(groups), rank, dtype=np.int64),
            rewards=np.array([group.rewards for group in groups.values()], dtype=np.float64).reshape(shape),
            lengths=np.array([len(c.token_ids) for c in completions], dtype=np.int64).reshape(shape),
            surprisal=np.array([surprisal(c.logprobs) for c in completions], dtype=np.float64).reshape(shape),
            truncated=np.array([c.finish_reason == "length" for c in completions], dtype=np.bool_).reshape(shape),
            grades=GradeTable.of(groups.values()),
        )

    @staticmethod
    def join(parts: Sequence[Outcomes]) -> Outcomes:
        """All groups of a step, in their order; `grades` stay in the order of `parts`."""
        position = np.concatenate([part.position for part in parts])
        order = np.argsort(position)
        return Outcomes(
            position=position[order],
            holder=np.concatenate([part.holder for part in parts])[order],
            rewards=np.concatenate([part.rewards for part in parts])[order],
            lengths=np.concatenate([part.lengths for part in parts])[order],
            surprisal=np.concatenate([part.surprisal for part in parts])[order],
            truncated=np.concatenate([part.truncated for part in parts])[order],
            grades=GradeTable.join([part.grades for part in parts]),
        )

    def rollouts(self, selected: Sequence[SelectedPrompt]) -> Rollouts:
        """As the selector takes them; `selected` are the prompts of the groups [k]."""
        return Rollouts(
            rewards=self.rewards,
            lengths=self.lengths,
            surprisal=self.surprisal,
            prompt_tokens=np.array([len(item.prompt.token_ids) for item in selected], dtype=np.int64),
            truncated=self.truncated,
        )
