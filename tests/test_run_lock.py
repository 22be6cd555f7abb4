"""The lock of a run directory: a second trainer, one of another machine, and what a dead one has left."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import holding, in_child, kill, until

from dppo_megatron.observe.lock import RunLock
from dppo_megatron.types import UserError


def _no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("kernel_locks", [True, False], ids=["kernel_locks", "no_locks"])
def test_a_second_trainer_is_told_who_has_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_locks: bool
) -> None:
    """While it lives; killed with SIGKILL, it is taken over from, by name. A child of its own does not matter."""
    if not kernel_locks:
        monkeypatch.setattr(fcntl, "lockf", _no_locks)
    child = in_child(lambda: RunLock(tmp_path, heartbeat_s=0.05))
    try:
        with pytest.raises(UserError, match=rf"being written by another trainer: host .*, process {child}, since"):
            RunLock(tmp_path)
    finally:
        kill(child)
    lock = RunLock(tmp_path, stale_s=0.1)
    assert f"process {child}" in lock.took_over
    lock.release()
    assert not (tmp_path / "lock.json").exists()
    second = RunLock(tmp_path)
    assert second.took_over == ""
    second.release()


def test_a_trainer_of_another_host_is_known_by_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel locks may be local to a host: the file's age decides, by the file system's own clock."""
    holder = {"host": "elsewhere", "pid": 1, "since": "yesterday", "boot": "x"}
    holder |= {"slurm_job": "77", "slurm_attempt": "2"}
    path = tmp_path / "lock.json"
    path.write_text(json.dumps(holder))
    os.utime(path, (time.time() - 3600,) * 2)
    lock = RunLock(tmp_path, stale_s=0.3)
    assert lock.took_over == "host elsewhere, process 1, Slurm job 77 (attempt 2), since yesterday"
    lock.release()
    path.write_text(json.dumps(holder))
    for behind_s in (0, 300):  # a client of Lustre dates its own heartbeats, by a clock that may be wrong
        at = f"(time.time() - {behind_s},) * 2"
        beat = f"import os,sys,time\nwhile True: os.utime(sys.argv[1], {at}); time.sleep(0.02)"
        os.utime(path, (time.time() - behind_s,) * 2)
        beating = subprocess.Popen([sys.executable, "-c", beat, str(path)])
        try:
            with pytest.raises(UserError, match="host elsewhere, process 1, Slurm job 77"):
                RunLock(tmp_path, stale_s=30.0)
        finally:
            beating.kill()
            beating.wait()
    RunLock(tmp_path, stale_s=0.3).release()  # it has stopped
    path.write_text(json.dumps(holder))
    os.utime(path, (time.time() + 1e6,) * 2)  # by a clock that was wrong: its age is less than nothing, for days
    RunLock(tmp_path, stale_s=0.3).release()


@pytest.mark.parametrize(("boot", "beats"), [("x", False), ("x", True), ("", False)])
def test_a_file_server_keeps_the_lock_of_a_machine_that_has_vanished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boot: str, beats: bool
) -> None:
    """Without a heartbeat the file is made anew, and a former holder that lives after all ends. Of a process of this
    machine (`boot` is empty: it has ours) the kernel knows best."""
    path = tmp_path / "lock.json"
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    former = RunLock(tmp_path, heartbeat_s=0.02 if beats else 1e9)
    monkeypatch.undo()
    path.write_text(json.dumps(json.loads(path.read_text()) | ({"boot": boot} if boot else {})))
    first, lockf = path.stat().st_ino, fcntl.lockf

    def held(descriptor: int, how: int) -> None:
        if os.fstat(descriptor).st_ino == first:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        lockf(descriptor, how)

    monkeypatch.setattr(fcntl, "lockf", held)
    if beats or not boot:
        with pytest.raises(UserError, match="being written by another trainer: host elsewhere"):
            RunLock(tmp_path, stale_s=30.0)
        assert path.stat().st_ino == first
    else:
        lock = RunLock(tmp_path, stale_s=0.2)
        assert lock.took_over.startswith(f"host elsewhere, process {os.getpid()}, since")
        with pytest.raises(UserError, match="was replaced while this trainer ran"):
            former.check()
        lock.check()
        lock.release()
        assert not path.exists()
    former.release()


@pytest.mark.parametrize("call", ["stat", "fstat", "pread"])
def test_a_file_server_that_fails_for_a_moment_is_no_other_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    lock = RunLock(tmp_path)

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, stale)
        lock.check()
    (tmp_path / "lock.json").write_text("{}")
    with pytest.raises(UserError, match="was replaced while this trainer ran"):
        lock.check()
    lock.release()


def _descriptor(path: Path) -> int:
    """That of a file which this process has open once."""
    [found] = [int(one.name) for one in Path("/proc/self/fd").iterdir() if os.path.realpath(one) == str(path)]
    return found


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize(("call", "number"), [("fstat", errno.ESTALE), ("pread", errno.EIO)])
def test_a_descriptor_that_nfs_has_given_up_hides_no_other_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, taken: bool
) -> None:
    """One fails for ever after another machine has replaced the file, the other after the server has given the lock up
    in a partition. Without another trainer, lock and heartbeat go on."""
    path, real = tmp_path / "lock.json", getattr(os, call)
    lock = RunLock(tmp_path, heartbeat_s=0.02)
    before = fcntl.fcntl(descriptor := _descriptor(path), fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, before | os.O_APPEND)  # marks the open file, whatever its number

    def given_up(one: int, *more: int) -> object:
        if one == descriptor and fcntl.fcntl(one, fcntl.F_GETFL) & os.O_APPEND:
            raise OSError(number, os.strerror(number))
        return real(one, *more)

    if taken:
        if call == "fstat":
            path.rename(tmp_path / "silly")
        path.write_text(json.dumps({"host": "third", "pid": 2, "since": "now", "boot": "y"}))
    monkeypatch.setattr(os, call, given_up)
    if taken:
        with pytest.raises(UserError, match="was replaced while this trainer ran"):
            lock.check()
        monkeypatch.undo()
        lock.release()
        assert json.loads(path.read_text())["host"] == "third"
        return
    lock.check()
    monkeypatch.undo()
    os.utime(path, (1, 1))
    until(lambda: path.stat().st_mtime > 2)
    assert not os.get_inheritable(_descriptor(path))
    with holding(lambda: _refused(tmp_path)):
        lock.release()


def test_a_lock_that_another_trainer_tries_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another machine waits for a heartbeat while the descriptor is replaced, sees it and ends."""
    lock = RunLock(tmp_path)

    def fails(number: int) -> Callable[..., None]:
        def fail(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fails(errno.EIO))
        patch.setattr(fcntl, "lockf", fails(errno.EAGAIN))
        lock.check()
    lock.check()
    with holding(lambda: _refused(tmp_path)):
        lock.release()


def test_a_trainer_that_has_been_taken_over_from_for_a_while_stops_too(tmp_path: Path) -> None:
    """The other one has ended and released the lock. A directory that is gone is a file system that is not mounted."""
    (directory := tmp_path / "run").mkdir()
    lock = RunLock(directory)
    (directory / "lock.json").rename(aside := tmp_path / "lock.json")
    with pytest.raises(UserError, match="was removed while this trainer ran"):
        lock.check()
    directory.rename(tmp_path / "not mounted")
    lock.check()
    (tmp_path / "not mounted").rename(directory)
    aside.rename(directory / "lock.json")
    lock.check()
    lock.release()
    assert not (directory / "lock.json").exists()


def _refused(directory: Path) -> None:
    with pytest.raises(UserError, match="being written by another trainer"):
        RunLock(directory)


@pytest.mark.parametrize(("silent_s", "written_s"), [(0.15, 61.0), (3600.0, 1.0)])
def test_two_that_find_a_dead_trainer_do_not_both_get_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_s: float, written_s: float
) -> None:
    """The first of them, on another host, has the kernel's lock. It writes its own name `written_s` later, when it too
    has waited for a sign of life of the trainer that has died; until then the file shows that one's."""
    path = tmp_path / "lock.json"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": "yesterday", "boot": "x"}))
    os.utime(path, (time.time() - silent_s,) * 2)
    inode, clock = path.stat().st_ino, [0.0]

    def sleep(seconds: float) -> None:
        if clock[0] < written_s <= clock[0] + seconds:
            path.write_text(json.dumps({"host": "third", "pid": 2, "since": "now", "boot": "y"}))
        clock[0] += seconds

    with holding(lambda: _with_kernel_lock(path)):
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(time, "sleep", sleep)
        with pytest.raises(UserError, match="being written by another trainer: host third, process 2"):
            RunLock(tmp_path)
        monkeypatch.undo()
    assert path.stat().st_ino == inode


def _with_kernel_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR)
    fcntl.lockf(descriptor, fcntl.LOCK_EX)
    return descriptor


@pytest.mark.parametrize("content", [b"", b"5", b"[" * 100_000, b"\xff", b"{}", b'{"host": 3, "pid": [1]}'])
def test_a_garbled_lock_stops_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lock.json").write_bytes(content)
    os.utime(tmp_path / "lock.json", (1, 1))
    RunLock(tmp_path, stale_s=0.3).release()
