"""Graders and a policy loss that go wrong on purpose. Graders run in processes of their own and import this file."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

_graded = 0


def length_parity(completion: str, answer: str) -> float:
    """Half of what an untrained model writes is right, so every step trains on something."""
    return float(len(completion) % 2)


async def paced_length_parity(completion: str, answer: str) -> float:
    """`length_parity` that takes `DPPO_GRADE_S` seconds from `DPPO_GRADE_SLOW_FROM` (unix time) on, as a judge does."""
    if time.time() > float(os.environ["DPPO_GRADE_SLOW_FROM"]):
        await asyncio.sleep(float(os.environ["DPPO_GRADE_S"]))
    return length_parity(completion, answer)


def odd_ones_raise(completion: str, answer: str) -> float:
    """Fails on every completion of odd length, but not on what a grader is tried on at start; the others are right."""
    if not completion or "The answer" in completion or completion == answer:
        return 1.0
    return 1.0 / (1 - len(completion) % 2)


def odd_ones_none(completions: list[str], answers: list[str]) -> list[float | None]:
    """The same, but it does not judge those of odd length."""
    pairs = zip(completions, answers, strict=True)
    return [None if len(one) % 2 and "The answer" not in one and one != right else 1.0 for one, right in pairs]


def large_at_last(completion: str, answer: str) -> float:
    """Half of all are right, and from the third step of a run on some are worth more than 1."""
    metrics = Path(os.environ["DPPO_RUN"], "metrics.jsonl")
    lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0  # the first is of step 0
    return (1.5 if lines >= 3 else 1.0) * length_parity(completion, answer)


def unlucky(completion: str, answer: str) -> float:
    """Hangs or dies on some completions, chosen by their text; rewards the length of the others.

    Not on those that a grader is tried on at start.
    """
    if not completion or "The answer" in completion or completion == answer:
        return length_parity(completion, answer)
    fate = sum(completion.encode()) % 40
    if fate == 0:
        _spin()
    if fate == 1:
        os._exit(1)
    return length_parity(completion, answer)


def length(completion: str, answer: str) -> float:
    return float(len(completion))


def always_raises(completion: str, answer: str) -> float:
    return 1 / 0


def returns_nothing(completion: str, answer: str) -> None:
    pass


def one_argument(completion: str) -> float:
    return 1.0


def never_right(completion: str, answer: str) -> float:
    return 0.0


def counted(completion: str, answer: str) -> float:
    """Never right; the file that the environment names has a byte for each grading."""
    with open(os.environ["FAULTY_COUNTS_IN"], "a") as file:
        file.write("1")
    return 0.0


def breaks_later(completion: str, answer: str) -> float:
    """Raises from a grading of its process on that the environment names."""
    global _graded
    _graded += 1
    if _graded > int(os.environ["FAULTY_BREAKS_AFTER"]):
        raise RuntimeError("the judge is out")
    return length_parity(completion, answer)


def nan_loss(batch: object, config: object) -> object:
    """Finite on the made-up packs that a loss is tried on, before there is a model; NaN on any real one."""
    from megatron.core.parallel_state import model_parallel_is_initialized

    from dppo_megatron.algorithms.tokens import TokenLoss

    loss = -batch.advantages * batch.logprobs  # type: ignore[attr-defined]
    return TokenLoss(loss * float("nan") if model_parallel_is_initialized() else loss)


def parity_if_reached(completion: str, answer: str) -> float:
    """`length_parity` of a judge that now and then takes no call, and that fails on some texts."""
    fate = sum(completion.encode()) % 11
    if completion and "The answer" not in completion and completion != answer and fate < 2:
        raise RuntimeError("no verdict") from (ConnectionRefusedError(111, "refused") if fate else None)
    return length_parity(completion, answer)


def _spin() -> None:
    while True:
        pass
