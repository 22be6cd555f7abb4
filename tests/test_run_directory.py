"""The run directory before a model is built: who may write to it, and what a full disk or a dead process does to it."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.job import job_config
from support.launch import run_ranks
from support.logged import logged_lines
from support.processes import in_child, kill
from support.tiny import Parallel, build_actor, write_model

from dppo_megatron.actor.layout import start_process_group
from dppo_megatron.checkpoint.store import read_state, write_state
from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import on_every_rank
from dppo_megatron.job import prepare_job
from dppo_megatron.observe import run_directory
from dppo_megatron.observe.lock import RunLock
from dppo_megatron.observe.run_directory import RunDirectory, as_user_error
from dppo_megatron.run import Run
from dppo_megatron.types import RunAborted, UserError


def test_what_rank_0_could_not_write_is_printed_by_it_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="quota") as caught, as_user_error(tmp_path):
        raise on_every_rank(OSError(122, "quota"))
    assert caught.value.__dict__ == {"is_reported": True}


def test_a_requeued_job_is_told_of_its_own_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm requeues a job while the node of its first attempt, which cannot be reached, still trains."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    child = in_child(lambda: RunLock(tmp_path))
    try:
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        with pytest.raises(UserError, match=rf"process {child}, Slurm job 77 \(attempt 0\)"):
            RunLock(tmp_path)
    finally:
        kill(child)
    lock = RunLock(tmp_path)
    assert "attempt 0" in lock.took_over and json.loads((tmp_path / "lock.json").read_text())["slurm_attempt"] == "1"
    lock.release()


def _as_nobody(path: Path) -> str:
    """On a rank: what a user is told who may not open the lock."""
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 0)
    try:
        RunDirectory(path)
    except UserError as error:
        return str(error)
    finally:
        if os.getresuid()[2] == 0:  # root again, to report
            os.setresuid(0, 0, 0)
    return "opened"


@pytest.mark.parametrize("closed", ["lock.json", "run.json", "checkpoints", "."])
def test_what_a_user_may_not_read_or_write_is_one_sentence(closed: str) -> None:
    """Somebody else's, or with the permissions taken away. Not in tmp_path, which others may not enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder)
        os.chmod(path, 0o777)
        (path / "run.json").write_text('{"format": "dppo_megatron run 1", "run": "x"}')
        (path / "checkpoints").mkdir(mode=0o777)
        (path / "lock.json").write_text("")
        for one in (path / "run.json", path / "checkpoints", path / "lock.json"):
            os.chmod(one, 0o777)
        assert run_ranks(_as_nobody, 1, path) == ["opened"]
        (path / "lock.json").write_text("")
        os.chmod(path / closed, 0o000)
        (said,) = run_ranks(_as_nobody, 1, path)
        os.chmod(path / closed, 0o755)
    assert said.startswith(f"run_dir = '{path}' cannot be written: Permission denied") and "\n" not in said


def test_a_trainer_whose_lock_was_removed_stops(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.check()
    (tmp_path / "lock.json").unlink()
    second = RunLock(tmp_path)
    with pytest.raises(UserError, match="was replaced while this trainer ran"):
        lock.check()
    second.check()
    lock.release()
    second.check()
    second.release()


# ----------------------------------------------------------------------------------------------------- the directory


def _begun(path: Path, pipe: str) -> None:
    """A run's directory with a pipe in the place of a file, on which reading would wait for ever."""
    RunDirectory(path).close()
    (path / pipe).unlink(missing_ok=True)
    os.mkfifo(path / pipe)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda d: (d / "run").write_text("a file"), "File exists"),
        (lambda d: (d / "run" / "checkpoints").mkdir(parents=True) or (d / "run/lock.json").mkdir(), "Is a directory"),
        (lambda d: (d / "run").mkdir() or (d / "run/checkpoints").write_text("a file"), "File exists"),
        (lambda d: (d / "run").symlink_to("/proc/nowhere"), "File exists"),
        (lambda d: (d / "run/metrics.jsonl/x").mkdir(parents=True), "run.json does not say which run that is"),
        (lambda d: _begun(d / "run", "metrics.jsonl"), r"not a file \(.*metrics.jsonl\)"),
        (lambda d: _begun(d / "run", "trace.jsonl"), r"not a file \(.*trace.jsonl\)"),
        (lambda d: _begun(d / "run", "run.json"), "which run that is: it is not a file"),
        (lambda d: _begun(d / "run", "lock.json"), "cannot be written"),
        (lambda d: (d / "run").mkdir() or (d / "run/lock.json").symlink_to("lock.json"), "symbolic link"),
        (lambda d: (d / "run").mkdir() or (d / "run/lock.json").symlink_to("/nonexistent/x"), "symbolic link"),
    ],
)
def test_a_directory_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    spoil(tmp_path)
    with pytest.raises(UserError, match=said) as refused:
        RunDirectory(tmp_path / "run")
    assert "\n" not in str(refused.value) and str(tmp_path / "run") in str(refused.value)


def test_a_read_only_file_system(tmp_path: Path) -> None:
    """/proc takes no directories from anybody, root included."""
    with pytest.raises(UserError, match=r"run_dir = '/proc/dppo' cannot be written: "):
        RunDirectory(Path("/proc/dppo"))


def _start(files: Path, places: list[Path], late: bool) -> str:
    """On ranks: start a run in the directory "run" of this rank's place. Waiting takes no time, but if `late`, the
    place becomes rank 0's while this rank waits."""
    place, waited = places[int(os.environ["RANK"])], 0.0

    def sleep(seconds: float) -> None:
        nonlocal waited
        waited += seconds
        if late and waited > 30:
            os.chdir(places[0])

    place.mkdir(parents=True, exist_ok=True)
    os.chdir(place)
    try:
        with (
            patch.object(run_directory, "time", SimpleNamespace(sleep=sleep, strftime=time.strftime)),
            Run(prepare_job(job_config(files, Path("run")), len(places))),
        ):
            return f"started after {waited:g} s"
    except UserError as error:
        return str(error)


def test_machines_without_a_common_file_system_are_told_at_the_start(files: Path, tmp_path: Path) -> None:
    """Each would write its own ranks' part of every checkpoint, which rank 0 would publish as complete. A copy of the
    directory is not the directory. A machine that sees rank 0's half a minute late, as by NFS, is waited for."""
    apart, copied, late = ([tmp_path / f"{name}{rank}" for rank in (0, 1)] for name in ("apart", "copied", "late"))
    shutil.copytree(_ended(copied[0] / "run"), copied[1] / "run")
    (late[1] / "run").mkdir(parents=True)
    for places in (apart, copied):
        where = f"{socket.gethostname()}:{places[1] / 'run'}"
        told = f"rank 0's directory is not {where}; a job's machines must share the file system"
        assert [text.partition(": ")[2] for text in run_ranks(_start, 2, files, places, False)] == [told, told]
    assert run_ranks(_start, 2, files, late, True) == ["started after 0 s", "started after 31 s"]


def _ended(path: Path) -> Path:
    """A directory in which a run has begun and ended."""
    RunDirectory(path).close()
    return path


@pytest.mark.parametrize("identity", ["", "5", "{}", '{"format": "x", "run": "y"}', "[" * 100_000, None])
def test_a_record_without_its_identity_is_left_alone(tmp_path: Path, identity: str | None) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    if identity is not None:
        (tmp_path / "run.json").write_text(identity)
    with pytest.raises(UserError, match=r"holds metrics\.jsonl, but run\.json does not say which run that is"):
        RunDirectory(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_a_run_that_begins_again_keeps_its_old_records(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        said = logged_lines()
        files = RunDirectory(tmp_path)
        files.open_record(Config(), {"format": "x"}, None, {})
        files.write("metrics.jsonl", {"step": 0, "attempt": number})
        files.close()
        assert sum("is now" in line for line in said) == (0 if number == 1 else 7)
        for name in ("samples", "timeline", "profile", "hf"):
            (tmp_path / name).mkdir()
        (tmp_path / "summary.json").write_text(str(number))
    assert {path.name for path in (tmp_path / "old").iterdir()} >= {"hf.0001", "samples.0002", "timeline.0002"}
    assert (tmp_path / "old" / "summary.0002.json").read_text() == "2"
    kept = [json.loads((tmp_path / "old" / f"metrics.000{n}.jsonl").read_text())["attempt"] for n in (1, 2)]
    assert kept == [1, 2] and json.loads((tmp_path / "metrics.jsonl").read_text())["attempt"] == 3


# ------------------------------------------------------------------------------------------------------- full disks


class _Touches:
    """Unpickled by `pickle.load`, it makes a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_the_loops_state_is_read_without_running_it(tmp_path: Path) -> None:
    """Neither torch's own format nor a plain pickle gets to call anything; what cannot come back is not written."""
    path, touched = tmp_path / "loop.pt", tmp_path / "touched"
    torch.save({"loop": _Touches(touched)}, path)
    with pytest.raises(UserError, match="cannot be read"):
        read_state(path)
    path.write_bytes(pickle.dumps({"loop": _Touches(touched)}))
    with pytest.raises(UserError, match="cannot be read"):
        read_state(path)
    with pytest.raises(UserError, match="cannot be read"):
        write_state(path, {"loop": _Touches(touched)})
    assert not touched.exists()
    with pytest.raises(UserError, match="does not hold the state of a run"):
        write_state(path, {"something": "else"})


def _save_with_strays(model: Path, root: Path, keep: int) -> list[str]:
    """On a rank: five saves among strays; after each, what is good, and what was said."""
    from dppo_megatron.checkpoint.store import CheckpointStore, describe

    said = logged_lines()
    actor = build_actor(model, Parallel())
    store = CheckpointStore(root, run="mine", assets=model, keep=keep, async_save=False)
    for name in ("step_000900", "step_000000"):
        (root / name).mkdir(parents=True)
    for step in (1, 2, 3, 4, 5):
        if step == 5:  # both that would be counted are harmed after they were written
            for path in root.glob("step_00000[34]/common.pt"):
                os.truncate(path, 3)
        store.save(actor, {"step": step}, describe(step, {}, run="mine"))
        assert (root / f"step_{step:06d}" / "manifest.json").is_file(), f"step {step} was deleted by its own save"
    return said


@pytest.mark.parametrize(("keep", "left"), [(1, {5}), (3, {5, 2})])
def test_retention_counts_good_ones_only(tmp_path: Path, keep: int, left: set[int]) -> None:
    """Strays of later and earlier steps, and two that were harmed meanwhile: put aside, never counted."""
    root = tmp_path / "checkpoints"
    said = run_ranks(_save_with_strays, 1, write_model(tmp_path / "model"), root, keep)[0]
    names = {path.name for path in root.iterdir()}
    assert names == {f"step_{step:06d}" for step in left | {900}} | {"latest", "aside"}
    aside = {path.name for path in (root / "aside").iterdir()}
    assert aside == ({"step_000000"} if keep == 1 else {"step_000000", "step_000003", "step_000004"})
    assert all(any(name in line for line in said) for name in aside)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_killed_rank_leaves_nothing_in_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Megatron's writer would ask for a server process with a directory there, for each rank that saves."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    model = write_model(tmp_path / "model")

    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    run_ranks(_save_once, 1, model, tmp_path / "checkpoints", asynchronous)  # ends ranks with SIGKILL
    left = {path.name for path in temporary.iterdir()}
    assert not [name for name in left if name.startswith("pymp-")], left


def _save_beside_a_full_disk(model: Path, root: Path) -> list[int]:
    """On ranks: five saves while the last rank can make no temporary file; how many of its checkpoints' files a rank
    has examined in its part of each, and how many checkpoints the store remembers."""
    import torch.distributed as dist

    from dppo_megatron.checkpoint import store as store_module

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rank, is_dir, sums = dist.get_rank(), Path.is_dir, store_module._sums_of_rank
    tempfile.TemporaryFile = full if rank == dist.get_world_size() - 1 else tempfile.TemporaryFile
    examined = list[set[str]]()

    def noted(path: Path) -> bool:
        examined[-1].add(path.name)
        return is_dir(path)

    def counted(folder: Path) -> Any:
        examined.append(set())
        Path.is_dir = noted  # type: ignore[assignment]
        try:
            return sums(folder)
        finally:
            Path.is_dir = is_dir  # type: ignore[method-assign]

    store_module._sums_of_rank = counted
    store = store_module.CheckpointStore(root, run="mine", assets=model, keep=2, async_save=False)
    actor = build_actor(model, Parallel(dp=dist.get_world_size()))
    for step in range(1, 6):
        store.save(actor, {"step": step}, store_module.describe(step, {}, run="mine"))
    assert all(name.startswith(f"__{rank}_") for names in examined for name in names if "distcp" in name)
    return [len(examined), len(store._good)]


def test_saves_of_many_ranks(tmp_path: Path) -> None:
    """A full /tmp of one machine stops no save and hangs no other rank, no rank examines the files of all others, and
    what was removed is not remembered."""
    root = tmp_path / "checkpoints"
    assert run_ranks(_save_beside_a_full_disk, 2, write_model(tmp_path / "model"), root) == [[5, 2]] * 2
    assert {path.name for path in root.glob("step_*")} == {"step_000004", "step_000005"}


def _save_once(model: Path, root: Path, asynchronous: bool) -> None:
    from dppo_megatron.checkpoint.store import CheckpointStore, describe

    store = CheckpointStore(root, run="mine", assets=model, keep=1, async_save=asynchronous)
    store.save(build_actor(model, Parallel()), {"step": 1}, describe(1, {}, run="mine"))
    store.finalize(blocking=True)
    assert (root / "step_000001" / "manifest.json").is_file()


# ------------------------------------------------------------------------------------------------------------ ranks


def _alone(ports: list[str]) -> str:
    """On ranks, each of which waits for the other at an address where that one is not; all at the same time."""
    import torch.distributed as dist

    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = ports[rank]
    with pytest.raises(RunAborted) as stop:
        start_process_group(2.0)
    return str(stop.value)


def test_a_rank_that_is_alone_ends() -> None:
    """In seconds here, in minutes by default; the group's own patience is days."""

    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(free.getsockname()[1]) for free in (one, other)]
    for said in run_ranks(_alone, 2, ports):
        assert "could not meet the other ranks of 2 within guard.rendezvous_timeout_s = 2 s" in said


def test_a_start_that_fails_leaves_nothing_that_binds_the_next(tmp_path: Path) -> None:
    """An empty directory is left as it was, one that holds a run keeps all of it."""
    path = tmp_path / "new" / "run"
    directory = RunDirectory(path)
    directory.open_record(Config(), {"format": "x"}, None, {})
    assert (path / "config.yaml").exists()
    directory.undo_start()
    assert not path.exists()
    first = RunDirectory(path)
    first.open_record(Config(), {"format": "x"}, None, {})
    first.close()
    before = sorted(file.name for file in path.iterdir())
    RunDirectory(path).undo_start()
    assert sorted(file.name for file in path.iterdir()) == before
