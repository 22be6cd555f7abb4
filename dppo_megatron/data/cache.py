"""Caches the prompts of a large training set in one file per machine, which every rank maps instead of reading the set.

As Python objects a prompt takes 4 KiB, in every rank. In this Arrow file it takes only the space of its texts and
tokens, in pages that all ranks share, and a `Prompt` object is made on access.

A rank that finds no file reads the set and writes one, under a lock. The other ranks of the machine (of the file
system, if it is shared and has locks) wait for it, and read the set themselves only if there still is no file. The lock
of a killed process ends with the process. Rows are stored as JSON, so that reading them cannot run code.
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
"""Smallest source that is cached: 3,000 problems, which are read in two seconds."""
_MOST_BYTES = 2**32
"""Largest source that is recognized by a hash of its content, which takes every rank 0.6 s per GiB. A larger one, maybe
a whole repository of which little is read, is recognized by its files' times, so that a copy of it is read again."""
_ROWS_PER_BATCH = 4096
_UNUSED_S = 30 * 86_400
"""Age at which a file that nobody has read is deleted at any start; a run may map its file for weeks."""
_LEFT_S = 86_400
"""Age at which an incomplete file must be a killed process's. A younger one may be in use by another machine."""
_OURS = re.compile(r"\.?[0-9a-f]{32}\.[0-9a-f]{32}\.arrow(\..*\.new)?")
_CHECKSUM_BYTES = 4


class LazyPrompts(Sequence[Prompt]):
    """A sequence of prompts, each of which `make` creates from its index when it is accessed."""

    def __init__(self, num_prompts: int, make: Callable[[int], Prompt]) -> None:
        self._num_prompts, self._make = num_prompts, make

    def __len__(self) -> int:
        return self._num_prompts

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._make(position) for position in range(*index.indices(self._num_prompts))]
        return self._make(range(self._num_prompts)[index])

    @classmethod
    def joined(cls, sets: Sequence[Sequence[Prompt]]) -> LazyPrompts:
        """The prompts of several sets, one set after the other."""
        ends = list(accumulate(map(len, sets), initial=0))

        def make(index: int) -> Prompt:
            which = bisect_right(ends, index) - 1
            return sets[which][index - ends[which]]

        return cls(ends[-1], make)

    @classmethod
    def of_table(cls, table: Any, mapped: mmap.mmap, first_index: int) -> LazyPrompts:
        """The prompts in a cache file, `table` in the memory map `mapped`, numbered from `first_index`."""
        accesses = count(1)

        def make(index: int) -> Prompt:
            [values] = table.slice(index, 1).to_pylist()
            values |= {"token_ids": tuple(values["token_ids"]), "row": json.loads(values["row"])}
            if next(accesses) % 16 == 0:  # each maps 1.5 MiB; unmapped, it stays in the page cache, shared by all ranks
                mapped.madvise(mmap.MADV_DONTNEED)
            return Prompt(index=first_index + index, **values)

        return cls(table.num_rows, make)


def columns_of(prompts: Sequence[Prompt]) -> PromptFeatures:
    """The features of prompts in memory."""
    codes: dict[str, int] = {}
    return PromptFeatures(
        np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.int64),
        np.array([np.nan if prompt.level is None else prompt.level for prompt in prompts], dtype=np.float64),
        np.array([codes.setdefault(prompt.source, len(codes)) for prompt in prompts], dtype=np.int64),
        tuple(codes),
    )


def _columns_of_table(table: Any) -> PromptFeatures:
    """The features of the prompts in a cache file, a pyarrow table."""
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
    """The cache file for one set with its current content, settings and code."""

    path: Path
    _key: str
    _source: str
    _files: tuple[tuple[str | int, ...], ...]
    """The files that the set is read from, as `_files_of` returned them."""

    @classmethod
    def of(
        cls, folder: str, settings: ResolvedSet, tokenizer: PreTrainedTokenizerBase, looked_for: str
    ) -> PromptCache | None:
        """None if it is not cached: no `folder`, a small set, one of the hub by name, or an unstable chat template.

        Args:
            looked_for: digest of the evaluation problems, and whether they are dropped from training.
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
        except OSError:  # reading the set will raise it with a better message
            return None
        return cls(Path(folder) / f"{name[:32]}.{key[:32]}.arrow", key, settings.path, files)

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """True: this process must write the file. False: another one had the lock, and has finished."""
        is_first, descriptor = True, None
        with suppress(OSError):  # the directory is read-only or has no locks: every process reads for itself
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
        """The prompts, numbered from `first_index`, their features, and the facts that `write` got. None: there is no
        file, another user may have written it, or it is damaged."""
        import pyarrow  # 0.2 s of CPU, as in rows.py

        try:
            with open_to_read(self.path) as file:
                status = os.fstat(file.fileno())
                end = status.st_size - _CHECKSUM_BYTES
                is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
                if not is_ours or end <= 0 or _checksum(file, end) != file.read():
                    return None
                with suppress(OSError):
                    os.utime(file.fileno())  # marks it as used
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
        plain = [*texts, ("level", pa.float64()), ("token_ids", pa.list_(pa.int32()))]
        metadata = {"key": self._key, "facts": json.dumps(facts)}
        schema = pa.schema([*plain, ("row", pa.large_string())], metadata=metadata)
        try:
            if _files_of(self._source) != self._files:
                raise ValueError("the set has changed while it was read")
            self._remove_unused()
            with suppress(FileExistsError), replacing(self.path, mode=0o600) as file:
                with pa.ipc.new_file(file, schema) as writer:
                    for first in range(0, len(prompts), _ROWS_PER_BATCH):
                        part = prompts[first : first + _ROWS_PER_BATCH]
                        columns: list[Any] = [[getattr(prompt, name) for prompt in part] for name, _ in plain]
                        columns.append([json.dumps(prompt.row) for prompt in part])
                        writer.write_batch(pa.record_batch(columns, schema=schema))
                file.flush()
                with open(f"/proc/self/fd/{file.fileno()}", "rb") as written:
                    checksum = _checksum(written, file.tell())
                file.write(checksum)
                file.flush()
                os.fsync(file.fileno())  # now: what takes long must not lie between the look and the new name
                if self.read(0):  # without locks another machine was faster; NFS would kill its ranks, which map that
                    raise FileExistsError
            return f"its prompts are kept in {self.path} ({self.path.stat().st_size / 1e6:,.0f} MB), for later starts"
        except (OSError, ValueError, TypeError, pa.ArrowException) as error:  # TypeError: a date in a row is not JSON
            return f"its prompts cannot be kept in {self.path}, so every start reads the set: {reason(error)}"

    def _remove_unused(self) -> None:
        """Delete old files of any set that nobody reads any more (a job that stages its data under a new path never
        uses its former files), and those of killed processes. Younger ones may be in use elsewhere."""
        for file in self.path.parent.iterdir():
            with suppress(OSError):
                most = _LEFT_S if file.suffix == ".new" else _UNUSED_S
                if _OURS.fullmatch(file.name) and file != self.path and time.time() - file.stat().st_mtime > most:
                    file.unlink()


def _checksum(file: IO[bytes], size: int) -> bytes:
    """The checksum of the first `size` bytes, which are read and not mapped, so that no page becomes resident."""
    checksum = 0
    while size and (chunk := file.read(min(size, 2**20))):
        checksum, size = zlib.crc32(chunk, checksum), size - len(chunk)
    return checksum.to_bytes(_CHECKSUM_BYTES, "little")


def _files_of(path: str) -> tuple[tuple[str | int, ...], ...]:
    """Name, size and times of each file that a set is read from; none for the hub. The ctime is included because no
    program can set it back after replacing a file's content."""
    try:
        paths = sorted(Path(path).rglob("*")) if Path(path).is_dir() else [Path(path)]
        named = [(str(one), one.stat()) for one in paths if one.is_file()]
    except OSError:
        return ()
    return tuple((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns) for name, status in named)


def _contents(files: tuple[tuple[str | int, ...], ...]) -> list[tuple[str | int, str]]:
    """Name and digest of each file. Raises OSError. `write` notices by the files' times if they change meanwhile."""
    digests = []
    for name, *_ in files:
        with open(name, "rb") as file:
            digests.append((name, file_digest(file, "sha256").hexdigest()))
    return digests


def _versions() -> list[Any]:
    """Versions of all that turns rows into prompts; of our code a hash, as a checkout changes without a new version."""
    import pyarrow

    package = Path(__file__).parents[1]
    code = [*sorted((package / "data").glob("*.py")), package / "config" / "data.py"]
    code_hashes = [sha256(path.read_bytes()).hexdigest() for path in code]
    return [sys.version, pyarrow.__version__, tokenizers.__version__, transformers.__version__, code_hashes]


def _digest(*parts: Any) -> str:
    return sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()
