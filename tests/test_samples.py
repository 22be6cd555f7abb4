"""samples/: what is written is what happened, in bounds, and in order again after a resume."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.job import job_config, write_job_files
from support.logged import logged_lines

from dppo_megatron.config.observe import SamplesConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.observe import samples
from dppo_megatron.observe.samples import (
    RecordedGroup,
    SampleFile,
    SampleWriter,
    add_actor_logprobs,
    rewind_samples,
    sample_files,
    to_table,
)
from dppo_megatron.selection import Rollouts
from dppo_megatron.steps.trace import reasons_of, recorded_groups
from dppo_megatron.types import Completion, Grade, Group, Prompt, RolloutPrompt
from dppo_megatron.workbench.runs.sample_rows import newest_sample_file, read_rows


def _group(position: int, size: int = 2, tokens: int = 3, text: str = "answer") -> RecordedGroup:
    asked = f"problem {position}"
    prompt = Prompt(100 + position, f"Q: {asked}", (1, 2), "42", "algebra", problem=asked)
    completion = Completion(np.arange(tokens), np.full(tokens, -0.5, np.float32), "stop", text, ((7, tokens),))
    rewards = np.array([1.0] + [np.nan] * (size - 1))
    grades = (Grade(1.0, "42", "exact"),) + (Grade(np.nan, failure="timed out"),) * (size - 1)
    return RecordedGroup(
        position,
        Group(RolloutPrompt(prompt, 0.5, 2.0), (completion,) * size, rewards, grades),
        advantages=np.linspace(1, -1, size),
        completion_prob=np.array([0.25] + [np.nan] * (size - 1)),
        weights=np.array([8.0] + [0.0] * (size - 1)),
        kept=np.array([True] + [False] * (size - 1)),
        why=("score",) + ("failed",) * (size - 1),
    )


def _writer(path: Path, **settings: Any) -> SampleWriter:
    return SampleWriter(path / "samples", 0, 1, SamplesConfig(**settings))


def _write(path: Path, steps: range, **settings: Any) -> None:
    writer = _writer(path, **settings)
    for step in steps:
        writer._directory.mkdir(exist_ok=True)
        writer._write(step, [_group(0)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run."""
    from dppo_megatron.job import prepare_job
    from dppo_megatron.run import Run
    from dppo_megatron.train import train

    files = write_job_files(tmp_path_factory.mktemp("task"))
    run_dir = tmp_path_factory.mktemp("samples") / "run"
    job = prepare_job(job_config(files, run_dir), 1)
    with Run(job) as run:
        train(run)
    return run_dir


@pytest.mark.slow
def test_a_run_leaves_what_its_trace_says(finished: Path) -> None:
    """trace.jsonl and metrics.jsonl come from rank 0's arrays, the samples from the groups themselves."""
    frame = pd.read_parquet(finished / "samples")
    trace = [json.loads(line) for line in (finished / "trace.jsonl").read_text().splitlines()][1:]
    metrics = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()][1:]
    assert [row["step"] for row in trace] == [1, 2, 3, 4]
    assert (frame.problem == frame.prompt).all() and (frame.correct == (frame.reward >= 1)).all()
    for row, measured in zip(trace, metrics, strict=True):
        mine = frame[frame.step == row["step"]].sort_values(["group", "completion"])
        groups = mine.groupby("group").first()
        assert groups.prompt_index.tolist() == row["prompts"]
        assert groups.prompt_prob.tolist() == pytest.approx(row["inclusion_prob"], rel=1e-5)
        assert mine.reward.tolist() == pytest.approx(np.ravel(row["rewards"]).tolist(), rel=1e-5)
        assert mine.tokens.tolist() == np.ravel(row["lengths"]).tolist()
        assert np.flatnonzero(mine.kept).tolist() == row["kept"]
        assert mine.tokens[mine.kept].sum() == measured["tokens/trained"]
        squares = (mine.advantage * np.ravel(row["logit_grad_norm"]) / mine.tokens) ** 2  # of sequence_mean
        full, kept = (squares / mine.prompt_prob).sum(), (squares * mine.weight**2).sum()
        growth = kept / full if full else 1.0
        assert measured["prune/realised_design_effect"] == pytest.approx(growth, rel=1e-3)
        assert (mine.advantage[mine.why == "zero advantage"] == 0).all()
        kept = mine[mine.kept]
        assert (kept.completion_prob > 0).all()
        # Horvitz-Thompson: every weight is one over a probability
        assert (kept.completion_weight * kept.completion_prob).to_numpy() == pytest.approx(1.0)
        # the embedded engine and the actor have the same weights: equal to rounding
        scored = kept[kept.actor_logprobs.notna()]
        assert len(scored) == len(kept)
        for mine_, theirs in zip(scored.logprobs, scored.actor_logprobs, strict=True):
            assert theirs == pytest.approx(mine_, abs=1e-3)


def test_a_row() -> None:
    table = to_table(5, [_group(1), _group(0, text="\ud800 lone")])
    rows = table.to_pylist()
    places = [(row["step"], row["group"], row["completion"]) for row in rows]
    assert places == [
        (5, 0, 0),
        (5, 0, 1),
        (5, 1, 0),
        (5, 1, 1),
    ]
    assert rows[0]["text"] == "\\ud800 lone"  # has no form in UTF-8
    assert rows[2] | {"token_ids": None, "logprobs": None} == {
        "step": 5, "group": 1, "completion": 0, "prompt_index": 101, "source": "algebra", "prompt": "Q: problem 1",
        "problem": "problem 1", "correct": True, "parts": [], "reference": "42", "text": "answer", "extracted": "42",
        "reward": 1.0, "reward_why": "exact",
        "advantage": 1.0, "kept": True, "why": "score", "prompt_prob": 0.5, "prompt_weight": 2.0,
        "completion_prob": 0.25, "completion_weight": 4.0, "weight": 8.0, "tokens": 3, "finish_reason": "stop",
        "weights_version_first": 7, "weights_version_last": 7, "token_ids": None, "logprobs": None,
        "actor_logprobs": None,
    }  # fmt: skip
    assert (rows[3]["reward"], rows[3]["reward_why"], rows[3]["completion_prob"]) == (None, "timed out", None)
    assert rows[3]["correct"] is None


def test_right_is_what_the_first_named_reward_says() -> None:
    """Not what was rewarded: .06 for brevity are not right, and a right answer may be punished for its length."""
    grades = (Grade(0.06, parts={"right": 0.0, "short": 0.6}), Grade(-0.1, parts={"right": 1.0, "short": -11.0}))
    one = replace(_group(0), group=replace(_group(0).group, grades=grades))
    found = to_table(1, [one], {"reward": 0.5}).to_pylist()
    assert [row["correct"] for row in found] == [False, True]
    assert [dict(row["parts"]) for row in found] == [dict(grade.parts) for grade in grades]
    assert [row["correct"] for row in to_table(1, [one], {"reward": 1.5}).to_pylist()] == [False, False]
    other = (Grade(1.0, parts={"short": 1.0}, undecided=True), grades[1])  # the first did not judge it
    one = replace(one, group=replace(one.group, grades=other))
    assert [row["correct"] for row in to_table(1, [one], {"reward": 0.5}).to_pylist()] == [None, True]


def test_a_file_of_other_columns_is_moved_and_the_others_merged(tmp_path: Path) -> None:
    _write(tmp_path, range(1, 64))
    first = sample_files(tmp_path / "samples")[0].path
    pq.write_table(pq.ParquetFile(first).read().drop_columns(["problem"]), first)
    _write(tmp_path, range(64, 65))
    [merged] = sample_files(tmp_path / "samples")
    assert [len(read_rows(merged.path, ["problem"], step)) for step in (1, 2, 64)] == [0, 2, 2]
    assert [path.name for path in (tmp_path / "old").iterdir()] == [f"{first.stem}.0001.parquet"]


def test_actor_logprobs_find_their_completion() -> None:
    """Places count in the update's rows, which are groups times G plus the completion; other ranks' are not here."""
    groups = [_group(2), _group(4)]
    add_actor_logprobs(groups, np.array([1, 5, 8]), 2, {0: np.zeros(3), 1: np.ones(3), 2: np.full(3, 2.0)})
    assert [list(one.actor_logprobs) for one in groups] == [[1], [0]]
    assert to_table(1, groups)["actor_logprobs"].to_pylist() == [None, [1.0] * 3, [2.0] * 3, None]
    add_actor_logprobs([], np.array([1]), 2, {0: np.zeros(3)})


@pytest.mark.parametrize(("last", "back_to"), [(3, 0), (70, 64), (130, 100), (63, 200)])
def test_rewound_to_a_step(last: int, back_to: int, tmp_path: Path) -> None:
    path = tmp_path
    _write(path, range(1, last + 1))
    assert len(sample_files(path / "samples")) < 64 + last // 64
    assert rewind_samples(path / "samples", back_to, path / "old") == []
    left = [pd.read_parquet(one.path) for one in sample_files(path / "samples")]
    assert [step for frame in left for step in frame.step.unique()] == list(range(1, min(last, back_to) + 1))


def test_a_rewound_file_is_named_by_its_last_step_with_samples(tmp_path: Path) -> None:
    """`watch` shows that one, and showed nothing of a file that ended at a step without."""
    _write(tmp_path, range(10, 641, 10))
    rewind_samples(tmp_path / "samples", 105, tmp_path / "old")
    newest = newest_sample_file(tmp_path / "samples")
    assert newest is not None and newest[1] == 100 and len(read_rows(newest[0], ["step"], 100))


def test_a_merge_that_was_cut_short(tmp_path: Path) -> None:
    """The merged file is there and some of its parts are as well: no step is read twice, and a resume clears up."""
    _write(tmp_path, range(1, 64))
    parts = {one.path: one.path.read_bytes() for one in sample_files(tmp_path / "samples")}
    _write(tmp_path, range(64, 65))
    for path, data in list(parts.items())[20:]:
        path.write_bytes(data)
    (tmp_path / "samples" / ".steps_000065-000065.rank0000.parquet.new").write_bytes(b"x")
    assert [(one.first, one.last) for one in sample_files(tmp_path / "samples")] == [(1, 64)]
    rewind_samples(tmp_path / "samples", 64, tmp_path / "old")
    assert len(list((tmp_path / "samples").iterdir())) == 1
    assert pd.read_parquet(tmp_path / "samples").step.nunique() == 64


def test_files_of_many_ranks_are_compared_with_those_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank lists those of all ranks, in every step."""
    looked = Counter[str]()

    class Counted(SampleFile):
        def __getattribute__(self, name: str) -> Any:
            looked[name] += 1
            return super().__getattribute__(name)

    for rank in range(64):
        (tmp_path / f"steps_000001-000064.rank{rank:04d}.parquet").touch()
        (tmp_path / f"steps_000064-000064.rank{rank:04d}.parquet").touch()  # of the merge that was cut short
        (tmp_path / f"steps_000065-000065.rank{rank:04d}.parquet").touch()
    monkeypatch.setattr(samples, "SampleFile", Counted)
    assert len(samples.sample_files(tmp_path)) == 128
    assert looked["rank"] < 20 * 192  # sorting compares too


def test_what_cannot_be_read_is_moved_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    """A damaged file of steps that stay and of steps that go; one among those that are merged; somebody's notes."""
    folder, old = tmp_path / "samples", tmp_path / "old"
    _write(tmp_path, range(1, 65))
    (merged,) = sample_files(folder)
    merged.path.write_bytes(merged.path.read_bytes()[:-9])
    (folder / "notes.txt").write_text("mine")
    (said,) = rewind_samples(folder, 40, old)
    assert "cannot be read" in said and [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert [path.suffix for path in old.iterdir()] == [".parquet"]
    _write(tmp_path, range(41, 104))
    sample_files(folder)[3].path.write_bytes(b"PAR1 no more")
    _write(tmp_path, range(104, 105))
    assert [(one.first, one.last) for one in sample_files(folder)] == [(41, 104)]
    assert sorted(pd.read_parquet(sample_files(folder)[0].path).step.unique()) == [*range(41, 44), *range(45, 105)]
    assert len(list(old.iterdir())) == 2 and (folder / "notes.txt").read_text() == "mine"


def test_the_oldest_go_where_the_bound_is_reached(tmp_path: Path) -> None:
    _write(tmp_path, range(1, 3))
    one = sample_files(tmp_path / "samples")[0].path.stat().st_size
    _write(tmp_path, range(3, 40), max_gb=5.5 * one / 1e9)
    files = sample_files(tmp_path / "samples")
    assert files[-1].last == 39
    assert sum(one.path.stat().st_size for one in files) <= 5.5 * one


@pytest.mark.parametrize("rank", [0, 3])
def test_trouble_is_said_once_and_stops_nothing(rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the writer's thread: in the log, or by a rank that has none on its own."""
    (tmp_path / "samples").write_text("a file where the directory should be")
    said = logged_lines()
    writer = SampleWriter(tmp_path / "samples", rank, 4, SamplesConfig())
    for step in range(3):
        writer.write(step, [_group(0)])
    writer.close()
    printed = capsys.readouterr().out.splitlines()
    [line] = printed if rank else said
    assert "samples of step 0 cannot be written" in line and f"rank {rank}" in line and len(said + printed) == 1


def test_less_than_a_hundredth_of_a_step() -> None:
    """256 completions of 2,000 tokens: 0.5 M tokens take a step of minutes on any machine that holds a model. The
    bound is that of a step of 60 s, in CPU seconds, which other processes do not change."""
    groups = [_group(position, size=8, tokens=2000, text="x" * 6000) for position in range(32)]
    before = time.process_time()
    to_table(1, groups)
    assert time.process_time() - before < 0.6


def test_which_groups_are_recorded() -> None:
    config = Config(seed=3)
    count = 2000
    rollouts = Rollouts(np.zeros((count, 2)), np.full((count, 2), 10), np.zeros((count, 2)))
    index = np.arange(count)[::-1]
    config.observe.samples = SamplesConfig(share=0.2, max_mb_per_step=100)
    steps = [set(recorded_groups(config, step, index, rollouts).tolist()) for step in range(1, 9)]
    # 0.2 in each step, of others each time: both of two in 0.04; 5 deviations
    assert all(abs(len(one) / count - 0.2) < 5 * np.sqrt(0.2 * 0.8 / count) for one in steps)
    assert abs(len(steps[0] & steps[1]) / count - 0.04) < 5 * np.sqrt(0.04 * 0.96 / count)
    config.observe.samples.max_mb_per_step = len(steps[0]) * 0.5 * 16 * 20 / 1e6
    small = set(recorded_groups(config, 1, index, rollouts).tolist())
    assert small < steps[0] and len(small) == len(steps[0]) // 2
    config.observe.samples = SamplesConfig(share=0.0)
    assert len(recorded_groups(config, 1, index, rollouts)) == 0


def test_reasons() -> None:
    """A completion for each: reward, advantage, probability, kept, truncated -> why."""
    cases = [
        (1.0, 1.0, 1.0, True, False, "certain"),
        (1.0, 1.0, 0.4, True, False, "score"),
        (1.0, 1.0, 0.4, False, False, "score"),
        (1.0, 1.0, 0.05, False, False, "floor"),
        (1.0, 1.0, 0.05, True, False, "floor"),
        (1.0, 1.0, 0.0, False, False, "rank"),
        (1.0, 0.0, 0.0, False, False, "zero advantage"),
        (1.0, 0.0, 1.0, True, False, "certain"),
        (np.nan, 0.0, 0.0, False, False, "failed"),
        (1.0, 1.0, np.nan, False, True, "overlong"),
        (1.0, 1.0, np.nan, False, False, "group"),
    ]
    config = Config()
    config.objective.overlong.filter = True
    reward, advantage, prob, kept, truncated, why = (np.array(column) for column in zip(*cases, strict=True))
    rollouts = Rollouts(reward[:, None], np.ones((len(cases), 1), int), np.ones((len(cases), 1)), None, truncated)
    decision = SimpleNamespace(kept=kept, advantages=advantage, completion_prob=prob)
    assert reasons_of(config, decision, rollouts).tolist() == why.tolist()  # type: ignore[arg-type]
    config.objective.kl.coef = 0.1  # which has a gradient at advantage 0 too: what is gone was drawn away
    why[why == "zero advantage"] = "rank"
    decision.completion_prob[7], decision.kept[7], why[7] = 0.4, False, "score"
    assert reasons_of(config, decision, rollouts).tolist() == why.tolist()  # type: ignore[arg-type]


def test_files_without_rows_or_columns(tmp_path: Path) -> None:
    """A writer that was closed before the first row leaves no row group; a file without columns is none of ours."""
    pq.ParquetWriter(tmp_path / "empty.parquet", to_table(0, []).schema).close()
    assert read_rows(tmp_path / "empty.parquet", ["step", "group"], 1) == []
    tables = [to_table(step, [_group(0)]) for step in (1, 2)]
    names = sorted(tables[0].column_names, key=lambda name: (name == "step", name != "parts"))
    with pq.ParquetWriter(tmp_path / "turned.parquet", tables[0].select(names).schema) as file:
        for table in tables:  # statistics are of the leaves, of which `parts` before `step` has two
            file.write_table(table.select(names))
    assert [len(read_rows(tmp_path / "turned.parquet", ["group"], step)) for step in (1, 2, 3)] == [2, 2, 0]
    pq.write_table(pa.table({"step": pa.array([1], pa.int32())}), tmp_path / "bare.parquet")
    with pytest.raises(ValueError, match=r"^bare\.parquet: group is missing"):
        read_rows(tmp_path / "bare.parquet", ["step", "group"], 1)
    pq.write_table(tables[0].append_column("group", tables[0]["group"]), tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"^twice\.parquet: .*exists 2 times"):
        read_rows(tmp_path / "twice.parquet", ["step", "group"], 1)
