"""metrics.jsonl and trace.jsonl: one line a step, written atomically, and truncated to the checkpoint on resume.

No line is ever lost. One that does not fit on a full disk waits in memory. One that is damaged, or belongs to a step
that is done again, is moved to `old/` beside the record, whole: two lines whose newline was lost are one damaged line.
A checkpoint stores a checksum of every line up to its step, so that even a changed digit is detected.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from dppo_megatron.files import append_to, make_directory, move_into, open_to_read, replacing

OLD = "old"
"""Directory beside the record for lines and files that are no longer part of it."""

_BLANK = b" \t\r"
_HEADER = -1
"""In place of a step: the first line of a trace."""


class JsonLines:
    """One JSON object a line. A line is one write to the file, so that neither a reader nor a kill sees half of it.

    Non-finite numbers become null: NaN and Infinity are not JSON.

    Args:
        sums: CRC-32 of the lines that the file holds, by step.
    """

    def __init__(self, path: Path, sums: Mapping[int, int] | None = None) -> None:
        self._path = path
        self._file = append_to(path)  # open for the life of the run
        self._waiting: list[bytes] = []
        self.sums = dict(sums or {})
        """CRC-32 of every line that has a step, written or waiting."""

    @property
    def num_waiting(self) -> int:
        """Lines that could not be written so far."""
        return len(self._waiting)

    def write(self, row: dict[str, Any]) -> bool:
        """Append one object; see `flush`. On OSError the line is kept and written before the next one."""
        line = _line(row)
        if "step" in row:
            self.sums[row["step"]] = zlib.crc32(line)
        self._waiting.append(line + b"\n")
        return self.flush()

    def flush(self) -> bool:
        """Write the waiting lines. A line that was written only in part is removed again before OSError is raised.

        Returns:
            Whether the file had been deleted or replaced meanwhile; all of its lines are there again.
        """
        restored = self._restore()
        while self._waiting:
            rest = memoryview(self._waiting[0])
            end = os.fstat(self._file.fileno()).st_size
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(end)
                raise
            del self._waiting[0]
        return restored

    def _restore(self) -> bool:
        """Write the record anew, from the file that is open, if that has lost its name; what has the name is moved."""
        try:
            if os.path.samestat(os.lstat(self._path), os.fstat(self._file.fileno())):
                return False
        except FileNotFoundError:
            pass
        self._file.seek(0)
        lines = self._file.read()
        move_to_old(self._path)
        _write(self._path, lines)
        self._file.close()
        self._file = append_to(self._path)
        return True

    def sync(self) -> bool:
        """Flush everything to the disk. Raises OSError if that fails."""
        restored = self.flush()
        os.fsync(self._file.fileno())
        return restored

    def close(self) -> None:
        self._file.close()


def rewind(path: Path, last_step: int, sums: Mapping[int, int] | None = None) -> tuple[list[str], dict[int, int]]:
    """Truncate the record at `path` to `last_step`: damaged and later lines are moved to `old/`.

    A torn last line is what a kill leaves; it is dropped silently. Good lines that are out of order are sorted.

    Args:
        sums: CRC-32 of the lines as they were when the checkpoint was written, by step; None: unknown.

    Returns:
        A line for the log for everything unusual, and the checksums of what `path` holds now.
    """
    before, kept = _read_own(path), dict[int, bytes]()
    damaged, later = list[bytes](), list[bytes]()

    def place(line: bytes) -> None:
        line = line.strip(_BLANK)
        step = _step_of(line)
        if step is None:
            damaged.extend([line] if line.strip(_BLANK + b"\0") else [])
        elif step > last_step:
            later.append(line)
        elif (step != _HEADER and sums is not None and sums.get(step) != zlib.crc32(line)) or (
            kept.setdefault(step, line) != line  # two lines for one step, and no checksum to choose by: the first stays
        ):
            damaged.append(line)

    *whole, tail = before.split(b"\n")
    for line in whole:
        place(line)
    if _step_of(tail) is not None or (sums or {}).keys() - kept.keys():
        place(tail)  # else it is a torn line, which was never completely written
    after, said = b"".join(kept[step] + b"\n" for step in sorted(kept)), list[str]()
    for lines, name, what in (
        (damaged, "damaged", f"warning: {path}: damaged lines"),
        (later, "redone", f"{path}: lines after step {last_step}"),
    ):
        if lines:
            target = path.parent / OLD / f"{path.stem}.{name}{path.suffix}"
            _append(target, lines)
            said.append(f"{what} ({len(lines)}) moved to {target}")
    if missing := sorted((sums or {}).keys() - kept.keys()):
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        said.append(f"warning: {path}: the lines of {len(missing)} finished steps are lost ({listed})")
    if after != before:
        _write(path, after)
    return said, {step: zlib.crc32(line) for step, line in kept.items() if step != _HEADER}


def move_to_old(path: Path, old: Path | None = None) -> Path | None:
    """Move what is no longer part of the record to `old`; returns its new path, None if there was none.

    Args:
        old: the directory; None: `old/` beside `path`.

    Example: metrics.jsonl becomes old/metrics.0001.jsonl, the next one old/metrics.0002.jsonl.
    """
    if not path.exists() or (path.is_file() and not path.stat().st_size):
        return None
    return move_into(old or path.parent / OLD, path, (f"{path.stem}.{n:04d}{path.suffix}" for n in count(1)))


def put_first(path: Path, header: Mapping[str, Any]) -> None:
    """Write a trace's first line if it is missing."""
    rest = _read_own(path)
    if not rest.startswith(b'{"format"'):
        _write(path, _line(header) + b"\n" + rest)


def _step_of(line: bytes) -> int | None:
    """The step of a line; None if it is no line of a record."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    step = row.get("step")
    if type(step) is int and step >= 0:
        return step
    return _HEADER if "step" not in row and isinstance(row.get("format"), str) else None


def _append(path: Path, lines: list[bytes]) -> None:
    make_directory(path.parent)
    with append_to(path) as file:
        file.write(b"".join(line + b"\n" for line in lines))
        os.fsync(file.fileno())  # before they disappear from the record


def _read_own(path: Path) -> bytes:
    """What the file holds, b"" if there is none. Its damaged lines are copied to `old/`, so a link, which may lead to
    anything that this user can read, is an OSError."""
    if not os.path.lexists(path):
        return b""
    with open_to_read(path) as file:
        return file.read()


def _write(path: Path, data: bytes) -> None:
    with replacing(path, durable=True) as file:
        file.write(data)


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(finite(row), allow_nan=False).encode()


def finite(value: Any) -> Any:
    """`value` with None for every number in it that JSON has no form for: NaN and the infinities."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
