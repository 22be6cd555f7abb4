"""What the loop survives, and what it names: broken gradients, graders, disks and ranks."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import queue
import re
import resource
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.faulty import nan_loss
from support.job import job_config, read_metrics
from support.killing import Kill, run_killed, run_whole, train_or_die
from support.launch import RankError, run_ranks
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model

from dppo_megatron.algorithms.objectives import make_objective, supervised
from dppo_megatron.config.objective import ObjectiveConfig
from dppo_megatron.job import prepare_job
from dppo_megatron.observe import watchdog
from dppo_megatron.observe.json_lines import JsonLines, rewind
from dppo_megatron.observe.metrics import Summary
from dppo_megatron.observe.watchdog import Watchdog
from dppo_megatron.run import Run
from dppo_megatron.train import train
from dppo_megatron.types import RunAborted
from dppo_megatron.weights.hf_files import HFWriter

pytestmark = pytest.mark.slow

SHORT = {
    "sft__steps": 2,
    "checkpoint__every_steps": 1,
    "steps": 3,
    "rollout__prompts_per_step": 8,
    "reward__function": "support.faulty:length_parity",
    "reward__min_self_consistency": 0,
}
sys.path.append(str(Path(__file__).parent))  # grader processes are given this process's path


# ---------------------------------------------------------------------------------------------------- not finite


def _updates(model: Path, parallel: Parallel, poisoned: bool) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """On ranks: two updates, with one between them, if `poisoned`, in which one sample's weight is infinite."""
    actor = build_actor(model, parallel)
    samples = random_samples(6, 37)
    broken = [*samples[:3], replace(samples[3], weight=float("inf")), *samples[4:]]
    measured = []
    for batch in (samples, broken, samples) if poisoned else (samples, samples):
        measured.append(actor.update(batch, plan_for(batch, parallel), supervised()).figures())
    return measured, {name: tensor.numpy().copy() for name, tensor in actor.weights()}


@pytest.mark.parametrize("parallel", [Parallel(tp=2), Parallel(dp=2, distributed_optimizer=True)], ids=str)
def test_an_update_that_is_not_finite_leaves_no_trace(tmp_path: Path, parallel: Parallel) -> None:
    """Weights, moments and schedule are those of a run in which the broken batch never was."""
    model = write_model(tmp_path / "model")
    measured, weights = run_ranks(_updates, 2, model, parallel, True)[0]
    expected, clean = run_ranks(_updates, 2, model, parallel, False)[0]
    assert [row["skipped_updates"] for row in measured] == [0, 1, 0]
    assert [measured[0], measured[2]] == expected
    for name, tensor in clean.items():
        np.testing.assert_array_equal(weights[name], tensor, err_msg=name)


def test_the_guard_stops_with_a_checkpoint_and_the_samples(
    files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3 after as many skipped updates in a row as allowed; metrics.jsonl stays JSON."""
    extra = SHORT | {
        "steps": 9,
        "checkpoint__every_steps": 0,
        "guard__max_skipped_updates": 2,
        "objective__function": "support.faulty:nan_loss",
    }
    assert run_ranks(_command_line, 1, files, tmp_path / "run", extra) == [3]
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["train/loss"] is None and rows[-1]["train/skipped_updates"] == 1
    said = capfd.readouterr().err
    assert "2 updates in a row" in said and "samples of the last (prompt:completion): " in said
    assert (tmp_path / "run" / "checkpoints" / "step_000002" / "manifest.json").is_file()


def test_an_sft_that_diverges_is_a_stop_and_no_crash(
    files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3 on both ranks, of two machines, and once the setting to lower; nobody looks for one that has died."""
    with pytest.MonkeyPatch.context() as patched:  # the ranks are forked
        loss = make_objective(ObjectiveConfig(), nan_loss)
        patched.setattr("dppo_megatron.steps.loop.supervised", lambda: loss)
        patched.setattr(Watchdog, "wait_for_silence", lambda _: ["somebody"])
        extra = SHORT | {"sft__learning_rate": 0.5}
        assert run_ranks(_command_line_on_its_machine, 2, files, tmp_path / "run", extra) == [3, 3]
    said = capfd.readouterr()
    assert "stopped: SFT, step 1: loss or gradient is not finite; lower sft.learning_rate = 0.5" in said.err
    assert said.err.count("stopped: ") == 1
    assert "has died" not in said.out + said.err and "Traceback" not in said.err


def test_a_failed_sync_keeps_the_update_before_it(files: Path, tmp_path: Path) -> None:
    """A guard in the sync after step 2 leaves step 2's checkpoint and metrics. One in the sync of the run that goes on
    from there leaves everything as it was, and so does one in the rollout of step 3."""
    run_dir = tmp_path / "run"
    for name, call in (("load_weights", 3), ("load_weights", 1), ("rollout", 1)):
        run_ranks(_train_until_it_fails, 1, files, run_dir, name, call)
        assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"step_000002", "latest"}
        assert [row["step"] for row in read_metrics(run_dir)] == [0, 1, 2]
        assert "train/loss" in read_metrics(run_dir)[-1]
    run_whole(files, run_dir, 1, SHORT | {"checkpoint__every_steps": 0})
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and "eval/heldout/pass@1" in rows[-1]


def _train_until_it_fails(files: Path, run_dir: Path, name: str, failing: int) -> None:
    """On a rank: that call of a method of the engine or of the loop finds no server."""
    config = job_config(files, run_dir, **SHORT | {"checkpoint__every_steps": 0})
    with contextlib.suppress(RunAborted), Run(prepare_job(config, 1)) as run:
        owner: Any = run.loop._engine if name == "load_weights" else run.loop
        plain, calls = getattr(owner, name), itertools.count(1)

        def call_or_fail(*arguments: Any) -> Any:
            if next(calls) == failing:
                raise RunAborted("no rollout server answers")
            return plain(*arguments)

        setattr(owner, name, call_or_fail)
        train(run)
        raise AssertionError("the run was not stopped")


def _a_close_that_fails(files: Path, run_dir: Path) -> dict[str, Any]:
    job = prepare_job(job_config(files, run_dir, **SHORT), 1)
    run = Run(job)
    close = run.loop.close

    def close_and_fail() -> None:
        close()
        raise OSError("a server's log is gone")

    run.loop.close = close_and_fail  # type: ignore[method-assign]
    said = ""
    try:
        with run:
            pass
    except OSError as error:
        said = str(error)
    return {"said": said, "locked": (run_dir / "lock.json").exists(), "handled": run._stop_requests._before}


def test_what_fails_at_the_end_leaves_nothing_open(files: Path, tmp_path: Path) -> None:
    """A part that cannot be closed is said, and all that come after it are closed."""
    [found] = run_ranks(_a_close_that_fails, 1, files, tmp_path / "run")
    assert found == {"said": "a server's log is gone", "locked": False, "handled": {}}


def _command_line(files: Path, run_dir: Path, extra: dict[str, Any]) -> int:
    from support.job import REPOSITORY, settings

    from dppo_megatron.workbench.cli import main

    return main(["train", str(REPOSITORY / "configs" / "quickstart.yaml"), *settings(files, run_dir, **extra)])


def _command_line_on_its_machine(files: Path, run_dir: Path, extra: dict[str, Any]) -> int:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return _command_line(files, run_dir, extra)


# ------------------------------------------------------------------------------------------------------- graders


def test_training_goes_on_beside_a_broken_grader(files: Path, tmp_path: Path) -> None:
    """Hangs and crashes are counted as failures, on every rank, and the run ends as it should."""
    extra = SHORT | {"reward__function": "support.faulty:unlucky", "reward__timeout_s": 0.5, "data__eval_paths": "{}"}
    extra |= {"reward__max_failed_share": 1}
    run_whole(files, tmp_path / "run", 2, extra)
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 4
    assert sum(row["reward/failed_count"] for row in rows[1:]) > 0
    trace = [json.loads(line) for line in (tmp_path / "run" / "trace.jsonl").read_text().splitlines()][1:]
    for row, step in zip(rows[1:], trace, strict=True):
        rewards = [reward for group in step["rewards"] for reward in group]
        assert row["reward/failed_count"] == rewards.count(None)
        assert set(rewards) <= {None, 0.0, 1.0}


GRADERS_THAT_STOP_A_START = {
    "always_raises": "fails on the reference boxed: .* it raised ZeroDivisionError: division by zero",
    "returns_nothing": "it returned None",
    "one_argument": "takes .* a grader is called as function\\(completion, answer\\)",
    "missing": "cannot be imported: AttributeError",
    "never_right": "takes 0 % for right when given as an answer, fewer than reward.min_self_consistency = 0.99",
}


@pytest.mark.parametrize("name", GRADERS_THAT_STOP_A_START)
def test_a_broken_grader_stops_the_start(
    files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """Exit code 2 with the reason, and no run directory: not a run of rewards 0."""
    extra = SHORT | {"reward__function": f"support.faulty:{name}", "reward__min_self_consistency": 0.99}
    assert run_ranks(_command_line, 1, files, tmp_path / "run", extra) == [2]
    said = capfd.readouterr().err
    assert re.search(f"error: reward.function = 'support.faulty:{name}'.*{GRADERS_THAT_STOP_A_START[name]}", said), said
    assert not (tmp_path / "run").exists()


def test_references_are_graded_by_one_rank(
    files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank tries the grader on five texts; what one finds about the references, in three forms, ends all."""
    monkeypatch.setenv("FAULTY_COUNTS_IN", str(tmp_path / "graded"))
    extra = SHORT | {"reward__function": "support.faulty:counted", "reward__min_self_consistency": 0.99}
    assert run_ranks(_command_line, 2, files, tmp_path / "run", extra) == [2, 2]
    assert capfd.readouterr().err.count("takes 0 % for right") == 1 and not (tmp_path / "run").exists()
    references = len((files / "train.jsonl").read_text().splitlines())
    assert (tmp_path / "graded").stat().st_size == 2 * 5 + 3 * references


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_grader_that_breaks_later_stops_the_run(
    files: Path, tmp_path: Path, world_size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3 with a checkpoint of the last good step, and resumed with a mended grader it goes on from there."""
    extra = SHORT | {"reward__function": "support.faulty:breaks_later", "data__eval_paths": "{}"}
    extra["reward__processes"] = 1  # it counts its own gradings
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTY_BREAKS_AFTER", str(100 // world_size))  # in step 2: a step has 64, the start a few
        assert run_ranks(_command_line, world_size, files, tmp_path / "run", extra) == [3] * world_size
        said = capfd.readouterr().err
        assert "gradings failed, more than reward.max_failed_share = 0.1 allows" in said
        assert "x raised RuntimeError: the judge is out" in said
        recorded = [row["step"] for row in read_metrics(tmp_path / "run")]
        assert recorded and recorded[-1] < 3
        assert (tmp_path / "run" / "checkpoints" / f"step_{recorded[-1]:06d}" / "manifest.json").is_file()
        patch.setenv("FAULTY_BREAKS_AFTER", "1000000")
        assert run_ranks(_command_line, world_size, files, tmp_path / "run", extra) == [0] * world_size
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2, 3]


def test_metrics_of_several_rewards(files: Path, tmp_path: Path) -> None:
    """The parts add up to the mean; facts that no grader gives are null; an evaluation goes by the first part."""
    extra = SHORT | {
        "reward__functions__parity": "{function: support.faulty:length_parity, weight: 2.0}",
        "reward__functions__length": "{function: support.faulty:length, weight: -0.25}",
        "pruning__prompt__score": "rms",  # the other one takes rewards in [0, 1] only
    }
    run_whole(files, tmp_path / "run", 1, extra)
    rows = read_metrics(tmp_path / "run")
    for row in rows[1:]:
        assert row["reward/mean"] == pytest.approx(2 * row["reward/parity"] - 0.25 * row["reward/length"])
        assert row["reward/parsed_share"] is None and row["reward/timeouts"] == 0
        assert 0 <= row["reward/parity"] <= 1 < row["reward/length"]
    assert rows[-1]["eval/heldout/pass@1"] > 0


# --------------------------------------------------------------------------------------------------------- disks


def _train_on_a_full_disk(files: Path, run_dir: Path, extra: dict[str, Any]) -> int:
    """On a rank: while the second checkpoint is written, files cannot grow beyond 16 KiB."""
    from dppo_megatron.checkpoint.store import CheckpointStore

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    plain = CheckpointStore.save

    def save(self: CheckpointStore, actor: Any, state: Any, manifest: Any) -> None:
        full = manifest.step == 2
        self.finalize(blocking=True)  # the first one's files are on the disk before it fills
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384 if full else -1, -1))
        try:
            plain(self, actor, state, manifest)
            if full:
                self.finalize(blocking=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStore, "save", save)
        return train_or_die(files, run_dir, 1, extra, None)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_full_disk_costs_one_checkpoint(
    files: Path, tmp_path: Path, asynchronous: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A warning, no half checkpoint, and the next one is written again."""
    extra = SHORT | {"checkpoint__async_save": asynchronous, "checkpoint__keep": 0}
    assert run_ranks(_train_on_a_full_disk, 1, files, tmp_path / "run", extra) == [0]
    assert "warning: no checkpoint could be written" in capfd.readouterr().out
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"latest", "step_000001", "step_000003"}
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2, 3]


def _end_on_a_full_quota(files: Path, run_dir: Path, of: type, name: str) -> int:
    """On a rank: what is written at a run's end exceeds the quota; such an error names no file."""

    def fail(*_: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of, name, fail)
        return _command_line(files, run_dir, SHORT | {"steps": 1})


@pytest.mark.parametrize(("of", "name"), [(HFWriter, "put"), (Summary, "write")])
def test_what_a_quota_leaves_out_at_the_end_is_said(
    files: Path, tmp_path: Path, of: type, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the command that makes the model's files after all."""
    run = tmp_path / "run"
    assert run_ranks(_end_on_a_full_quota, 1, files, run, of, name) == [3]
    target = run / ("hf" if of is HFWriter else "summary.json")
    said = f"stopped: all steps are done, but '{target}' cannot be written: {os.strerror(errno.EDQUOT)}"
    if of is HFWriter:
        latest = run / "checkpoints" / "latest"
        said += f"; `dppo-megatron convert to-hf --checkpoint {latest} --out DIR` makes hf/ from the last checkpoint"
    assert said + "\n" in capfd.readouterr().err
    assert (run / "hf").exists() == (of is Summary)


def _stop_and_fail_to_save(files: Path, run_dir: Path, name: str, error: BaseException) -> str:
    """On a rank: a method of the store raises `error` in the save of a run that is asked to stop; how it ends."""
    extra = SHORT | {"checkpoint__async_save": True, "sft__steps": 1}  # after the only step it goes on to a checkpoint
    try:
        with Run(prepare_job(job_config(files, run_dir, **extra), 1)) as run:
            plain = getattr(run._store, name)

            def fail(*arguments: Any, **keywords: Any) -> Any:
                if name == "finalize" and run._store._pending is None:
                    return plain(*arguments, **keywords)
                raise error

            setattr(run._store, name, fail)
            run._stop_requests.received = "SIGUSR1"
            train(run)
    except Exception as ended:
        return f"{type(ended).__name__}: {ended}{', on every rank' * getattr(ended, 'is_reported', False)}"
    return "trained"


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("save", torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
        (
            "finalize",
            OSError("No space left on device"),
            "RunAborted: stopped after step 0 (SIGUSR1), but no checkpoint could be written, on every rank",
        ),
    ],
)
def test_a_stop_without_its_checkpoint_is_said(
    files: Path, tmp_path: Path, name: str, error: BaseException, said: str
) -> None:
    """Also where it was to be written in the background. An error of one rank is no full disk."""
    assert run_ranks(_stop_and_fail_to_save, 1, files, tmp_path / "run", name, error) == [said]


def _train_into_a_full_log(files: Path, run_dir: Path) -> int:
    """On a rank: its stdout is a file on a full disk."""
    sys.stdout = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    return _command_line(files, run_dir, SHORT)


def test_a_full_log_does_not_end_the_run(files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All steps are done; that its log is not whole is said at the end, where it still can be."""
    assert run_ranks(_train_into_a_full_log, 1, files, tmp_path / "run") == [2]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2, 3]
    assert (tmp_path / "run" / "summary.json").is_file() and (tmp_path / "run" / "hf").is_dir()
    assert "error: stdout cannot be written: No space left on device" in capfd.readouterr().err


def _train_and_lose_the_lock(files: Path, run_dir: Path, name: str, count: int, aborts: bool) -> int:
    """On a rank: in a call of the loop's, somebody else takes the directory over."""
    from dppo_megatron.steps.loop import Loop

    plain, calls = getattr(Loop, name), itertools.count(1)

    def taken_over(self: Loop, *arguments: Any) -> Any:
        if next(calls) == count:
            (run_dir / "lock.json").unlink()
            (run_dir / "lock.json").write_text("{}")
            if aborts:
                raise RunAborted("no rollout server answers")
        return plain(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, name, taken_over)
        return _command_line(files, run_dir, SHORT)


@pytest.mark.parametrize(
    ("name", "count", "aborts", "recorded", "saved"),
    [
        ("generate", 2, False, [0, 1], {"latest", "step_000001"}),
        ("evaluate", 1, True, [], set()),
        ("evaluate", 2, False, [0, 1, 2], {"latest", "step_000002", "step_000003"}),
    ],
)
def test_a_trainer_that_was_taken_over_from_writes_nothing_more(
    files: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    count: int,
    aborts: bool,
    recorded: list[int],
    saved: set[str],
) -> None:
    assert run_ranks(_train_and_lose_the_lock, 1, files, tmp_path / "run", name, count, aborts) == [2]
    assert "lock.json was replaced while this trainer ran" in capfd.readouterr().err
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == recorded
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == saved and (tmp_path / "run" / "lock.json").read_text() == "{}"


def test_lines_are_whole_and_json(tmp_path: Path) -> None:
    """NaN becomes null, a line that does not fit is taken back, and rewinding drops what came later or is torn."""
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in range(4):
        lines.write({"step": step, "loss": float("nan") if step == 2 else 1.5, "more": [float("inf"), "x"]})
    lines.close()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert rows[2] == {"step": 2, "loss": None, "more": [None, "x"]}
    assert run_ranks(_write_beyond_the_limit, 1, path) == ["File too large"]
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')
    rewind(path, 1)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:2]


def _write_beyond_the_limit(path: Path) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, -1))
    lines = JsonLines(path)
    try:
        lines.write({"step": 4, "long": "x" * 100})
    except OSError as error:
        assert path.read_bytes() == before
        return str(error.strerror)
    return "written"


# --------------------------------------------------------------------------------------------------------- ranks


def _stop_one(run_dir: Path, files: Path, number: int) -> int:
    """On ranks: rank 1 kills or stops itself in its second rollout."""
    extra = SHORT | {"guard__watchdog_s": 6, "steps": 50}
    from dppo_megatron.steps.loop import Loop

    plain, calls = Loop.generate, 0

    def generate(self: Loop, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), number)
        return plain(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "generate", generate)
        return train_or_die(files, run_dir, 2, extra, None)


def test_a_rank_that_hangs_is_named_and_the_others_stop(
    files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGSTOP: nothing closes its connections, and the collective alone would wait for minutes."""
    with pytest.raises(RankError, match="rank 0 of 2 died without a message: exit code 1"):
        run_ranks(_stop_one, 2, tmp_path / "run", files, signal.SIGSTOP, dies=0)
    assert "watchdog: rank 1 (host " in (said := capfd.readouterr().err)
    assert "has given no sign of life for" in said


def test_a_rank_that_dies_is_named(files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """SIGKILL: its peers' collectives fail at once, with a message that names nobody; ours does."""
    with pytest.raises(RankError, match="rank 1 of 2 died without a message"):
        run_ranks(_stop_one, 2, tmp_path / "run", files, signal.SIGKILL)
    said = capfd.readouterr()
    assert "rank 1 (host " in said.out + said.err


def test_a_rank_that_dies_while_it_saves_is_no_full_disk(
    files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other one fails in the save's collectives: it says who has died, and nothing of a write that failed."""
    kill = Kill("saving", 2, rank=1)
    with pytest.raises(RankError, match="rank 1 of 2 died without a message"):
        run_ranks(train_or_die, 2, files, tmp_path / "run", 2, SHORT | {"guard__watchdog_s": 6}, kill)
    said = capfd.readouterr()
    assert "no checkpoint could be written" not in said.out + said.err
    assert "rank 1 (host " in said.out + said.err
    assert {path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")} == {"step_000001"}


def test_the_watchdog_is_silent_about_the_living(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks' watchdogs on one store, one of which stops: only the other's complaint, and only then. A job that was
    suspended as a whole is not silent, whoever goes on first. The clock is the test's: signs come every second, silence
    counts from three on and is death after ten."""
    now = 0.0
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    complaints: queue.Queue[str] = queue.Queue()
    dogs = [Watchdog(store, rank, 2, 10.0, leave=complaints.put) for rank in range(2)]

    def a_second_of(living: list[Watchdog]) -> None:
        nonlocal now
        now += 1
        for dog in living:
            dog._beat(int(now))
        for dog in living:
            dog._check_ranks()

    for _ in range(100):
        a_second_of(dogs)
        assert dogs[0].silent() == dogs[1].silent() == []
    now += 100
    for _ in range(3):
        a_second_of(dogs[:1])
        assert dogs[0].silent() == []
    a_second_of(dogs)
    for seconds in range(1, 12):
        assert not store.check(["watchdog/stop"])
        a_second_of(dogs[:1])
        assert len(dogs[0].silent()) == (seconds > 3)
    dogs[0].start()
    said = complaints.get(timeout=120)
    assert said.startswith("rank 1 (host ") and said.endswith("has given no sign of life for 11 s")
    dogs[0].stop()


def test_a_killed_run_leaves_no_graders(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grader processes end with the process that started them, even while one of them hangs."""
    extra = SHORT | {"reward__function": "support.faulty:unlucky", "reward__timeout_s": 600, "data__eval_paths": "{}"}
    monkeypatch.setenv("FAULTY_RUN", str(tmp_path))  # by which their processes can be told from others
    assert run_killed(files, tmp_path / "run", 1, extra, Kill("reward", 1, delay_s=0.5))
    deadline = time.monotonic() + 120
    while _processes_with(f"FAULTY_RUN={tmp_path}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _processes_with(f"FAULTY_RUN={tmp_path}")


def _processes_with(setting: str) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if setting.encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found
