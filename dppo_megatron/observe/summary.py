"""summary.json and the closing table: a run's totals, also for other tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dppo_megatron.files import write_text
from dppo_megatron.texts import one_line

_COUNTS = {
    "prompts_considered": "prune/prompts_considered",
    "prompts_generated": "prune/prompts_generated",
    "completions_generated": "prune/completions_generated",
    "completions_trained": "prune/completions_trained",
    "tokens_generated": "tokens/generated",
    "tokens_trained": "tokens/trained",
}


@dataclass
class Summary:
    """Totals over the RL steps. `train_s` is the sum of the steps; `wall_s` is the whole run, from its start."""

    steps: int = 0
    wall_s: float = 0.0
    warm_start_s: float = 0.0
    train_s: float = 0.0
    train_cpu_s: float = 0.0
    """CPU seconds of rank 0's process in the RL steps; graders and servers are processes of their own."""
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
    """Seconds of each phase of the steps."""

    def add(self, metrics: dict[str, Any]) -> None:
        self.steps += 1
        for name, key in _COUNTS.items():
            setattr(self, name, getattr(self, name) + int(metrics[key]))
        self.train_cpu_s += metrics["time/step_cpu_s"]
        for key, seconds in metrics.items():
            if key.startswith("time/") and key != "time/step_cpu_s":
                phase = key.removeprefix("time/").removesuffix("_s")
                self.phase_s[phase] = self.phase_s.get(phase, 0.0) + seconds
        self.train_s = self.phase_s["step"]

    def without_before(self, names: Sequence[str]) -> list[str]:
        """The evaluation sets in `names` that have no score from before training."""
        return [name for name in names if name not in self.eval_before]

    def begin_sets(self, step: int, scores: Mapping[str, float | None], names: Sequence[str]) -> None:
        """Add the sets that a resume at `step` has added, and drop the final scores of those it has removed.

        Args:
            scores: of the new ones.
            names: all sets of the run from here on.
        """
        self.eval_before |= scores
        self.eval_before_step |= dict.fromkeys(scores, step)
        self.eval_after = {name: score for name, score in self.eval_after.items() if name in names}

    def write(self, path: Path) -> None:
        """Write as JSON, in one piece."""
        write_text(path, json.dumps(asdict(self), indent=2) + "\n")

    def table(self) -> str:
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
            ("warm start", f"{self.warm_start_s:.1f} s"),
            ("RL steps", f"{self.train_s:.1f} s"),
        ]
        parts = sorted(((s, name) for name, s in self.phase_s.items() if name != "step"), reverse=True)
        rows += [(f"  {name}", f"{seconds:.1f} s") for seconds, name in parts]
        rows.append(("whole run", f"{self.wall_s:.1f} s"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _percent(score: float | None) -> str:
    return "null" if score is None else f"{100 * score:.1f} %"
