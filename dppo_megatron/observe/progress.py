"""Progress of whatever takes more than two seconds: a live bar on a terminal, plain lines now and then in a pipe.

A task that ends sooner leaves no trace. In a log file a line each 15 s would bury what a day-long run says, so lines
come at 5 s and then ever more rarely, up to a minute apart; each has the time that is left, where that is known.

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
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from dppo_megatron.texts import entry, one_line, show

_DELAY_S = 2.0
_LEAST_S, _MOST_S = 5.0, 60.0
"""In a pipe: how far lines are apart, half as long as the task has taken."""
_REDRAW_S = 0.1


@dataclass(frozen=True, slots=True)
class Pace:
    """When a task says something."""

    first_line_s: float = 5.0
    """In a pipe."""
    beat_s: float = 1.0
    """How often the thread looks; 0: no thread, for a test whose clock stands still meanwhile."""
    closing_line: bool = True
    """Whether a line says at the end how long it took."""


_TASK = Pace()
_PHASES = Pace(first_line_s=60.0, closing_line=False)
"""Of a step: its own line follows, and a step of 30 s needs no other in a log."""


class Progress:
    """One task, from construction to the end of the `with` block. Call it with what is done so far.

    The time left assumes that the rest is as fast as what is done. Long answers finish last, so near the end of an
    evaluation it is an underestimate.

    Args:
        what: `evaluation`, `warm start`.
        total: 0 if it is not known.
        unit: in the plural; empty: nothing is counted.
        stream: where a terminal would be.
        clock: seconds that only grow.
        say: takes a plain line; None: printed to `stream`.
        visible: False on ranks that say nothing; the environment variable DPPO_PROGRESS=off silences all.
        pace: when lines come.
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
        pace: Pace = _TASK,
    ) -> None:
        self._what, self._total, self._unit = what, total, unit
        visible = visible and os.environ.get("DPPO_PROGRESS") != "off"
        self._stream, self._clock, self._visible = stream or sys.stderr, clock, visible
        self._say, self._pace = say or self._print, pace
        self._live = visible and self._stream.isatty()
        self._began = clock()
        self._done, self._tokens, self._note = 0, 0, ""
        self._shown_from_s = self._next_s = _DELAY_S if self._live else pace.first_line_s
        self._bar: Any = None
        self._lock = threading.Lock()
        """Of the display: the thread that works and the one that looks both draw."""
        self._ended = threading.Event()
        self._beat: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._visible and self._pace.beat_s:
            self._beat = threading.Thread(target=self._look, name=f"progress of {self._what}", daemon=True)
            self._beat.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        if self._beat is not None:
            self._beat.join()
        if self._bar is not None:
            self._bar.close()
        seconds = self._clock() - self._began
        if self._visible and kind is None and seconds >= self._shown_from_s and self._pace.closing_line:
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
        while not self._ended.wait(self._pace.beat_s):
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
            if self._live:
                self._next_s = seconds + _REDRAW_S
                self._draw(seconds)
            else:
                self._next_s = seconds + min(max(_LEAST_S, seconds / 2), _MOST_S)
                self._say(f"{self._what}: {self._state(seconds)}")

    def _draw(self, seconds: float) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=self._total or None,
                file=self._stream,
                dynamic_ncols=True,
                leave=False,
                bar_format="{desc} |{bar}|" if self._total else "{desc}",
            )
        self._bar.n = min(self._done, self._total)
        self._bar.set_description_str(one_line(f"{self._what}: {self._state(seconds)}"), refresh=True)

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

    def _print(self, text: str) -> None:
        show(text, file=self._stream)


class RunProgress:
    """A run's steps: a live bar on a terminal, one plain line a step in a pipe; silent on every rank but 0."""

    def __init__(self, total_steps: int, *, visible: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._visible, self._clock = total_steps, visible, clock
        live = visible and sys.stderr.isatty()
        self._bar = tqdm(total=total_steps, unit="step", dynamic_ncols=True) if live else None

    def say(self, text: str) -> None:
        """A line above the bars, from any thread."""
        if not self._visible:
            return
        if self._bar is not None:
            self._bar.write(entry(text))
        else:
            print_line(text)

    def watch(self, what: str, total: int, unit: str) -> Progress:
        """The progress of a part of the run, below the bar of its steps; see `types.Watch`."""
        return Progress(what, total, unit, clock=self._clock, say=self.say, visible=self._visible)

    @contextmanager
    def phases(self, step: int) -> Iterator[Callable[[str], None]]:
        """While a step lasts: which phase it is in, and for how long; what is given takes a phase's name."""
        how: dict[str, Any] = {"clock": self._clock, "say": self.say, "visible": self._visible}
        with Progress(f"step {step}", 0, "", **how, pace=_PHASES) as shown:
            yield shown.note

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """Show the end of `step`."""
        mean = metrics["reward/mean"]  # null if the step has no reward: everything pruned, or every grading failed
        text = (
            f"reward {'-' if mean is None or math.isnan(mean) else format(mean, '.3f')}"
            f"  generated {metrics['prune/completions_generated']:.0f}"
            f"  trained {metrics['prune/completions_trained']:.0f}"
            f"  grad {metrics['train/grad_norm']:.2f}"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            self.say(f"step {step:>4}/{self._total}  {text}  {metrics['time/step_s']:.2f} s")

    def close(self) -> None:
        """End the bar, leaving it on the screen."""
        if self._bar is not None:
            self._bar.close()


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
