"""The configured grader as the rollout clients' hook: completions are graded in their node's client as they land.

Each lane is a pool of one process. A grading that hangs is killed and paid for by its own lane, while the others go on;
so k hangs cost about ceil(k / lanes) time limits, and nobody waits for a batch to be full.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.rewards.grading import Grader, make_grader, task_of
from dppo_megatron.types import Grade, Prompt


class _ToGrade(Protocol):
    """A completion as the client hands it over (`rollout/client/grading.ToGrade`)."""

    @property
    def prompt(self) -> Prompt: ...
    @property
    def completion_index(self) -> int: ...
    @property
    def text(self) -> str: ...


def grade_completions(grader: Grader, tasks: Sequence[_ToGrade]) -> list[Grade]:
    """One grade a completion, in their order."""
    return grader.grade(
        [
            task_of(one.prompt, one.text, f"prompt {one.prompt.index}, completion {one.completion_index}")
            for one in tasks
        ]
    )


class GraderLanes:
    """One grader process a lane. Processes start when their lane is first used."""

    def __init__(self, reward: RewardConfig) -> None:
        self.lanes = max(1, reward.processes)
        self._graders: list[Grader] = [make_grader(replace(reward, processes=1)) for _ in range(self.lanes)]

    def grade(self, lane: int, tasks: Sequence[_ToGrade]) -> list[Grade]:
        """One grade a task, in their order."""
        return grade_completions(self._graders[lane], tasks)

    def close(self) -> None:
        """End the processes."""
        for grader in self._graders:
            grader.close()


@dataclass(frozen=True)
class GradeInClient:
    """Makes the hook in a client's process: what `ServerEngine` takes as `client_hook`."""

    reward: RewardConfig
    module_path: tuple[str, ...] = ()
    """Where the trainer finds modules (sys.path): a user's grader must be found in the client too. Empty: no change."""

    def __call__(self) -> GraderLanes:
        sys.path[:] = self.module_path or sys.path
        return GraderLanes(self.reward)
