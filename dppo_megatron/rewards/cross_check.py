"""Compares a sampled share of gradings with Math-Verify's (`reward.cross_check`), off the training path.

Math-Verify is slow and can hang. It runs in a grader process of its own, which is killed at the time limit. No step
waits for it: a step reports what has finished since the step before, and begins no comparisons while 512 are open.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import math
import random
from collections.abc import Iterable
from concurrent.futures import Future

from dppo_megatron.config.reward import RewardConfig
from dppo_megatron.rewards.functions import NamedFunction
from dppo_megatron.rewards.pool import Grader
from dppo_megatron.texts import entry
from dppo_megatron.types import Grade, GradeTask, Group, UserError

_log = logging.getLogger(__name__)
_MOST_OPEN = 512
_FUNCTION = NamedFunction("", f"{__name__}:math_verify", key="reward.cross_check")


def check_installed(reward: RewardConfig) -> None:
    """Raise UserError if comparisons are configured and Math-Verify is not installed."""
    if reward.cross_check and importlib.util.find_spec("math_verify") is None:
        raise UserError(
            f"reward.cross_check = {reward.cross_check:g} compares with Math-Verify, which is not installed:"
            " pip install math-verify==0.9.0, or set reward.cross_check=0"
        )


def math_verify(completion: str, answer: str) -> float:
    """Its reward, called as in its README, without its own timeouts: the process has a time limit."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # else it logs a line about timeouts for each call
    gold = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
    return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))


class CrossCheck:
    """The comparisons of one rank. Its grader process starts with the first."""

    def __init__(self, reward: RewardConfig) -> None:
        self._share = reward.cross_check
        self._random = random.Random(0)
        self._open: list[tuple[Grade, GradeTask, Future[list[Grade]]]] = []
        self._grader = Grader([_FUNCTION], timeout_s=reward.timeout_s, memory_mb=reward.memory_mb)

    def begin(self, groups: Iterable[Group]) -> None:
        """Begin to compare a share of the gradings of `groups`. Returns at once."""
        for group in groups if self._share else ():
            for index, (one, grade) in enumerate(zip(group.completions, group.grades, strict=True)):
                if self._random.random() < self._share and len(self._open) < _MOST_OPEN and not grade.failure:
                    task = GradeTask.of(group.selected.prompt, one.text, index, len(one.token_ids), one.finish_reason)
                    self._open.append((grade, task, self._grader.submit([task])))

    def metrics(self) -> dict[str, float]:
        """Comparisons finished since the last call, without failed ones: their number, and the share that differs."""
        if not self._share:
            return {}
        finished = [future.done() for _, _, future in self._open]
        done = list(itertools.compress(self._open, finished))
        self._open = [one for one, is_done in zip(self._open, finished, strict=True) if not is_done]
        compared = [(grade, task, other) for grade, task, future in done if not (other := future.result()[0]).failure]
        different = [(grade, task) for grade, task, other in compared if grade.reward != other.reward]
        for grade, task in different[:3]:
            line = f"{task.label}: {grade.reward:g} for {grade.extracted!r}, the reference is {task.answer!r}"
            _log.info("%s", entry(f"Math-Verify disagrees on {line}"))
        share = len(different) / len(compared) if compared else math.nan
        return {"reward/cross_check_count": float(len(compared)), "reward/cross_check_disagreement": share}

    def close(self) -> None:
        """End the grader process; open comparisons are dropped."""
        self._grader.close()
