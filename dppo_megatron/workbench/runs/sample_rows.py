"""Reads samples/: rows as a run writes them (`observe/samples.py`), or an error that the caller shows as a gap."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dppo_megatron.files import open_to_read
from dppo_megatron.observe.samples import NAME, to_table


def newest_sample_file(directory: Path) -> Path | None:
    """The complete file with the latest step, of the lowest rank that has one; None where there is none."""
    try:
        names = [match for path in directory.iterdir() if (match := NAME.fullmatch(path.name))]
    except OSError:
        return None
    if not names:
        return None
    newest = max(names, key=lambda match: (int(match[2]), -int(match[3]), int(match[1])))
    return directory / newest.string


def read_rows(path: Path, columns: Sequence[str], step: int | None = None) -> list[dict[str, Any]]:
    """Rows of a sample file, of `columns` only.

    Args:
        step: whose rows; None: those of the file's last row group, which are of its last step.

    Raises:
        OSError: there is no such file (any more: the run merges them), or it may not be read.
        ValueError: it is no parquet, or not as a run writes it: another column, type or null.
    """
    try:
        with open_to_read(path) as source, pq.ParquetFile(source) as file:
            groups = range(file.num_row_groups) if step is not None else range(file.num_row_groups)[-1:]
            rows: list[dict[str, Any]] = []
            for index in groups:
                statistics = file.metadata.row_group(index).column(0).statistics
                if step is not None and statistics is not None and not statistics.min <= step <= statistics.max:
                    continue
                table = file.read_row_group(index, columns=list(columns))
                _check_table(table, columns)
                rows += [row for row in table.to_pylist() if step is None or row["step"] == step]
    except OSError:
        raise
    except (pa.ArrowException, ValueError, TypeError, LookupError, OverflowError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    return rows


_NULLABLE = {"extracted", "reward", "completion_prob", "actor_logprobs"}
_NULLABLE |= {"weights_version_first", "weights_version_last"}
_NEVER_NEGATIVE = ("step", "group", "tokens", "token_ids")


def _check_table(table: Any, columns: Sequence[str]) -> None:
    if missing := [name for name in columns if name not in table.schema.names]:
        raise ValueError(f"lacks {', '.join(missing)}")
    schema = to_table(0, []).schema
    for name in columns:
        column, wanted = table.column(name), schema.field(name).type
        is_list = pa.types.is_list(wanted)
        found = column.type.value_type if is_list and pa.types.is_list(column.type) else column.type
        if found != (wanted.value_type if is_list else wanted):
            raise ValueError(f"{name} is of type {column.type}")
        flat = pc.list_flatten(column) if is_list else column
        if (column.null_count and name not in _NULLABLE) or (is_list and flat.null_count):
            raise ValueError(f"{name} holds nulls")
        if name in _NEVER_NEGATIVE and len(flat) and pc.min(flat).as_py() < 0:
            raise ValueError(f"{name} holds negative numbers")
