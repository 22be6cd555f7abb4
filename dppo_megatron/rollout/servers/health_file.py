"""servers.json: the fleet's state of its servers, for `dppo-megatron watch`, which has only files. Decides nothing.

The rollout thread writes it between two rounds of health probes: at once where a state has changed, else every
`_EVERY_S`. A file that cannot be written is ignored: the run's record is on the same disk, and reports that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dppo_megatron.files import open_to_read, write_text

if TYPE_CHECKING:  # a reader needs no torch, which the servers' dialects do
    from dppo_megatron.rollout.servers.member import Endpoint

HEALTH = "servers.json"
_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """One server, or a router in front of some."""

    url: str
    state: str
    """live, stale or out (rollout/servers/member.py)."""
    reason: str
    outages: int
    completions: int
    """In flight there."""
    asleep: bool


class HealthFile:
    """Writes the file of one run.

    Args:
        directory: of the run. One without a run.json is no run's, such as an evaluation's; nothing is written there.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / HEALTH
        self._states: list[str] = []
        self._written = float("-inf")

    def write(self, members: Sequence[Endpoint]) -> None:
        """Write, if there is news or the last time is some seconds ago."""
        now, states = time.monotonic(), [member.condition for member in members]
        if states == self._states and now - self._written < _EVERY_S:
            return
        self._states, self._written = states, now
        servers = [
            asdict(ServerHealth(m.name, m.state, m.reason, m.outages, m.completions, bool(m.asleep))) for m in members
        ]
        with suppress(OSError):
            if (self._path.parent / "run.json").exists():
                write_text(self._path, json.dumps({"at": time.time(), "servers": servers}) + "\n")


def read_health(path: Path) -> tuple[list[ServerHealth], float]:
    """The servers and when they were looked at, in seconds since 1970; none where there is no such file."""
    try:
        with open_to_read(path) as file:
            value = json.loads(file.read())
        return [ServerHealth(**server) for server in value["servers"]], float(value["at"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return [], 0.0
