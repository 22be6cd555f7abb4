"""Follows a run's record while it grows: each look reads what was added since the last one.

A run of 10,000 steps has a metrics.jsonl of some 30 MB. Read again every two seconds it would keep a core busy beside
the trainer; followed, a look costs one `stat` and the new lines. Only the metrics that are shown are kept. A record
that became shorter or was replaced (a resume truncates it) is read again from its start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dppo_megatron.types import UserError
from dppo_megatron.workbench.report.read import RunRecord, finite_number, ledger_of, run_status, step_of

SHOWN = (
    "reward/mean", "reward/failed", "rollout/completion_tokens_mean", "rollout/truncated",
    "train/grad_norm", "train/entropy", "train/skipped_updates", "mismatch/logprob_abs_diff_mean",
    "prune/prompts_considered", "prune/prompts_generated", "prune/completions_generated", "prune/completions_trained",
    "prune/ess_share", "prune/w_cv2", "pack/fill", "tokens/generated", "tokens/trained", "rollout/servers_live",
)  # fmt: skip
"""Metrics that are kept beside those under time/ and eval/."""
_CHUNK_BYTES = 1 << 20
_OF_THE_TRAINED = ("mismatch/logprob_abs_diff_mean", "prune/ess_share", "prune/w_cv2", "pack/fill", "train/entropy")


class Follow:
    """One run, as far as it has got.

    Args:
        path: the run directory.

    Raises:
        UserError: no such directory, or nothing of a run in it.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise UserError(f"'{path}' is no directory; name the run_dir of a run")
        if not any((path / name).exists() for name in ("metrics.jsonl", "run.json")):
            raise UserError(f"'{path}' holds neither run.json nor metrics.jsonl; name the run_dir of a run")
        self._path = path
        self._decode = msgspec.json.Decoder().decode
        self._begin()

    def _begin(self) -> None:
        self.record = RunRecord(self._path.resolve().name, self._path, "")
        self._read_to, self._file_id, self._rest = 0, 0, b""
        self._damaged = 0

    def look(self) -> RunRecord:
        """Read what is new; returns the same record, longer."""
        try:
            with open(self._path / "metrics.jsonl", "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file_id or found.st_size < self._read_to:
                    self._begin()
                    self._file_id = found.st_ino
                file.seek(self._read_to)
                while added := file.read(_CHUNK_BYTES):
                    self._read_to += len(added)
                    *lines, self._rest = (self._rest + added).split(b"\n")
                    for line in lines:
                        self._take(line)
        except FileNotFoundError:
            pass  # the run is starting
        except PermissionError:
            raise UserError(f"'{self._path / 'metrics.jsonl'}' may not be read by you") from None
        except OSError:
            pass  # a file system that hangs: what is known is shown, with its age
        self.record.status = run_status(self._path)
        self.record.notes = [f"metrics.jsonl: {self._damaged} damaged lines are left out"] if self._damaged else []
        return self.record

    def _take(self, line: bytes) -> None:
        try:
            row = self._decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            row = None
        step = step_of(row)
        if step is None:
            self._damaged += 1
        elif not self.record.steps or step > self.record.steps[-1]:
            self._append(row)

    def _append(self, row: Mapping[str, Any]) -> None:
        record = self.record
        before = len(record.steps)
        record.steps.append(row["step"])
        values = {key: row.get(key) for key in SHOWN}
        values |= {key: value for key, value in row.items() if key.startswith(("time/", "eval/"))}
        if not values["prune/completions_trained"]:
            values |= dict.fromkeys(_OF_THE_TRAINED)
        generated = finite_number(values["prune/completions_generated"])
        truncated = finite_number(values["rollout/truncated"])
        values["rollout/truncated_share"] = truncated / generated if generated and truncated is not None else None
        for key in values.keys() | record.columns.keys():
            record.columns.setdefault(key, [None] * before).append(finite_number(values.get(key)))
        self._append_ledger(ledger_of(row), before)

    def _append_ledger(self, entries: list[dict[str, Any]], before: int) -> None:
        known = {one["name"]: one for one in self.record.ledger}
        now = {one["name"]: one for one in entries}
        for name in now:
            if name not in known:
                known[name] = {"name": name, "notes": [], "label": [None] * before, "kept": [None] * before}
                self.record.ledger.append(known[name])
        for name, one in known.items():
            entry = now.get(name, {})
            one["label"].append(entry.get("label"))
            one["kept"].append(entry.get("kept"))
            if entry.get("note") and not one["notes"]:
                one["notes"].append(entry["note"])
