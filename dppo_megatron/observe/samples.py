"""samples/: each recorded completion, what was decided about it and why, as parquet.

Each step is first written to a file of its own, so a killed run still has its last step. Every 64 such files are merged
into one, because parallel file systems handle few large files better than many small ones.

    loop (every rank)          thread "samples"
    write(step, groups) ──▶ queue of 4 ──▶ arrow columns ──▶ steps_000012-000012.rank0000.parquet
      never waits: samples may be lost      every 64: ──▶ steps_000001-000064.rank0000.parquet
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from dppo_megatron.config.observe import SamplesConfig
from dppo_megatron.files import make_directory, replacing
from dppo_megatron.observe.json_lines import OLD, move_to_old
from dppo_megatron.texts import log, reason, show
from dppo_megatron.types import BoolArray, Completion, FloatArray, Group, IntArray, is_correct

SAMPLES = "samples"
NAME = re.compile(r"steps_(\d+)-(\d+)\.rank(\d+)\.parquet")
_INCOMPLETE = re.compile(r"\.steps_\d+-\d+\.rank\d+\.parquet(\.\d+)?\.new")
_NONE: Mapping[str, float] = MappingProxyType({})
_MERGE = 64
"""Steps in a merged file."""
_QUEUE = 4
"""Steps that may wait for the disk. Each keeps the completions of its recorded groups in memory."""


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """One group and the decisions about it. Arrays are [n], its completions."""

    group_index: int
    """Its index in the step."""
    group: Group
    advantages: FloatArray
    completion_prob: FloatArray
    """Inclusion probability given the group; NaN where the completion did not take part in the draw."""
    weights: FloatArray
    """Product of the weights of all selections; 0 for completions that were not kept."""
    kept: BoolArray
    why: tuple[str, ...]
    """Why each completion was kept or not (docs/run_directory.md)."""
    actor_logprobs: dict[int, FloatArray] = field(default_factory=dict)
    """Completion index -> the actor's log-probability of each token, for the completions that this rank scored."""


def add_actor_logprobs(
    groups: Sequence[RecordedGroup], rows: IntArray, width: int, values: Mapping[int, FloatArray]
) -> None:
    """Add the actor's log-probabilities to the recorded groups, for the completions of one update.

    Args:
        rows: [n] completions in the update's plan: index of the group times `width`, plus the completion index.
        values: index into `rows` -> log-probabilities, [completion tokens].
    """
    by_index = {one.group_index: one for one in groups}
    for place, logprobs in values.items() if groups else ():
        group_index, completion_index = divmod(int(rows[place]), width)
        if group_index in by_index:
            by_index[group_index].actor_logprobs[completion_index] = logprobs


class SampleWriter:
    """Writes this rank's recorded groups in a background thread. A failure never stops a run: each kind is logged once.

    Args:
        directory: `samples/` of the run; created with the first file.
        correct_from: `Prompt.graded_by` -> the reward from which a completion counts as correct; 1 if not in it.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        world_size: int,
        settings: SamplesConfig,
        correct_from: Mapping[str, float] = _NONE,
    ) -> None:
        self._directory, self._rank, self._world_size, self._correct_from = directory, rank, world_size, correct_from
        self._log = show if rank else log  # `log` prints nothing on ranks other than 0
        self._max_bytes = int(settings.max_gb * 1e9 / world_size)
        self._queue: queue.Queue[tuple[int, list[RecordedGroup]] | None] = queue.Queue(_QUEUE)
        self._warned: set[str] = set()
        self._thread: threading.Thread | None = None

    def write(self, step: int, groups: list[RecordedGroup]) -> None:
        """Queue a step's recorded groups and return at once. The caller must not change them afterwards."""
        if not groups:
            return
        self._start()
        try:
            self._queue.put_nowait((step, groups))
        except queue.Full:
            self._warn("slow", f"the disk is slower than the steps: samples of step {step} and perhaps more are lost")

    def close(self, timeout_s: float = 60.0) -> None:
        """Write the queued steps, then stop the thread; the next `write` starts it again. Called before a checkpoint is
        saved too, so that a run that resumes from it has the samples up to that step."""
        if self._thread is None:
            return
        thread = self._start()  # an earlier `close` may have timed out, and the thread has ended since
        try:
            self._queue.put(None, timeout=timeout_s)
            thread.join(timeout_s)
        except queue.Full:
            self._warn("stuck", "the disk does not answer: the samples of the last steps are lost")

    def _start(self) -> threading.Thread:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
            self._thread.start()
        return self._thread

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._write(*item)
            except Exception as error:  # samples are only for inspection: whatever fails must not end the run
                self._warn(type(error).__name__, f"samples of step {item[0]} cannot be written: {error}")

    def _write(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        make_directory(self._directory)
        _store([to_table(step, groups, self._correct_from)], self._directory / _name(step, step, self._rank))
        files = self._own()
        singles = [one for one in files if one.first == one.last]
        if len(singles) >= _MERGE:
            merged = self._directory / _name(singles[0].first, singles[-1].last, self._rank)
            read = [_read_or_move(one.path, self._directory.parent / OLD) for one in singles]
            for warning in filter(None, (warning for _, warning in read)):
                self._log(warning)
            if tables := [table for table, _ in read if table is not None]:
                _store(tables, merged)
            for one in singles:
                one.path.unlink(missing_ok=True)
            files = self._own()
        sizes = [one.path.stat().st_size for one in files]
        while len(files) > 1 and sum(sizes) > self._max_bytes:
            files.pop(0).path.unlink()
            sizes.pop(0)

    def _own(self) -> list[SampleFile]:
        """This rank's files, and its share of those that an earlier start with more ranks has left."""
        return [one for one in sample_files(self._directory) if one.rank % self._world_size == self._rank]

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._log(f"warning: {text} (rank {self._rank}, logged once)")


@dataclass(frozen=True, slots=True, order=True)
class SampleFile:
    """One file of samples/; sorts by its steps."""

    first: int
    last: int
    rank: int
    path: Path


def sample_files(directory: Path) -> list[SampleFile]:
    """The complete files, oldest first; of a merge that a kill interrupted, the merged file and not its parts."""
    found = []
    for path in directory.glob("steps_*.parquet"):
        if match := NAME.fullmatch(path.name):
            first, last, rank = map(int, match.groups())
            found.append(SampleFile(first, last, rank, path))
    wide: dict[int, list[SampleFile]] = {}
    for one in found:
        if one.last > one.first:
            wide.setdefault(one.rank, []).append(one)
    parts = {
        one
        for one in found
        for other in wide.get(one.rank, ())
        if one != other and other.first <= one.first and one.last <= other.last
    }
    return sorted(set(found) - parts)


def rewind_samples(directory: Path, last_step: int, old: Path) -> list[str]:
    """Delete the samples of steps after `last_step`, which are done again. Files of any other name stay.

    Args:
        old: where an unreadable file is moved that holds steps up to `last_step` and after it.

    Returns:
        A log line for each file that was moved.
    """
    if not directory.is_dir():
        return []
    warnings, files = [], sample_files(directory)
    keep = {one.path for one in files if one.last <= last_step}
    for one in files:
        if one.first <= last_step < one.last:
            table, warning = _read_or_move(one.path, old)
            if table is None:
                warnings.append(warning)
                continue
            table = table.filter(table["step"].to_numpy() <= last_step)
            last = max(table["step"].to_pylist(), default=last_step)  # not every step has samples; `watch` shows `last`
            shortened = one.path.with_name(_name(one.first, last, one.rank))
            _store([table], shortened)
            keep.add(shortened)
    for path in directory.iterdir():
        is_ours = NAME.fullmatch(path.name) or _INCOMPLETE.fullmatch(path.name)
        if is_ours and path not in keep and path.is_file():
            path.unlink()
    return warnings


def to_table(step: int, groups: Sequence[RecordedGroup], correct_from: Mapping[str, float] = _NONE) -> Any:
    """A step's completions as a pyarrow table: one row per completion, in the order of the groups."""
    import pyarrow as pa

    rows = [(one, index) for one in sorted(groups, key=lambda one: one.group_index) for index in range(len(one.kept))]
    done = [one.group.completions[index] for one, index in rows]
    grades = [one.group.grades[index] if one.group.grades else None for one, index in rows]
    prompts = [one.group.selected for one, _ in rows]
    weights = [float(one.weights[index]) for one, index in rows]
    actor = [one.actor_logprobs.get(index) for one, index in rows]
    bounds = [correct_from.get(one.prompt.graded_by, 1.0) for one in prompts]
    correct = [None if grade is None else is_correct(grade, bound) for grade, bound in zip(grades, bounds, strict=True)]
    columns: dict[str, tuple[Any, Any]] = {
        "step": ([step] * len(rows), pa.int32()),
        "group": ([one.group_index for one, _ in rows], pa.int32()),
        "completion": ([index for _, index in rows], pa.int32()),
        "prompt_index": ([item.prompt.index for item in prompts], pa.int64()),
        "source": ([unicode_text(item.prompt.source) for item in prompts], pa.string()),
        "prompt": ([unicode_text(item.prompt.text) for item in prompts], pa.string()),
        "problem": ([unicode_text(item.prompt.problem) for item in prompts], pa.string()),
        "reference": ([unicode_text(item.prompt.answer) for item in prompts], pa.string()),
        "text": ([unicode_text(one.text) for one in done], pa.string()),
        "extracted": ([unicode_text(one.extracted) if one else None for one in grades], pa.string()),
        "reward": ([_number(one.group.rewards[index]) for one, index in rows], pa.float64()),
        "correct": (correct, pa.bool_()),
        "parts": ([list(one.parts.items()) if one else [] for one in grades], pa.map_(pa.string(), pa.float64())),
        "reward_why": ([unicode_text(one.failure or one.why) if one else "" for one in grades], pa.string()),
        "advantage": ([float(one.advantages[index]) for one, index in rows], pa.float64()),
        "kept": ([bool(one.kept[index]) for one, index in rows], pa.bool_()),
        "why": ([one.why[index] for one, index in rows], pa.string()),
        "prompt_prob": ([item.inclusion_prob for item in prompts], pa.float64()),
        "prompt_weight": ([item.weight for item in prompts], pa.float64()),
        "completion_prob": ([_number(one.completion_prob[index]) for one, index in rows], pa.float64()),
        "completion_weight": ([w / item.weight for w, item in zip(weights, prompts, strict=True)], pa.float64()),
        "weight": (weights, pa.float64()),
        "tokens": ([len(one.token_ids) for one in done], pa.int32()),
        "finish_reason": ([one.finish_reason for one in done], pa.string()),
        "weights_version_first": ([_version(one, 0) for one in done], pa.int64()),
        "weights_version_last": ([_version(one, -1) for one in done], pa.int64()),
        # arrays of the column's own type: pyarrow converts others number by number, which takes ten times as long
        "token_ids": ([one.token_ids.astype(np.int32) for one in done], pa.list_(pa.int32())),
        "logprobs": ([one.logprobs.astype(np.float32) for one in done], pa.list_(pa.float32())),
        "actor_logprobs": ([one if one is None else one.astype(np.float32) for one in actor], pa.list_(pa.float32())),
    }
    return pa.table({name: pa.array(values, kind) for name, (values, kind) in columns.items()})


def _store(tables: Sequence[Any], path: Path) -> None:
    """Write one row group per step and table, so a reader can skip steps."""
    import pyarrow.parquet as pq

    with replacing(path) as out, pq.ParquetWriter(out, tables[0].schema, compression="zstd") as file:
        for table in tables:
            for step in table["step"].unique().to_pylist():
                file.write_table(table.filter(table["step"].to_numpy() == step))


def _read_or_move(path: Path, old: Path) -> tuple[Any, str]:
    """The table of a file and ""; if it cannot be read, None and a log line that names where the file now is."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()  # read_table would parse the directory's name for partitions
        return pa.concat_tables([to_table(0, []), table]), ""  # raises if the columns differ: those cannot be merged
    except Exception as error:  # pyarrow raises many types for damaged files
        return None, f"warning: {path} cannot be read ({reason(error)}); it is now {move_to_old(path, old)}"


def _name(first: int, last: int, rank: int) -> str:
    return f"steps_{first:06d}-{last:06d}.rank{rank:04d}.parquet"


def unicode_text(value: str | None) -> str | None:
    """Escape lone surrogates, which a model can write and UTF-8 cannot encode."""
    return value if value is None or value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def _version(completion: Completion, span: int) -> int | None:
    return completion.weights_spans[span][0] if completion.weights_spans else None
