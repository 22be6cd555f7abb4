"""The outcomes of a step's rollouts as arrays: what rank 0 needs to select completions, without their tokens.

Each rank makes the rows of the groups that it holds; rank 0 joins them. That is 33 bytes a completion, where pickled
completions were 24 bytes a *token*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from dppo_megatron.pruning import logit_grad_norm
from dppo_megatron.rewards.measures import GradeTable
from dppo_megatron.selection import Rollouts
from dppo_megatron.types import BoolArray, FloatArray, Group, IntArray, RolloutPrompt, mean_of_sums


@dataclass(frozen=True, slots=True)
class RolloutTable:
    """The outcomes of k groups."""

    position: IntArray
    """[k] position of each group in the step."""
    holder: IntArray
    """[k] the rank that holds its completions."""
    rewards: FloatArray
    """[k, G], NaN where grading failed."""
    lengths: IntArray
    """[k, G] completion tokens."""
    logit_grad_norm: FloatArray
    """[k, G], see `pruning.logit_grad_norm`."""
    surprisal: FloatArray
    """[k, G] -log of the probability with which the engine sampled each completion: the sum over its tokens."""
    truncated: BoolArray
    """[k, G] stopped at the token limit."""
    grades: GradeTable

    @staticmethod
    def of(groups: Mapping[int, Group], group_size: int, rank: int) -> RolloutTable:
        """Outcomes of the groups that `rank` holds; `groups` maps position in the step to group."""
        completions = [completion for group in groups.values() for completion in group.completions]
        shape = (len(groups), group_size)
        return RolloutTable(
            position=np.array(list(groups), dtype=np.int64),
            holder=np.full(len(groups), rank, dtype=np.int64),
            rewards=np.array([group.rewards for group in groups.values()], dtype=np.float64).reshape(shape),
            lengths=np.array([len(c.token_ids) for c in completions], dtype=np.int64).reshape(shape),
            logit_grad_norm=np.array([logit_grad_norm(c.logprobs) for c in completions], dtype=np.float64).reshape(
                shape
            ),
            surprisal=np.array([-c.logprobs.sum(dtype=np.float64) for c in completions]).reshape(shape),
            truncated=np.array([c.finish_reason == "length" for c in completions], dtype=np.bool_).reshape(shape),
            grades=GradeTable.of(groups.values()),
        )

    @staticmethod
    def join(parts: Sequence[RolloutTable]) -> RolloutTable:
        """All groups of a step, sorted by position; `grades` stay in the order of `parts`."""
        order = np.argsort(np.concatenate([part.position for part in parts]))
        names = [field.name for field in fields(RolloutTable) if field.name != "grades"]
        columns = {name: np.concatenate([getattr(part, name) for part in parts])[order] for name in names}
        return RolloutTable(**columns, grades=GradeTable.join([part.grades for part in parts]))

    def metrics(self, inclusion_prob: FloatArray) -> dict[str, float]:
        """Figures of all that was rolled out, as Horvitz-Thompson estimates over the prompts that could have been:
        entropy a token of the distribution that was sampled from, mean length, share truncated; and how many were.

        Args:
            inclusion_prob: [k] of each group's prompt.
        """
        weight = 1.0 / inclusion_prob[:, None]
        tokens = float((weight * self.lengths).sum())
        completions = float(weight.sum()) * self.lengths.shape[1]
        return {
            "train/entropy": mean_of_sums(float((weight * self.surprisal).sum()), tokens),
            "rollout/completion_tokens_mean": mean_of_sums(tokens, completions),
            "rollout/truncated_share": mean_of_sums(float((weight * self.truncated).sum()), completions),
            "rollout/truncated_count": float(self.truncated.sum()),
        }

    def rollouts(self, selected: Sequence[RolloutPrompt]) -> Rollouts:
        """The selector's input; `selected` [k] are the prompts of the groups."""
        return Rollouts(
            rewards=self.rewards,
            lengths=self.lengths,
            logit_grad_norm=self.logit_grad_norm,
            prompt_tokens=np.array([len(item.prompt.token_ids) for item in selected], dtype=np.int64),
            truncated=self.truncated,
        )
