"""Grades completions into groups. A failed grading is counted, not scored 0: a broken grader must not look like a weak
model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.rewards.functions import BUILT_IN, NamedFunction
from dppo_megatron.rewards.pace import Pace
from dppo_megatron.rewards.pool import Grader
from dppo_megatron.types import Completion, Grade, GradeTask, Group, RolloutPrompt, UserError, deciding_reward

__all__ = ["GradeTask", "Grader", "deciding_reward", "grade_groups", "make_grader"]


def make_grader(reward: RewardConfig, function: str = "", key: str = "", *, shared_by: int = 1) -> Grader:
    """The configured grader. Nothing is imported and no process started before it is used. A rollout client makes it in
    its own process: `partial(make_grader, reward)` is what `ServerEngine` takes as `client_hook`.

    Args:
        function: another grader than the configured one, for an evaluation set: a built-in name or `module:function`.
        key: the setting that names `function`, for messages.
        shared_by: graders like this one in the job, which share its limit on gradings in a minute.

    Raises:
        UserError: neither a built-in name nor `module:function`.
    """
    if function:
        functions = [_named(key or "grader", function)]
    elif reward.functions:
        functions = [
            _named(f"reward.functions.{name}.function", item.function, name, item.weight)
            for name, item in reward.functions.items()
        ]
    else:
        functions = [_named("reward.function", reward.function)]
    return Grader(
        functions,
        processes=reward.processes,
        timeout_s=reward.timeout_s,
        memory_mb=reward.memory_mb,
        max_concurrent=reward.max_concurrent,
        max_failures_in_a_row=reward.max_failures_in_a_row,
        pace=Pace(reward.max_per_minute / shared_by),
        shared_by=shared_by,
    )


def grade_groups(
    grader: Grader,
    selected: Sequence[RolloutPrompt],
    completions: Sequence[Completion],
    size: int,
    known: Mapping[int, Grade] | None = None,
) -> list[Group]:
    """The groups of `selected`, graded in one call.

    Args:
        completions: [len(selected) * size], the groups one after another.
        known: position in `completions` -> its grade, where a rollout client has graded it already.
    """
    graded = dict(known or {})
    open_ones = [i for i in range(len(completions)) if i not in graded]
    if open_ones:
        tasks = [
            GradeTask.of(selected[i // size].prompt, one.text, i % size, len(one.token_ids), one.finish_reason)
            for i, one in ((i, completions[i]) for i in open_ones)
        ]
        graded |= zip(open_ones, grader.grade(tasks), strict=True)
    grades = [graded[i] for i in range(len(completions))]
    groups = []
    for position, item in enumerate(selected):
        mine = slice(position * size, (position + 1) * size)
        rewards = np.array([grade.reward for grade in grades[mine]], dtype=np.float64)
        groups.append(Group(item, tuple(completions[mine]), rewards, tuple(grades[mine])))
    return groups


def _named(key: str, function: str, name: str = "", weight: float = 1.0) -> NamedFunction:
    path = BUILT_IN.get(function, function)
    module, separator, attribute = path.partition(":")
    if not (separator and module and attribute):
        names = ", ".join(sorted(BUILT_IN))
        raise UserError(f"{key} = '{function}': expected a built-in grader ({names}) or module:function")
    return NamedFunction(name, path, weight, f"{key} = '{function}'")
