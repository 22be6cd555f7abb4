"""samples/ of a run, as the report and `watch` read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dppo_megatron.files import open_to_read
from dppo_megatron.observe.samples import NAME, to_table
from dppo_megatron.texts import one_line

LEGEND = "■ trained on, □ pruned; green: right, red: grading failed"
"""Legend of the squares that stand for completions, in the report and in `watch`."""
_SCHEMA = to_table(0, []).schema
COLUMNS: list[str] = _SCHEMA.names
_NULLABLE = {"extracted", "reward", "correct", "completion_prob", "actor_logprobs"}
_NULLABLE |= {"weights_version_first", "weights_version_last"}
_LONGEST_PROMPT = 100_000
_INSTRUCTION = 30
"""If all prompts share so many characters at the start, these are taken for an instruction, not a question."""


def newest_sample_file(directory: Path) -> tuple[Path, int] | None:
    """The complete file with the latest step, of the lowest rank that has one, and that step; None without any."""
    names = [match for path in directory.glob("steps_*") if (match := NAME.fullmatch(path.name))]
    newest = max(names, key=lambda match: (int(match[2]), -int(match[3]), int(match[1])), default=None)
    return (directory / newest.string, int(newest[2])) if newest else None


def read_rows(path: Path, columns: Sequence[str], step: int) -> list[dict[str, Any]]:
    """Rows of a step in a sample file, of `columns` only.

    Raises:
        OSError: there is no such file (any more: the run merges them), or it may not be read.
        ValueError: it is no parquet, or a column is missing or has another type or nulls.
    """
    rows: list[dict[str, Any]] = _table(path, columns, step).to_pylist()
    return rows


def steps_of(path: Path) -> list[int]:
    """The steps whose rows a sample file holds: a merged one has only few of those from its first to its last. Raises
    as `read_rows`."""
    return sorted(_table(path, ["step"], None).column("step").unique().to_pylist())


def _table(path: Path, columns: Sequence[str], step: int | None) -> pa.Table:
    """The rows of a step; None: of all. Without Arrow's threads: with them, a process that ends right after can abort
    ("terminate called without an active exception": `watch`, once, on a busy machine)."""
    try:
        with open_to_read(path) as source, pq.ParquetFile(source, pre_buffer=False) as file:
            kinds = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
            if wrong := next((name for name in columns if kinds.get(name) != _SCHEMA.field(name).type), ""):
                raise ValueError(f"{wrong} is of type {kinds[wrong]}" if wrong in kinds else f"{wrong} is missing")
            groups = [at for at in range(file.num_row_groups) if _may_hold(file.metadata.row_group(at), step)]
            table = file.read_row_groups(groups, columns=list({*columns, "step"}), use_threads=False)
            if step is not None:
                table = table.filter(pa.array(table.column("step").to_numpy() == step))
            if unknown := [name for name in columns if name not in _NULLABLE and table.column(name).null_count]:
                raise ValueError(f"{unknown[0]} holds nulls")
            return table.select(columns)
    except (pa.ArrowException, ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path.name}: {error}") from None


def _may_hold(group: Any, step: int | None) -> bool:
    """Whether a row group may have rows of a step, by its statistics."""
    columns = map(group.column, range(group.num_columns))
    known = next((one.statistics for one in columns if one.path_in_schema == "step"), None)
    return step is None or known is None or not known.has_min_max or bool(known.min <= step <= known.max)


def titles(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each of a run's prompts: its `problem` in samples/, without a long instruction that all of them
    begin with."""
    problems = [one_line(row["problem"], _LONGEST_PROMPT) for row in rows]
    low, high = min(problems, default=""), max(problems, default="")  # all others begin with what these two share
    differs = next((at for at, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), 0)
    shared = low.rfind(" ", 0, differs)
    return [f"...{one[shared:]}" if shared >= _INSTRUCTION else one for one in problems]
