"""One step of accept, in one process: `python -m dppo_megatron.workbench.accept.child STEP DIRECTORY OPTIONS`.

Figures are written line by line as they are found, so that a crash or a limit loses only what was not measured yet.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.children import die_with_parent
from dppo_megatron.observe.json_lines import finite
from dppo_megatron.workbench.accept.bars import STEPS, Step


@dataclass(frozen=True, slots=True)
class Sheet:
    """Where a step notes what it finds."""

    step: Step
    directory: Path
    """Of this step; what is put here stays."""
    cuda: bool
    """Else everything is done tiny, to show that it runs."""
    model: str
    """The user's, or empty."""
    server_python: str

    def note(self, figure: str, value: float | None, prediction: float | None = None, note: str = "") -> None:
        """A figure of `bars.py`; without a value the note is the reason. `prediction` only where the table has none."""
        assert figure in self.step.figures, (self.step.name, figure)  # without a row it would be lost
        note = note if value is None or finite(float(value)) is not None else ""  # a NaN becomes null, and has failed
        self._write(figure, value=None if value is None else float(value), prediction=prediction, note=note)

    def facts(self, **facts: Any) -> None:
        """What other steps and the page are to know of the machine."""
        self._write("facts", **facts)

    def _write(self, figure: str, **values: Any) -> None:
        with (self.directory / "figures.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite({"figure": figure} | values), allow_nan=False) + "\n")


def measure(sheet: Sheet) -> None:
    """Only the step's module is imported: what one step lacks must not end the others."""
    module, function = sheet.step.by.split(".")
    getattr(importlib.import_module(f"dppo_megatron.workbench.accept.{module}"), function)(sheet, *sheet.step.given)


def main(name: str, directory: str, options: str) -> None:
    die_with_parent()  # a killed command leaves no measurement behind
    (step,) = (step for step in STEPS if step.name == name)
    measure(Sheet(step, Path(directory), **json.loads(options)))


if __name__ == "__main__":
    main(*sys.argv[1:])
