"""Phase timers, and the progress display."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


class Timers:
    """Seconds spent in each phase of a step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, *, cpu: bool = False) -> Iterator[None]:
        """Add the time of the block to `name`; with `cpu`, the CPU time of this process to `<name>_cpu` as well."""
        start, cpu_start = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - start)
            if cpu:
                self._add(f"{name}_cpu", time.process_time() - cpu_start)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def drain(self) -> dict[str, float]:
        """`time/<phase>_s` of everything since the last call."""
        seconds = {f"time/{name}_s": value for name, value in self._seconds.items()}
        self._seconds.clear()
        return seconds


class Progress:
    """A live bar on a terminal, one plain line a step in a pipe; silent on every rank but 0."""

    def __init__(self, total_steps: int, *, visible: bool) -> None:
        self._total = total_steps
        self._visible = visible
        live = visible and sys.stderr.isatty()
        self._bar = tqdm(total=total_steps, unit="step", dynamic_ncols=True) if live else None

    def say(self, text: str) -> None:
        """A line above the bar."""
        if not self._visible:
            return
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

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
