"""Phase timers, and what a finished step took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dppo_megatron.spans import Spans


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of a finished step, grouped by what they scale with."""

    step_s: float
    """The whole of it, `probe_s` included."""
    rollout_s: float
    """Generating and grading."""
    update_s: float
    probe_s: float
    """The noise probe, which most steps do not have."""

    @property
    def other_s(self) -> float:
        """Selecting, packing, syncing."""
        return max(0.0, self.step_s - self.rollout_s - self.update_s - self.probe_s)


class Timers:
    """Seconds spent in each phase of a step.

    Args:
        spans: gets each phase as a span too.
    """

    def __init__(self, spans: Spans | None = None) -> None:
        self._seconds: dict[str, float] = {}
        self._spans = spans or Spans()
        self._open: list[str] = []
        self.tell: Callable[[str], None] | None = None
        """Takes the name of the innermost phase, whenever that changes; for people who watch."""

    @contextmanager
    def phase(self, name: str, *, cpu: bool = False) -> Iterator[None]:
        """Add the time of the block to `name`; with `cpu`, the CPU time of this process to `<name>_cpu` as well."""
        start, cpu_start = time.perf_counter(), time.process_time()
        self._open.append(name)
        self._tell()
        try:
            yield
        finally:
            end = time.perf_counter()
            self._open.pop()
            self._tell()
            self._add(name, end - start)
            self._spans.add("phases", name, start, end)
            if cpu:
                self._add(f"{name}_cpu", time.process_time() - cpu_start)

    def _tell(self) -> None:
        if self.tell is not None:
            self.tell(self._open[-1] if self._open else "")

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def timing(self) -> StepTiming:
        """Of everything since the last `drain`; a phase that there was no need for took 0 s."""
        step, rollout, reward, update, probe = (
            self._seconds.get(name, 0.0) for name in ("step", "rollout", "reward", "update", "probe")
        )
        return StepTiming(step_s=step, rollout_s=rollout + reward, update_s=update, probe_s=probe)

    def drain(self) -> dict[str, float]:
        """`time/<phase>_s` of everything since the last call."""
        seconds = {f"time/{name}_s": value for name, value in self._seconds.items()}
        self._seconds.clear()
        return seconds
