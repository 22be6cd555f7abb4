"""Progress of whatever takes more than two seconds: a live bar on a terminal, plain lines now and then in a pipe.

A task that ends sooner leaves no trace. In a log file a line each 15 s would bury what a day-long run logs, so lines
come at 5 s and then ever more rarely, up to a minute apart; each has the time that is left, where that is known. Bars
are rich's, which moves what anything else prints above them; it is imported when the first bar is drawn.

Some tasks count nothing (Megatron writes a checkpoint, another rank starts) or count in large jumps. So a thread looks
once a second, beside the one that works: a call that blocks for a minute is not a silent minute.

Example, of 100 answers at 4 s each:
    evaluation: 2 of 100 answers, 12 tokens/s, about 7 min left
    evaluation: 4 of 100 answers, ...
    evaluation: 100 answers in 7 min

Without a count, and without a total:
    saving the checkpoint of step 20: 5 s             reading train.jsonl: 48,000 problems, 5 s
    saving the checkpoint of step 20: done in 12 s    reading train.jsonl: 91,000 problems in 9 s
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
"""In a pipe: how far lines are apart, half as long as the task has taken."""
_REDRAW_S = 0.1


class Progress:
    """One task, from construction to the end of the `with` block. Call it with what is done so far.

    The time left assumes that the rest is as fast as what is done. Long answers finish last, so near the end of an
    evaluation it is an underestimate.

    Args:
        what: `evaluation`, `SFT`.
        total: 0 if it is not known.
        unit: in the plural; empty: nothing is counted.
        stream: where a terminal would be.
        clock: seconds that only grow.
        say: takes a plain line; None: printed to `stream`.
        visible: False on ranks that say nothing; the environment variable DPPO_PROGRESS=off silences all.
        beat_s: how often the thread looks; 0: no thread, for a test whose clock stands still meanwhile.
        phase_of_step: the step has a line too, so a log gets no line before a minute and no closing one.
        bars: where a bar is added, below the others; None: a separate display.
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
        self._closes = not phase_of_step
        self._bars, self._owns_bars = bars, bars is None
        self._task: TaskID | None = None
        self._live = self._visible and _is_terminal(self._stream)
        self._began = clock()
        self._done, self._tokens, self._note = 0, 0, ""
        self._shown_from_s = self._next_s = _DELAY_S if self._live else 60.0 if phase_of_step else _LEAST_S
        self._lock = threading.Lock()
        """Of the display: the thread that works and the one that looks both draw."""
        self._ended = threading.Event()
        self._beat: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._visible and self._beat_s:
            self._beat = threading.Thread(target=self._look, name=f"progress of {self._what}", daemon=True)
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
        if self._visible and kind is None and seconds >= self._shown_from_s and self._closes:
            done = f"{self._count(self._done)} {self._unit}" if self._unit else "done"
            self._say(f"{self._what}: {done} in {duration(seconds)}{self._rate(seconds)}")

    def __call__(self, done: int, tokens: int = 0) -> None:
        """So much of the total is done, with so many tokens."""
        self._done, self._tokens = done, tokens
        self._show()

    def note(self, text: str) -> None:
        """What is being done now, for a task that counts nothing."""
        self._note = text
        self._show()

    def _look(self) -> None:
        while not self._ended.wait(self._beat_s):
            try:
                self._show()
            except (OSError, ValueError):  # the terminal has gone, or the stream was closed: not this thread's to say
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
    """A run's steps: a live bar on a terminal, one plain line a step in a pipe; silent on every rank but 0."""

    def __init__(self, total_steps: int, *, visible: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._visible, self._clock = total_steps, visible, clock
        self._first: tuple[int, float] | None = None
        """The first step that ended, and when: a resumed run has done others before, at an unknown speed."""
        self._bars = _bars(sys.stderr, transient=False) if visible and _is_terminal(sys.stderr) else None
        if self._bars is not None:
            self._steps = self._bars.add_task(f"0 of {total_steps} steps", total=total_steps)
            self._bars.refresh()

    def say(self, text: str) -> None:
        """A line above the bars, from any thread."""
        if self._visible:
            print_line(text)

    def part(self, what: str, total: int, unit: str) -> Progress:
        """The progress of a part of the run, below the bar of its steps; a `progress.Display`."""
        return Progress(what, total, unit, **self._how())

    @contextmanager
    def phases(self, step: int) -> Iterator[Callable[[str], None]]:
        """While a step lasts: which phase it is in, and for how long; what is given takes a phase's name."""
        with Progress(f"step {step}", 0, "", phase_of_step=True, **self._how()) as shown:
            yield shown.note

    def _how(self) -> dict[str, Any]:
        return {"clock": self._clock, "say": self.say, "visible": self._visible, "bars": self._bars}

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        mean = metrics["reward/mean"]  # null if the step has no reward: everything pruned, or every grading failed
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
    has_bars = os.environ.get("TERM") not in ("dumb", "unknown")  # those cannot redraw any
    return stream.isatty() and has_bars and find_spec("rich") is not None


def _bars(stream: TextIO, *, transient: bool) -> Bars:
    """rich's display of tasks on a terminal, started; `transient`: wiped at its end."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    class Terminal(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False  # rich hides the cursor, and a run that is killed would leave the terminal without one

    bars = Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        console=Terminal(file=stream, force_terminal=True),
        auto_refresh=False,
        transient=transient,
        redirect_stdout=sys.stdout.isatty(),  # else lines that go to a file would come to the terminal
    )
    bars.start()
    return bars


def print_line(text: str) -> None:
    """Print to stdout. A log file on a full disk loses lines and does not end the run; a reader that has gone does."""
    try:
        show(text)
    except BrokenPipeError:
        raise
    except OSError:
        pass


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
