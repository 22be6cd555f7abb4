"""One step of accept in a process of its own: `python -m dppo_megatron.accept.child STEP DIRECTORY OPTIONS`.

Figures are written line by line as they are found, so that a crash or a limit loses only what was not measured yet.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.accept.bars import STEPS


@dataclass(frozen=True, slots=True)
class Sheet:
    """Where a step notes what it finds."""

    step: str
    directory: Path
    """Of this step; what is put here stays."""
    cuda: bool
    """Else everything is done tiny, to show that it runs."""
    model: str
    """The user's, or empty."""
    server_python: str

    def note(self, figure: str, value: float, prediction: float | None = None, note: str = "") -> None:
        """A figure of `bars.py`, with what was expected of it."""
        self._write(self._declared(figure), value=float(value), prediction=prediction, note=note)

    def skip(self, figure: str, why: str) -> None:
        """It is not measured here."""
        self._write(self._declared(figure), why=why)

    def facts(self, **facts: Any) -> None:
        """What other steps and the page are to know of the machine."""
        self._write("facts", **facts)

    def _declared(self, figure: str) -> str:
        """A figure without a row would be lost."""
        assert any(step.name == self.step and figure in step.figures for step in STEPS), (self.step, figure)
        return figure

    def _write(self, figure: str, **values: Any) -> None:
        with (self.directory / "figures.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"figure": figure} | values) + "\n")


_MEASURED_BY: dict[str, tuple[str, str]] = {
    "environment": ("machine", "environment"),
    "ipc": ("machine", "ipc"),
    "ipc-expandable": ("machine", "ipc"),
    "parity": ("machine", "parity"),
    "parity-te": ("machine", "parity_te"),
    "gpu-tests": ("jobs", "gpu_tests"),
    "servers": ("jobs", "servers"),
    "mfu-4b-te": ("speed", "utilization_te"),
    "mfu-4b-local": ("speed", "utilization_local"),
    "packed": ("speed", "packed"),
    "memory": ("speed", "memory"),
    "job": ("jobs", "killed_and_resumed"),
    "fp8": ("speed", "fp8"),
    "mfu-0.6b": ("speed", "lengths"),
    "layouts": ("machine", "layouts"),
    "servers-nccl": ("jobs", "server_elsewhere"),
    "servers-dp": ("jobs", "server_of_two"),
}
"""Step -> module and function. Only that module is imported: what one step lacks must not end the others."""


def measured_by(step: str) -> Callable[[Sheet], None]:
    """The function of a step."""
    module, function = _MEASURED_BY[step]
    found: Callable[[Sheet], None] = getattr(importlib.import_module(f"dppo_megatron.accept.{module}"), function)
    return found


def main(step: str, directory: str, options: str) -> int:
    """Run one step."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a killed command leaves no measurement behind
    measured_by(step)(Sheet(step, Path(directory), **json.loads(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
