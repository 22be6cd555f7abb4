"""Grades completions into groups. A failed grading is counted, not scored 0: a broken grader must not look like a weak
model."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

import numpy as np

from dppo_megatron.config.reward import RewardConfig
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


def make_grader(reward: RewardConfig, key: str = "reward", *, shared_by: int = 1) -> Grader:
    """The configured grader. Nothing is imported and no process started before it is used.

    Args:
        key: the section that holds the settings, for messages.
        shared_by: graders like this one in the job, which share its limit on gradings in a minute.

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
        processes=reward.processes,
        timeout_s=reward.timeout_s,
        memory_mb=reward.memory_mb,
        max_concurrent=reward.max_concurrent,
        max_failures_in_a_row=reward.max_failures_in_a_row,
        pace=Pace(reward.max_per_minute / shared_by),
    )


class Graders:
    """The graders of a job, each for the completions whose `graded_by` names it. Equal settings share one. Any thread
    may call it. A rollout client makes its own: `partial(Graders, rewards)` is what `ServerEngine` takes as
    `client_hook`.

    Args:
        rewards: settings by the section that holds them (`resolved_sets.set_rewards`).
        shared_by: as in `make_grader`.

    Raises:
        UserError: as `make_grader`.
    """

    def __init__(self, rewards: Mapping[str, RewardConfig], *, shared_by: int = 1) -> None:
        self.rewards = dict(rewards)
        self._graders: dict[str, Grader] = {}
        self.share(shared_by)

    def share(self, by: int) -> None:
        """From now on the limits are shared by so many; the processes end, and grading again starts others."""
        self.close()
        self._shared_by, made = by, dict[str, Grader]()
        for key, reward in self.rewards.items():
            same = next((one for other, one in made.items() if self.rewards[other] == reward), None)
            made[key] = same or make_grader(reward, key, shared_by=by)
        self._graders = made

    def __getitem__(self, key: str) -> Grader:
        return self._graders[key]

    def alone(self) -> Graders:
        """With the whole of the limits, for one rank that grades while no other does; itself where it shares none."""
        return self if self._shared_by == 1 else Graders(self.rewards)

    def key_of(self, set_key: str) -> str:
        """The settings of the rewards of the set `data.train_sets.NAME` or `data.eval_sets.NAME`."""
        return key if (key := f"{set_key}.reward") in self.rewards else "reward"

    def submit(self, tasks: Sequence[GradeTask]) -> Future[list[Grade]]:
        """As `Grader.submit`."""
        members: dict[str, list[int]] = {}
        for place, task in enumerate(tasks):
            members.setdefault(task.graded_by, []).append(place)
        asked = [(of, self[key].submit([tasks[place] for place in of])) for key, of in members.items()]
        if len(asked) == 1:
            return asked[0][1]
        whole: Future[list[Grade]] = Future()

        def done(part: Future[list[Grade]]) -> None:
            with suppress(InvalidStateError):  # cancelled, or another part was the last one at the same time
                if part.cancelled():
                    whole.cancel()
                elif (error := part.exception()) is not None:
                    whole.set_exception(error)
                elif all(one.done() for _, one in asked):
                    found = {place: grade for of, one in asked for place, grade in zip(of, one.result(), strict=True)}
                    whole.set_result([found[place] for place in range(len(tasks))])

        whole.add_done_callback(lambda _: [one.cancel() for _, one in asked])
        for _, one in asked:
            one.add_done_callback(done)
        if not asked:
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
        """End the processes of all, or of those that only `keys` use; grading again starts others."""
        needed = [] if keys is None else [one for key, one in self._graders.items() if key not in keys]
        for one in self._graders.values():
            if one not in needed:
                one.close()


def grade_groups(
    grader: Graders,
    selected: Sequence[RolloutPrompt],
    completions: Sequence[Completion],
    sizes: Sequence[int],
    known: Mapping[int, Grade] | None = None,
) -> list[Group]:
    """The groups of `selected`, graded in one call; an unfinished completion is not graded, since a wrong answer is
    not what it is.

    Args:
        completions: the groups one after another, of these `sizes`.
        known: position in `completions` -> its grade, where a rollout client has graded it already.
    """
    never = {"abort": failed(UNSAMPLED), "early": STOPPED_EARLY}
    graded = {i: never[one.finish_reason] for i, one in enumerate(completions) if one.finish_reason in never}
    graded |= known or {}
    open_ones = [i for i in range(len(completions)) if i not in graded]
    starts = [0, *itertools.accumulate(sizes)]
    group = [k for k, size in enumerate(sizes) for _ in range(size)]
    if open_ones:
        tasks = [
            GradeTask.of(
                selected[group[i]].prompt, one.text, i - starts[group[i]], len(one.token_ids), one.finish_reason
            )
            for i, one in ((i, completions[i]) for i in open_ones)
        ]
        graded |= zip(open_ones, grader.grade(tasks), strict=True)
    grades = [graded[i] for i in range(len(completions))]
    groups = []
    for position, item in enumerate(selected):
        mine = slice(starts[position], starts[position + 1])
        rewards = np.array([grade.reward for grade in grades[mine]], dtype=np.float64)
        groups.append(Group(item, tuple(completions[mine]), rewards, tuple(grades[mine])))
    return groups


def _named(key: str, function: str, name: str = "", weight: float = 1.0) -> NamedFunction:
    path = BUILT_IN.get(function, function)
    module, separator, attribute = path.partition(":")
    if not (separator and module and attribute):
        names = ", ".join(sorted(BUILT_IN))
        raise UserError(f"{key} = '{function}': expected a built-in grader ({names}) or module:function")
    if module.endswith(".py"):
        name = module[:-3].strip("./").replace("/", ".")
        raise UserError(f"{key} = '{function}': a module is named without .py, as it is imported: {name}:{attribute}")
    return NamedFunction(name, path, weight, f"{key} = '{function}'")
