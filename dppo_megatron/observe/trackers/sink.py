"""The trainer's side of the trackers: queues each step for a thread of each tool and returns at once (docs/observe.md).

A tracker whose process or first message fails is lost: nothing more is sent to it.
"""

from __future__ import annotations

import math
import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dppo_megatron.children import start_python
from dppo_megatron.config.changes import config_values, flat
from dppo_megatron.config.schema import Config
from dppo_megatron.frames import framed, read_frame
from dppo_megatron.observe.samples import RecordedGroup, to_table
from dppo_megatron.observe.trackers.process import ANSWER, ENCODER, Begin, Cell, EndRun, StepLine
from dppo_megatron.texts import log

TRACKERS = "trackers"
_QUEUE = 64
"""Steps that may wait for a tool: with steps of one second, the minute in which wandb logs in."""
_JOIN_S = 5.0
"""For the thread of a killed process to end: it takes milliseconds, unless a child of the tool holds the pipe open."""
_NO_STATISTICS = {
    "DO_NOT_TRACK": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}
"""Turns off the usage statistics that the tools send to their makers, offline too; a variable already set is kept."""
COLUMNS = ["group", "completion", "prompt", "text", "reference", "extracted", "reward", "advantage", "weight", "why"]
_ROWS = 16
_LONGEST_TEXT = 4000


class _TrackerQueue:
    """One tracker. The main thread calls `put`, `finish` and `close`; `_run` is a second thread."""

    def __init__(self, name: str, begin: Begin, limit_s: float) -> None:
        self.name = name
        self._has_logged = False
        self._dropped, self._failed = 0, 0
        self._is_lost = False
        self._begin, self._limit_s = begin, limit_s
        self._queue: queue.SimpleQueue[StepLine | EndRun] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def failures(self) -> int:
        """Steps that it did not get, and calls that failed."""
        return self._dropped + self._failed

    def put(self, line: StepLine) -> None:
        if self._queue.qsize() < _QUEUE:
            self._queue.put(line)
        else:
            self._dropped += 1
            self._note(f"slower than the steps; step {line.step} and perhaps others are left out")

    def finish(self, end: EndRun) -> None:
        self._queue.put(end)

    def close(self, deadline: float) -> None:
        """After `finish`: deliver what is queued until `deadline` (of time.monotonic), then kill the process."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail(f"still sending after observe.tracking.drain_s = {self._limit_s:g} s; the rest is not sent")
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._thread.join(_JOIN_S)  # it counts the steps left in the queue, now that its process has ended

    def _run(self) -> None:
        try:
            self._process = _start(self.name, self._limit_s)
            failure = self._send(self._begin)
        except OSError as error:
            failure = f"its process cannot be started: {error.strerror}"
        if failure:
            self._is_lost = True
            self._fail(f"{failure}; it gets nothing from this run")
        message: StepLine | EndRun | None = None
        while not isinstance(message, EndRun):
            message = self._queue.get()
            if self._is_lost:
                self._failed += isinstance(message, StepLine)
            elif failure := self._send(message):
                self._fail(failure)

    def _send(self, message: Begin | StepLine | EndRun) -> str:
        """Send a message and wait for its answer. Returns what failed; "" if nothing did."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(framed(ENCODER.encode(message)))
            self._process.stdin.flush()
            answer = ANSWER.decode(read_frame(self._process.stdout.read) or b"")
            if answer.note:
                log(f"tracker {self.name} {answer.note}")
            return answer.failure
        except (OSError, msgspec.DecodeError):
            self._is_lost = True
            return "its process has ended"
        except UnicodeEncodeError as error:  # a lone surrogate in a name; those in texts are escaped before
            return f"a text that is not valid Unicode: {error.reason}"

    def _fail(self, failure: str) -> None:
        self._failed += 1
        self._note(failure)

    def _note(self, failure: str) -> None:
        if not self._has_logged:
            self._has_logged = True
            log(f"warning: tracker {self.name}: {failure} (logged once; the run goes on)")


class Trackers:
    """All trackers of a run, from construction to `close`. On rank 0.

    Args:
        names: `observe.trackers`; `config/observe.py` has checked that their packages are installed.
        limit_s: seconds that all of them together have to send what is queued at the end.
    """

    def __init__(self, names: Sequence[str], begin: Begin, limit_s: float) -> None:
        self._limit_s = limit_s
        self._queues = [_TrackerQueue(name, begin, limit_s) for name in names]

    @property
    def failures(self) -> int:
        return sum(one.failures for one in self._queues)

    def step(self, line: StepLine) -> None:
        for one in self._queues:
            one.put(line)

    def close(self, *, finished: bool) -> None:
        deadline = time.monotonic() + self._limit_s
        for one in self._queues:  # all of them first: one that hangs must not use up the time of the others
            one.finish(EndRun(finished))
        for one in self._queues:
            one.close(deadline)


def start_trackers(config: Config, directory: Path, run: str, resumed_step: int | None) -> Trackers:
    """The trackers of `config`, whose files are in the run's `directory`.

    Args:
        resumed_step: the last step that the record of a resumed run has; None: the run is new.
    """
    observe = config.observe
    begin = Begin(
        run=run,
        directory=str((directory / TRACKERS).absolute()),
        project=observe.tracking.project,
        name=observe.tracking.name or f"{directory.absolute().name}-{run[:6]}",
        tags=observe.tracking.tags,
        offline=observe.tracking.offline,
        config=settings(config_values(config)),
        resumed_step=resumed_step,
    )
    return Trackers(observe.trackers, begin, observe.tracking.drain_s)


def _start(name: str, limit_s: float) -> subprocess.Popen[bytes]:
    return start_python(
        "dppo_megatron.observe.trackers.process",
        name,
        f"{limit_s:g}",
        variables=_NO_STATISTICS | os.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # else Control-C at the terminal would reach it too
    )


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of metrics.jsonl, and the kept fraction of each ledger row.

    Example:
        >>> numbers({"a/b": 1, "c/d": None, "prune/ledger": [{"name": "prompt", "kept_fraction": 0.5}]})
        {'a/b': 1.0, 'ledger/prompt': 0.5}
    """
    ledger = {f"ledger/{row['name']}": row["kept_fraction"] for row in line.get("prune/ledger", ())}
    return {
        name: float(value)
        for name, value in [*line.items(), *ledger.items()]
        if isinstance(value, int | float) and math.isfinite(value)
    }


def settings(values: Mapping[str, Any]) -> dict[str, Cell]:
    """Dotted key -> value; lists become text.

    Example:
        >>> settings({"rollout": {"engine": "hf"}, "steps": 4, "modules": ["a", "b"]})
        {'rollout.engine': 'hf', 'steps': 4, 'modules': "['a', 'b']"}
    """
    return {key: value if isinstance(value, Cell) else str(value) for key, value in flat(values).items()}


def table(groups: Sequence[RecordedGroup]) -> list[list[Cell]]:
    """The first 16 completions of a step's recorded groups, in the order of `COLUMNS`."""
    first = sorted(groups, key=lambda group: group.group_index)[:_ROWS]
    shown = to_table(0, first).select(COLUMNS).slice(0, _ROWS).to_pylist()
    return [[_truncated(cell) for cell in row.values()] for row in shown]


def _truncated(cell: Cell) -> Cell:
    if isinstance(cell, str) and len(cell) > _LONGEST_TEXT:
        return cell[: _LONGEST_TEXT - 3] + "..."
    return cell
