"""Grading hooks for the rollout client's process, which imports this file and little else."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from dppo_megatron.types import Grade


class RaisingHook:
    """What no hook should do."""

    def submit(self, tasks: Sequence[Any]) -> Future[list[Grade]]:
        raise ValueError("this hook is broken")

    def close(self) -> None: ...


class CountingHook(RaisingHook):
    """Gives each completion the number of its tokens."""

    def submit(self, tasks: Sequence[Any]) -> Future[list[Grade]]:
        graded: Future[list[Grade]] = Future()
        graded.set_result([Grade(float(task.completion_tokens)) for task in tasks])
        return graded


class ForgetfulHook(RaisingHook):
    """Nor this: it gives fewer grades than there are completions."""

    def submit(self, tasks: Sequence[Any]) -> Future[list[Grade]]:
        graded: Future[list[Grade]] = Future()
        graded.set_result([])
        return graded
