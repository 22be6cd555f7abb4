"""Progress of an evaluation and its remaining time: a bar on a terminal, an occasional line in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

_EVERY_S = 15.0


class Progress:
    """Counts completions.

    The remaining time assumes that completions take equally long. Long answers finish last, so it is an underestimate
    near the end.

    Args:
        total: completions to come.
        clock: seconds.
    """

    def __init__(
        self, total: int, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._stream, self._clock = total, stream or sys.stderr, clock
        self._began = self._said = clock()
        self._bar = (
            tqdm(total=total, unit="answer", file=self._stream, dynamic_ncols=True) if self._stream.isatty() else None
        )

    def __call__(self, done: int, tokens: int) -> None:
        """Report that `done` completions with `tokens` tokens in total have finished."""
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            return
        now = self._clock()
        if now - self._said < _EVERY_S and done < self._total:
            return
        self._said = now
        seconds = max(now - self._began, 1e-9)
        line = f"evaluation: {done} of {self._total} answers, {tokens / seconds:,.0f} tokens/s"
        if done < self._total:
            line += f", about {duration(seconds / done * (self._total - done))} left"
        print(line, file=self._stream, flush=True)

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
