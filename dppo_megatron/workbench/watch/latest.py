"""What the picture needs beside the metrics: samples of the last step, health of the servers, settings."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dppo_megatron.observe.samples import SAMPLES
from dppo_megatron.rollout.servers.health_file import HEALTH, ServerHealth, read_health
from dppo_megatron.workbench.runs.record import Follow, RunRecord, read_settings
from dppo_megatron.workbench.runs.samples import newest_sample_file, read_rows

_COLUMNS = ("step", "group", "prompt", "text", "reward", "kept", "why", "tokens", "weight", "extracted")


@dataclass
class Sampled:
    """One group of the newest step with samples."""

    step: int = 0
    prompt: str = ""
    members: list[dict[str, Any]] = field(default_factory=list)


class Latest:
    """A run as it is now; files are read only when they have changed. Raises UserError as `Follow`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._follow = Follow(path)
        self.samples = Sampled()
        self._sample_file: Path | None = None

    @property
    def record(self) -> RunRecord:
        return self._follow.record

    def look(self) -> RunRecord:
        record = self._follow.look()
        if not record.settings:
            record.settings = read_settings(self._path / "config.yaml", [])
        newest = newest_sample_file(self._path / SAMPLES)
        if newest is not None and newest != self._sample_file and (read := _read_samples(newest)) is not None:
            self.samples, self._sample_file = read, newest
        return record

    def servers(self) -> tuple[list[ServerHealth], float]:
        """The run's servers, and how many seconds ago they were looked at."""
        servers, at = read_health(self._path / HEALTH)
        return servers, max(0.0, time.time() - at)

    def idle_s(self) -> float | None:
        """Seconds since the last line of the record."""
        try:
            return max(0.0, time.time() - (self._path / "metrics.jsonl").stat().st_mtime)
        except OSError:
            return None


def _read_samples(path: Path) -> Sampled | None:
    """The group of the file's last step whose rewards differ most, the first of equals.

    None if the file cannot be read: it may be merged into another one at this moment.
    """
    try:
        rows = read_rows(path, _COLUMNS)
    except (OSError, ValueError):
        return None
    if not rows:
        return None
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    chosen = max(groups.values(), key=_spread)
    return Sampled(chosen[0]["step"], chosen[0]["prompt"] or "", chosen)


def _spread(group: list[dict[str, Any]]) -> float:
    rewards = [row["reward"] for row in group if row["reward"] is not None and math.isfinite(row["reward"])]
    return statistics.pvariance(rewards) if rewards else 0.0
