"""The trainer's end of the trackers: hands each step over and goes on, whatever the tools do.

    trainer, main thread      thread "NAME", one a tracker            process of NAME
    step(line) ──▶ queue of 64 ──▶ writes a message, reads the answer ──▶ the tool ──▶ files, network
      never waits: a step that        waits for: the process                 waits for: its files and servers
      finds the queue full is lost
      to this tracker, and counted

What a tracker fails at is counted, logged once, and in metrics.jsonl as `observe/tracker_failures`. One whose process
or first message fails is lost: it is sent nothing more.
"""

from __future__ import annotations

import math
import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dppo_megatron.children import start_python
from dppo_megatron.config.changes import flat
from dppo_megatron.frames import framed, read_frame
from dppo_megatron.observe.samples import RecordedGroup, to_table
from dppo_megatron.observe.trackers.process import ANSWER, ENCODER, Begin, Cell, EndRun, StepLine
from dppo_megatron.texts import log

TRACKERS = "trackers"
_QUEUE = 64
"""Steps that may wait for a tool: a minute of second-long steps, while wandb logs in."""
_COUNTING_S = 5.0
"""For the thread of a killed process: milliseconds, but for a child of the tool that holds the pipe open."""
_NO_STATISTICS = {
    "DO_NOT_TRACK": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}
"""The tools' reports of their own use to their makers, also offline; a variable that is set keeps its value."""
COLUMNS = ["group", "completion", "prompt", "text", "reference", "extracted", "reward", "advantage", "weight", "why"]
_ROWS = 16
_LONGEST_TEXT = 4000


class _TrackerQueue:
    """One tracker. `put`, `finish` and `close` are called by the main thread, the rest runs in a second one."""

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
        """Steps that it has not got, and calls that failed."""
        return self._dropped + self._failed

    def put(self, line: StepLine) -> None:
        """Returns at once."""
        if self._queue.qsize() < _QUEUE:
            self._queue.put(line)
        else:
            self._dropped += 1
            self._note(f"slower than the steps; step {line.step} and perhaps others are left out")

    def finish(self, end: EndRun) -> None:
        """Nothing comes after this. Returns at once."""
        self._queue.put(end)

    def close(self, deadline: float) -> None:
        """Deliver what waits, until `deadline` (of time.monotonic), then end the process. After `finish`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail(f"still sending after observe.tracking.drain_s = {self._limit_s:g} s; the rest is left")
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._thread.join(_COUNTING_S)  # counts what is left in the queue, now that its process has ended

    def _run(self) -> None:
        try:
            self._process = _start(self.name, self._limit_s)
            failure = self._ask(self._begin)
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
            elif failure := self._ask(message):
                self._fail(failure)

    def _ask(self, message: Begin | StepLine | EndRun) -> str:
        """What went wrong; empty: nothing."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(framed(ENCODER.encode(message)))
            self._process.stdin.flush()
            return ANSWER.decode(read_frame(self._process.stdout.read) or b"").failure
        except (OSError, msgspec.DecodeError):
            self._is_lost = True
            return "its process has ended"
        except UnicodeEncodeError as error:  # half a surrogate pair: in a name, since texts are made plain
            return f"a text that is no Unicode: {error.reason}"

    def _fail(self, why: str) -> None:
        self._failed += 1
        self._note(why)

    def _note(self, failure: str) -> None:
        if not self._has_logged:
            self._has_logged = True
            log(f"warning: tracker {self.name}: {failure} (logged once; the run goes on)")


class Trackers:
    """All trackers of a run, from construction to `close`. On rank 0.

    Args:
        names: `observe.trackers`; their packages are installed (`config/observe.py` has looked).
        limit_s: for what is left to be sent at the end, of all of them together.
    """

    def __init__(self, names: Sequence[str], begin: Begin, limit_s: float) -> None:
        self._limit_s = limit_s
        self._feeds = [_TrackerQueue(name, begin, limit_s) for name in names]

    @property
    def failures(self) -> int:
        """Of all trackers together, so far."""
        return sum(feed.failures for feed in self._feeds)

    def step(self, line: StepLine) -> None:
        """Hand a step to every tracker; returns at once."""
        for feed in self._feeds:
            feed.put(line)

    def close(self, *, finished: bool) -> None:
        """Deliver what waits, within the limit."""
        deadline = time.monotonic() + self._limit_s
        for feed in self._feeds:  # all of them first: one that hangs must not use up the time of the others
            feed.finish(EndRun(finished))
        for feed in self._feeds:
            feed.close(deadline)


def _start(name: str, limit_s: float) -> subprocess.Popen[bytes]:
    return start_python(
        "dppo_megatron.observe.trackers.process",
        name,
        f"{limit_s:g}",
        variables=_NO_STATISTICS | os.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Control-C at the terminal is the trainer's
    )


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of metrics.jsonl; of each ledger row its kept fraction.

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
    """Dotted key -> value; a list as text.

    Example:
        >>> settings({"rollout": {"engine": "hf"}, "steps": 4, "modules": ["a", "b"]})
        {'rollout.engine': 'hf', 'steps': 4, 'modules': "['a', 'b']"}
    """
    return {key: value if isinstance(value, Cell) else str(value) for key, value in flat(values).items()}


def table(groups: Sequence[RecordedGroup]) -> list[list[Cell]]:
    """The first 16 completions of a step's recorded groups, in the order of `COLUMNS`."""
    first = sorted(groups, key=lambda group: group.position)[:_ROWS]
    shown = to_table(0, first).select(COLUMNS).slice(0, _ROWS).to_pylist()
    return [[_truncated(cell) for cell in row.values()] for row in shown]


def _truncated(cell: Cell) -> Cell:
    if isinstance(cell, str) and len(cell) > _LONGEST_TEXT:
        return cell[: _LONGEST_TEXT - 3] + "..."
    return cell
