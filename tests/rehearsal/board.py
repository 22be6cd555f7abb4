"""What each rank of a job on one machine is waiting for, in memory that all of them map; and who can never go on.

A rank writes its own row only. It says what it waits for while it waits, counts what it has begun, and lists the
communicators that it has come to. From that any rank can tell without a clock whether another one will still come:

    a rank that waits for nothing goes on
    a rank that waits goes on if all that it needs have come already, or go on
    nobody else does
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

import numpy as np

GROUPS = 2048
_BYTES = 4096


@dataclass(frozen=True)
class Wait:
    """What a rank is in.

    `together`: call number `count` of a group, which needs `needs`. `arrival`: of the `count`-th message in a group
    from the one in `needs`. `departure`: of that to it. `communicator`: of all of `needs` at the communicator `key`.
    `end`: the rank has finished or failed.
    """

    kind: Literal["together", "arrival", "departure", "communicator", "end"]
    what: str
    """For a person: the call, its group and its line."""
    needs: tuple[int, ...] = ()
    group: int = 0
    count: int = 0
    key: str = ""


class Board:
    """A row for each rank of `world_size` in a sparse file."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        text = np.dtype([("version", "u8"), ("length", "u4"), ("text", f"V{_BYTES}")])
        pairs = (GROUPS, world_size)
        rows = np.dtype(
            [("wait", text), ("come", text), ("begun", "u4", GROUPS), ("sent", "u4", pairs), ("received", "u4", pairs)]
        )
        self._rows = np.asarray(np.memmap(path, rows, "r+", shape=world_size))  # a memmap is slow to index
        self._rank, self._world_size = rank, world_size
        self._come: list[str] = []

    @staticmethod
    def create(path: Path, world_size: int) -> None:
        """An empty file of the right size; it takes room where it is written."""
        with path.open("wb") as file:
            file.truncate(world_size * (2 * (_BYTES + 12) + 4 * GROUPS * (1 + 2 * world_size)))

    def begin(self, group: int) -> int:
        """Count one collective call of ours; its number."""
        self._rows["begun"][self._rank, group] += 1
        return int(self._rows["begun"][self._rank, group])

    def message(self, group: int, peer: int, *, sent: bool) -> int:
        """Count one message of ours; its number."""
        counts = self._rows["sent" if sent else "received"]
        counts[self._rank, group, peer] += 1
        return int(counts[self._rank, group, peer])

    def come_to(self, key: str) -> None:
        """This rank is at the first call of communicator `key`, for good."""
        self._come.append(key)
        self._write("come", self._come)

    def wait(self, what: Wait | None) -> None:
        """This rank waits for `what` from now on; None: for nothing."""
        self._write("wait", None if what is None else vars(what))

    def have_come(self, key: str, members: Sequence[int]) -> list[int]:
        """Those of `members` that are or have been at the first call of `key`."""
        return [rank for rank in members if key in (self._read("come", rank)[1] or ())]

    def stuck(self) -> Mapping[int, Wait] | None:
        """What all ranks wait for, if this one can never go on; None if it may, or if that cannot be told now."""
        before = [self._read("wait", rank) for rank in range(self._world_size)]
        waits = {rank: Wait(**value) for rank, (_, value) in enumerate(before) if value is not None}
        going = set(range(self._world_size)) - set(waits)
        while more := {rank for rank in waits if rank not in going and self._goes_on(rank, waits[rank], going)}:
            going |= more
        same = [version for version, _ in before] == [self._read("wait", r)[0] for r in range(self._world_size)]
        return waits if same and self._rank not in going else None

    def _goes_on(self, rank: int, wait: Wait, going: set[int]) -> bool:
        if wait.kind == "end":
            return False
        return all(other in going or self._is_there(rank, wait, other) for other in wait.needs if other != rank)

    def _is_there(self, rank: int, wait: Wait, other: int) -> bool:
        row = self._rows[other]
        if wait.kind == "together":
            return bool(row["begun"][wait.group] >= wait.count)
        if wait.kind == "arrival":
            return bool(row["sent"][wait.group, rank] >= wait.count)
        if wait.kind == "departure":
            return bool(row["received"][wait.group, rank] >= wait.count)
        return bool(self.have_come(wait.key, [other]))

    def _write(self, field: str, value: object) -> None:
        """Odd versions are being written."""
        cell = self._rows[field][self._rank : self._rank + 1]
        data = json.dumps(value).encode()
        assert len(data) <= _BYTES, data
        cell["version"] += 1
        cell.view("u1")[12 : 12 + len(data)] = np.frombuffer(data, "u1")
        cell["length"] = len(data)
        cell["version"] += 1

    def _read(self, field: str, rank: int) -> tuple[int, object]:
        cell = self._rows[field][rank : rank + 1]
        while True:
            version, length = int(cell["version"][0]), int(cell["length"][0])
            data = cell.view("u1")[12 : 12 + length].tobytes()
            if version % 2 == 0 and version == int(cell["version"][0]):
                return version, json.loads(data) if version else None


def number_of(group_name: str) -> int:
    """A group's column. torch numbers groups alike on all ranks; the few that it names by a hash share the rest."""
    if group_name.isdecimal() and int(group_name) < GROUPS // 2:
        return int(group_name)
    return GROUPS // 2 + crc32(group_name.encode()) % (GROUPS // 2)
