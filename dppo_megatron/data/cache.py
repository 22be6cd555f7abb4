"""Keeps the prompts of a large training set in one file a machine, which every rank maps instead of reading the set.

As Python objects a prompt takes 4 KiB, in every rank. In this file of Arrow's it takes as much as its texts and tokens,
in pages that all ranks share, and a `Prompt` is made of it when one is asked for. The file counts only as long as
nothing has changed that prompts depend on: the files they were read from, settings, tokenizer, evaluation problems that
were looked for, libraries, and the code that reads them.

Who waits for whom: a rank that finds no such file reads the set and writes one, under a lock. The others of the machine
(of the file system, if it is shared and has locks) wait for that, and read the set themselves only if there is no file
then. The lock of a process that was killed ends with it.

A file is believed if this user alone can have written it and its checksum is right; else it is written anew. Rows are
kept as JSON, which runs nothing when it is read.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import sys
import zlib
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from hashlib import sha256
from io import RawIOBase
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
import numpy.typing as npt
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.resolved_sets import ResolvedSet
from dppo_megatron.data.templates import chat_template_of
from dppo_megatron.files import make_directory, open_own, open_to_read, replacing
from dppo_megatron.progress import progress
from dppo_megatron.texts import reason
from dppo_megatron.types import FloatArray, IntArray, Prompt

_LEAST_BYTES = 2**20
"""Size of the smallest source that is worth a file: 3,000 problems, read in two seconds."""
_AT_ONCE = 4096
_CHECKSUM_BYTES = 4
_VARIES = re.compile(r"strftime_now|\brandom\b")
"""What a chat template may call that is not the same at the next start: Llama 3.1's has today's date."""


class _OnDemand(Sequence[Prompt]):
    """Prompts that are made when they are asked for."""

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self._make(place) for place in range(*index.indices(len(self)))]
        return self._make(range(len(self))[index])

    @abstractmethod
    def _make(self, place: int) -> Prompt:
        """The prompt at `place`, from 0."""


class JoinedPrompts(_OnDemand):
    """The prompts of several sets, one set after the other."""

    def __init__(self, sets: Sequence[Sequence[Prompt]]) -> None:
        self._sets, self._ends = sets, list(accumulate(map(len, sets), initial=0))

    def __len__(self) -> int:
        return self._ends[-1]

    def _make(self, place: int) -> Prompt:
        which = bisect_right(self._ends, place) - 1
        return self._sets[which][place - self._ends[which]]


class _CachedPrompts(_OnDemand):
    def __init__(self, table: Any, first_index: int) -> None:
        self._table, self._first_index = table.drop_columns(["problem"]), first_index

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def _make(self, place: int) -> Prompt:
        [values] = self._table.slice(place, 1).to_pylist()
        made = {"token_ids": tuple(values["token_ids"]), "row": json.loads(values["row"])}
        return Prompt(index=self._first_index + place, **values | made)


@dataclass(frozen=True, slots=True)
class PromptColumns:
    """What is known of a set's prompts without making each: arrays [prompts], in their order."""

    prompt_tokens: IntArray
    level: FloatArray
    """NaN where the row does not say."""
    source: IntArray
    """Place of the prompt's source in `sources`."""
    sources: tuple[str, ...]
    problems: npt.NDArray[np.uint64]
    """Hash of each problem's text, white space normalized; for comparing sets."""

    @classmethod
    def of(cls, prompts: Sequence[Prompt], problems: npt.NDArray[np.uint64]) -> PromptColumns:
        places: dict[str, int] = {}
        return cls(
            np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.int64),
            np.array([np.nan if prompt.level is None else prompt.level for prompt in prompts], dtype=np.float64),
            np.array([places.setdefault(prompt.source, len(places)) for prompt in prompts], dtype=np.int64),
            tuple(places),
            problems,
        )

    @classmethod
    def of_table(cls, table: Any) -> PromptColumns:
        from pyarrow.compute import list_value_length

        source = table["source"].combine_chunks().dictionary_encode()
        return cls(
            list_value_length(table["token_ids"]).to_numpy().astype(np.int64),
            table["level"].to_numpy(),
            source.indices.to_numpy().astype(np.int64),
            tuple(source.dictionary.to_pylist()),
            table["problem"].to_numpy(),
        )


@dataclass(frozen=True, slots=True)
class PromptCache:
    """The file for one set as it is read now."""

    path: Path
    _key: str
    _source: str
    _files: tuple[tuple[str | int, ...], ...]
    """Those the set is read from, as `_files_of` found them."""

    @classmethod
    def of(
        cls, folder: str, settings: ResolvedSet, tokenizer: PreTrainedTokenizerBase, looked_for: str
    ) -> PromptCache | None:
        """None: no `folder`; a small set, or one of the hub by its name; or prompts that the next start need not have.

        Args:
            looked_for: of the evaluation problems, and what becomes of training problems among them.
        """
        files = _files_of(settings.path)
        template = chat_template_of(tokenizer) if settings.template.apply_chat_template else ""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        folder = os.path.expanduser(folder)
        if not folder or folder.startswith("~") or sum(int(one[1]) for one in files) < _LEAST_BYTES:
            return None
        if _VARIES.search(template or "") or not isinstance(backend, tokenizers.Tokenizer):
            return None
        read = [getattr(settings, one.name) for one in fields(ResolvedSet)]
        special = (type(tokenizer).__qualname__, tokenizer.special_tokens_map, tokenizer.chat_template)
        # sources with other settings have files of their own; those of other days take one's place
        name = _digest(os.path.abspath(settings.path), read, backend.to_str(), special, looked_for)
        return cls(Path(folder) / f"{name[:32]}.arrow", _digest(name, files, _versions()), settings.path, files)

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """True: this process is the one to write the file. False: another was, and has ended."""
        descriptor = None
        try:
            make_directory(self.path.parent)
            descriptor = open_own(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            is_first = _locked(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_first:
                with progress(f"waiting for the process that reads {self._source}"):
                    _locked(descriptor, fcntl.LOCK_SH)
        except OSError:  # not to be written, or a file system without locks: each for itself
            is_first = True
        try:
            yield is_first
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def read(self, first_index: int) -> tuple[Sequence[Prompt], PromptColumns, dict[str, Any]] | None:
        """Prompts, numbered from `first_index`, and the facts they were written with; None if there is no such file."""
        import pyarrow  # 0.2 s of CPU, as in rows.py

        try:
            with open_to_read(self.path) as file:
                status = os.fstat(file.fileno())
                ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
                if not ours or not _is_whole(file, status.st_size):
                    return None
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            arrow = pyarrow.py_buffer(mapped).slice(0, status.st_size - _CHECKSUM_BYTES)
            table = pyarrow.ipc.open_file(arrow).read_all()
            if table.schema.metadata[b"key"] != self._key.encode():
                return None
            facts: dict[str, Any] = json.loads(table.schema.metadata[b"facts"])
            return _CachedPrompts(table, first_index), PromptColumns.of_table(table), facts
        except (OSError, ValueError, KeyError, pyarrow.ArrowException):
            return None

    def write(self, prompts: Sequence[Prompt], problems: npt.NDArray[np.uint64], facts: Mapping[str, Any]) -> str:
        """Write the file; returns a line for the log: where it is, or why there is none."""
        import pyarrow

        try:
            if _files_of(self._source) != self._files:
                raise ValueError("the set has changed while it was read")
            path = self.path
            with replacing(path, mode=0o600, durable=True) as file:
                summed, schema = _Summed(file), _schema({"key": self._key, "facts": json.dumps(facts)})
                with pyarrow.ipc.new_file(summed, schema) as writer:
                    for first in range(0, len(prompts), _AT_ONCE):
                        part = slice(first, first + _AT_ONCE)
                        columns = _columns(prompts[part], problems[part])
                        writer.write_batch(pyarrow.RecordBatch.from_pydict(columns, schema))
                file.write(_checksum_bytes(summed.checksum))
            return f"its prompts are kept in {path} ({path.stat().st_size / 1e6:,.0f} MB), for later starts"
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            return f"its prompts cannot be kept in {self.path}, so every start reads the set: {reason(error)}"


class _Summed(RawIOBase):
    """Writes to a file, with the checksum of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.checksum = file, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return self._file.write(data)


def _is_whole(file: IO[bytes], size: int) -> bool:
    """Whether the checksum at the end is right. Read and not mapped, so that no page becomes resident by it."""
    checksum, left, chunk = 0, size - _CHECKSUM_BYTES, memoryview(bytearray(2**20))
    while left > 0 and (count := file.readinto(chunk[: min(left, len(chunk))])):  # type: ignore[attr-defined]
        checksum, left = zlib.crc32(chunk[:count], checksum), left - count
    return left == 0 and file.read() == _checksum_bytes(checksum)


def _checksum_bytes(checksum: int) -> bytes:
    return checksum.to_bytes(_CHECKSUM_BYTES, "little")


def _locked(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    return True


def _schema(metadata: dict[str, str]) -> Any:
    import pyarrow as pa

    texts = [(name, pa.large_string()) for name in ("text", "answer", "source", "origin", "row")]
    others = [("token_ids", pa.list_(pa.int32())), ("level", pa.float64()), ("problem", pa.uint64())]
    return pa.schema([*texts, *others], metadata=metadata)


def _columns(prompts: Sequence[Prompt], problems: npt.NDArray[np.uint64]) -> dict[str, Any]:
    names = ("text", "answer", "source", "origin", "level", "token_ids")
    kept: dict[str, Any] = {name: [getattr(prompt, name) for prompt in prompts] for name in names}
    return kept | {"row": [_as_json(prompt.row) for prompt in prompts], "problem": problems}


def _as_json(row: Mapping[str, Any]) -> str:
    if not _is_json(row):
        raise ValueError("its rows hold other values than JSON has, such as dates")
    return json.dumps(row)


def _is_json(value: Any) -> bool:
    """Whether JSON gives the same value back: no date, no bytes, and no tuple, which would be a list."""
    if isinstance(value, (dict, list)):
        return all(map(_is_json, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (str, int, float))


def _files_of(path: str) -> tuple[tuple[str | int, ...], ...]:
    """Name, size and times of each file that a set is read from; none for the hub. A new text in an old file's place is
    told by its status change, which no program can set back."""
    try:
        found = sorted(Path(path).rglob("*")) if Path(path).is_dir() else [Path(path)]
        named = [(str(one), one.stat()) for one in found if one.is_file()]
    except OSError:
        return ()
    return tuple((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns) for name, status in named)


def _versions() -> list[Any]:
    """Of everything that makes prompts of rows. The code itself, because a checkout changes without a new version."""
    import pyarrow

    package = Path(__file__).parents[1]
    code = [*sorted((package / "data").glob("*.py")), package / "config" / "conditions.py"]
    of_code = [sha256(path.read_bytes()).hexdigest() for path in code]
    return [sys.version, pyarrow.__version__, tokenizers.__version__, transformers.__version__, of_code]


def _digest(*parts: Any) -> str:
    return sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()
