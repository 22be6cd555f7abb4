"""Grades completions, and builds groups of them. A failed grading is counted and not scored 0: a broken grader must not
look like a weak model."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

import numpy as np

from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.launcher_env import launched_here
from dppo_megatron.rewards.functions import BUILT_IN, NamedFunction
from dppo_megatron.rewards.measures import failed
from dppo_megatron.rewards.pool import Grader
from dppo_megatron.rewards.work import Pace
from dppo_megatron.types import (
    STOPPED_EARLY,
    UNSAMPLED,
    Completion,
    Grade,
    GradeTask,
    Group,
    RolloutPrompt,
    UserError,
    deciding_reward,
)

__all__ = ["GradeTask", "Grader", "Graders", "deciding_reward", "grade_groups", "make_grader"]
_MOST_BY_CORES = 16
"""Each process imports the user's grader (60 MB with sympy, 300 with torch) and may use `reward.memory_mb` beyond that:
32 GiB per rank by default, 256 on a node of eight GPUs."""


def make_grader(reward: RewardConfig, key: str = "reward", *, shared_by: int = 1) -> Grader:
    """The configured grader. It is imported, in its processes, when it is first used.

    Args:
        key: the section of the settings, for messages.
        shared_by: number of such graders in the job; together they keep to `max_per_minute`.

    Raises:
        UserError: neither a built-in name nor `module:function`.
    """
    if reward.functions:
        functions = [
            _named(f"{key}.functions.{name}.function", item.function, name, item.weight)
            for name, item in reward.functions.items()
        ]
    else:
        functions = [_named(f"{key}.function", reward.function)]
    return Grader(
        functions,
        processes=reward.processes or _by_cores(functions),
        one_if_many=not reward.processes,
        timeout_s=reward.timeout_s,
        memory_mb=reward.memory_mb,
        max_concurrent=reward.max_concurrent,
        max_failures_in_a_row=reward.max_failures_in_a_row,
        pace=Pace(reward.max_per_minute / shared_by),
    )


class Graders:
    """The graders of a job, each for the completions whose `graded_by` names it. Sections with equal settings share a
    grader. Any thread may call it. A rollout client makes its own: `ServerEngine` takes `partial(Graders, rewards)` as
    its `client_hook`.

    Args:
        rewards: section -> its settings (`resolved_sets.set_rewards`).
        shared_by: as in `make_grader`.

    Raises:
        UserError: as `make_grader`.
    """

    def __init__(self, rewards: Mapping[str, RewardConfig], *, shared_by: int = 1) -> None:
        self.rewards = dict(rewards)
        self._graders: dict[str, Grader] = {}
        self.share(shared_by)

    def share(self, by: int) -> None:
        """Share the limits among `by` graders from now on. The processes end; the next grading starts new ones."""
        self.close()
        self._shared_by, graders = by, dict[str, Grader]()
        for key, reward in self.rewards.items():
            same = next((one for other, one in graders.items() if self.rewards[other] == reward), None)
            graders[key] = same or make_grader(reward, key, shared_by=by)
        self._graders = graders

    def __getitem__(self, key: str) -> Grader:
        return self._graders[key]

    def alone(self) -> Graders:
        """Graders with unshared limits, for a rank that grades while no other does; itself if it shares no limit."""
        return self if self._shared_by == 1 else Graders(self.rewards)

    def key_of(self, set_key: str) -> str:
        """The section with the reward settings of the set `data.train_sets.NAME` or `data.eval_sets.NAME`."""
        return key if (key := f"{set_key}.reward") in self.rewards else "reward"

    def process_notes(self) -> list[str]:
        """Lines for the log: how many processes a grader of the user's own has that `reward.processes` does not say."""
        own = {
            one.key: one
            for key, one in self._graders.items()
            if one.has_started and not self.rewards[key].processes and not _is_built_in(one.functions)
        }
        why = {"each": f"{_cores()} cores here, ranks: {launched_here()}", "async": "it is asynchronous"}
        return [
            f"{key}: grader processes per rank: {one.num_processes}"
            f" (reward.processes = 0; {why.get(one.mode, 'it takes lists')})"
            for key, one in own.items()
        ]

    def submit(self, tasks: Sequence[GradeTask]) -> Future[list[Grade]]:
        """As `Grader.submit`."""
        by_grader: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            by_grader.setdefault(task.graded_by, []).append(index)
        parts = [(rows, self[key].submit([tasks[index] for index in rows])) for key, rows in by_grader.items()]
        if len(parts) == 1:
            return parts[0][1]
        whole: Future[list[Grade]] = Future()

        def done(part: Future[list[Grade]]) -> None:
            with suppress(InvalidStateError):  # cancelled, or two parts ended at the same time
                if part.cancelled():
                    whole.cancel()
                elif (error := part.exception()) is not None:
                    whole.set_exception(error)
                elif all(one.done() for _, one in parts):
                    grades = {i: grade for rows, one in parts for i, grade in zip(rows, one.result(), strict=True)}
                    whole.set_result([grades[index] for index in range(len(tasks))])

        whole.add_done_callback(lambda _: [one.cancel() for _, one in parts])
        for _, one in parts:
            one.add_done_callback(done)
        if not parts:
            whole.set_result([])
        return whole

    def grade(self, tasks: Sequence[GradeTask]) -> list[Grade]:
        """As `Grader.grade`."""
        future = self.submit(tasks)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self, keys: Collection[str] | None = None) -> None:
        """End the processes of all graders, or of those that only `keys` use. The next grading starts new ones."""
        kept = [] if keys is None else [one for key, one in self._graders.items() if key not in keys]
        for one in self._graders.values():
            if one not in kept:
                one.close()


def grade_groups(
    grader: Graders,
    selected: Sequence[RolloutPrompt],
    completions: Sequence[Completion],
    sizes: Sequence[int],
    known: Mapping[int, Grade] | None = None,
) -> list[Group]:
    """The groups of `selected`, graded in one call. A completion that was not sampled to its end is not graded: that
    would make it look like a wrong answer.

    Args:
        completions: those of all groups, one group after another.
        sizes: number of completions of each group.
        known: position in `completions` -> its grade, if a rollout client has graded it already.
    """
    unfinished = {"abort": failed(UNSAMPLED), "early": STOPPED_EARLY}
    graded = {i: unfinished[one.finish_reason] for i, one in enumerate(completions) if one.finish_reason in unfinished}
    graded |= known or {}
    starts = [0, *itertools.accumulate(sizes)]
    places = [(k, i) for k, size in enumerate(sizes) for i in range(size)]  # of each completion: group, and index in it
    tasks = {
        position: GradeTask.of(selected[k].prompt, one.text, i, len(one.token_ids), one.finish_reason)
        for position, (one, (k, i)) in enumerate(zip(completions, places, strict=True))
        if position not in graded
    }
    if tasks:
        graded |= zip(tasks, grader.grade([*tasks.values()]), strict=True)
    grades = [graded[i] for i in range(len(completions))]
    groups = []
    for position, item in enumerate(selected):
        members = slice(starts[position], starts[position + 1])
        rewards = np.array([grade.reward for grade in grades[members]], dtype=np.float64)
        groups.append(Group(item, tuple(completions[members]), rewards, tuple(grades[members])))
    return groups


def _by_cores(functions: Sequence[NamedFunction]) -> int:
    """Processes for a grader whose number is not set, per rank."""
    return 1 if _is_built_in(functions) else min(_MOST_BY_CORES, max(1, _cores() // launched_here()))


def _is_built_in(functions: Sequence[NamedFunction]) -> bool:
    return all(one.path in BUILT_IN.values() for one in functions)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _named(key: str, function: str, name: str = "", weight: float = 1.0) -> NamedFunction:
    path = BUILT_IN.get(function, function)
    module, separator, attribute = path.partition(":")
    if not (separator and module and attribute):
        names = ", ".join(sorted(BUILT_IN))
        raise UserError(f"{key} = '{function}': expected a built-in grader ({names}) or module:function")
    if module.endswith(".py"):
        file = module[:-3].removeprefix("./")
        folder, _, name = file.rpartition("/")
        if file.startswith(("/", "~", "../")):
            where = f", with {folder or '/'} on PYTHONPATH"
        else:
            name, where = file.replace("/", "."), ""
        raise UserError(
            f"{key} = '{function}': a module is named without .py, as it is imported: {name}:{attribute}{where}"
        )
    return NamedFunction(name, path, weight, f"{key} = '{function}'")
