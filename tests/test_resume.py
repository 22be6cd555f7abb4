"""A run that was killed and resumed is the run that was never interrupted: bit for bit, record and weights."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from support.job import job_config, nearly, read_metrics
from support.killing import Kill, arm, run_killed, run_whole, train_or_die
from support.launch import RankError, run_ranks

from dppo_megatron.checkpoint.checkpoint_dir import read_manifest, write_manifest
from dppo_megatron.config import load_config
from dppo_megatron.config.changes import FREE, check_changes, config_values, saved_values
from dppo_megatron.job import prepare_job
from dppo_megatron.observe import watchdog
from dppo_megatron.observe.run_directory import RunDirectory
from dppo_megatron.pruning.prompt_score import FittedScore
from dppo_megatron.run import Run, Stopped
from dppo_megatron.steps.coordinator import Coordinator
from dppo_megatron.steps.loop import Loop
from dppo_megatron.train import train
from dppo_megatron.types import RunAborted, UserError
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3
from dppo_megatron.workbench.runs.run_record import run_status

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2pp2": (4, {"actor__layout__tensor_parallel": 2, "actor__layout__pipeline_parallel": 2}),
}
SHORT = {
    "sft__steps": 4,
    "checkpoint__every_steps": 1,
    "steps": 3,
    "rollout__prompts_per_step": 8,
    "reward__function": "support.faulty:parity_if_reached",  # completions are missing from every step
    "reward__max_failed_share": 1,
    "reward__min_self_consistency": 0,
    "objective__advantage": "rloo",
    "pruning__prompt__group_size_factor": 2.0,
    "pruning__prompt__rate": 0.1,
    "pruning__early_stop__after_tokens": 12,
}


@pytest.fixture(scope="module")
def whole(files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An uninterrupted run of each layout."""
    runs = {}
    for name, (world_size, layout) in LAYOUTS.items():
        runs[name] = tmp_path_factory.mktemp("whole") / name
        run_whole(files, runs[name], world_size, SHORT | layout)
        rows = read_metrics(runs[name])[1:]
        assert all(0 < row["prune/completions_trained"] < row["prune/completions_generated"] for row in rows)
        assert all(row["rollout/missing_count"] > row["rollout/missing_biased_count"] > 0 for row in rows)
        assert all(row["rollout/stopped_early_count"] for row in rows)
        trace = [json.loads(line) for line in (runs[name] / "trace.jsonl").read_text().splitlines()[1:]]
        assert len({len(group) for step in trace for group in step["rewards"]}) > 1, "groups of one size"
    return runs


def assert_same_run(mine: Path, theirs: Path) -> None:
    """All of metrics.jsonl but the clock, the selection's trace, the samples, and every byte of the weights."""
    assert read_metrics(mine) == read_metrics(theirs)
    rows = [[json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()] for run in (mine, theirs)]
    for left, right in zip(*rows, strict=True):
        assert {k: v for k, v in left.items() if k not in ("seconds", "config")} == {
            k: v for k, v in right.items() if k not in ("seconds", "config")
        }
    samples = [
        pd.read_parquet(run / "samples").sort_values(["step", "group", "completion"], ignore_index=True)
        for run in (mine, theirs)
    ]
    # the actor's log-probabilities depend on the layout
    pd.testing.assert_frame_equal(*(one.drop(columns=["actor_logprobs"]) for one in samples))
    weights = [load_file(run / "hf" / "model.safetensors") for run in (mine, theirs)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[1].items():
        assert torch.equal(weights[0][name].view(torch.uint8), tensor.view(torch.uint8)), name


KILLS = [  # seeded by hand: some on entering a call, some in the midst of it
    ("tp1", Kill("sft", 2)),
    ("tp1", Kill("select", 3)),
    ("tp1", Kill("reward", 4, delay_s=0.001)),
    ("tp1", Kill("saving", 2, delay_s=0.05)),
    ("tp1", Kill("evaluate", 2, delay_s=0.05)),
    ("tp1", Kill("finish", 1)),
    ("tp2pp2", Kill("sync", 3, rank=1, delay_s=0.01)),
    pytest.param("tp2pp2", Kill("update", 2, rank=3, delay_s=0.02), marks=pytest.mark.long),
]


@pytest.mark.parametrize(("layout", "kill"), KILLS, ids=lambda item: item if isinstance(item, str) else item.phase)
def test_killed_and_resumed_is_never_interrupted(
    files: Path, whole: dict[str, Path], tmp_path: Path, layout: str, kill: Kill
) -> None:
    """`make test-night` does the same at many random moments, and worse."""
    world_size, extra = LAYOUTS[layout]
    run_dir = tmp_path / "run"
    assert run_killed(files, run_dir, world_size, SHORT | extra, kill)
    assert not (run_dir / "summary.json").exists()
    run_whole(files, run_dir, world_size, SHORT | extra)
    assert_same_run(run_dir, whole[layout])
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"latest", "step_000002", "step_000003"}
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["tokens_trained"] == sum(row["tokens/trained"] for row in read_metrics(run_dir)[1:])


def test_asynchronous_saves_change_nothing(files: Path, whole: dict[str, Path], tmp_path: Path) -> None:
    """Written while the next step runs, killed during that, resumed: still the same run."""
    extra = SHORT | {"checkpoint__async_save": True}
    assert run_killed(files, tmp_path / "run", 1, extra, Kill("update", 3))
    run_whole(files, tmp_path / "run", 1, extra)
    assert_same_run(tmp_path / "run", whole["tp1"])
    assert (tmp_path / "run" / "checkpoints" / "latest" / "manifest.json").is_file()


def test_resumes_at_another_layout(files: Path, whole: dict[str, Path], tmp_path: Path) -> None:
    """From TP1 to TP2 and from there to DP2: the same prompts and draws, losses equal to rounding."""
    run_dir = tmp_path / "run"
    assert run_killed(files, run_dir, 1, SHORT, Kill("generate", 2))
    assert run_killed(files, run_dir, 2, SHORT | {"actor__layout__tensor_parallel": 2}, Kill("generate", 2, rank=1))
    run_whole(files, run_dir, 2, SHORT)
    mine, theirs = read_metrics(run_dir), read_metrics(whole["tp1"])
    assert [row["step"] for row in mine] == [0, 1, 2, 3]
    for left, right in zip(mine, theirs, strict=True):
        for key in right.keys() - {"prune/ledger", "eval/problems"}:
            if not key.startswith("pack/"):  # two data-parallel ranks need other packs
                assert left[key] == nearly(right[key], rel=1e-4, abs=1e-5), key


def _go_on(config: str, kill: Kill | None) -> None:
    with Run(prepare_job(load_config(config, []), 1)) as run:
        if kill:
            arm(run, kill, kill.strike)
        train(run)


def test_a_run_is_where_it_is_from_any_directory(
    files: Path, whole: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun with relative paths; resumed from elsewhere by its own config.yaml, at home again by the job's command,
    each time from what the other has saved; evaluated from elsewhere; and moved with its data."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    shutil.copytree(files, project / "files")
    elsewhere.mkdir()
    monkeypatch.chdir(project)
    assert run_killed(Path("files"), Path("run"), 1, SHORT, Kill("generate", 2))
    monkeypatch.chdir(elsewhere)
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(_go_on, 1, "../project/run/config.yaml", Kill("generate", 2), dies=0)
    monkeypatch.chdir(project)
    run_whole(Path("files"), Path("run"), 1, SHORT)
    assert_same_run(project / "run", whole["tp1"])
    monkeypatch.chdir(elsewhere)
    assert main(["eval", "../project/run", "--limit", "4", "--out", "here"]) == 0
    assert (elsewhere / "here" / "results.json").is_file()
    project.rename(tmp_path / "moved")
    run_ranks(_go_on, 1, "../moved/run/config.yaml", None)  # finished: nothing is left to do
    assert not (elsewhere / "run").exists() and not project.exists()


def test_a_finished_run_stays_as_it_is(
    files: Path, whole: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Starting it again does no step, and names libraries of another version; asking for more steps goes on where it
    ended."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole["tp1"], run_dir, symlinks=True)
    before = (run_dir / "metrics.jsonl").read_bytes()
    manifest = read_manifest(newest := run_dir / "checkpoints" / "step_000003")
    assert not isinstance(manifest, str)
    older = manifest.versions | {"torch": "2.4.0", "megatron_core": "0.15.0"}
    write_manifest(newest, replace(manifest, versions=older))
    run_whole(files, run_dir, 1, SHORT)
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    printed = capfd.readouterr().out
    said = [line for line in printed.splitlines() if "changed since the run began: " in line]
    assert len(said) == 2 and said[0].endswith(f"torch: 2.4.0 -> {torch.__version__}") and "0.15.0 -> " in said[1]
    assert run_status(run_dir) == "finished" and "step    3: heldout" not in printed
    assert run_killed(files, run_dir, 1, SHORT | {"steps": 5}, Kill("generate", 2))
    assert "changed since the run began: steps: 3 -> 5" in capfd.readouterr().out
    assert run_status(run_dir) != "finished" and json.loads((run_dir / "old/summary.0001.json").read_text())
    run_whole(files, run_dir, 1, SHORT | {"steps": 4})
    assert [row["step"] for row in read_metrics(run_dir)] == [0, 1, 2, 3, 4] and run_status(run_dir) == "finished"


def test_more_steps_raise_a_decayed_rate_aloud(files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Half of a linear decay from 1e-3 is left where it had ended."""
    extra = SHORT | {"sft__steps": 1, "steps": 2, "actor__optimizer__lr_schedule": "linear"}
    extra |= {"actor__optimizer__lr_warmup_steps": 0, "actor__optimizer__min_learning_rate": 1e-4}
    run_whole(files, tmp_path / "run", 1, extra)
    run_whole(files, tmp_path / "run", 1, extra)
    assert "the learning rate" not in (said := capfd.readouterr()).out + said.err
    run_whole(files, tmp_path / "run", 1, extra | {"steps": 4})
    assert "the learning rate goes from 0.0001 at the last update to 0.00055" in capfd.readouterr().out


def test_a_spoilt_checkpoint_is_passed_over_aloud(
    files: Path, whole: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A flipped byte in the newest checkpoint: the one before is used, and the run comes out the same."""
    run_dir = tmp_path / "run"
    assert run_killed(files, run_dir, 1, SHORT, Kill("generate", 3))
    shard = next((run_dir / "checkpoints" / "step_000002").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "torn')
    run_whole(files, run_dir, 1, SHORT)
    said = capfd.readouterr().out
    assert "step_000002 is not used:" in said and "has another checksum than when it was written" in said
    assert "step_000001: going on at step 2" in said
    assert_same_run(run_dir, whole["tp1"])


def test_a_new_run_from_a_checkpoint_of_another(files: Path, whole: dict[str, Path], tmp_path: Path) -> None:
    """The record begins at the next step; killed, the new run goes on from its own checkpoints, and the same command
    does so when what it began from is gone: the other run deletes its older ones."""
    origin = tmp_path / "step_000002"
    shutil.copytree(whole["tp1"] / "checkpoints" / "step_000002", origin)
    extra = SHORT | {"checkpoint__resume": origin, "steps": 4}
    assert run_killed(files, tmp_path / "fork", 1, extra, Kill("generate", 2))
    shutil.rmtree(origin)
    run_whole(files, tmp_path / "fork", 1, extra)
    assert [row["step"] for row in read_metrics(tmp_path / "fork")] == [3, 4]
    mine, theirs = read_metrics(tmp_path / "fork")[0], read_metrics(whole["tp1"])[-1]
    assert mine.items() <= theirs.items()  # which evaluated at its own last step
    run_whole(files, tmp_path / "none", 1, SHORT | {"checkpoint__resume": whole["tp1"] / "checkpoints" / "step_000003"})
    [line] = read_metrics(tmp_path / "none")  # no step is left: the line has its own evaluation, no training of its own
    assert line["step"] == 3 and {key.partition("/")[0] for key in line} == {"step", "eval"}


def _signalled(files: Path, run_dir: Path, extra: dict[str, Any], number: int) -> int:
    """On a rank: gets a signal while it trains, after a step of its own."""

    def recorded() -> int:
        metrics = run_dir / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    before = recorded() or 1  # the line of the first evaluation

    def send_when_recorded() -> None:
        while recorded() <= before:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send_when_recorded, daemon=True).start()
    return train_or_die(files, run_dir, 1, extra, None)


def test_signals_save_and_leave(files: Path, tmp_path: Path) -> None:
    """Exit code 0 and a checkpoint of the step that was running, though none was due; then it goes on, to the next
    signal and to its end."""
    extra = SHORT | {"checkpoint__every_steps": 0, "checkpoint__keep": 1, "steps": 80}
    last = 0
    for number in (signal.SIGTERM, signal.SIGUSR1):
        assert run_ranks(_signalled, 1, files, tmp_path / "run", extra, number) == [0]
        steps = [row["step"] for row in read_metrics(tmp_path / "run")]
        assert steps == list(range(steps[-1] + 1)) and last < steps[-1] < 80
        last, names = steps[-1], {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
        assert names == {"latest", f"step_{last:06d}"}
    run_whole(files, tmp_path / "run", 1, extra | {"steps": steps[-1] + 1})
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [*steps, steps[-1] + 1]


def _ended_beside_an_evaluation(files: Path, run_dir: Path, extra: dict[str, Any], moment: Kill, aborts: bool) -> str:
    """On a rank: a signal, or an abort, on entering a call; how the run ends."""

    def strike() -> None:
        if aborts:
            raise RunAborted("no rollout server answers")
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        with Run(prepare_job(job_config(files, run_dir, **extra), 1)) as run:
            arm(run, moment, strike)
            train(run)
    except (Stopped, RunAborted) as end:
        return str(end)
    return "trained"


def test_a_checkpoint_does_not_wait_for_the_evaluation(files: Path, tmp_path: Path) -> None:
    """Signals and aborts around evaluations save the step, and the run that goes on makes the evaluation, once: it and
    its summary are those of a run that was never interrupted, with asynchronous saves too; a tracker has each once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    extra = SHORT | {"eval__every_steps": 1, "checkpoint__every_steps": 2, "checkpoint__async_save": True}
    extra |= {"observe__trackers": "[tensorboard]", "observe__tracking__samples_every": 1}
    run_whole(files, tmp_path / "whole", 1, extra)
    run_dir = tmp_path / "run"
    for moment, aborts, saved, recorded in (
        (Kill("evaluate", 1), True, 0, []),
        (Kill("evaluate", 1), False, 0, [0]),  # heard after it
        (Kill("record", 1), False, 1, [0]),  # heard before it
        (Kill("evaluate", 2), True, 2, [0, 1]),
        (Kill("evaluate", 2), True, 3, [0, 1, 2]),
        (Kill("evaluate", 1), True, 3, [0, 1, 2]),
    ):
        [end] = run_ranks(_ended_beside_an_evaluation, 1, files, run_dir, extra, moment, aborts)
        assert end == "no rollout server answers" if aborts else end.startswith(f"stopped after step {saved} (SIGTERM)")
        assert os.readlink(run_dir / "checkpoints" / "latest") == f"step_{saved:06d}"
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == recorded
    run_whole(files, run_dir, 1, extra)
    assert_same_run(run_dir, tmp_path / "whole")
    assert not list((run_dir / "old").glob("metrics*"))
    summaries = [json.loads((one / "summary.json").read_text()) for one in (run_dir, tmp_path / "whole")]
    for key in ("steps", "tokens_trained", "eval_before", "eval_after", "eval_before_step"):
        assert summaries[0][key] == summaries[1][key], key
    tracked = EventAccumulator(str(run_dir / "trackers" / "tensorboard"))
    tracked.Reload()
    scores = [(event.step, event.value) for event in tracked.Scalars("eval/heldout/pass@1")]
    assert scores == [(row["step"], nearly(row["eval/heldout/pass@1"])) for row in read_metrics(run_dir)]
    assert [event.step for event in tracked.Scalars("reward/mean")] == [1, 2, 3]
    assert [event.step for event in tracked.Tensors("samples/text_summary")] == [1, 2, 3]


def _resume_counting(files: Path, run_dir: Path, extra: dict[str, Any]) -> int:
    """On a rank: the number of evaluations that the run makes."""
    calls, plain = list[Any](), Loop.evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "evaluate", lambda self, *names: calls.append(names) or plain(self, *names))
        assert train_or_die(files, run_dir, 1, extra, None) == 0
    return len(calls)


def test_a_kill_in_an_evaluation_costs_no_step(files: Path, tmp_path: Path) -> None:
    """Also of an asynchronous save: its checkpoint is complete before the evaluation begins. A set that is added then
    begins with that evaluation, which is made once; one that is removed leaves no final score."""
    extra = SHORT | {"eval__every_steps": 1, "checkpoint__async_save": True}
    assert run_killed(files, tmp_path / "run", 1, extra, Kill("evaluate", 3))
    assert os.readlink(tmp_path / "run" / "checkpoints" / "latest") == "step_000002"
    shutil.copytree(tmp_path / "run", tmp_path / "without", symlinks=True)
    run_whole(files, tmp_path / "without", 1, extra | {"steps": 2, "data__eval_paths": {}})
    without = json.loads((tmp_path / "without" / "summary.json").read_text())
    assert without["eval_before"] == without["eval_after"] == {}
    extra |= {"steps": 2, "data__eval_paths.new": files / "heldout.jsonl"}
    assert run_ranks(_resume_counting, 1, files, tmp_path / "run", extra) == [1]
    summary, line = json.loads((tmp_path / "run" / "summary.json").read_text()), read_metrics(tmp_path / "run")[-1]
    assert summary["eval_before"]["new"] == summary["eval_after"]["new"] == line["eval/new/pass@1"]
    assert summary["eval_before_step"] == {"new": 2} and summary["eval_before"].keys() == {"heldout", "new"}


def _resume_unread(files: Path, run_dir: Path, extra: dict[str, Any]) -> str:
    """On a rank: with a metrics.jsonl that cannot be read; how the start ends."""
    with pytest.MonkeyPatch.context() as patch:
        unread = PermissionError(errno.EACCES, "Permission denied", "metrics.jsonl")
        patch.setattr(RunDirectory, "metrics_of", Mock(side_effect=unread))
        with pytest.raises(UserError) as error:
            train_or_die(files, run_dir, 2, extra, None)
    return str(error.value)


def test_a_record_that_cannot_be_read_is_a_sentence_on_every_rank(files: Path, tmp_path: Path) -> None:
    """For the trackers, only rank 0 reads it; the lock is released."""
    extra = SHORT | {"steps": 1, "observe__trackers": "[tensorboard]"}
    run_whole(files, tmp_path / "run", 1, extra)
    said = run_ranks(_resume_unread, 2, files, tmp_path / "run", extra)
    assert said == [said[0]] * 2 and "cannot be written: Permission denied (metrics.jsonl)" in said[0]
    assert not (tmp_path / "run" / "lock.json").exists()


def _signalled_in_sft(files: Path, run_dir: Path) -> str:
    """On ranks: the second gets a signal in SFT's second step of 4; how the run ends."""
    try:
        with Run(prepare_job(job_config(files, run_dir, **SHORT), 2)) as run:
            if run.loop.actor.layout.rank == 1:
                arm(run, Kill("sft", 2), lambda: os.kill(os.getpid(), signal.SIGTERM))
            train(run)
    except Stopped as stopped:
        return str(stopped)
    return "trained"


def test_a_signal_in_sft_ends_the_run_after_that_step(files: Path, tmp_path: Path) -> None:
    """On all ranks, and without a checkpoint, as is said."""
    ends = run_ranks(_signalled_in_sft, 2, files, tmp_path / "run")
    said = "stopped after SFT step 2 ({}), without a checkpoint: SFT will start over"
    assert ends == [said.format("another rank got a signal"), said.format("SIGTERM")]
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_slurms_sigterm_and_torchruns_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank gets both; five seconds later another one ends it, and no sooner."""
    now, ended = [100.0], []
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(signal, "raise_signal", ended.append)
    asked = watchdog.StopRequests()
    asked.listen()
    try:
        for later in (0.0, 0.05, 4.9, 0.1):
            assert not ended
            now[0] += later
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked.received == "SIGTERM"
    finally:
        asked.restore()
    assert ended == [signal.SIGTERM]


def test_the_docs_list_what_may_change() -> None:
    page = Path(__file__).parent.parent / "docs" / "checkpoints.md"
    text = " ".join(page.read_text(encoding="utf-8").split())
    listed = text.partition("may differ and are only reported:")[2].partition("Others can be permitted")[0]
    assert set(re.findall(r"`([a-z_0-9.]+)`", listed)) == set(FREE)


def test_changed_settings(files: Path, tmp_path: Path) -> None:
    """What may differ is listed, what may not is refused by name, and can be permitted."""
    config = job_config(files, tmp_path / "run")
    before = config_values(config)
    parts = {"actor__recompute": "selective", "actor__recompute_modules": "[mlp]"}
    changed = job_config(files, tmp_path / "run", eval__every_steps=2, actor__layout__tensor_parallel=2, **parts)
    assert check_changes(changed, before, "x") == [
        "actor.layout.tensor_parallel: 1 -> 2",
        "actor.recompute: 'none' -> 'selective'",
        "actor.recompute_modules: ['core_attn'] -> ['mlp']",
        "eval.every_steps: 0 -> 2",
    ]
    stages = {"actor__layout__pipeline_parallel": 4}
    group = "actor.megatron.microbatch_group_size_per_vp_stage"
    overlap = "actor.megatron.overlap_p2p_comm"
    chunks = {"actor__layout__virtual_pipeline": 2, group.replace(".", "__"): 8, overlap.replace(".", "__"): "true"}
    interleaved = config_values(job_config(files, tmp_path / "run", **stages, **chunks))
    assert check_changes(job_config(files, tmp_path / "run", **stages), interleaved, "x") == [
        "actor.layout.virtual_pipeline: 2 -> 1",
        f"{group}: 8 -> None",
        f"{overlap}: True -> None",
    ]
    forbidden = {"seed": 7, "actor__optimizer__learning_rate": 0.5}
    with pytest.raises(UserError) as refused:
        check_changes(job_config(files, tmp_path / "run", **forbidden), before, "x")
    said = str(refused.value)
    assert "seed: 0 -> 7" in said and "checkpoint.may_change=[actor.optimizer.learning_rate,seed]" in said
    added = job_config(files, tmp_path / "run", **{"data__eval_sets.new.path": files / "heldout.jsonl"})
    assert check_changes(added, before, "x") == ["data.eval_sets.new: added"]
    assert check_changes(config, config_values(added), "x") == ["data.eval_sets.new: removed"]
    assert "see docs/checkpoints.md" in said and "only" not in said
    permitted = job_config(files, tmp_path / "run", checkpoint__may_change="[seed,actor.optimizer]", **forbidden)
    assert len(check_changes(permitted, before, "x")) == 2
    write_tiny_qwen3(tmp_path / "another", seed=1)
    another = {"model__hf_path": tmp_path / "another", "data__train_path": files / "heldout.jsonl"}
    with pytest.raises(UserError) as refused:
        check_changes(job_config(files, tmp_path / "run", **another), before, "x")
    assert (said := str(refused.value)).count("only for") == 2 and "weights come from the checkpoint" in said
    permitted = job_config(files, tmp_path / "run", checkpoint__may_change="[model,data]", **another)
    assert check_changes(permitted, before, "x")[1].endswith("another'; the weights stay the checkpoint's")


@pytest.mark.parametrize(
    ("key", "was", "value", "refused"),
    [
        ("pruning.prompt.method", "dppo", "none", True),
        ("pruning.prompt.method", "dppo", "dppo_auto", True),
        ("pruning.completion.method", "dppo", "none", True),
        ("pruning.prompt.score", "fit", "rms", True),
        ("pruning.prompt.score", "beta", "fit", True),
        ("pruning.prompt.score", "beta", "rms", False),
        ("pruning.prompt.discount", "0.5", "0.6", False),
        ("actor.lora.targets", "[all-linear]", "[q_proj,k_proj,v_proj]", True),
        ("actor.lora.alpha", "32", "16", True),
        ("actor.lora.rank", "3", "4", True),
        ("actor.optimizer.distributed", "true", "false", True),
        ("model.dtype", "float32", "bfloat16", False),
    ],
)
def test_no_permission_carries_a_policys_state_to_another(
    files: Path, tmp_path: Path, key: str, was: str, value: str, refused: bool
) -> None:
    """Whose state would be refused with the servers and the actor up, or dropped in silence, as learned adapters were.
    What does not fit is not advised either."""
    setting = key.replace(".", "__")
    extra: dict[str, Any] = {"actor__lora__rank": 8} if "lora" in key else {}
    before = config_values(job_config(files, tmp_path / "run", **extra | {setting: was}))
    for permitted in ("[]", f"[{key.partition('.')[0]}]", f"[{key},seed]"):
        extra |= {setting: value, "checkpoint__may_change": permitted, "seed": 7}
        now = job_config(files, tmp_path / "run", **extra)
        if permitted.endswith(",seed]") and not refused:
            assert len(check_changes(now, before, "x")) == 2
            continue
        with pytest.raises(UserError) as error:
            check_changes(now, before, "x")
        said = str(error.value)
        assert (f"under another {key} cannot be taken over" in said) == refused
        assert ("may_change" in said) != refused and (f"{key}: " in said) == (refused or permitted == "[]")


def test_a_reference_policy_that_the_checkpoint_lacks(files: Path, tmp_path: Path) -> None:
    """A KL term that begins later needs a path, which is advised, and then resumes; adapters allow none. Nor can
    another type of number be permitted without the distributed optimizer."""
    run_whole(files, tmp_path / "run", 1, SHORT | {"steps": 1})
    before = saved_values(tmp_path / "run" / "config.yaml")
    later = SHORT | {"steps": 2, "objective__kl__coef": 0.1}
    for permitted in ("[steps]", "[objective]"):
        with pytest.raises(UserError, match="the checkpoint holds no reference policy") as error:
            check_changes(job_config(files, tmp_path / "run", **later, checkpoint__may_change=permitted), before, "x")
    advised = "[objective.kl.coef,objective.kl.reference_path]"
    assert f"checkpoint.may_change={advised} (with objective.kl.reference_path" in str(error.value)
    later |= {"checkpoint__may_change": advised, "objective__kl__reference_path": files / "model"}
    run_whole(files, tmp_path / "run", 1, later)
    assert read_metrics(tmp_path / "run")[-1]["train/kl"] >= 0
    alone = {"actor__optimizer__distributed": "false"}
    for extra, changed in (
        ({"actor__lora__rank": 2}, {"objective__kl__coef": 0.1}),
        (alone, {"model__dtype": "bfloat16"}),
    ):
        before = config_values(job_config(files, tmp_path / "run", **extra))
        extra = extra | changed | {"checkpoint__may_change": "[objective,model]"}
        with pytest.raises(UserError, match="cannot be taken over, whatever is permitted"):
            check_changes(job_config(files, tmp_path / "run", **extra), before, "x")


@pytest.mark.parametrize(
    ("owner", "part", "why"),
    [(FittedScore, "tokens", "missing keys ['tokens']"), (Coordinator, "noise", "it lacks 'noise'")],
)
def test_state_of_another_version_is_refused(files: Path, tmp_path: Path, owner: type, part: str, why: str) -> None:
    """Nothing can be made of a state that lacks a part, a policy's or the loop's own, as an earlier version wrote it: a
    sentence."""

    def go(steps: int, lacks: str) -> str:
        values = SHORT | {"steps": steps, "checkpoint__may_change": "[steps]"}
        whole = owner.state_dict
        with pytest.MonkeyPatch.context() as patch:
            if lacks:
                kept = lambda self: {key: value for key, value in whole(self).items() if key != lacks}  # noqa: E731
                patch.setattr(owner, "state_dict", kept)
            try:
                with Run(prepare_job(job_config(files, tmp_path / "run", **values), 1)) as run:
                    train(run)
            except UserError as error:
                return str(error)
        return ""

    assert run_ranks(go, 1, 1, part) == [""]
    (said,) = run_ranks(go, 1, 2, "")
    assert "step_000001: was written by another version of dppo_megatron" in said
    assert why in said and "\n" not in said


def test_refused_from_the_command_line(files: Path, whole: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and not a byte of the run changed."""
    from support.job import REPOSITORY, settings

    before = (whole["tp1"] / "metrics.jsonl").read_bytes()
    arguments = [str(REPOSITORY / "configs" / "quickstart.yaml"), *settings(files, whole["tp1"], **SHORT)]
    assert run_ranks(main, 1, ["train", *arguments, "seed=3"]) == [2]
    assert "cannot be resumed with other settings: seed: 0 -> 3" in capfd.readouterr().err
    method = ["pruning.prompt.method=dppo_auto", "checkpoint.may_change=[pruning]"]
    assert run_ranks(main, 1, ["train", *arguments, *method]) == [2]
    assert "learned under another pruning.prompt.method cannot be taken over" in capfd.readouterr().err
    assert run_ranks(main, 1, ["train", *arguments, "steps=2"]) == [2]
    assert "steps = 2: " in (said := capfd.readouterr().err) and "step_000003 has done 3; set steps to that" in said
    assert main(["train", *arguments, "--resume", "never"]) == 2
    assert "already holds a run" in capfd.readouterr().err
    assert (whole["tp1"] / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("reference", ["the start", "another model"])
def test_reference_policy_is_saved_and_reshards(files: Path, tmp_path: Path, reference: str) -> None:
    """With a KL term, resumed at another layout: the term's metric goes on as in the uninterrupted run. Another model
    is read again."""
    extra = SHORT | {"objective__kl__coef": 0.5, "actor__optimizer__learning_rate": 5e-3}
    if reference == "another model":
        write_tiny_qwen3(tmp_path / "other", seed=1)
        extra["objective__kl__reference_path"] = tmp_path / "other"
    run_whole(files, tmp_path / "whole", 1, extra)
    assert run_killed(files, tmp_path / "run", 1, extra, Kill("select", 3))
    run_whole(files, tmp_path / "run", 2, extra | {"actor__layout__pipeline_parallel": 2})
    mine, theirs = read_metrics(tmp_path / "run")[-1], read_metrics(tmp_path / "whole")[-1]
    term = [key for key in theirs if key.startswith("train/kl")]
    assert term and all(np.abs(theirs[key]) > 1e-6 for key in term), "the policy has not moved from its reference"
    for key in term:
        assert mine[key] == pytest.approx(theirs[key], rel=1e-3), key
