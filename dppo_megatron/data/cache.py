"""Keeps the prompts of a large training set in one file a machine, which every rank maps instead of reading the set.

As Python objects a prompt takes 4 KiB, in every rank. In this file of Arrow's it takes as much as its texts and tokens,
in pages that all ranks share, and a `Prompt` is made of it when one is asked for. The file counts only as long as
nothing has changed that prompts depend on: the content of the files they were read from, settings, tokenizer,
evaluation problems that were looked for, libraries, and the code that reads them.

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
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from hashlib import file_digest, sha256
from itertools import accumulate, count
from pathlib import Path
from typing import IO, Any

import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.resolved_sets import ResolvedSet
from dppo_megatron.data.templates import chat_template_of, varies
from dppo_megatron.files import make_directory, open_own, open_to_read, replacing
from dppo_megatron.progress import progress
from dppo_megatron.texts import reason
from dppo_megatron.types import Prompt, PromptFeatures

_LEAST_BYTES = 2**20
"""Size of the smallest source that is worth a file: 3,000 problems, read in two seconds."""
_MOST_BYTES = 2**32
"""Of a source that is known by its content, whenever it was copied: hashing takes every rank 0.6 s a GiB. A larger one,
a whole set of the hub perhaps of which little is read, is known by its files' times."""
_AT_ONCE = 4096
_UNUSED_S = 30 * 86_400
"""After which a file that nobody has read goes at any start: a run that maps one may last weeks."""
_LEFT_S = 86_400
"""After which a file that was never ended is a killed process's: another machine may not see our lock, and be at it."""
_OURS = re.compile(r"\.?[0-9a-f]{32}\.[0-9a-f]{32}\.arrow(\..*\.new)?")
_CHECKSUM_BYTES = 4


class LazyPrompts(Sequence[Prompt]):
    """So many prompts, each of which `make` makes of its place, from 0, when it is asked for."""

    def __init__(self, num_prompts: int, make: Callable[[int], Prompt]) -> None:
        self._num_prompts, self._make = num_prompts, make

    def __len__(self) -> int:
        return self._num_prompts

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._make(place) for place in range(*index.indices(self._num_prompts))]
        return self._make(range(self._num_prompts)[index])

    @classmethod
    def joined(cls, sets: Sequence[Sequence[Prompt]]) -> LazyPrompts:
        """The prompts of several sets, one set after the other."""
        ends = list(accumulate(map(len, sets), initial=0))

        def make(place: int) -> Prompt:
            which = bisect_right(ends, place) - 1
            return sets[which][place - ends[which]]

        return cls(ends[-1], make)

    @classmethod
    def of_table(cls, table: Any, mapped: mmap.mmap, first_index: int) -> LazyPrompts:
        """Those of a cache's file, numbered from `first_index`."""
        made = count(1)

        def make(place: int) -> Prompt:
            [values] = table.slice(place, 1).to_pylist()
            values |= {"token_ids": tuple(values["token_ids"]), "row": json.loads(values["row"])}
            if next(made) % 16 == 0:  # the kernel maps 1.5 MiB around each; they stay in its cache, for all ranks
                mapped.madvise(mmap.MADV_DONTNEED)
            return Prompt(index=first_index + place, **values)

        return cls(table.num_rows, make)


def columns_of(prompts: Sequence[Prompt]) -> PromptFeatures:
    """The features of prompts that are all made."""
    places: dict[str, int] = {}
    return PromptFeatures(
        np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.int64),
        np.array([np.nan if prompt.level is None else prompt.level for prompt in prompts], dtype=np.float64),
        np.array([places.setdefault(prompt.source, len(places)) for prompt in prompts], dtype=np.int64),
        tuple(places),
    )


def _columns_of_table(table: Any) -> PromptFeatures:
    """Those in the file of a cache, a pyarrow table."""
    from pyarrow.compute import list_value_length

    source = table["source"].combine_chunks().dictionary_encode()
    return PromptFeatures(
        list_value_length(table["token_ids"]).to_numpy().astype(np.int64),
        table["level"].to_numpy(),
        source.indices.to_numpy().astype(np.int64),
        tuple(source.dictionary.to_pylist()),
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
        """None: no `folder`; a small set, or one of the hub by its name; or prompts that may differ at the next start.

        Args:
            looked_for: digest of the evaluation problems, and what becomes of training problems among them.
        """
        files = _files_of(settings.path)
        size = sum(int(one[1]) for one in files)
        template = chat_template_of(tokenizer) if settings.template.apply_chat_template else ""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        folder = os.path.expanduser(folder)
        if not folder or folder.startswith("~") or size < _LEAST_BYTES:
            return None
        if varies(template or "") or not isinstance(backend, tokenizers.Tokenizer):
            return None
        read = [getattr(settings, one.name) for one in fields(ResolvedSet)]
        special = (type(tokenizer).__qualname__, tokenizer.special_tokens_map, tokenizer.chat_template)
        name = _digest(os.path.abspath(settings.path), read, backend.to_str(), special, looked_for)
        try:
            key = _digest(name, files if size > _MOST_BYTES else _contents(files), _versions())
        except OSError:  # which reading it says better
            return None
        return cls(Path(folder) / f"{name[:32]}.{key[:32]}.arrow", key, settings.path, files)

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """True: this process is the one to write the file. False: another was, and has ended."""
        is_first, descriptor = True, None
        with suppress(OSError):  # not to be written, or a file system without locks: each for itself
            make_directory(self.path.parent)
            descriptor = open_own(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_first = False
                with progress(f"waiting for the process that reads {self._source}"):
                    fcntl.flock(descriptor, fcntl.LOCK_SH)
        try:
            yield is_first
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def read(self, first_index: int) -> tuple[Sequence[Prompt], PromptFeatures, dict[str, Any]] | None:
        """Prompts, numbered from `first_index`, and the facts they were written with; None if there is no such file."""
        import pyarrow  # 0.2 s of CPU, as in rows.py

        try:
            with open_to_read(self.path) as file:
                status = os.fstat(file.fileno())
                end = status.st_size - _CHECKSUM_BYTES
                is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
                if not is_ours or end <= 0 or _checksum(file, end) != file.read():
                    return None
                with suppress(OSError):
                    os.utime(file.fileno())  # it is used
                    self._remove_unused()
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            table = pyarrow.ipc.open_file(pyarrow.py_buffer(mapped).slice(0, end)).read_all()
            if table.schema.metadata[b"key"] != self._key.encode():
                return None
            columns, facts = _columns_of_table(table), json.loads(table.schema.metadata[b"facts"])
            mapped.madvise(mmap.MADV_DONTNEED)
            return LazyPrompts.of_table(table, mapped, first_index), columns, facts
        except (OSError, ValueError, KeyError, pyarrow.ArrowException):
            return None

    def write(self, prompts: Sequence[Prompt], facts: Mapping[str, Any]) -> str:
        """Write the file; returns a line for the log: where it is, or why there is none."""
        import pyarrow as pa

        texts = [(name, pa.large_string()) for name in ("text", "answer", "source", "origin", "problem")]
        given = [*texts, ("level", pa.float64()), ("token_ids", pa.list_(pa.int32()))]
        metadata = {"key": self._key, "facts": json.dumps(facts)}
        schema = pa.schema([*given, ("row", pa.large_string())], metadata=metadata)
        try:
            if _files_of(self._source) != self._files:
                raise ValueError("the set has changed while it was read")
            self._remove_unused()
            with replacing(self.path, mode=0o600, durable=True) as file:
                with pa.ipc.new_file(file, schema) as writer:
                    for first in range(0, len(prompts), _AT_ONCE):
                        part = prompts[first : first + _AT_ONCE]
                        columns: list[Any] = [[getattr(prompt, name) for prompt in part] for name, _ in given]
                        columns.append([json.dumps(prompt.row) for prompt in part])
                        writer.write_batch(pa.record_batch(columns, schema=schema))
                file.flush()
                with open(f"/proc/self/fd/{file.fileno()}", "rb") as written:
                    checksum = _checksum(written, file.tell())
                file.write(checksum)
            return f"its prompts are kept in {self.path} ({self.path.stat().st_size / 1e6:,.0f} MB), for later starts"
        except (OSError, ValueError, TypeError, pa.ArrowException) as error:  # TypeError: JSON has no dates
            return f"its prompts cannot be kept in {self.path}, so every start reads the set: {reason(error)}"

    def _remove_unused(self) -> None:
        """Files of any set that nobody reads, and what killed processes have left: a job that stages its data below a
        path of its own comes back to none of them. Younger ones may be in use, or about to be written, elsewhere."""
        for left in self.path.parent.iterdir():
            with suppress(OSError):
                most = _LEFT_S if left.suffix == ".new" else _UNUSED_S
                if _OURS.fullmatch(left.name) and left != self.path and time.time() - left.stat().st_mtime > most:
                    left.unlink()


def _checksum(file: IO[bytes], size: int) -> bytes:
    """Of the first `size` bytes. They are read and not mapped, so that no page becomes resident by it."""
    checksum = 0
    while size and (chunk := file.read(min(size, 2**20))):
        checksum, size = zlib.crc32(chunk, checksum), size - len(chunk)
    return checksum.to_bytes(_CHECKSUM_BYTES, "little")


def _files_of(path: str) -> tuple[tuple[str | int, ...], ...]:
    """Name, size and times of each file that a set is read from; none for the hub. A new text in an old file's place is
    told by its status change, which no program can set back."""
    try:
        found = sorted(Path(path).rglob("*")) if Path(path).is_dir() else [Path(path)]
        named = [(str(one), one.stat()) for one in found if one.is_file()]
    except OSError:
        return ()
    return tuple((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns) for name, status in named)


def _contents(files: tuple[tuple[str | int, ...], ...]) -> list[tuple[str | int, str]]:
    """Name and digest of each file. Raises OSError. What changes on the way, `write` tells by the times before."""
    found = []
    for name, *_ in files:
        with open(name, "rb") as file:
            found.append((name, file_digest(file, "sha256").hexdigest()))
    return found


def _versions() -> list[Any]:
    """Of everything that makes prompts of rows. The code itself, because a checkout changes without a new version."""
    import pyarrow

    package = Path(__file__).parents[1]
    code = [*sorted((package / "data").glob("*.py")), package / "config" / "conditions.py"]
    of_code = [sha256(path.read_bytes()).hexdigest() for path in code]
    return [sys.version, pyarrow.__version__, tokenizers.__version__, transformers.__version__, of_code]


def _digest(*parts: Any) -> str:
    return sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()
