"""Phase timers of a step, and a run's totals: summary.json, which other tools read, and the table that ends the log."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dppo_megatron.files import write_text
from dppo_megatron.spans import recorder
from dppo_megatron.texts import aligned, one_line
from dppo_megatron.types import StepCounts


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of a finished step, grouped by what they scale with."""

    step_s: float
    """The whole step, `probe_s` included."""
    generating_s: float
    grading_s: float
    update_s: float
    probe_s: float
    """The noise probe, which most steps do not have."""

    @property
    def rollout_s(self) -> float:
        return self.generating_s + self.grading_s

    @property
    def other_s(self) -> float:
        return max(0.0, self.step_s - self.rollout_s - self.update_s - self.probe_s)


class Timers:
    """Seconds spent in each phase of a step; each phase is a span too."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self.on_phase: Callable[[str], None] | None = None
        """Called with the name of the innermost phase whenever that changes, for the progress display."""

    @contextmanager
    def phase(self, name: str, *, cpu: bool = False) -> Iterator[None]:
        """Add the time of the block to `name`; with `cpu`, the CPU time of this process to `<name>_cpu` as well."""
        start, cpu_start = time.perf_counter(), time.process_time()
        self._open.append(name)
        self._report_phase()
        try:
            yield
        finally:
            end = time.perf_counter()
            self._open.pop()
            self._report_phase()
            self._add(name, end - start)
            recorder().add("phases", name, start, end)
            if cpu:
                self._add(f"{name}_cpu", time.process_time() - cpu_start)

    def _report_phase(self) -> None:
        if self.on_phase is not None:
            self.on_phase(self._open[-1] if self._open else "")

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def timing(self) -> StepTiming:
        """Seconds since the last `drain`, in the order of the fields; 0 for phases that did not run."""
        return StepTiming(*(self._seconds.get(name, 0.0) for name in ("step", "rollout", "reward", "update", "probe")))

    def drain(self) -> dict[str, float]:
        """`time/<phase>_s` -> seconds since the last call."""
        seconds = {f"time/{name}_s": value for name, value in self._seconds.items()}
        self._seconds.clear()
        return seconds


@dataclass
class Summary:
    """Totals over the RL steps. `train_s` is the sum of the steps; `wall_s` is the whole run, earlier starts too."""

    steps: int = 0
    wall_s: float = 0.0
    sft_s: float = 0.0
    train_s: float = 0.0
    train_cpu_s: float = 0.0
    """CPU seconds of rank 0's process in the RL steps; graders and servers are other processes."""
    eval_before: dict[str, float | None] = field(default_factory=dict)
    """pass@1 by set; None where every grading failed."""
    eval_after: dict[str, float | None] = field(default_factory=dict)
    eval_before_step: dict[str, int] = field(default_factory=dict)
    """The step of `eval_before` for sets added at a resume; 0 for the others."""
    prompts_considered: int = 0
    prompts_generated: int = 0
    completions_generated: int = 0
    completions_trained: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    phase_s: dict[str, float] = field(default_factory=dict)

    def add(self, counts: StepCounts, metrics: Mapping[str, float]) -> None:
        """Add a step: its counts, and the seconds of its phases, which are the metrics `time/*`."""
        self.steps += 1
        for name, number in asdict(counts).items():
            setattr(self, name, getattr(self, name) + number)
        self.train_cpu_s += metrics["time/step_cpu_s"]
        for key, seconds in metrics.items():
            if key.startswith("time/") and key != "time/step_cpu_s":
                phase = key.removeprefix("time/").removesuffix("_s")
                self.phase_s[phase] = self.phase_s.get(phase, 0.0) + seconds
        self.train_s = self.phase_s["step"]

    def add_evaluation(self, step: int, scores: dict[str, float | None]) -> None:
        """Add the scores after `step`; the first ones of a set are those before training."""
        new = {name: score for name, score in scores.items() if name not in self.eval_before}
        self.eval_before |= new
        if step:
            self.eval_before_step |= dict.fromkeys(new, step)
            self.eval_after = scores or self.eval_after

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(asdict(self), indent=2) + "\n")

    def table(self) -> str:
        """Lines of name and value, for the end of the log."""
        rows: list[tuple[str, str]] = []
        for name, after in self.eval_after.items():
            before, since = self.eval_before.get(name), self.eval_before_step.get(name, 0)
            text = f"{_percent(before)} -> {_percent(after)}"
            if before is not None and after is not None:
                text += f"  ({100 * (after - before):+.1f} points{f' since step {since}' if since else ''})"
            rows.append((f"{one_line(name)} pass@1", text))
        not_generated = self.prompts_considered - self.prompts_generated
        not_trained = self.completions_generated - self.completions_trained
        rows += [
            ("steps", f"{self.steps}"),
            ("prompts", f"{self.prompts_generated} generated, {not_generated} pruned of {self.prompts_considered}"),
            (
                "completions",
                f"{self.completions_trained} trained, {not_trained} pruned of {self.completions_generated} generated",
            ),
            ("completion tokens", f"{self.tokens_trained} trained of {self.tokens_generated} generated"),
            ("SFT", f"{self.sft_s:.1f} s"),
            ("RL steps", f"{self.train_s:.1f} s"),
        ]
        parts = sorted(((s, name) for name, s in self.phase_s.items() if name != "step"), reverse=True)
        rows += [(f"  {name}", f"{seconds:.1f} s") for seconds, name in parts]
        rows.append(("whole run", f"{self.wall_s:.1f} s"))
        return "\n".join(aligned(rows, left=2))


def _percent(score: float | None) -> str:
    return "null" if score is None else f"{100 * score:.1f} %"
