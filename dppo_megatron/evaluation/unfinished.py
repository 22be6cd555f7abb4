"""What an evaluation has sampled so far, on the disk: a kill loses what was being generated and nothing that was done.

`samples.unfinished.jsonl` has a line about the evaluation, then a line a sample as it is generated, and a short line
with each sample's verdict once it is graded. The same command goes on from it. One file of appended lines and not
samples.jsonl itself: that has its samples in order and is whole or not there.
"""

from __future__ import annotations

import errno
import fcntl
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, TypeAlias

import msgspec

from dppo_megatron.config.changes import flat
from dppo_megatron.evaluation.eval_samples import EvalSample
from dppo_megatron.files import append_to, make_directory, open_to_read
from dppo_megatron.texts import log
from dppo_megatron.types import UserError

UNFINISHED = "samples.unfinished.jsonl"
Key: TypeAlias = tuple[str, int, int]
"""Set, place of the problem in it, number of the sample."""
_VERDICT = ("reward", "correct", "extracted", "vote", "unparsed", "why", "failure")


def key_of(sample: EvalSample) -> Key:
    return sample.set, sample.problem_index, sample.sample


class UnfinishedSamples:
    """The samples of an evaluation that may have been begun before.

    Args:
        directory: of the evaluation; made if it is not there.
        about: what decides the samples and their grades, as JSON.
        graded_by: of the graders as they are now; verdicts of others are not kept (an edited file, a time limit).

    Raises:
        UserError: what is there was begun with something else (named), or the file cannot be read or written.
    """

    def __init__(self, directory: Path, about: Mapping[str, Any], graded_by: str = "") -> None:
        self._path, self._graded_by = directory / UNFINISHED, graded_by
        self.samples: dict[Key, EvalSample] = {}
        """Generated so far."""
        try:
            make_directory(directory)
            self._file = append_to(self._path)
            _lock(self._file)
            self._file.seek(0)
            head, found, end = _read(self._file.read(), graded_by)
            if head is None and end:
                raise UserError(f"'{self._path}': its first line is damaged; repair it, or remove the file")
            if head is None:
                self._file.truncate(0)
                self._append([about])
                return
            self._file.truncate(end)  # half a line, of a kill
        except BlockingIOError:
            raise UserError(f"another evaluation is writing to '{directory}'; choose another --out") from None
        except OSError as error:
            raise UserError(f"'{self._path}' cannot be written: {error.strerror}") from None
        if different := _difference(head, about):
            raise UserError(
                f"'{directory}' holds an evaluation that was begun with something else ({different}); go on with it"
                f" as it was, choose another --out, or remove {UNFINISHED}"
            )
        self.samples = found

    def add(self, sample: EvalSample) -> None:
        """Keep one that was generated and is not graded yet."""
        self.samples[key_of(sample)] = sample
        self._append([{name: value for name, value in asdict(sample).items() if name not in _VERDICT}])

    def grade(self, samples: Iterable[EvalSample]) -> None:
        """Keep the verdicts of samples that were added."""
        graded = list(samples)
        self.samples |= {key_of(one): one for one in graded}
        keys = ("set", "problem_index", "sample", *_VERDICT)
        self._append([{name: getattr(one, name) for name in keys} | {"by": self._graded_by} for one in graded])

    def finished(self) -> None:
        """The results are written: remove the file."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()

    def _append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(row, default=str) + "\n" for row in rows)  # ASCII: see `write_samples`
        try:
            rest = memoryview(text.encode())
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise UserError(f"'{self._path}' cannot be written: {error.strerror}") from None


def _lock(file: IO[bytes]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # some file systems of clusters have no locks (Lustre mounted without)
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def read_unfinished(directory: Path) -> tuple[dict[str, Any], list[EvalSample]] | None:
    """(what it is about, its samples so far) of an evaluation that has not ended; None if there is none."""
    try:
        with open_to_read(directory / UNFINISHED) as file:
            head, found, _ = _read(file.read())
    except OSError:
        return None
    return None if head is None else (head, list(found.values()))


def _read(text: bytes, graded_by: str | None = None) -> tuple[dict[str, Any] | None, dict[Key, EvalSample], int]:
    """The first line, the samples with the verdicts of `graded_by` (None: any), and where the last whole line ends."""
    lines = text.split(b"\n")
    end = len(text) - len(lines.pop())
    head, rows, damaged = None, dict[Key, dict[str, Any]](), 0
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
            if number == 0:
                head = dict(row)
                continue
            key = row["set"], row["problem_index"], row["sample"]
            if graded_by is not None and row.get("by", graded_by) != graded_by:
                continue
            rows[key] = rows.get(key, {}) | row
        except (ValueError, TypeError, KeyError, RecursionError):
            if number == 0:
                return None, {}, end
            damaged += 1
    found: dict[Key, EvalSample] = {}
    for key, row in rows.items():
        try:
            found[key] = msgspec.convert(row, EvalSample)
        except msgspec.ValidationError:  # a verdict whose sample's line is damaged
            damaged += 1
    if damaged:
        log(f"eval: {damaged} lines of {UNFINISHED} are damaged; their samples are made again")
    return head, found, end


def _difference(head: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """What differs, as `reward.function: 'math', now 'my:grade'`; empty: nothing."""
    before, now = flat(head), flat(json.loads(json.dumps(about, default=str)))
    both = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    texts = [f"{key}: {before.get(key)!r}, now {now.get(key)!r}" for key in both[:3]]
    return "; ".join(texts) + (f" and {len(both) - 3} more" if len(both) > 3 else "")
