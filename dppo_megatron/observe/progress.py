"""Progress of whatever takes more than two seconds: a live bar on a terminal, plain lines now and then in a pipe.

A task that ends sooner leaves no trace. In a log file a line each 15 s would bury what a day-long run says, so lines
come at 5 s and then ever more rarely, up to a minute apart; each has the time that is left.

Example, of 100 answers at 4 s each:
    evaluation: 2 of 100 answers, 12 tokens/s, about 7 min left
    evaluation: 3 of 100 answers, ...
    evaluation: 100 answers in 7 min
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

_DELAY_S = 2.0
_FIRST_LINE_S, _LEAST_S, _MOST_S = 5.0, 5.0, 60.0
"""In a pipe: the first line, and how far lines are apart, half as long as the task has taken."""
_REDRAW_S = 0.1


class Progress:
    """One task, from construction to the end of the `with` block. Call it with what is done so far.

    The time left assumes that the rest is as fast as what is done. Long answers finish last, so near the end of an
    evaluation it is an underestimate.

    Args:
        what: `evaluation`, `warm start`.
        unit: in the plural.
        stream: where a terminal would be.
        clock: seconds that only grow.
        say: takes a plain line; None: printed to `stream`.
        visible: False on ranks that say nothing.
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
    ) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._stream, self._clock, self._visible = stream or sys.stderr, clock, visible
        self._say = say or self._print
        self._live = visible and self._stream.isatty()
        self._began = clock()
        self._done, self._tokens = 0, 0
        self._next_s = _DELAY_S if self._live else _FIRST_LINE_S
        self._was_seen = False
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._was_seen and kind is None:
            seconds = self._clock() - self._began
            self._say(f"{self._what}: {self._done} {self._unit} in {duration(seconds)}{self._rate(seconds)}")

    def __call__(self, done: int, tokens: int = 0) -> None:
        """So much of the total is done, with so many tokens."""
        self._done, self._tokens = done, tokens
        seconds = self._clock() - self._began
        if not self._visible or seconds < self._next_s:
            return
        self._was_seen = True
        if self._live:
            self._next_s = seconds + _REDRAW_S
            self._draw(seconds)
        else:
            self._next_s = seconds + min(max(_LEAST_S, seconds / 2), _MOST_S)
            self._say(f"{self._what}: {self._state(seconds)}")

    def _draw(self, seconds: float) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=self._total, file=self._stream, dynamic_ncols=True, leave=False, bar_format="{desc} |{bar}|"
            )
        self._bar.n = min(self._done, self._total)
        self._bar.set_description_str(f"{self._what}: {self._state(seconds)}", refresh=True)

    def _state(self, seconds: float) -> str:
        text = f"{self._done} of {self._total} {self._unit}{self._rate(seconds)}"
        if not self._done:
            return f"{text}, waiting for {duration(seconds)}"
        left_s = seconds / self._done * (self._total - self._done)
        return f"{text}, about {duration(left_s)} left" if self._done < self._total else text

    def _rate(self, seconds: float) -> str:
        return f", {self._tokens / max(seconds, 1e-9):,.0f} tokens/s" if self._tokens else ""

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class RunProgress:
    """A run's steps: a live bar on a terminal, one plain line a step in a pipe; silent on every rank but 0."""

    def __init__(self, total_steps: int, *, visible: bool) -> None:
        self._total, self._visible = total_steps, visible
        live = visible and sys.stderr.isatty()
        self._bar = tqdm(total=total_steps, unit="step", dynamic_ncols=True) if live else None

    def say(self, text: str) -> None:
        """A line above the bars, from any thread."""
        if not self._visible:
            return
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def watch(self, what: str, total: int, unit: str) -> Progress:
        """The progress of a part of the run, below the bar of its steps; see `types.Watch`."""
        return Progress(what, total, unit, say=self.say, visible=self._visible)

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


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
