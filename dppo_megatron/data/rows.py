"""Reads problem sets of any format into rows: files, directories and the hub (through the `datasets` library).

Files may hold anything: text in another encoding, numbers of 10,000 digits, objects nested a thousand deep, half a
download. Every error of a parser becomes a `UserError` of one line here, with the line number if known, so that the
rest of `data/` sees only plain Python values. JSON is parsed by the standard library and not by a faster one because
its hooks give the exact text of a number, with which graders compare.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import resource
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from dppo_megatron.config.paths import distinct_keys, json_reason
from dppo_megatron.texts import reason
from dppo_megatron.types import UserError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONGEST_LINE = 64 * 2**20
"""Most bytes of a line. A problem has thousands; a longer line means that this is another kind of file."""
_MOST_UNPACKED = 300
"""Largest ratio of unpacked to compressed size: that of rows is 3 to 75, that of nothing but zeros 230 to 1,030."""
_SMALL = 2**23
"""Bytes that a gzip file may unpack to whatever that ratio."""
_MOST_REPEATED = 2**28
"""Bytes that a table may unpack to whatever that ratio: a system prompt repeated in 10,000 rows is stored once."""
_MOST_GROWN = 2**30
"""Most memory, in bytes, that reading a few hundred rows may take."""
_NAME = re.compile(r"(?P<name>(?:[\w.-]+/)?[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_OLDEST = 4
"""Oldest version of `datasets`. Earlier ones run scripts of a repository."""
_ROWS_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a problem file."""

    origin: str
    """`path:line` or `path[row]` (from 0), for messages."""
    values: dict[str, Any]


class JsonFloat(float):
    """A float that the file spells differently than Python: 0.50, 1e22. Pickled, for graders, it is a plain float."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def parse(cls, text: str) -> float:
        """A plain float if Python spells it as `text`, because a JsonFloat takes four times the memory."""
        value = float(text)
        return value if repr(value) == text else cls(text)

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


def read_rows(path: str, subset: str, split: str) -> Iterator[Row]:
    """The rows of `hub:owner/name`, of a directory that `datasets` can load, or of a file. Raises UserError if it is
    none of these or cannot be read."""
    if path.startswith("hub:") or Path(path).is_dir():
        return _of_library(path, subset, split)
    return read_file(path)


def read_file(path: str) -> Iterator[Row]:
    """The rows of a .jsonl, .json, .csv, .tsv or .parquet file; text formats also with .gz at the end. Raises UserError
    if the name has none of these suffixes, or the content is of another format."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    kind = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else (suffixes or [""])[-1]
    reader = _READERS.get(kind)
    if reader is None or (suffixes[-1] == ".gz" and kind == ".parquet"):
        raise UserError(
            f"{path}: unknown kind of file; its name must end in {', '.join(_READERS)} (text also with .gz)"
        )
    try:
        yield from reader(path)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path}: damaged gzip file: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or reason(error)}") from None


def _table_rows(table: Any, origin: str, first: int) -> Iterator[Row]:
    """The rows of a pyarrow table. `first`: index of its first row in the file or set."""
    short = {column.name: column.type for column in table.schema if _holds_short_floats(column.type)}
    for number, values in enumerate(table.to_pylist(), start=first):
        for name, kind in short.items():
            values[name] = _as_written(values[name], kind)
        yield Row(f"{origin}[{number}]", values)


def listed(names: Iterable[str]) -> str:
    """Names of fields for a message, shortened: a damaged file may have any number of names of any length."""
    text = ", ".join(name if len(name) <= 60 else f"{name[:60]}..." for name in names)
    return text if len(text) <= 600 else f"{text[:600]}, ..."


_SHORT = {"halffloat": np.float16, "float": np.float32}
"""Arrow's names of float types that Python does not have."""


def _holds_short_floats(kind: Any) -> bool:
    inside = (kind.field(index).type for index in range(kind.num_fields))
    return str(kind) in _SHORT or any(map(_holds_short_floats, inside))


def _as_written(value: Any, kind: Any) -> Any:
    """A value of Arrow type `kind`, with every short float in it as the float64 of the same shortest text: 0.1 and not
    0.10000000149. Also inside lists and objects, as the answer in verl's rows is inside an object."""
    if value is None:
        return None
    if short := _SHORT.get(str(kind)):
        return float(str(short(value)))
    if isinstance(value, dict):
        return {name: _as_written(value[name], kind.field(name).type) for name in value}
    if hasattr(kind, "item_type"):  # a map: a list of pairs
        return [(key, _as_written(item, kind.item_type)) for key, item in value]
    return [_as_written(item, kind.value_type) for item in value] if kind.num_fields else value


def _json_lines(path: str) -> Iterator[Row]:
    for number, text in _lines(path):
        if text.strip():
            origin = f"{path}:{number}"
            yield Row(origin, _object(_parse(text, origin), origin))


def _json(path: str) -> Iterator[Row]:
    """A list of objects, {"data": [...]}, or JSON Lines, which many files named .json hold."""
    with _open(path) as file:
        size = os.stat(path).st_size
        raw = file.read(max(_SMALL, _MOST_UNPACKED * size) + 1)
        _check_ratio(len(raw), size, path)
    text = _decode(raw.removeprefix(_BYTE_ORDER_MARK), path, "").strip()
    if text.startswith("{") and _has_objects_as_lines(text):
        yield from _json_lines(path)
        return
    document = _parse(text, path)
    items = document.get("data") if isinstance(document, dict) else document
    if not isinstance(items, list):
        raise UserError(f'{path}: expected a list of JSON objects, {{"data": [...]}}, or one object per line')
    for number, values in enumerate(items):
        origin = f"{path}[{number}]"
        yield Row(origin, _object(values, origin))


def _has_objects_as_lines(text: str) -> bool:
    """Whether a text that begins with an object is JSON Lines, and not {"data": [...]}."""
    try:
        first, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return end < len(text) or ("data" not in first and "\n" not in text)


def _csv(path: str, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_LINE)  # the default of 131,072 refuses long worked solutions
    reader = csv.reader((text for _, text in _lines(path)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        origin = f"{path}:{reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{origin}: not valid CSV: {error}") from None
        if not cells:
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            if len(set(header)) < len(header) or not all(header):
                names = listed(header)
                raise UserError(f"{origin}: the header must name every column, each differently; it has: {names}")
        elif len(cells) != len(header):
            raise UserError(f"{origin}: {len(cells)} cells, but the header has {len(header)}; quote cells with commas")
        else:
            yield Row(origin, dict(zip(header, cells, strict=True)))


def _parquet(path: str) -> Iterator[Row]:
    import pyarrow  # here, as it takes 0.2 s of CPU and a job on JSON Lines does not need it
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise UserError(f"{path}: two columns have the same name; it has: {listed(names)}")
            batches = file.iter_batches(batch_size=_ROWS_AT_A_TIME, use_threads=False)
            yield from _rows_of_tables(map(pyarrow.Table.from_batches, ([batch] for batch in batches)), path)
    except (pyarrow.ArrowException, ValueError, OverflowError, MemoryError, TypeError, KeyError) as error:
        raise UserError(f"{path}: damaged or unreadable Parquet file: {reason(error)}") from None


def _rows_of_tables(tables: Iterator[Any], path: str) -> Iterator[Row]:
    """The rows of `tables` of a few hundred rows each, from the file or directory `path`. Memory is bounded, because a
    kilobyte of a file may repeat one string a million times."""
    number, unpacked = 0, 0
    files = [file for file in Path(path).rglob("*") if file.is_file()] if Path(path).is_dir() else [Path(path)]
    size = sum(file.stat().st_size for file in files if file.is_file())  # 0 for a set of the hub
    while True:
        try:
            with growing_at_most(_MOST_GROWN):
                if (table := next(tables, None)) is None:
                    return
                unpacked += sum(map(_unpacked_bytes, table.itercolumns()))
                rows = list(_table_rows(table, path, number))
        except MemoryError:
            raise UserError(
                f"{path}[{number}]: the {_ROWS_AT_A_TIME} rows from this one on take more than {_MOST_GROWN >> 30} GiB"
                " of memory; a problem has thousands of bytes: this is another kind of file, or is damaged"
            ) from None
        if size:
            _check_ratio(unpacked, size, path, _MOST_REPEATED)
        yield from rows
        number += len(rows)


def _unpacked_bytes(column: Any) -> int:
    """Bytes of a column with its dictionary codes replaced by the values they stand for."""
    chunks = (chunk.dictionary_decode() if hasattr(chunk, "dictionary") else chunk for chunk in column.chunks)
    return sum(chunk.nbytes for chunk in chunks)


@contextmanager
def growing_at_most(most: int) -> Iterator[None]:
    """In the block, this process gets a MemoryError if it takes more than `most` bytes of additional memory."""
    if not os.path.exists("/proc/self/statm"):  # not Linux
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/statm", encoding="ascii") as file:
        most += int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (most if soft < 0 else min(most, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


_READERS: dict[str, Callable[[str], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".parquet": _parquet,
}


def _open(path: str) -> IO[bytes]:
    return gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def _check_ratio(unpacked: int, size: int, path: str, small: int = _SMALL) -> None:
    """Raise UserError for a file of `size` bytes that unpacks to more than `small` and to hundreds of times as many."""
    if unpacked > max(small, _MOST_UNPACKED * size):
        raise UserError(
            f"{path}: unpacks to more than {_MOST_UNPACKED} times its size; if that is right, unpack it yourself (write"
            " a table as .jsonl)"
        )


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """(number from 1, text with its line end) of each line. A byte-order mark is removed."""
    with _open(path) as file:
        size = os.stat(path).st_size
        for number, line in enumerate(iter(partial(file.readline, _LONGEST_LINE + 1), b""), start=1):
            if len(line) > _LONGEST_LINE:
                raise UserError(f"{path}:{number}: the line has more than {_LONGEST_LINE:,} bytes")
            _check_ratio(file.tell(), size, path)
            text = _decode(line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line, path, f":{number}")
            yield number, text


def _decode(raw: bytes, path: str, line: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        kinds = {b"PAR1": "Parquet", b"\x1f\x8b": "gzip", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"PK": "zip"}
        kind = next((kind for magic, kind in kinds.items() if raw.startswith(magic)), "")
        where = line or f":{raw.count(10, 0, error.start) + 1}"
        advice = f"it looks like {kind}" if kind else "if it is Latin-1: iconv -f latin1 -t utf-8"
        raise UserError(f"{path}{where}: not UTF-8 text (byte 0x{raw[error.start]:02x}); {advice}") from None


def _object(value: Any, origin: str) -> dict[str, Any]:
    """A row's values. A list of objects, such as turns in Open-Reasoner-Zero, has its indices as names (0.value)."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return {str(index): item for index, item in enumerate(value)}
    if not isinstance(value, dict):
        raise UserError(f"{origin}: expected a JSON object, got {type(value).__name__}")
    return value


def _parse(text: str, origin: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=distinct_keys, parse_float=JsonFloat.parse)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: not valid JSON: {json_reason(error)}") from None


def _of_library(path: str, subset: str, split: str) -> Iterator[Row]:
    """The rows of `hub:owner/name` or `hub:owner/name@revision`, of a directory that `save_to_disk` wrote, or of a
    downloaded repository of the hub. Raises UserError if `datasets` is missing, there is no network, or `path` is none
    of these or has no such subset or split."""
    named = _NAME.fullmatch(path.removeprefix("hub:")) if path.startswith("hub:") else None
    if path.startswith("hub:") and named is None:
        raise UserError(f"{path}: expected hub:owner/name or hub:owner/name@revision")
    datasets = _import_datasets(path)
    saved = any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if saved and subset:
        raise UserError(f"{path}: subset = '{subset}' has no effect: a directory saved by `datasets` has splits only")
    try:
        if named:
            loaded = datasets.load_dataset(
                named["name"], subset or None, split=split or None, revision=named["revision"] or None
            )
        else:
            datasets.disable_progress_bars()  # nothing is downloaded
            # streamed, so that no copy of the repository is left in the library's cache
            repository = {"path": str(Path(path).absolute()), "name": subset or None, "streaming": True}
            loaded = datasets.load_from_disk(path) if saved else datasets.load_dataset(**repository)
    except Exception as error:  # the library and its dependencies raise some thirty classes
        neither = f"neither a directory saved by `datasets` nor a downloaded repository: {reason(error)}"
        raise UserError(f"{path}: {_hub_reason(error) if named else neither}") from None
    yield from _arrow_rows(_one_split(loaded, path, split), path)


def _import_datasets(path: str) -> Any:
    """The module `datasets`. It decodes no images or audio here, so its extras are not needed."""
    try:
        import datasets  # here, as it takes two seconds and a job on JSON Lines does not need it
    except ImportError:
        raise UserError(f"{path}: needs the extra 'data': pip install 'dppo_megatron[data]'") from None
    if int((version := datasets.__version__).partition(".")[0]) < _OLDEST:
        raise UserError(f"{path}: needs datasets {_OLDEST} or later (older ones run its scripts), not {version}")
    return datasets


def _one_split(loaded: Any, path: str, split: str) -> Any:
    """The requested split; without a name, the only one."""
    if not isinstance(loaded, dict):
        if split and str(loaded.split) != split and not path.startswith("hub:"):
            raise UserError(f"{path}: has no split '{split}': it was saved as one set, so leave the split out")
        return loaded
    if split in loaded:
        return loaded[split]
    names = ", ".join(map(str, loaded)) or "none"
    if not split and len(loaded) == 1:
        return next(iter(loaded.values()))
    raise UserError(f"{path}: {f'has no split {split!r}' if split else 'name its split'}; it has: {names}")


def _arrow_rows(split: Any, origin: str) -> Iterator[Row]:
    """The rows of a split of `datasets`, read as Arrow tables whatever its format."""
    number = 0
    try:
        for row in _rows_of_tables(iter(split.with_format("arrow").iter(_ROWS_AT_A_TIME)), origin):
            yield row
            number += 1
    except Exception as error:
        raise UserError(f"{origin}[{number}]: cannot be read: {reason(error)}") from None


def _hub_reason(error: Exception) -> str:
    """Why a set of the hub did not load, with advice."""
    names, detail = {kind.__name__ for kind in type(error).__mro__}, reason(error)
    if os.environ.get("HF_DATASETS_OFFLINE") == "1" or os.environ.get("HF_HUB_OFFLINE") == "1":
        return f"offline (HF_DATASETS_OFFLINE or HF_HUB_OFFLINE is set) and not in the local cache: {detail}"
    if names & {"ConnectionError", "OfflineModeIsEnabled", "Timeout", "ConnectError"}:
        return f"the hub cannot be reached: {detail}"
    if "DatasetNotFoundError" in names:
        closed = "needs a login that has accepted its terms" if "gated" in str(error) else ""
        return f"{closed or 'not found on the hub, or not open to you'} (hf auth login): {detail}"
    return f"the connection to the hub broke, run it again: {detail}" if "TransportError" in names else detail
