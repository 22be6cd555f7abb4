"""Progress of whatever takes more than two seconds: a live bar on a terminal, plain lines now and then in a pipe.

In a log file, a line every 15 s would bury what else a day-long run logs, so the first line is printed after 5 s and
later ones less and less often, up to a minute apart. Some tasks count nothing (Megatron writes a checkpoint, another
rank starts) or in large steps. So a second thread updates the display once a second: a call that blocks for a minute is
not a silent minute.

Example, of 100 answers at 4 s each:
    evaluation: 2 of 100 answers, 12 tokens/s, about 7 min left
    evaluation: 4 of 100 answers, ...
    evaluation: 100 answers in 7 min
    saving the checkpoint of step 20: done in 12 s
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

from dppo_megatron.texts import one_line, show

_DELAY_S = 2.0
_LEAST_S, _MOST_S = 5.0, 60.0
"""In a pipe: bounds of the time between two lines, which is half of the time that the task has taken so far."""
_REDRAW_S = 0.1


class Progress:
    """One task, from construction to the end of the `with` block. Call it with how much is done so far.

    Args:
        what: the task's name, such as `evaluation` or `SFT`.
        total: 0 if it is not known.
        unit: in the plural; empty: nothing is counted.
        stream: shows a bar if it is a terminal.
        clock: monotonic, in seconds.
        say: prints a plain line; None: to `stream`.
        visible: False on ranks that show nothing; the environment variable DPPO_PROGRESS=off hides everything.
        beat_s: seconds between the thread's updates; 0: no thread, for tests with a clock of their own.
        phase_of_step: the step has a line of its own, so a log gets no line in the first minute and none at the end.
        bars: the display to which the bar is added, below the others; None: a new one.
    """

    def __init__(
        self,
        what: str,
        total: int,
        unit: str,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] | None = None,
        visible: bool = True,
        beat_s: float = 1.0,
        phase_of_step: bool = False,
        bars: Bars | None = None,
    ) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._visible = visible and os.environ.get("DPPO_PROGRESS") != "off"
        self._stream, self._clock, self._beat_s = stream or sys.stderr, clock, beat_s
        self._say = say or partial(show, file=self._stream)
        self._has_last_line = not phase_of_step
        self._bars, self._owns_bars = bars, bars is None
        self._task: TaskID | None = None
        self._live = self._visible and _is_terminal(self._stream)
        self._began = clock()
        self._done, self._tokens, self._note = 0, 0, ""
        self._shown_from_s = self._next_s = _DELAY_S if self._live else 60.0 if phase_of_step else _LEAST_S
        self._lock = threading.Lock()  # both the working thread and `_beat` draw
        self._ended = threading.Event()
        self._beat: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._visible and self._beat_s:
            self._beat = threading.Thread(target=self._refresh, name=f"progress of {self._what}", daemon=True)
            self._beat.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        if self._beat is not None:
            self._beat.join()
        if self._bars is not None and self._task is not None:
            self._bars.remove_task(self._task)
            self._bars.stop() if self._owns_bars else self._bars.refresh()
        seconds = self._clock() - self._began
        if self._visible and kind is None and seconds >= self._shown_from_s and self._has_last_line:
            done = f"{self._count(self._done)} {self._unit}" if self._unit else "done"
            self._say(f"{self._what}: {done} in {duration(seconds)}{self._rate(seconds)}")

    def __call__(self, done: int, tokens: int = 0) -> None:
        """Show that `done` of the total are done, with `tokens` tokens so far."""
        self._done, self._tokens = done, tokens
        self._show()

    def note(self, text: str) -> None:
        """Show what is being done now, for a task that counts nothing."""
        self._note = text
        self._show()

    def _refresh(self) -> None:
        while not self._ended.wait(self._beat_s):
            try:
                self._show()
            except (OSError, ValueError):  # the terminal or the stream was closed: left to the working thread to raise
                return

    def _show(self) -> None:
        if not self._visible:
            return
        with self._lock:
            seconds = self._clock() - self._began
            if seconds < self._next_s:
                return
            text = f"{self._what}: {self._state(seconds)}"
            if self._live:
                self._next_s = seconds + _REDRAW_S
                self._draw(text)
            else:
                self._next_s = seconds + min(max(_LEAST_S, seconds / 2), _MOST_S)
                self._say(text)

    def _draw(self, text: str) -> None:
        if self._bars is None:
            self._bars = _bars(self._stream, transient=True)
        if self._task is None:
            self._task = self._bars.add_task("", total=self._total or None)
        self._bars.update(self._task, completed=min(self._done, self._total), description=one_line(text), refresh=True)

    def _count(self, number: int) -> str:
        return f"{number}" if self._total else f"{number:,}"

    def _state(self, seconds: float) -> str:
        if not self._unit:
            return f"{self._note}, {duration(seconds)}" if self._note else duration(seconds)
        if not self._total:
            return f"{self._count(self._done)} {self._unit}, {duration(seconds)}"
        text = f"{self._done} of {self._total} {self._unit}{self._rate(seconds)}"
        if not self._done:
            return f"{text}, waiting for {duration(seconds)}"
        left_s = seconds / self._done * (self._total - self._done)
        return f"{text}, about {duration(left_s)} left" if self._done < self._total else text

    def _rate(self, seconds: float) -> str:
        return f", {self._tokens / max(seconds, 1e-9):,.0f} tokens/s" if self._tokens else ""


class RunProgress:
    """A run's steps: a live bar on a terminal, one plain line per step in a pipe; nothing on ranks other than 0."""

    def __init__(self, total_steps: int, *, visible: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._visible, self._clock = total_steps, visible, clock
        self._first: tuple[int, float] | None = None
        """The first step that ended here, and when; steps before a resume took an unknown time."""
        self._bars = _bars(sys.stderr, transient=False) if visible and _is_terminal(sys.stderr) else None
        if self._bars is not None:
            self._steps = self._bars.add_task(f"0 of {total_steps} steps", total=total_steps)
            self._bars.refresh()

    def say(self, text: str) -> None:
        if self._visible:
            print_line(text)

    def part(self, what: str, total: int, unit: str) -> Progress:
        """The progress of a part of the run, below the bar of its steps; a `progress.Display`."""
        return Progress(what, total, unit, **self._options())

    @contextmanager
    def phases(self, step: int) -> Iterator[Callable[[str], None]]:
        """Show, while a step lasts, its current phase and for how long; yields a function that takes a phase's name."""
        with Progress(f"step {step}", 0, "", phase_of_step=True, **self._options()) as shown:
            yield shown.note

    def _options(self) -> dict[str, Any]:
        return {"clock": self._clock, "say": self.say, "visible": self._visible, "bars": self._bars}

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        mean = metrics["reward/mean"]  # None if the step has no reward: everything pruned, or every grading failed
        text = (
            f"reward {'-' if mean is None or math.isnan(mean) else format(mean, '.3f')}"
            f"  generated {metrics['prune/completions_generated']:.0f}"
            f"  trained {metrics['prune/completions_trained']:.0f}"
            f"  grad {metrics['train/grad_norm']:.2f}"
        )
        if self._bars is None:
            self.say(f"step {step:>4}/{self._total}  {text}  {metrics['time/step_s']:.2f} s")
            return
        now = self._clock()
        first, began = self._first = self._first or (step, now)
        left_s = (now - began) / max(step - first, 1) * (self._total - step)
        left = f", about {duration(left_s)} left" if first < step < self._total else ""
        shown = f"{step} of {self._total} steps{left}  {text}"
        self._bars.update(self._steps, completed=step, description=shown, refresh=True)

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()


def _is_terminal(stream: TextIO) -> bool:
    can_redraw = os.environ.get("TERM") not in ("dumb", "unknown")
    return stream.isatty() and can_redraw and find_spec("rich") is not None


def _bars(stream: TextIO, *, transient: bool) -> Bars:
    """A started rich display of tasks on a terminal; `transient`: it is erased at its end."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    class Terminal(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False  # rich would hide the cursor, and a killed run would leave the terminal without one

    bars = Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        console=Terminal(file=stream, force_terminal=True),
        auto_refresh=False,
        transient=transient,
        redirect_stdout=sys.stdout.isatty(),  # else lines for a file would be printed on the terminal
    )
    bars.start()
    return bars


def print_line(text: str) -> None:
    """Print to stdout. A log file on a full disk loses lines without ending the run; a closed pipe raises."""
    try:
        show(text)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
