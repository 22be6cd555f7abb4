"""Renders a run for the terminal: reads what is new in its files, and makes rich's tables and texts of it.

Text that models wrote is shown without control characters: a terminal would obey escape sequences in a completion.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dppo_megatron.observe.progress_display import duration
from dppo_megatron.observe.samples import SAMPLES
from dppo_megatron.rollout.servers.health_file import HEALTH, ServerHealth, read_health
from dppo_megatron.texts import one_line
from dppo_megatron.workbench.report.findings import findings
from dppo_megatron.workbench.runs.run_record import Follow, RunRecord, finite_number, read_settings
from dppo_megatron.workbench.runs.sample_rows import LEGEND, newest_sample_file, read_rows, titles

_STATE = {"finished": "green", "running": "cyan", "stopped": "yellow", "crashed": "bold red"}
_SERVER = {"live": "green", "stale": "yellow", "out": "bold red"}
_LEVEL = {"bad": "bold red", "warning": "yellow", "note": "dim"}
_PHASES = ("rollout", "reward", "select", "prune", "exchange", "update", "sync")
BLOCKS = "▁▂▃▄▅▆▇█"
_RECENT = 20
"""How many of the last steps the time left and the split of the time are computed from."""
_SAMPLE_COLUMNS = ("step", "group", "problem", "text", "reward", "correct", "kept", "why", "tokens", "weight")
_CURVES = (
    ("reward", "reward/mean", ".3f"),
    ("length", "rollout/completion_tokens_mean", ".0f"),
    ("truncated", "rollout/truncated_share", ".1%"),
    ("entropy", "train/entropy", ".3f"),
    ("gradient norm", "train/grad_norm", ".2f"),
    ("seconds per step", "time/step_s", ".2f"),
)


class Latest:
    """A run as it is now; files are read only when they have changed. Raises UserError as `Follow` does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._follow = Follow(path)
        self.samples: list[dict[str, Any]] = []
        """One group of the newest step with samples."""
        self.title = ""
        """The group's prompt."""
        self._sample_file: tuple[Path, int] | None = None

    @property
    def record(self) -> RunRecord:
        return self._follow.record

    def look(self) -> RunRecord:
        """Read what the run has written since, and its newest samples."""
        record = self._follow.look()
        if not record.settings:
            record.settings = read_settings(self._path / "config.yaml", [])
        newest = newest_sample_file(self._path / SAMPLES)
        if newest is not None and newest != self._sample_file and (read := _read_samples(*newest)):
            self.samples, self.title, self._sample_file = *read, newest
        return record

    def servers(self) -> tuple[list[ServerHealth], float]:
        """The run's servers, and how many seconds ago they were checked."""
        servers, at = read_health(self._path / HEALTH)
        return servers, max(0.0, time.time() - at)

    def idle_s(self) -> float | None:
        """Seconds since the last line of the record."""
        try:
            return max(0.0, time.time() - (self._path / "metrics.jsonl").stat().st_mtime)
        except OSError:
            return None


def _read_samples(path: Path, step: int) -> tuple[list[dict[str, Any]], str] | None:
    """The step's group with the highest variance of rewards, the first of equals, and its title. None if the file
    cannot be read: it may be merged into another one at this moment."""
    groups: dict[int, list[dict[str, Any]]] = {}
    with suppress(OSError, ValueError):
        for row in read_rows(path, _SAMPLE_COLUMNS, step):
            groups.setdefault(row["group"], []).append(row)
    named = zip(groups.values(), titles([group[0] for group in groups.values()]), strict=True)
    return max(named, key=lambda one: _spread(one[0]), default=None)


def _spread(group: list[dict[str, Any]]) -> float:
    rewards = [row["reward"] for row in group if row["reward"] is not None and math.isfinite(row["reward"])]
    return statistics.pvariance(rewards) if rewards else 0.0


def frame(latest: Latest, width: int, members: int = 4) -> RenderableType:
    """The whole picture, `width` cells wide, with at most `members` completions of the group of samples."""
    record = latest.record
    parts: list[RenderableType] = [_head(record, latest, width)]
    if len(record.steps) > 1:
        parts += [_curves(record, width), _time_split(record), _pruning(record)]
    parts += _evaluations(record)
    servers, age_s = latest.servers()
    if servers and record.status != "finished":
        parts.append(_servers(servers, age_s))
    if latest.samples:
        parts.append(_samples(latest.samples, latest.title, width, members))
    parts += _warnings(record)
    return Group(*parts)


def seconds_left(record: RunRecord, total_steps: int) -> float | None:
    """The steps that remain times the median duration of the last ones; None before the first and after the end."""
    recent = [one for one in record.columns.get("time/step_s", [])[-_RECENT:] if one is not None]
    if not recent or record.status in ("finished", "crashed", "stopped"):
        return None
    return max(0, total_steps - record.steps[-1]) * statistics.median(recent)


def _head(record: RunRecord, latest: Latest, width: int) -> RenderableType:
    step, total = (record.steps or [0])[-1], int(finite_number(record.setting("steps", 0)) or 0)
    line = Text(f"step {step}" + (f" of {total}" if total else ""))
    if (left := seconds_left(record, total)) is not None and total:
        line.append(f", about {duration(left)} left")
    spent = sum(one or 0.0 for one in record.columns.get("time/step_s", []))
    line.append(f"   {duration(spent)} of RL", style="dim")
    idle_s = latest.idle_s()
    if record.status == "running" and idle_s is not None:
        line.append(f", last step {duration(idle_s)} ago" if record.steps else "", style="dim")
    if not record.steps:
        line = Text("no step yet: loading, SFT, or the evaluation before RL")
    methods = [str(record.setting(f"pruning.{level}.method", "?")) for level in ("prompt", "completion")]
    model = str(record.setting("model.hf_path", "?")).rstrip("/").rpartition("/")[2]
    what = f"{model}, {record.setting('rollout.engine', '?')}, pruning {' / '.join(methods)}"
    bar = ProgressBar(total, step, max(10, width - 6), style="dim", complete_style="cyan", finished_style="cyan")
    bar_line = Padding(bar, 0)  # Padding ends the line, which rich's bar does not
    title = Text.assemble((_line(record.name), "bold"), "  ", (record.status, _STATE.get(record.status, "")))
    inside = Group(line, bar_line, Text(_line(what), style="dim"))
    return Panel(inside, title=title, title_align="left", width=width)


def _curves(record: RunRecord, width: int) -> RenderableType:
    table = Table(box=None, padding=(0, 1), show_header=False)
    for style, justify in (("bold", "left"), ("cyan", "left"), ("", "right"), ("dim", "right")):
        table.add_column(style=style, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name, key, form in _CURVES:
        values = record.columns.get(key, [])
        present = [one for one in values if one is not None]
        if present:
            span = f"{format(min(present), form)} to {format(max(present), form)}"
            table.add_row(name, sparkline(values, max(10, width - 48)), format(present[-1], form), span)
    return table


def _time_split(record: RunRecord) -> RenderableType:
    """Mean seconds of each phase over the last steps."""
    means = {name: _recent(record, f"time/{name}_s") or 0.0 for name in _PHASES}
    whole = _recent(record, "time/step_s") or sum(means.values())
    means["other"] = whole - sum(means.values())
    parts = [
        f"{name} {value:.2f} s ({value / whole:.0%})" for name, value in means.items() if value >= 0.01 * whole > 0
    ]
    return _indented(("time per step  ", "bold"), ", ".join(parts))


def _pruning(record: RunRecord) -> RenderableType:
    parts = []
    pairs = (
        ("prompts", "prune/prompts_generated", "prune/prompts_considered", "rolled out"),
        ("completions", "prune/completions_trained", "prune/completions_generated", "trained on"),
    )
    for name, above, below, word in pairs:
        kept, total = _recent(record, above), _recent(record, below)
        if kept is not None and total:
            parts.append(f"{kept / total:.0%} of {name} {word}")
    if (growth := _recent(record, "prune/realised_design_effect")) is not None:
        parts.append(f"variance {growth:.2f}x")
    if (fill := _recent(record, "pack/fill")) is not None:
        parts.append(f"micro-batches {fill:.0%} full")
    return _indented(("pruning  ", "bold"), ", ".join(parts))


def _evaluations(record: RunRecord) -> Iterator[RenderableType]:
    for key, values in record.columns.items():
        if key.startswith("eval/") and key.endswith("/pass@1"):
            scored = [(step, one) for step, one in zip(record.steps, values, strict=True) if one is not None]
            if scored:
                shown = "  ".join(f"{one:.1%} (step {step})" for step, one in scored[-4:])
                yield _indented((f"{_line(key[5:-7])} pass@1  ", "bold"), shown)


def _servers(servers: Sequence[ServerHealth], age_s: float) -> RenderableType:
    title = f"servers, {duration(age_s)} ago"
    table = Table(box=None, padding=(0, 1), title=title, title_justify="left", title_style="bold")
    for name in ("address", "state", "completions in flight", "outages"):
        table.add_column(name, header_style="dim", no_wrap=name == "address")
    for one in servers:
        state = "asleep" if one.asleep else _line(one.state)
        words = Text(state, style=_SERVER.get(one.state, "")) + Text(f" {_line(one.reason)}" if one.reason else "")
        table.add_row(Text(_line(one.url)), words, str(one.completions), str(one.outages))
    return table


def _samples(group: list[dict[str, Any]], title: str, width: int, count: int) -> RenderableType:
    """A prompt, its best completion and then its worst ones, each by the end of its text, where the answer is."""
    members = sorted(group, key=lambda one: -1e30 if one["reward"] is None else one["reward"], reverse=True)
    shown = [*members[:1], *members[:0:-1]][:count]
    facts = []
    for one in shown:
        failed, right = one["reward"] is None, one["correct"]
        judged = "" if right is None else "right" if right else "wrong"
        verdict = "failed" if failed else f"{one['reward']:.2f} {judged}"
        weight = f"weight {one['weight']:.2f}" if one["kept"] else "pruned"
        square = ("■" if one["kept"] else "□", "red" if failed else "green" if right else "")
        detail = f"{weight} ({_line(one['why'])}), {one['tokens']} tokens  "
        facts.append(Text.assemble(" ", square, f" {verdict:<11} ", (detail, "dim")))
    facts_width = max(one.cell_len for one in facts)
    head = Text.assemble((f" samples of step {group[0]['step']}  ", "bold"), (LEGEND, "dim"))
    lines = [head, Text(f" {title}", "italic")]
    for one, fact in zip(shown, facts, strict=True):
        fact.pad_right(facts_width - fact.cell_len)
        lines.append(fact + Text(_end(_line(one["text"] or ""), width - facts_width - 1)))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def _end(text: str, room: int) -> str:
    """The last `room` cells of a text, with dots in front if it was truncated."""
    return text if cell_len(text) <= room else f"...{set_cell_size(text[::-1], max(0, room - 3))[::-1]}"


def _warnings(record: RunRecord) -> Iterator[RenderableType]:
    for one in findings(record)[:5]:
        at = f" (step {one.steps})" if one.steps else ""
        yield _indented((f"{one.level}: ", _LEVEL[one.level]), _line(one.text), (at, "dim"))


def _indented(*parts: str | tuple[str, str]) -> RenderableType:
    """Text with all its lines indented, to tell them from those of a log."""
    return Padding.indent(Text.assemble(*parts), 1)


def _line(text: str) -> str:
    return one_line(text, 1_000_000)


def _recent(record: RunRecord, key: str) -> float | None:
    return _mean(record.columns.get(key, [])[-_RECENT:])


def sparkline(values: Sequence[float | None], width: int) -> str:
    """A curve of at most `width` characters, each the mean of a slice of `values`; a space where a slice has none.

    Example: [0, 1, 2, 3] at width 2 -> means 0.5 and 2.5, lowest and highest: "▁█".
    """
    parts = [_mean(part) for part in np.array_split(np.array(values, dtype=object), min(width, len(values)) or 1)]
    present = [one for one in parts if one is not None]
    low, high = min(present, default=0.0), max(present, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low if high > low else 1.0)
    return "".join(" " if one is None else BLOCKS[round((one - low) * scale)] for one in parts) if present else ""


def _mean(values: Iterable[float | None]) -> float | None:
    present = [one for one in values if one is not None]
    return sum(present) / len(present) if present else None
