"""The page about runs: their columns, findings and samples, as data for the code in `assets/`.

It has samples of some steps, spread over the run, each with as many groups as fit, and at least one. Tokens are stored
as ids, with one table of their texts: the same few thousand tokens occur over and over.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dppo_megatron.observe.samples import SAMPLES, SampleFile, sample_files
from dppo_megatron.workbench.report.document import ASSETS, script_data, write_html
from dppo_megatron.workbench.report.findings import findings
from dppo_megatron.workbench.runs.run_record import RunRecord, default_settings
from dppo_megatron.workbench.runs.sample_rows import COLUMNS, LEGEND, read_rows, steps_of, titles

_SCRIPTS = ("data.js", "charts.js", "traces.js", "metrics.js", "sections.js", "samples.js", "page.js")
SAMPLE_BYTES = 12_000_000
"""Limit for the samples of all runs together, before they are packed to a third and less: a browser opens a page of
this size without delay."""
_STEPS = 40
_TITLE = 200
_OF_THE_GROUP = ("group", "prompt_index", "source", "prompt", "problem", "reference", "prompt_prob", "prompt_weight")
_HIDDEN = ("step", *_OF_THE_GROUP)


def write_page(path: Path, runs: Sequence[RunRecord]) -> None:
    """Write the report of `runs`. Raises UserError if `path` cannot be written."""
    names, parts = [run.name for run in runs], list[str]()
    for number, run in enumerate(runs):
        samples = read_samples(run.path, str(run.setting("model.hf_path", "")), SAMPLE_BYTES // len(runs))
        run.notes += [f"samples/{name} cannot be read and is left out" for name in sorted(samples.unreadable)]
        if names.count(run.name) > 1:
            run.name = f"{run.path.resolve().parent.name}/{run.name}"
        # an element for each step, which the page parses when the step is opened
        named = ("recorded_steps", "groups_in_step", "tokens", "note")
        index = {"steps": sorted(samples.steps)} | {name: getattr(samples, name) for name in named}
        parts.append(script_data(f"samples-{number}", index))
        parts += [script_data(f"samples-{number}-{step}", groups) for step, groups in samples.steps.items()]
    defaults = default_settings()
    about = {"runs": [_data(run) for run in runs], "defaults": defaults, "legend": LEGEND}
    parts.insert(0, script_data("report-data", about))
    write_html(path, ASSETS / "page.html", "dppo-megatron report", parts, [ASSETS / name for name in _SCRIPTS])


def _data(run: RunRecord) -> dict[str, Any]:
    shown = {name: getattr(run, name) for name in ("name", "status", "steps", "ledger", "summary", "settings")}
    columns = {key: [_short(value) for value in values] for key, values in run.columns.items()}
    return shown | {"path": str(run.path), "columns": columns, "findings": [asdict(one) for one in findings(run)]}


@dataclass
class Samples:
    """The samples of one run that go into the page."""

    steps: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Step -> groups, each with its `members`."""
    recorded_steps: int = 0
    """How many steps the run has samples of; the page may hold fewer."""
    groups_in_step: dict[int, int] = field(default_factory=dict)
    """Recorded groups of each step in `steps`; the page may hold fewer."""
    tokens: dict[int, str] = field(default_factory=dict)
    """Token id -> its text; empty if the tokenizer was not found."""
    note: str = ""
    """Why there are none."""
    unreadable: set[str] = field(default_factory=set)
    """Names of files that are left out."""


def read_samples(run: Path, model: str, max_bytes: int) -> Samples:
    """Choose the samples of a run that go into the page.

    Args:
        model: model.hf_path of the run, for the tokenizer if there is no hf/ yet.
        max_bytes: approximate limit of their size as JSON; only a single group may be above it.
    """
    samples = Samples()
    files = sample_files(run / SAMPLES)
    if not files:
        samples.note = "The run has recorded no samples (observe.samples.share)."
        return samples
    budget = max_bytes
    recorded = sorted(set(chain.from_iterable(_steps(one, samples.unreadable) for one in files)))
    samples.recorded_steps, chosen = len(recorded), _spread(recorded, _STEPS)
    for left, step in zip(range(len(chosen), 0, -1), chosen, strict=True):
        groups, total = _groups(files, step, samples.unreadable)
        sizes = list(accumulate(map(_size, groups)))
        count = max(1, bisect_right(sizes, budget // left))
        if sizes and (not samples.steps or sizes[count - 1] <= budget):
            budget -= sizes[count - 1]
            samples.steps[step], samples.groups_in_step[step] = groups[:count], total
    shown = [group for groups in samples.steps.values() for group in groups]
    for group, title in zip(shown, titles(shown), strict=True):
        group["title"] = title[:_TITLE]
        del group["problem"]
    ids = {i for groups in samples.steps.values() for g in groups for m in g["members"] for i in m["token_ids"] or ()}
    samples.tokens = _texts(ids, [run / "hf", Path(model)])
    return samples


def _spread(steps: list[int], count: int) -> list[int]:
    """`count` of the steps, in an order in which any first few are spread too: the last step, then ever finer.

    Example: 10 steps, 4 -> the 10th, 4th, 7th and 1st.
    """
    if len(steps) > count:
        steps = [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]
    from_last = sorted(range(len(steps)), key=lambda i: -(i & -i) if i else -len(steps))
    return [steps[-1 - i] for i in from_last]


def _steps(one: SampleFile, unreadable: set[str]) -> list[int]:
    """The steps that a file holds."""
    if one.first == one.last:
        return [one.first]
    return [step for step in _read(one, unreadable, steps_of) if one.first <= step <= one.last]


def _read(one: SampleFile, unreadable: set[str], read: Callable[[Path], list[Any]]) -> list[Any]:
    """What `read` finds in a file; nothing if it cannot be read."""
    try:
        return read(one.path)
    except FileNotFoundError:
        return []  # a run in progress has merged it into another
    except (OSError, ValueError):
        unreadable.add(one.path.name)
        return []


def _groups(files: list[SampleFile], step: int, unreadable: set[str]) -> tuple[list[dict[str, Any]], int]:
    """The groups of a step, of all ranks, in order; and how many there are."""
    groups: dict[int, dict[str, Any]] = defaultdict(dict)
    for one in files:
        if not one.first <= step <= one.last:
            continue
        for row in _read(one, unreadable, lambda path: read_rows(path, COLUMNS, step)):
            group = groups[row["group"]]
            group.update({name: _short(row[name]) for name in _OF_THE_GROUP})
            group.setdefault("members", []).append(_member(row))
    return [groups[position] for position in sorted(groups)], len(groups)


def _member(row: dict[str, Any]) -> dict[str, Any]:
    member = {name: _short(value) for name, value in row.items() if name not in _HIDDEN}
    for name in ("logprobs", "actor_logprobs"):
        if row[name] is not None:
            member[name] = [round(value, 3) if math.isfinite(value) else None for value in row[name]]
    return member


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _size(group: dict[str, Any]) -> int:
    """Approximate size as JSON, in characters."""
    return sum([len(group["prompt"]), *(400 + len(one["text"]) + 14 * one["tokens"] for one in group["members"])])


def _texts(ids: set[int], places: list[Path]) -> dict[int, str]:
    for place in places:
        with suppress(Exception):  # tokenizers raises just that for a file that is missing or unreadable
            tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
            return {i: tokenizer.decode([i], skip_special_tokens=False) or tokenizer.id_to_token(i) or "" for i in ids}
    return {}
