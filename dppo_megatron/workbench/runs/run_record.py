"""A run's files as far as they can be read, whether it has finished, is running or has crashed.

Damaged lines are skipped and counted, and a missing file leaves its part empty: a person wants to see whatever there
is. Code that computes figures refuses a record with such `notes` (`compare/arms.py`).

metrics.jsonl is followed: each look reads only what was added since the last one. A run of 10,000 steps has some 30 MB,
and reading them every two seconds would keep a core busy beside the trainer. A record that became shorter or was
replaced (a resume truncates it) is read again from its start.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from dppo_megatron.config.changes import flat
from dppo_megatron.config.load import config_values
from dppo_megatron.config.schema import Config
from dppo_megatron.evaluation.eval_samples import FOLLOWED
from dppo_megatron.files import open_to_read
from dppo_megatron.observe.json_lines import finite
from dppo_megatron.observe.lock import FILE as LOCK
from dppo_megatron.types import UserError

_LARGEST = 1e308
"""Numbers from here on are shown as missing."""
_HEARTBEAT_S = 60.0
"""A lock file older than this is a crashed trainer's: a live one touches it every five seconds."""
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_RATIOS = (
    ("rollout/truncated_share", "rollout/truncated_count", "prune/completions_generated"),
    ("reward/failed_share", "reward/failed_count", "prune/completions_generated"),
    ("tokens/generated_per_s", "tokens/generated", "time/rollout_s"),
    ("tokens/trained_per_s", "tokens/trained", "time/update_s"),
)
"""Figures that are computed from two others if the record does not have them."""
_TRAINED_METRICS = (
    "mismatch/logprob_abs_diff_mean", "pack/fill", "pack/imbalance", "pack/largest_over_mean", "pack/padding",
    "prune/weight_max",
    "train/clip_fraction", "train/entropy", "train/loss", "train/ratio",
)  # fmt: skip
"""Metrics of trained completions: 0 in a step without any (padding: 1), which is shown as missing. In newer runs some
are null there, and entropy has a value, as it is of all that was rolled out."""
_PARTS = ("label", "kept", "bias")
_NUMBER = re.compile(r"\d[\d.e+-]*")
_SIZE = re.compile(r"(; )?bias about \d[\d.e+-]* %$")


class NoStep(UserError):
    """A run before its first evaluation and step."""


@dataclass
class RunRecord:
    """One run, as columns over its steps."""

    name: str
    path: Path
    status: str = ""
    """finished, running, crashed (it ended without releasing its lock) or stopped."""
    steps: list[int] = field(default_factory=list)
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    """Metric -> its value in each of `steps`; None where it was not a number."""
    ledger: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the bias ledger: name, notes, and in each step its label, kept fraction and estimated bias."""
    solved: dict[int, Any] = field(default_factory=dict)
    """Step of an evaluation -> `eval/problems` as it was read."""
    summary: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    """Dotted key -> value, as JSON."""
    notes: list[str] = field(default_factory=list)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the line of a later step."""
        self.steps.append(row["step"])
        for series in [*self.columns.values(), *(one[part] for one in self.ledger for part in _PARTS)]:
            series.append(None)
        for key, value in _figures(row).items():
            if key not in self.columns:
                self.columns[key] = [None] * len(self.steps)
            self.columns[key][-1] = value
        if "eval/problems" in row:
            self.solved[row["step"]] = row["eval/problems"]
        entries = row.get("prune/ledger")
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("name"), str):
                self._add_entry(entry)

    def add_scores(self, step: Any, metrics: Any) -> None:
        """Add what `eval --follow` has measured of a step, where the run did not evaluate itself."""
        if step not in self.steps or not isinstance(metrics, dict):
            return
        at = self.steps.index(step)
        for key, value in metrics.items():
            series = self.columns.setdefault(key, [None] * len(self.steps))
            series[at] = finite_number(value) if series[at] is None else series[at]

    def _add_entry(self, entry: Mapping[str, Any]) -> None:
        one = next((one for one in self.ledger if one["name"] == entry["name"]), None)
        if one is None:
            one = {"name": entry["name"], "notes": []} | {part: [None] * len(self.steps) for part in _PARTS}
            self.ledger.append(one)
        label, note = entry.get("label"), entry.get("note")
        one["label"][-1] = label if isinstance(label, str) else None
        one["kept"][-1] = finite_number(entry.get("kept_fraction"))
        one["bias"][-1] = finite_number(entry.get("bias_estimate"))
        note = _SIZE.sub("", note) if isinstance(note, str) else note  # the estimate is shown as a mean over steps
        known = [_NUMBER.sub("", other) for other in one["notes"]]  # the same note of another step has other numbers
        if note and isinstance(note, str):
            if (shape := _NUMBER.sub("", note)) in known:
                one["notes"][known.index(shape)] = note  # the newest step's
            elif len(known) < 3:
                one["notes"].append(note)

    def setting(self, key: str, default: Any) -> Any:
        """The value of a setting; `default` where it is null or not known."""
        value = json.loads(self.settings.get(key, "null"))
        return default if value is None else value


class Follow:
    """Reads one run's metrics while they grow. Raises UserError: no such directory, or nothing of a run in it."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise UserError(f"'{path}' is no directory; name the run_dir of a run")
        if not any((path / name).exists() for name in ("metrics.jsonl", "run.json")):
            raise UserError(f"'{path}' holds neither run.json nor metrics.jsonl; name the run_dir of a run")
        self._path = path
        self._decode = msgspec.json.Decoder().decode
        self._heartbeat: list[float] = []
        self._followed: dict[Path, dict[str, Any]] = {}
        """results.json of the steps that `eval --follow` has evaluated."""
        self._begin()

    def _begin(self) -> None:
        self.record = RunRecord(self._path.resolve().name, self._path)
        self._read_to, self._file_id, self._rest = 0, 0, b""
        self._damaged = 0

    def look(self, *, to_the_end: bool = False) -> RunRecord:
        """Read what is new; returns the same record, longer. `to_the_end`: the last line counts even without its
        newline, since nothing is being added."""
        try:
            with open_to_read(self._path / "metrics.jsonl") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._file_id or status.st_size < self._read_to:
                    self._begin()
                    self._file_id = status.st_ino
                file.seek(self._read_to)
                added = file.read()
                self._read_to += len(added)
                *lines, self._rest = (self._rest + added).split(b"\n")
                self._damaged += sum(not self._take(line) for line in lines)
        except OSError as error:  # most often the run is starting, or a file system hangs: what is known is shown
            if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP):
                raise UserError(f"'{self._path / 'metrics.jsonl'}' cannot be read: {error.strerror}") from None
        if to_the_end:
            self._take(self._rest)  # if it is no whole line, a kill has truncated it, which is not counted as damage
        self._add_followed()
        self.record.status = run_status(self._path, self._heartbeat)
        self.record.notes = [f"metrics.jsonl: {self._damaged} damaged lines are left out"] if self._damaged else []
        return self.record

    def _add_followed(self) -> None:
        """Add the scores of this run from `eval --follow`; an earlier run in this directory may have left some too."""
        run = _json(self._path / "run.json", []).get("run")
        for path in sorted((self._path / FOLLOWED).glob("step_*/results.json")):
            results = self._followed.setdefault(path, {}) or _json(path, [])
            self._followed[path] = results  # a file is written once, whole
            about = results.get("about")
            if isinstance(about, dict) and about.get("run") == run:
                self.record.add_scores(results.get("step"), results.get("metrics"))

    def _take(self, line: bytes) -> bool:
        """Add a line; False if it is no step's, or not after the others': a run writes one line a step, in order."""
        try:
            row = self._decode(line)
        except _UNREADABLE:
            return False
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) is not int or not (self.record.steps or [-1])[-1] < step < 2**53:
            return False
        self.record.add(row)
        return True


def read_run(path: Path) -> RunRecord:
    """All that the report shows. Raises UserError: no directory, or one without a metrics.jsonl that has a step."""
    run = read_metrics(path)
    run.settings = read_settings(path / "config.yaml", run.notes)
    if run.setting("rollout.async_steps", 0) and not run.setting("rollout.servers.colocate", False):
        # it generates during the whole step, and the rollout's seconds are only the wait at its end
        none = [None] * len(run.steps)
        tokens, seconds = (run.columns.get(name, none) for name in ("tokens/generated", "time/step_s"))
        run.columns["tokens/generated_per_s"] = list(map(_quotient, tokens, seconds))
    return run


def read_metrics(path: Path) -> RunRecord:
    """metrics.jsonl and summary.json alone. Raises UserError as `read_run`."""
    if path.is_dir() and not (path / "metrics.jsonl").is_file():
        raise UserError(f"'{path}' holds no metrics.jsonl; name the run_dir of a run")
    run = Follow(path).look(to_the_end=True)
    if not run.steps:
        raise NoStep(f"'{path}/metrics.jsonl' holds no step yet")
    run.summary = _json(path / "summary.json", run.notes)
    return run


def finite_number(value: Any) -> float | None:
    """`value` if it is a number that a float can hold; JSON's integers may have any number of digits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        return None
    return value


def run_status(path: Path, seen: list[float] | None = None) -> str:
    """finished, running, crashed or stopped, as the files say.

    Args:
        seen: date of the last heartbeat and when it was seen, from the last call. The date decides only in a first
            look: the clock of the trainer's machine may differ, so later any change is a sign of life.
    """
    seen, now = [] if seen is None else seen, time.monotonic()
    try:
        beat = (path / LOCK).stat().st_mtime
    except FileNotFoundError:
        return "finished" if (path / "summary.json").exists() else "stopped"
    except PermissionError:
        raise
    except OSError:
        return "running"  # a file server that fails over says nothing about the run
    if seen[:1] != [beat]:
        seen[:] = beat, now if seen else now + beat - time.time()
    return "running" if now - seen[1] < _HEARTBEAT_S else "crashed"


def read_settings(path: Path, notes: list[str]) -> dict[str, str]:
    """Dotted key -> value, as JSON, of a config.yaml; empty if there is none. `notes` gets a line if it is damaged."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return _as_json(_mapping(path, lambda text: yaml.load(text, Loader=loader), notes))


def default_settings() -> dict[str, str]:
    """Dotted key -> default, as JSON."""
    return _as_json(config_values(Config()))


def _figures(row: Mapping[str, Any]) -> dict[str, float | None]:
    """A step's numbers, including those that are computed from others."""
    values = {
        key: finite_number(value) for key, value in row.items() if key != "step" and not isinstance(value, list | dict)
    }
    for name, above, below in _RATIOS:
        values.setdefault(name, _quotient(row.get(above), row.get(below)))
    if not finite_number(row.get("prune/completions_trained")):
        values |= {key: None if key.startswith("pack/") else values.get(key) or None for key in _TRAINED_METRICS}
    return values


def _quotient(above: Any, below: Any) -> float | None:
    a, b = finite_number(above), finite_number(below)
    return finite_number(a / b) if a is not None and b else None


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = finite(_mapping(path, json.loads, notes))
    return values


def _mapping(path: Path, parse: Callable[[str], Any], notes: list[str]) -> dict[str, Any]:
    """The mapping in a file; empty if there is no file, or it holds something else."""
    if not os.path.lexists(path):
        return {}
    try:
        with open_to_read(path) as file:
            value = parse(file.read().decode())
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        notes.append(f"{path.name} cannot be read")
        return {}
    return value if isinstance(value, dict) else {}


def _as_json(values: dict[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value, default=str) for key, value in flat(values).items()}
