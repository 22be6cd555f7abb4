"""timeline/: a step on all ranks as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing can open.

    step begins            step ends          record()
    spans on, profiler ──▶ off ──▶ ... ──▶ each rank's clock against rank 0's, spans to rank 0, one file

Ranks of one machine share a clock. Between machines, each clock is compared with rank 0's just before the file is
written: the shortest of a few round trips counts, and half its time is the error bound.
"""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dppo_megatron.config.observe import ObserveConfig
from dppo_megatron.distributed import clock_offset, rank, to_rank_zero
from dppo_megatron.files import make_directory, replacing
from dppo_megatron.observe.run_directory import PROFILE, TIMELINE
from dppo_megatron.spans import Span, Spans
from dppo_megatron.texts import log

PHASES = "phases"
_ORDER = (PHASES, "micro-batches", "pipeline", "weight sync")
"""The first tracks of a rank, from the top; the others follow in alphabetical order."""


@dataclass(frozen=True, slots=True)
class RankSpans:
    rank: int
    host: str
    offset_s: float
    """What to add to its clock to get rank 0's."""
    within_s: float
    """The bound of that offset's error."""
    spans: list[Span]


class StepRecorder:
    """Records the steps that `observe.timeline`, `timeline_every` and `profile_steps` select. On every rank.

    Args:
        directory: the run's.
    """

    def __init__(self, settings: ObserveConfig, directory: Path) -> None:
        self._settings, self._directory = settings, directory
        self.spans = Spans()
        self._num_left = settings.timeline
        """How many of the run's first steps are still to be recorded."""
        self._recorded: int | None = None
        """The step whose spans wait to be written."""

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        every = self._settings.timeline_every
        is_recorded = self._num_left > 0 or (every > 0 and number % every == 0)
        self._num_left = max(0, self._num_left - 1)
        self.spans.on = is_recorded
        try:
            with self._profiled(number):
                yield
        finally:
            self.spans.on = False
        self._recorded = number if is_recorded else None

    def write(self, number: int) -> None:
        """Write the timeline of step `number`, if it was recorded. Collective."""
        if self._recorded != number:
            return
        self._recorded = None
        offset_s, within_s = clock_offset(self.spans.clock)
        mine = RankSpans(rank(), socket.gethostname(), offset_s, within_s, self.spans.drain())
        if of_all_ranks := to_rank_zero(mine):
            path = self._directory / TIMELINE / f"step_{number:06d}.json.gz"
            try:
                make_directory(path.parent)
                with replacing(path) as out, gzip.open(out, "wt", encoding="utf-8", compresslevel=3) as file:
                    json.dump(trace(number, of_all_ranks), file)
            except OSError as error:
                log(f"warning: {path} cannot be written: {error.strerror}")

    @contextmanager
    def _profiled(self, number: int) -> Iterator[None]:
        ranks = self._settings.profile_ranks
        if number not in self._settings.profile_steps or (ranks and rank() not in ranks):
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
            yield
        path = self._directory / PROFILE / f"step_{number:06d}.rank{rank():04d}.json.gz"
        try:
            make_directory(path.parent)
            path.unlink(missing_ok=True)  # torch would write through a link
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            log(f"warning: {path} cannot be written: {error}")


def trace(step: int, ranks: Sequence[RankSpans]) -> dict[str, Any]:
    """A step in the Trace Event Format. Times are microseconds since the start of the step on rank 0.

    A track becomes a thread of its rank. Its nested spans are complete events; spans that may overlap are asynchronous
    events, which viewers show below each other.
    """
    starts = [span.start_s for span in ranks[0].spans if span.track == PHASES]
    origin_s = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for one in ranks:
        tracks = {span.track for span in one.spans}
        names = [name for name in _ORDER if name in tracks] + sorted(tracks - set(_ORDER))
        threads = {name: number for number, name in enumerate(names)}
        events.append(_metadata("process_name", one.rank, 0, f"rank {one.rank} ({one.host})"))
        events += [_metadata("thread_name", one.rank, number, name) for name, number in threads.items()]
        events += [_metadata("thread_sort_index", one.rank, number, number) for number in threads.values()]
        for span in one.spans:
            events += _events(span, one, threads[span.track], origin_s)
    clocks = [{"rank": one.rank, "offset_s": one.offset_s, "within_s": one.within_s} for one in ranks]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step": step, "clocks": clocks}}


def _metadata(event: str, process: int, thread: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if event == "thread_sort_index" else "name"
    return {"ph": "M", "name": event, "pid": process, "tid": thread, "args": {key: value}}


def _events(span: Span, one: RankSpans, thread: int, origin_s: float) -> list[dict[str, Any]]:
    start, end = _ns(span.start_s, one, origin_s), _ns(span.end_s, one, origin_s)
    common = {"name": span.name, "cat": span.track, "pid": one.rank, "tid": thread}
    if span.ticket is None:
        return [common | {"ph": "X", "ts": start / 1000, "dur": (end - start) / 1000}]
    ident = {"id2": {"local": f"{thread}.{span.ticket}"}}  # unique within its rank
    return [common | ident | {"ph": "b", "ts": start / 1000}, common | ident | {"ph": "e", "ts": end / 1000}]


def _ns(at_s: float, one: RankSpans, origin_s: float) -> int:
    """Nanoseconds since the step's start on rank 0, as integers, so that rounding leaves nested spans nested."""
    return round((at_s + one.offset_s - origin_s) * 1e9)
