"""timeline/: the spans of a step nest, do not overlap, and are the seconds of metrics.jsonl. And the trackers in a run.

The run here has two ranks, two pipeline stages, one tracker, and is resumed.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.job import job_config, read_metrics, write_job_files
from support.launch import run_ranks
from support.timelines import Shown, nested, read_timeline

from dppo_megatron.distributed import clock_offset
from dppo_megatron.job import prepare_job
from dppo_megatron.observe.timeline import RankSpans, trace
from dppo_megatron.run import Run
from dppo_megatron.spans import Span, Spans
from dppo_megatron.train import train
from dppo_megatron.workbench.runs.run_record import read_run

SETTINGS: dict[str, Any] = {
    "sft__steps": 1,
    "sft__examples_per_step": 8,
    "rollout__prompts_per_step": 8,
    "actor__layout__pipeline_parallel": 2,
    "packing__max_tokens_per_microbatch": 256,
    # all of it is trained on, although this model has no reward yet
    "pruning__prompt__method": "none",
    "pruning__completion__method": "none",
    "observe__timeline": 1,
    "observe__timeline_every": 3,
    "observe__profile_steps": "[2]",
    "observe__profile_ranks": "[1]",
    "observe__trackers": "[tensorboard]",
    "observe__tracking__samples_every": 2,
    "observe__tracking__drain_s": 300,
}


def _train(files: Path, run_dir: Path, steps: int) -> None:
    with Run(prepare_job(job_config(files, run_dir, steps=steps, **SETTINGS), 2)) as run:
        train(run)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, then two more: the timelines are those of step 1, of step 3 (the first of the second, and a third
    one), and none of 2 and 4."""
    directory = tmp_path_factory.mktemp("timeline")
    files = write_job_files(directory / "files")
    for steps in (2, 4):
        run_ranks(_train, 2, files, directory / "run", steps)
    return directory / "run"


def _assert_nested(spans: list[Shown]) -> None:
    open_ends: list[int] = []
    for start, end, name in spans:
        assert start <= end, name
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"{name} begins inside a span and ends outside"
        open_ends.append(end)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
def test_spans_nest_and_add_up_to_the_step(run_dir: Path, step: int) -> None:
    """On every rank and track; and rank 0's phases are, to the microsecond, the seconds of the step's metrics."""
    written = read_timeline(run_dir / "timeline" / f"step_{step:06d}.json.gz")
    tracks = nested(written["traceEvents"])
    for spans in tracks.values():
        _assert_nested(spans)
    [metrics] = [row for row in read_metrics(run_dir, with_time=True) if row["step"] == step]
    seconds: Counter[str] = Counter()
    for start, end, name in tracks[0, "phases"]:
        seconds[name] += end - start
    told = {key.removeprefix("time/").removesuffix("_s"): value for key, value in metrics.items() if "time/" in key}
    assert told.pop("step_cpu") > 0  # seconds of a processor are no span
    assert seconds.keys() == told.keys()
    for name, value in told.items():
        assert seconds[name] / 1e9 == pytest.approx(value, abs=1e-6), name
    begins, ends = next((start, end) for start, end, name in tracks[0, "phases"] if name == "step")
    assert begins == 0  # the file's own zero
    inside = [(start, end) for start, end, name in tracks[0, "phases"] if name not in ("step", "pack", "logprobs")]
    assert sum(end - start for start, end in inside) <= ends - begins
    assert all(start >= 0 and end <= ends for start, end in inside)


@pytest.mark.slow
def test_every_micro_batch_of_every_rank_is_there(run_dir: Path) -> None:
    """Each once forward and once backward, inside its rank's update; stages send to each other."""
    written = read_timeline(run_dir / "timeline" / "step_000001.json.gz")
    tracks = nested(written["traceEvents"])
    [metrics] = [row for row in read_metrics(run_dir) if row["step"] == 1]
    count = int(metrics["pack/microbatches"])
    assert count > 1, "the test needs several"
    for rank in (0, 1):
        names = Counter(name for _, _, name in tracks[rank, "micro-batches"])
        expected = {f"{kind} {index}" for kind in ("forward", "backward") for index in range(count)}
        updates = [(start, end) for start, end, name in tracks[rank, "phases"] if name == "update"]
        inside = [
            name
            for start, end, name in tracks[rank, "micro-batches"]
            if any(begin <= start and end <= finish for begin, finish in updates)
        ]
        assert set(names) == set(inside) == expected
        assert (rank, "pipeline") in tracks and (rank, "generation") in tracks
    assert [clock["rank"] for clock in written["otherData"]["clocks"]] == [0, 1]


@pytest.mark.slow
def test_only_the_steps_that_were_asked_for(run_dir: Path) -> None:
    assert sorted(path.name for path in (run_dir / "timeline").iterdir()) == [
        "step_000001.json.gz",
        "step_000003.json.gz",
    ]
    assert [path.name for path in (run_dir / "profile").iterdir()] == ["step_000002.rank0001.json.gz"]
    profile = read_timeline(run_dir / "profile" / "step_000002.rank0001.json.gz")
    assert any("aten::" in event.get("name", "") for event in profile["traceEvents"])


@pytest.mark.slow
def test_a_tracker_of_a_resumed_run_has_its_metrics(run_dir: Path) -> None:
    """TensorBoard, read by its own reader, against metrics.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run_dir / "trackers" / "tensorboard"))
    read.Reload()
    rows = {row["step"]: row for row in read_metrics(run_dir)}
    assert list(rows) == [0, 1, 2, 3, 4]
    tags = set(read.Tags()["scalars"])
    assert {"train/loss", "eval/heldout/pass@1", "reward/mean"} <= tags
    for tag in tags - {tag for tag in tags if tag.startswith(("time/", "perf/", "ledger/"))}:
        expected = {step: row[tag] for step, row in rows.items() if row.get(tag) is not None}
        assert {event.step: event.value for event in read.Scalars(tag)} == pytest.approx(expected, rel=1e-6), tag
    assert [event.step for event in read.Tensors("samples/text_summary")] == [2, 4]
    assert all(row["observe/tracker_failures"] == 0 for row in rows.values())
    assert not any("tracker" in note for note in read_run(run_dir).notes)


def test_clocks_of_two_ranks_agree() -> None:
    """Rank 1's clock is wrong by a known amount, on one machine: it is found within the bound that is given."""

    def measure() -> tuple[float, float]:
        from dppo_megatron.distributed import rank

        return clock_offset(lambda: time.perf_counter() + 1000.0 * rank())

    (own, exact), (offset_s, within_s) = run_ranks(measure, 2)
    assert (own, exact) == (0.0, 0.0)
    assert abs(offset_s + 1000.0) <= within_s + 1e-9


def test_overlapping_spans_stay_apart() -> None:
    """Two requests at once on a server, on rank 1, whose clock is 10 s ahead."""
    spans = [
        Span("requests a", "1-0-0", 12.0, 14.0, ticket=1),
        Span("requests a", "1-1-0", 13.0, 15.0, ticket=2),
    ]
    ranks = [RankSpans(0, "x", 0.0, 0.0, [Span("phases", "step", 1.0, 9.0)]), RankSpans(1, "y", -10.0, 1e-4, spans)]
    events = trace(7, ranks)["traceEvents"]
    begun = {event["id2"]["local"]: event["ts"] for event in events if event["ph"] == "b"}
    ended = {event["id2"]["local"]: event["ts"] for event in events if event["ph"] == "e"}
    assert list(begun.values()) == [1e6, 2e6] and list(ended.values()) == [3e6, 4e6]


def test_off_is_off() -> None:
    """No span is kept, and nothing grows, unless a step is recorded."""
    spans = Spans(clock=lambda: 1.0)
    with spans.span("phases", "x"):
        spans.add("phases", "y", 0.0, 1.0)
    assert spans.drain() == []
    spans.on = True
    with spans.span("phases", "x"):
        pass
    assert spans.drain() == [Span("phases", "x", 1.0, 1.0)] and spans.drain() == []
