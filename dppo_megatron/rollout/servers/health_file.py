"""servers.json: the states of a run's servers, for `dppo-megatron watch`, which reads only files. Nothing else uses it.

It is written between two rounds of health probes, and while a weight sync waits for servers: at once if a state has
changed, else every `_EVERY_S`.
A failure to write it is ignored: the run's record is on the same disk, and its writer reports the failure.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dppo_megatron.files import open_to_read, write_text

if TYPE_CHECKING:  # readers of the file start without torch, which member.py imports
    from dppo_megatron.rollout.servers.member import Member

HEALTH = "servers.json"
_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """One server."""

    url: str
    state: str
    """live, stale or out (rollout/servers/member.py)."""
    reason: str
    outages: int
    completions: int
    """Completions in flight."""
    asleep: bool


class HealthFile:
    """Writes the file of a run in `directory`, unless that has no run.json, as that of an evaluation."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / HEALTH
        self._states: list[str] = []
        self._written = float("-inf")
        self._lock = threading.Lock()
        """Rollouts and a weight sync may go on at the same time, and both threads would write the same new file."""

    def write(self, members: Sequence[Member]) -> None:
        """Write if a state has changed, or `_EVERY_S` after the last time."""
        with self._lock, suppress(OSError):
            now, states = time.monotonic(), [member.condition for member in members]
            if states == self._states and now - self._written < _EVERY_S:
                return
            self._states, self._written = states, now
            servers = [
                asdict(ServerHealth(m.name, m.state, m.reason, m.outages, m.completions, bool(m.asleep)))
                for m in members
            ]
            if (self._path.parent / "run.json").exists():
                write_text(self._path, json.dumps({"at": time.time(), "servers": servers}) + "\n")


def read_health(path: Path) -> tuple[list[ServerHealth], float]:
    """The servers, and when the file was written, in seconds since 1970; ([], 0.0) without a valid file."""
    try:
        with open_to_read(path) as file:
            value = json.loads(file.read())
        return [ServerHealth(**server) for server in value["servers"]], float(value["at"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return [], 0.0
