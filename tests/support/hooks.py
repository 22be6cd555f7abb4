"""Grading hooks for the rollout client's process, which imports this file and little else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dppo_megatron.types import Grade


class RaisingHook:
    """What no hook should do."""

    lanes = 1

    def grade(self, lane: int, tasks: Sequence[Any]) -> list[Grade]:
        raise ValueError("this hook is broken")

    def close(self) -> None: ...


class ForgetfulHook(RaisingHook):
    """Nor this: it gives fewer grades than there are completions."""

    def grade(self, lane: int, tasks: Sequence[Any]) -> list[Grade]:
        return []


@dataclass(frozen=True)
class SlowHook:
    """Makes itself: takes `seconds` for each completion."""

    seconds: float
    lanes: int = 2

    def __call__(self) -> SlowHook:
        return self

    def grade(self, lane: int, tasks: Sequence[Any]) -> list[Grade]:
        time.sleep(self.seconds)
        return [Grade(1.0) for _ in tasks]

    def close(self) -> None: ...
