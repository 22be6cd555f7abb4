"""Turns SIGTERM, and Slurm's warning before pre-emption, into a request to stop at the end of the step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

ASKS_TO_STOP = (signal.SIGTERM, signal.SIGUSR1)
"""SIGUSR1 is what jobs request from Slurm (`sbatch --signal=B:USR1@300`, examples/slurm/requeue.sbatch). Slurm sends it
to every process of a step, so servers, clients and graders ignore it."""


class StopRequests:
    """Remembers the first of the signals, from `listen` to `restore`. A second SIGTERM ends the process as usual."""

    def __init__(self) -> None:
        self.received = ""
        """Name of the signal; empty if none came."""
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Install the handlers; does nothing outside the main thread, where Python does not allow it."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in ASKS_TO_STOP}

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = self.received or signal.Signals(number).name
