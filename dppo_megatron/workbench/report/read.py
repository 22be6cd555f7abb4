"""Reads a run's files as far as possible, whether the run has finished, is running or has crashed.

Only a directory with a metrics.jsonl is required. Damaged lines are skipped and counted, and a missing file leaves its
part of the report empty. The trainer's own readers refuse such files, because a resume depends on them; here a person
wants to see whatever there is.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import yaml

from dppo_megatron.config.load import config_values
from dppo_megatron.config.schema import Config
from dppo_megatron.observe.lock import FILE as LOCK
from dppo_megatron.observe.record import finite
from dppo_megatron.observe.trackers.sink import FAILURES, TRACKERS
from dppo_megatron.types import UserError

LARGEST = 1e308
"""Numbers from here on are shown as missing."""
_HEARTBEAT_S = 60.0
"""A trainer touches its lock every five seconds."""

_OF_THE_TRAINED = (
    "mismatch/logprob_abs_diff_mean", "pack/fill", "pack/imbalance", "pack/largest_over_mean", "pack/padding",
    "prune/ess_share", "prune/w_cv2", "prune/w_max",
    "train/clip_fraction", "train/entropy", "train/loss", "train/ratio",
)  # fmt: skip
"""Metrics of trained completions: in a step without any they are 0, which is shown as missing."""


@dataclass
class RunRecord:
    """One run, as columns over its steps."""

    name: str
    path: Path
    status: str
    """finished, running, crashed (it ended without releasing its lock) or stopped."""
    steps: list[int] = field(default_factory=list)
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    """Metric -> its value in each of `steps`; None where it was not a number."""
    ledger: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the bias ledger: name, notes, and in each step its label and kept fraction."""
    summary: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    """Dotted key -> value, as JSON."""
    notes: list[str] = field(default_factory=list)
    """What could not be read."""


class _TraceRow(msgspec.Struct):
    """The fields of a trace line that are needed; the decoder skips the rest."""

    step: int
    rewards: list[list[float | None]] = []
    lengths: list[list[Annotated[int, msgspec.Meta(ge=0, lt=2**53)]]] = []
    inclusion_prob: list[float] = []


def read_run(path: Path) -> RunRecord:
    """Read a run directory.

    Raises:
        UserError: no directory, or one without a metrics.jsonl that has a step.
    """
    if not path.is_dir():
        raise UserError(f"'{path}' is no directory; name the run_dir of a run")
    if not (path / "metrics.jsonl").is_file():
        raise UserError(f"'{path}' holds no metrics.jsonl; name the run_dir of a run")
    run = RunRecord(path.resolve().name, path, run_status(path))
    rows = list(_rows(path / "metrics.jsonl", run.notes))
    if not rows:
        raise UserError(f"'{path}/metrics.jsonl' holds no step yet")
    rows = list({row["step"]: row for row in rows}.values())
    rows.sort(key=lambda row: row["step"])
    run.steps = [row["step"] for row in rows]
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list | dict))
    run.columns = {key: [finite_number(row.get(key)) for row in rows] for key in keys if key != "step"}
    run.ledger = _ledger(rows)
    _derive(run)
    _add_trace(run, path / "trace.jsonl")
    run.summary = _json(path / "summary.json", run.notes)
    run.settings = _settings(path / "config.yaml", run.notes)
    for name, missed in _json(path / TRACKERS / FAILURES, run.notes).items():
        if isinstance(missed, dict):
            run.notes.append(f"tracker {name} has failed {missed.get('failures')} times, first: {missed.get('first')}")
    return run


def finite_number(value: Any) -> float | None:
    """`value` if it is a number that a float can hold; JSON's integers may have any number of digits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return None
    return value


def step_of(row: Any) -> int | None:
    """The step that a line of metrics.jsonl is of; None if it is no step's line."""
    step = row.get("step") if isinstance(row, dict) else None
    return step if type(step) is int and 0 <= step < 2**53 else None


def ledger_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The bias ledger of a step's line: entries with a name, a label (text or None), a kept fraction and a note."""
    entries = row.get("prune/ledger")
    return [
        {
            "name": entry["name"],
            "label": entry["label"] if isinstance(entry.get("label"), str) else None,
            "kept": finite_number(entry.get("kept_fraction")),
            "note": entry["note"] if isinstance(entry.get("note"), str) else "",
        }
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("name"), str)
    ]


def default_settings() -> dict[str, str]:
    """Dotted key -> default, as JSON."""
    return _flat(config_values(Config()))


def standard_error(rewards: list[list[float | None]], weight: list[float]) -> float | None:
    """Standard error of the weighted mean reward, over groups: completions of one prompt are not independent.

    Example: two groups of means 0 and 1 with weight 1 -> mean 0.5, standard error 0.5.
    """
    means, weights = [], []
    for group, one in zip(rewards, weight, strict=False):
        graded = [value for value in group if value is not None]
        if graded:
            means.append(sum(graded) / len(graded))
            weights.append(one * len(graded))
    if len(means) < 2:
        return None
    mean, w = np.array(means), np.array(weights)
    centre = float((w * mean).sum() / w.sum())
    spread = float(np.sqrt((w**2 * (mean - centre) ** 2).sum()) / w.sum())
    return spread * math.sqrt(len(means) / (len(means) - 1))


def run_status(path: Path) -> str:
    """finished, running, crashed or stopped, as the files say."""
    lock = path / LOCK
    if lock.exists():
        try:
            return "running" if time.time() - lock.stat().st_mtime < _HEARTBEAT_S else "crashed"
        except OSError:
            pass  # released at this moment
    return "finished" if (path / "summary.json").exists() else "stopped"


def _rows(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    decode, damaged = msgspec.json.Decoder().decode, 0
    with open(path, "rb") as file:
        for line in file:
            try:
                row = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                damaged += line.endswith(b"\n")  # else it is being written, or was cut off by a kill
                continue
            if step_of(row) is not None:
                yield row
            else:
                damaged += "format" not in row if isinstance(row, dict) else 1
    if damaged:
        notes.append(f"{path.name}: {damaged} damaged lines are left out")


def _ledger(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for place, row in enumerate(rows):
        for entry in ledger_of(row):
            one = found.setdefault(
                entry["name"],
                {"name": entry["name"], "notes": [], "label": [None] * len(rows), "kept": [None] * len(rows)},
            )
            one["label"][place], one["kept"][place] = entry["label"], entry["kept"]
            if entry["note"] and entry["note"] not in one["notes"] and len(one["notes"]) < 3:
                one["notes"].append(entry["note"])
    return list(found.values())


def _derive(run: RunRecord) -> None:
    """Add the columns that are computed from others."""

    def ratio(name: str, above: str, below: str) -> None:
        pairs = zip(run.columns.get(above, []), run.columns.get(below, []), strict=False)
        run.columns[name] = [None if a is None or not b else a / b for a, b in pairs]

    ratio("rollout/truncated_share", "rollout/truncated", "prune/completions_generated")
    ratio("reward/failed_share", "reward/failed", "prune/completions_generated")
    ratio("tokens/generated_per_s", "tokens/generated", "time/rollout_s")
    ratio("tokens/trained_per_s", "tokens/trained", "time/update_s")
    trained = run.columns.get("prune/completions_trained", [])
    for name in _OF_THE_TRAINED:
        values = run.columns.get(name, [])
        run.columns[name] = [v if n else None for v, n in zip(values, trained, strict=False)]
    run.columns["prune/realised_design_effect"] = [
        None if value is None else 1.0 + value for value in run.columns.get("prune/w_cv2", [])
    ]


def _add_trace(run: RunRecord, path: Path) -> None:
    """Add standard errors and percentiles, which need the individual rollouts."""
    if not path.is_file():
        return
    place = {step: index for index, step in enumerate(run.steps)}
    names = ("reward/se", "length/p10", "length/p50", "length/p90")
    columns: dict[str, list[float | None]] = {name: [None] * len(place) for name in names}
    decode = msgspec.json.Decoder(_TraceRow).decode
    with open(path, "rb") as file:
        for line in file:
            try:
                row = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue  # the header, or a damaged line
            at = place.get(row.step)
            if at is None or not row.rewards:
                continue
            columns["reward/se"][at] = standard_error(row.rewards, [1 / p if p else 0.0 for p in row.inclusion_prob])
            lengths = np.array([length for group in row.lengths for length in group] or [0])
            for name, value in zip(names[1:], np.percentile(lengths, (10, 50, 90)).tolist(), strict=True):
                columns[name][at] = value
    run.columns |= columns


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        notes.append(f"{path.name} cannot be read")
        return {}
    return finite(value) if isinstance(value, dict) else {}


def _settings(path: Path, notes: list[str]) -> dict[str, str]:
    if not os.path.lexists(path):
        return {}
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        values = yaml.load(read_text(path), Loader=loader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        notes.append(f"{path.name} cannot be read")
        return {}
    return _flat(values) if isinstance(values, dict) else {}


def read_text(path: Path) -> str:
    """What a file holds. Raises OSError for anything else: on a pipe, reading would block."""
    if not path.is_file():
        raise OSError(f"{path} is not a file")
    return path.read_text(encoding="utf-8")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value, default=str)
    return flat
