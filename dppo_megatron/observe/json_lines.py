"""metrics.jsonl and trace.jsonl: one line per step, written atomically, and truncated to the checkpoint on resume.

No line of a finished step is lost. A line that does not fit on a full disk waits in memory. A line that is damaged, or
belongs to a step that is done again, is moved unchanged to `old/` beside the record. What a bounded record moves there
replaces what it moved before, so that it is bounded too. A checkpoint stores a checksum of every line, so that even a
changed digit is detected.

A resume reads the file once, line by line, and parses no line whose checksum is right: 10,000 steps of 512 x 16
rollouts are 1.9 GB. A full bounded record drops its older half, so that each byte is copied once on average.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from dppo_megatron.files import append_to, make_directory, move_into, open_own, open_to_read, replacing

OLD = "old"
"""Directory beside the record for lines and files that are no longer part of it."""

_BLANK = b" \t\r"
_HEADER = -1
"""Stands for the step of a trace's first line, which has none."""
_BLOCK = 1 << 20
"""Bytes read at a time."""
_FORCED_EVERY_S = 1.0
"""Lines that come faster are not forced to the disk one by one: 4 ms each, where a quickstart's step takes 150."""
_STEP = re.compile(rb'\{"step": ([0-9]{1,15})[,}]')


class JsonLines:
    """One JSON object per line. A line is a single write, so that neither a reader nor a kill sees half of it.

    Non-finite numbers become null: NaN and Infinity are not JSON.

    Args:
        sums: CRC-32 of the lines that the file holds, by step.
        max_bytes: bound of the file, which must then begin with a header; 0: none. The newest line always stays.
    """

    def __init__(self, path: Path, sums: Mapping[int, int] | None = None, max_bytes: int = 0) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._file = append_to(path)
        self.waiting: list[bytes] = []
        """Lines that have not been written yet."""
        self._unforced: list[bytes] = []
        """Lines at the end of the file that may not be on the disk yet."""
        self._forced_at, self._forced_size = -math.inf, os.fstat(self._file.fileno()).st_size
        self._has_dropped = False
        self.sums = dict(sums or {})
        """CRC-32 of every line that has a step, written or waiting."""

    def write(self, row: dict[str, Any]) -> list[str]:
        """Append an object; see `flush`. After an OSError the line waits, and is written before the next one."""
        line = _line(row)
        if "step" in row:
            self.sums[row["step"]] = zlib.crc32(line)
        self.waiting.append(line + b"\n")
        return self.flush()

    def flush(self) -> list[str]:
        """Write the waiting lines. A line that was written only in part is removed again before OSError is raised.

        Returns:
            Log lines: the file was full, or was opened again.
        """
        try:
            if os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path)):
                return self._bound(self._write_waiting())
        except OSError:
            pass  # perhaps of a descriptor that a file server's failover has made stale, for ever
        self._reopen()
        return [f"{self._path} was opened again", *self._bound(self._write_waiting())]

    def _write_waiting(self) -> int:
        """Returns the bytes of the last line; 0: none was written."""
        last_size = 0
        while self.waiting:
            rest = memoryview(self.waiting[0])
            end = os.fstat(self._file.fileno()).st_size
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(end)
                raise
            last_size = len(self.waiting[0])
            self._unforced.append(self.waiting.pop(0))
            if time.monotonic() - self._forced_at >= _FORCED_EVERY_S:
                self._force()
        return last_size

    def _force(self) -> None:
        """Force the lines to the disk. NFS reports a full disk or quota only here, and has dropped them: they wait."""
        try:
            os.fsync(self._file.fileno())
        except OSError:
            self.waiting[:0], self._unforced = self._unforced, []
            self._file.truncate(min(self._forced_size, os.fstat(self._file.fileno()).st_size))
            raise
        self._unforced = []
        self._forced_at, self._forced_size = time.monotonic(), os.fstat(self._file.fileno()).st_size

    def _reopen(self) -> None:
        before, self._file = self._file, append_to(self._path)
        with contextlib.suppress(OSError):
            before.close()
        size, unforced = self._file.seek(0, os.SEEK_END), b"".join(self._unforced)
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":  # half a line, which could not be removed
            size += self._file.write(b"\n")
        self._forced_size = max(0, size - len(unforced))
        if os.pread(self._file.fileno(), len(unforced), self._forced_size) != unforced:  # dropped with the descriptor
            self.waiting[:0], self._unforced, self._forced_size = self._unforced, [], size

    def _bound(self, last_size: int) -> list[str]:
        """Drop the older half if the file is too large. `last_size`: bytes of the last line; 0: none was written."""
        size = os.fstat(self._file.fileno()).st_size
        if not (last_size and 0 < self._max_bytes < size):
            return []
        with open_to_read(self._path) as file:
            head = file.readline()
            file.seek(max(len(head), min(size - self._max_bytes // 2, size - last_size)) - 1)
            file.readline()  # to where a line begins
            start, first = file.tell(), _parsed(file.readline())
        if start == len(head) or not first or not _parsed(head):
            return []
        is_first, self._has_dropped = not self._has_dropped, True
        try:
            self._rewrite(_line(msgspec.json.decode(head) | {"dropped_before": first.number}) + b"\n", start)
        except OSError as error:  # no room for the copy; the record itself is unchanged
            self._max_bytes = 0
            return [f"warning: {self._path} cannot be shortened ({error.strerror}), and grows beyond its bound"]
        self.sums = {step: crc for step, crc in self.sums.items() if step >= first.number}
        line = f"{self._path} is full: its older half is dropped, now and whenever it is full again"
        return [line] if is_first else []

    def _rewrite(self, head: bytes, start: int) -> None:
        """Replace the record by `head`, followed by the open file's bytes from `start` on."""
        self._file.seek(start)
        with replacing(self._path, durable=True) as file:
            file.write(head)
            shutil.copyfileobj(self._file, file, _BLOCK)
        self._unforced = []
        self._reopen()

    def sync(self) -> list[str]:
        """As `flush`, and force everything onto the disk. Raises OSError if that fails."""
        lines = self.flush()
        self._force()
        return lines

    def close(self) -> None:
        """After an OSError the lines that may be lost wait."""
        try:
            self._file.close()
        except OSError:
            self.waiting[:0] = self._unforced
            raise


class _Line(msgspec.Struct):
    step: Annotated[int, msgspec.Meta(ge=0)] | msgspec.UnsetType = msgspec.UNSET
    format: str | msgspec.UnsetType = msgspec.UNSET
    dropped_before: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def number(self) -> int:
        return _HEADER if self.step is msgspec.UNSET else self.step


_Part: TypeAlias = tuple[int, int, int]
"""A line's place in the file: its offset, its length without the newline, and the offset of the next line."""


@dataclass
class _Contents:
    kept: dict[int, _Part] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    """CRC-32 of the kept lines, by step."""
    damaged: list[_Part] = field(default_factory=list)
    later: list[_Part] = field(default_factory=list)
    """Lines of steps that are done again."""
    dropped_before: int = 0
    """Lines of earlier steps were dropped because the record was full; they are not missing."""
    size: int = 0

    def missing(self, sums: Mapping[int, int] | None) -> list[int]:
        return sorted(step for step in (sums or {}).keys() - self.kept.keys() if step >= self.dropped_before)


def rewind(
    path: Path,
    last_step: int,
    sums: Mapping[int, int] | None = None,
    header: Mapping[str, Any] | None = None,
    max_bytes: int = 0,
) -> tuple[list[str], dict[int, int]]:
    """Truncate the record at `path` to `last_step`: damaged and later lines are moved to `old/`.

    An incomplete last line, which a kill may leave, is dropped without a message. Good lines are sorted by step.

    Args:
        sums: CRC-32 of the lines when the checkpoint was written, by step; None: unknown. It lacks `last_step` if that
            line waited for an evaluation: any is then good.
        header: first line of a trace that lacks its own, or has no step left under it, whose settings may be older.
        max_bytes: largest size of each file in `old/`; 0: unbounded.

    Returns:
        A log line for everything unusual, and the checksums of the lines that `path` now holds.
    """
    found, messages = _look_through(path, last_step, sums), list[str]()
    for parts, name, what in (
        (found.damaged, "damaged", f"warning: {path}: damaged lines"),
        (found.later, "redone", f"{path}: lines after step {last_step}"),
    ):
        if parts:
            # a kill between a write and `_bound` leaves more than fits
            while max_bytes and len(parts) > 1 and sum(size + 1 for _, size, _ in parts) > max_bytes:
                parts = parts[1:]
            target = path.parent / OLD / f"{path.stem}.{name}{path.suffix}"
            make_directory(target.parent)
            if max_bytes:  # only what the last such start has moved
                target.unlink(missing_ok=True)
            with append_to(target) as file:
                file.writelines(line + b"\n" for line in _lines_at(path, parts))
                os.fsync(file.fileno())  # before they disappear from the record
            messages.append(f"{what} ({len(parts)}) moved to {target}")
    if missing := found.missing(sums):
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        messages.append(f"warning: {path}: the lines of {len(missing)} finished steps are lost ({listed})")
    first, steps = list[bytes](), sorted(found.kept)
    if header is not None and (steps == [_HEADER] or _HEADER not in steps):
        dropped = {"dropped_before": found.dropped_before} if found.dropped_before else {}
        first, steps = [_line({**header, **dropped})], [step for step in steps if step != _HEADER]
    parts = [found.kept[step] for step in steps]
    ends = [0, *(end for _, _, end in parts)]
    if first or any(part != (end, part[1], end + part[1] + 1) for end, part in zip(ends, parts, strict=False)):
        with replacing(path, durable=True) as file:
            file.writelines(line + b"\n" for source in (first, _lines_at(path, parts)) for line in source)
    elif ends[-1] < found.size:
        with open(open_own(path, os.O_RDWR), "r+b") as file:
            file.truncate(ends[-1])
            os.fsync(file.fileno())
    found.sums.pop(_HEADER, None)
    return messages, found.sums


def _look_through(path: Path, last_step: int, sums: Mapping[int, int] | None) -> _Contents:
    """Sort the lines into kept, damaged and later ones. Raises OSError if `path` is a link: damaged lines are copied to
    `old/`, and a link may lead to any file that this user can read."""
    found = _Contents()
    if not os.path.lexists(path):
        return found
    with open(open_own(path, os.O_RDONLY), "rb", buffering=_BLOCK) as file:
        for whole in file:
            start, line = found.size + len(whole) - len(whole.lstrip(_BLANK)), whole.strip(_BLANK + b"\n")
            found.size += len(whole)
            if whole.endswith(b"\n") or _parsed(line) or found.missing(sums):
                _place(found, (start, len(line), found.size), line, last_step, sums)
            # else it is the incomplete last line
    return found


def _place(found: _Contents, part: _Part, line: bytes, last_step: int, sums: Mapping[int, int] | None) -> None:
    crc, match = zlib.crc32(line), _STEP.match(line)
    step = int(match[1]) if match else _HEADER
    if sums is None or step > last_step or sums.get(step) != crc:
        row = _parsed(line)
        if row is None:
            found.damaged.extend([part] if line.strip(_BLANK + b"\0") else [])
            return
        step = row.number
        found.dropped_before = max(found.dropped_before, row.dropped_before)
    if step > last_step:
        found.later.append(part)
    elif (step != _HEADER and sums is not None and sums.get(step, crc if step == last_step else None) != crc) or (
        found.sums.setdefault(step, crc) != crc  # two lines of one step, no checksum to choose by: the first stays
    ):
        found.damaged.append(part)
    else:
        found.kept.setdefault(step, part)


def move_to_old(path: Path, old: Path | None = None) -> Path | None:
    """Move what is no longer part of the record to `old`; returns its new path, None if it does not exist or is empty.

    Args:
        old: the directory; None: `old/` beside `path`.

    Example: metrics.jsonl becomes old/metrics.0001.jsonl, the next one old/metrics.0002.jsonl.
    """
    if not path.exists() or (path.is_file() and not path.stat().st_size):
        return None
    return move_into(old or path.parent / OLD, path, (f"{path.stem}.{n:04d}{path.suffix}" for n in count(1)))


def _parsed(line: bytes) -> _Line | None:
    """None if it is no line of a record."""
    try:
        row = msgspec.json.decode(line.decode(), type=_Line)  # given bytes, msgspec checks no UTF-8 in skipped fields
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if row.step is row.format is msgspec.UNSET else row


def _lines_at(path: Path, parts: Sequence[_Part]) -> Iterator[bytes]:
    if parts:
        with open_to_read(path) as file:
            for start, size, _ in parts:
                file.seek(start)
                yield file.read(size)


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(finite(row), allow_nan=False).encode()


def finite(value: Any) -> Any:
    """`value` with None in place of every NaN and infinity, which JSON cannot express."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
