"""Graders and a policy loss that go wrong on purpose. Graders run in processes of their own and import this file."""

from __future__ import annotations

import os
import signal
import time

_ON_COMMAND = {
    "raise": lambda: 1 / 0,
    "hang": lambda: _spin(),
    "sleep": lambda: time.sleep(3600),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(7),
    "print": lambda: print('{"reward": 5}'),
    "nan": lambda: float("nan"),
    "text": lambda: "no number",
}


def on_command(completion: str, answer: str) -> float:
    """Does what the completion says; else 1.0 if it equals the answer."""
    result = _ON_COMMAND[completion]() if completion in _ON_COMMAND else None
    return float(completion == answer) if result is None else result


def length_parity(completion: str, answer: str) -> float:
    """Half of what an untrained model writes is right, so every step trains on something."""
    return float(len(completion) % 2)


def odd_ones_raise(completion: str, answer: str) -> float:
    """Fails on every completion of odd length; the others are right."""
    return 1.0 / (1 - len(completion) % 2)


def unlucky(completion: str, answer: str) -> float:
    """Hangs or dies on some completions, chosen by their text; rewards the length of the others."""
    fate = sum(completion.encode()) % 40
    if fate == 0:
        _spin()
    if fate == 1:
        os._exit(1)
    return length_parity(completion, answer)


def nan_loss(batch: object, config: object) -> object:
    """Finite on the made-up batch that a loss is tried on, NaN on any real one."""
    from dppo_megatron.algorithms.tokens import TokenLoss

    loss = -batch.advantages * batch.logprobs  # type: ignore[attr-defined]
    return TokenLoss(loss if len(loss) <= 8 else loss * float("nan"))


def _spin() -> None:
    while True:
        pass
