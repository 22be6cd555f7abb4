"""A known set, downloaded into files that need no field settings."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dppo_megatron.data.known import KNOWN_SETS, KnownSet, our_row
from dppo_megatron.files import replacing
from dppo_megatron.types import UserError, Watch, counted, unwatched


def write_known_set(
    name: str, out: Path, *, origin: str = "", overwrite: bool = False, watch: Watch = unwatched
) -> Iterator[str]:
    """Write the set's files into `out`; yields a line for each, with what was left out.

    All files of a set are read before one is written, each appears complete or not at all, and one that is there stays
    unless `overwrite` is given.

    Raises:
        UserError: no such set, no network, another layout than expected, or a file is there.
    """
    known = KNOWN_SETS.get(name)
    if known is None:
        near = difflib.get_close_matches(name, KNOWN_SETS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(KNOWN_SETS)}"
        raise UserError(f"no set is called '{name}'; {hint}")
    files = {part: out / f"{part}.jsonl" for part in known.splits}
    for path in files.values():
        if path.exists() and not overwrite:
            raise UserError(f"{path} is there already; give --overwrite to replace it, or another --out")
    if origin and not Path(origin).is_dir():
        raise UserError(f"--from {origin}: no such directory")
    parts: dict[str, _Part] = {}
    for part, split in known.splits.items():
        with watch(f"reading {origin or known.hub} ({split})", 0, "rows") as advance:
            parts[part] = _Part(counted(_rows(known, origin, split), advance), known, name)
    for part, split in known.splits.items():
        if not parts[part].rows:
            raise UserError(f"{origin or known.hub} ({split}): no row has the fields of this set; nothing was written")
    for part, path in files.items():
        rows = parts[part].rows
        with watch(f"writing {path}", len(rows), "rows") as advance:
            _write(path, counted(rows, advance))
        yield f"{path}: {len(rows)} problems{parts[part].left_out()}"


class _Part:
    """One split in our layout."""

    def __init__(self, rows: Iterable[dict[str, Any]], known: KnownSet, name: str) -> None:
        self.rows: list[dict[str, Any]] = []
        self._repeated = self._incomplete = self._contradicting = 0
        answers: dict[str, str] = {}
        for values in rows:
            row = our_row(values, known, name)
            if not row["problem"] or not row["answer"]:
                self._incomplete += 1
            elif known.deduplicate and row["problem"] in answers:
                self._repeated += 1
                self._contradicting += answers[row["problem"]] != row["answer"]
            else:
                answers[row["problem"]] = row["answer"]
                self.rows.append(row)

    def left_out(self) -> str:
        """A message about the rows of the split that were not written."""
        said = []
        if self._incomplete:
            said.append(f"{self._incomplete} without a problem or an answer")
        if self._repeated:
            said.append(f"{self._repeated} repetitions of a problem")
        if self._contradicting:
            said.append(f"{self._contradicting} of those with another answer than the first")
        return f" (left out: {', '.join(said)})" if said else ""


def _rows(known: KnownSet, origin: str, split: str) -> Iterator[dict[str, Any]]:
    # imported late: --help must not need tensor libraries
    from dppo_megatron.data.hub import read_directory, read_hub

    subset, hub = known.subset, f"hub:{known.hub}"
    for row in read_directory(origin, subset, split) if origin else read_hub(hub, subset, split):
        yield row.values


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be made: {error.strerror or error}") from None
    try:
        with replacing(path, durable=True) as file:
            file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
