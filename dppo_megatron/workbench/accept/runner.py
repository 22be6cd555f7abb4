"""Runs each step in its own process group with a time limit, and keeps the record; the child runs this file too.

A step that hangs or crashes becomes a row. The parent imports no torch and holds no GPU memory: it waits for the child
and at the limit ends the child's whole group. Servers are in other groups and end with the child that started them.
Figures are written line by line as they are measured, so that a crash or a limit loses only the later ones.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.children import die_with_parent, start_python
from dppo_megatron.files import append_to, remove_tree
from dppo_megatron.observe.json_lines import finite
from dppo_megatron.progress import progress
from dppo_megatron.types import RunAborted, UserError
from dppo_megatron.workbench.accept.bars import STEPS, Step
from dppo_megatron.workbench.accept.record import FIGURES, Ran, Record, read_figures

HOURS = 0.5
"""The sum of all steps' limits."""
_GRACE_S = 15.0
"""From SIGTERM to SIGKILL: time for a child to stop its servers."""
TESTS, BENCHMARK = "tests/test_gpu.py", "benchmarks/gpu/train_step.py"
"""Files of a checkout that some steps need."""
CHILD = "dppo_megatron.workbench.accept.runner"
ENVIRONMENT = "environment"
"""The step that records the facts which the other steps depend on."""


def run_steps(
    record: Record, directory: Path, hours: float, *, only: Collection[str] = (), again: Collection[str] = ()
) -> None:
    """Run the missing steps in order while there is time; `record` is written after each step.

    Args:
        hours: time limit of this call. More than 0.5 scales each step's limit in proportion; less starts fewer steps.
        only: names of steps; empty: all.
        again: names of steps to repeat.

    Raises:
        UserError: `record` holds figures of another machine.
        RunAborted: the step `environment` failed, so that this cannot be checked.
    """
    deadline, scale = time.monotonic() + 3600 * hours, max(1.0, hours / HOURS)
    if record.facts:
        _check_same_machine(record, directory, scale)
    for step in STEPS:
        ran = record.steps.get(step.name)
        is_wanted = not only or step.name in (ENVIRONMENT, *only)
        if not is_wanted or (ran and ran.state in ("done", "failed") and step.name not in again):
            continue
        limit_s, why = step.limit_s * scale, lacking(step, record)
        if not why and deadline - time.monotonic() < limit_s:
            why = f"no time left (needs {limit_s:.0f} s)"
        record.steps[step.name] = Ran("not run", why) if why else Ran("begun")
        record.write(directory)
        if not why:
            with progress(f"{step.name}: {step.what}, at most {limit_s:.0f} s"):
                record.steps[step.name] = _run(step, directory / "steps" / step.name, limit_s, record)
            record.write(directory)


def _check_same_machine(record: Record, directory: Path, scale: float) -> None:
    """Run `environment` again and compare its facts: a login node without GPUs may have written the record."""
    step, here = STEPS[0], Record(record.options)
    with progress(f"{step.name}: whether this is the same machine"):
        ran = _run(step, directory / "steps" / step.name, step.limit_s * scale, here)
    if not here.facts:
        raise RunAborted(f"--out {directory}: cannot tell whether its figures are of this machine: {ran.why}")
    theirs, ours = (f"{facts['device']} (GPUs: {facts['gpus']})" for facts in (record.facts, here.facts))
    if theirs != ours:
        raise UserError(f"--out {directory}: holds figures of {theirs}, and this is {ours}; name another directory")
    record.facts, record.steps[step.name] = here.facts, ran


def lacking(step: Step, record: Record) -> str:
    """Why a step cannot run here; empty if it can."""
    facts = record.facts
    if not facts:
        return "" if step.name == ENVIRONMENT else f"the step {ENVIRONMENT} has no result"
    gpus, has_pytest = facts["gpus"], importlib.util.find_spec("pytest")
    reasons = {
        "cuda": "" if gpus else "no CUDA device",
        "te": facts["lacks_transformer_engine"],
        "te_on_cuda": facts["lacks_transformer_engine"] if gpus else "",
        "two_gpus": "" if gpus > 1 else "one GPU" if gpus else "no CUDA device",
        "no_single_gpu": "one GPU" if gpus == 1 else "",
        "tests": "" if repository(TESTS) and has_pytest else "needs the repository's tests, and pytest",
        "benchmark": "" if repository(BENCHMARK) else "needs a checkout, whose benchmarks measure it",
        "server": "" if record.options["server_python"] else "no engine: --server-python names a Python that has one",
    }
    return next(filter(None, (reasons[need] for need in step.needs)), "")


def repository(file: str) -> Path | None:
    """A file of the repository, in the checkout that this package is in or that is the working directory."""
    roots = (Path(__file__).resolve().parents[3], Path.cwd())
    return next((root / file for root in roots if (root / file).exists()), None)


def _run(step: Step, own: Path, limit_s: float, record: Record) -> Ran:
    remove_tree(own)
    own.mkdir(parents=True)
    options = json.dumps(record.options | {"cuda": bool(record.facts.get("gpus"))})
    # the allocator's variables only as the step sets them; PYTHONSAFEPATH, as torchrun's processes do not inherit -P
    variables: dict[str, str | None] = {name: None for name in os.environ if name.endswith("_ALLOC_CONF")}
    variables |= step.environment | {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    started, why = time.monotonic(), ""
    with append_to(own / "log") as log:
        session: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
        child = start_python(CHILD, step.name, str(own), options, ranks=step.ranks, variables=variables, **session)
        try:
            if code := child.wait(limit_s):
                why = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            why = f"not finished within {limit_s:.0f} s"
        finally:
            _end(child)
    seconds, figures = time.monotonic() - started, read_figures(own)
    record.facts |= figures.pop("facts", {})
    if why and (line := _error_line(own / "log")):
        why += f": {line}"
    return Ran("failed" if why else "done", why, seconds, figures)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and its whole group, including what a child that has exited left behind."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)


def _error_line(log: Path) -> str:
    """The last line that names an error, else the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    # torchrun only reports that a rank failed
    errors = [line for line in lines if "Error" in line and "torch.distributed.elastic" not in line]
    return (errors or lines or [""])[-1][:300]


@dataclass(frozen=True, slots=True)
class Sheet:
    """Where a step writes its figures."""

    step: Step
    directory: Path
    """The step's own, which is kept."""
    cuda: bool
    """Whether there is a GPU; otherwise every step is tiny and shows only that it runs."""
    model: str
    """Directory of the user's model, or empty."""
    server_python: str

    def note(self, figure: str, value: float | None, prediction: float | None = None, note: str = "") -> None:
        """A figure of `bars.py`; without a value the note is the reason."""
        assert figure in self.step.figures, (self.step.name, figure)  # without a row it would be lost
        # a NaN becomes null, which fails unless it has a note
        note = note if value is None or finite(float(value)) is not None else ""
        self._write(figure, value=None if value is None else float(value), prediction=prediction, note=note)

    def facts(self, **facts: Any) -> None:
        """Facts of the machine for other steps and the page."""
        self._write("facts", **facts)

    def _write(self, figure: str, **values: Any) -> None:
        with append_to(self.directory / FIGURES) as file:
            file.write((json.dumps(finite({"figure": figure} | values), allow_nan=False) + "\n").encode())


def measure(sheet: Sheet) -> None:
    """Run the step. Only its own module is imported: a package that it lacks must not stop the other steps."""
    module, function = sheet.step.function.split(".")
    getattr(importlib.import_module(f"dppo_megatron.workbench.accept.{module}"), function)(sheet, *sheet.step.arguments)


if __name__ == "__main__":
    die_with_parent()  # no measurement may outlive a killed command
    [name, own, options] = sys.argv[1:]
    measure(Sheet(next(step for step in STEPS if step.name == name), Path(own), **json.loads(options)))
