"""What befalls a run in the night, and what of it can be done on this machine.

A blow strikes at a named moment (`support/killing.py`), from a process beside the rank, so that it strikes wherever
the rank is then. Only the clock is the rank's own matter: `time.time` of its Python, and the times of the run's files.
The machine's would be everybody's, and a preloaded library would not move the kernel's, by which threads wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.killing import Kill

_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10
"""ioctl of ext4, xfs and others: what `chattr +i` sets. It binds root too, unlike a mode."""
_GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),  # version 1
    (Path("/sys/fs/cgroup"), "memory.max"),  # version 2
)


@dataclass(frozen=True)
class Blow:
    """`amount`: seconds that a stop lasts or a clock jumps by, MiB that are left to a rank."""

    kind: str
    moment: Kill
    amount: float = 0.0

    def __str__(self) -> str:
        at = self.moment
        amount = f" {self.amount:.3g}" if self.amount else ""
        return f"{self.kind}{amount} in {at.phase} {at.count} of rank {at.rank} + {at.delay_s:.3f} s"


def strike(blow: Blow, run_dir: Path, files: Path, struck: Path) -> None:
    """On the rank, at the moment; `struck` is a file that proves it."""
    if blow.kind == "clock":
        struck.touch()
        return _jump(run_dir, blow.amount)
    victim = os.getpid()
    if os.fork() == 0:
        try:
            time.sleep(blow.moment.delay_s)
            if not blow.kind.startswith("server") or servers_of(files):
                struck.touch()
            _STRIKES[blow.kind](victim, blow.amount, run_dir, files)
        finally:
            os._exit(0)
    if blow.kind != "kill" or blow.moment.delay_s:
        return
    signal.pause()  # on entering the call means before its first line


def _kill(victim: int, amount: float, run_dir: Path, files: Path) -> None:
    os.kill(victim, signal.SIGKILL)


def _stop(victim: int, amount: float, run_dir: Path, files: Path) -> None:
    os.kill(victim, signal.SIGSTOP)
    time.sleep(amount)
    os.kill(victim, signal.SIGCONT)


def _hang(victim: int, amount: float, run_dir: Path, files: Path) -> None:
    os.kill(victim, signal.SIGSTOP)


def _out_of_memory(victim: int, amount: float, run_dir: Path, files: Path) -> None:
    """The kernel kills it when it has taken so much more."""
    root, limit = next((root, limit) for root, limit in _GROUPS if _makes_groups(root, limit))
    group = root / f"dppo-night-{victim}"
    group.mkdir()
    (group / limit).write_text(str(int(amount * (1 << 20))))
    (group / "cgroup.procs").write_text(str(victim))


def _no_memory(victim: int, amount: float, run_dir: Path, files: Path) -> None:
    """What it asks for beyond so much more is refused."""
    now = int(Path(f"/proc/{victim}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(victim, resource.RLIMIT_AS, (now + int(amount * (1 << 20)), resource.RLIM_INFINITY))


def _read_only(victim: int, amount: float, run_dir: Path, files: Path) -> None:
    set_immutable(run_dir, True)


def _kill_server(victim: int, amount: float, run_dir: Path, files: Path) -> None:
    for server in servers_of(files)[:1]:
        os.kill(server, signal.SIGKILL)


def _stop_server(victim: int, amount: float, run_dir: Path, files: Path) -> None:
    for server in servers_of(files)[:1]:
        _stop(server, amount, run_dir, files)


_STRIKES: dict[str, Callable[[int, float, Path, Path], None]] = {
    "kill": _kill,
    "stop": _stop,
    "hang": _hang,
    "out of memory": _out_of_memory,
    "no memory": _no_memory,
    "read-only": _read_only,
    "server killed": _kill_server,
    "server stopped": _stop_server,
}
KINDS = (*_STRIKES, "clock")


def _jump(run_dir: Path, seconds: float) -> None:
    """The clock is ahead by so much, or behind: of this process from now on, and by what its files say."""
    plain = time.time
    time.time = lambda: plain() + seconds  # type: ignore[assignment]
    for path in run_dir.rglob("*"):
        with contextlib.suppress(OSError):
            at = path.lstat()
            os.utime(path, (at.st_atime - seconds, at.st_mtime - seconds), follow_symlinks=False)


def servers_of(files: Path) -> list[int]:
    """Processes of the stand-in servers whose interpreter lies in `files`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            said = path.read_bytes()
            if b"fake_vllm.py" in said and str(files).encode() in said:
                found.append(int(path.parent.name))
    return sorted(found)


def set_immutable(directory: Path, wanted: bool) -> None:
    """Of a directory and all in it: nothing is made, renamed, removed, opened to be written. OSError if impossible."""
    inside = [path for path in directory.rglob("*") if not path.is_symlink() and (path.is_dir() or path.is_file())]
    for path in [directory, *inside]:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                (flags,) = struct.unpack("i", fcntl.ioctl(descriptor, _GET_FLAGS, struct.pack("i", 0)))
                flags = flags | _IMMUTABLE if wanted else flags & ~_IMMUTABLE
                fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack("i", flags))
            finally:
                os.close(descriptor)


def clear_up(run_dir: Path) -> None:
    """What a blow has left behind on the machine."""
    with contextlib.suppress(OSError):
        set_immutable(run_dir, False)
    for root, _ in _GROUPS:
        for group in root.glob("dppo-night-*"):
            with contextlib.suppress(OSError):  # of another night, or its last process has not gone yet
                group.rmdir()


def impossible(directory: Path) -> dict[str, str]:
    """Kinds that cannot be done here, with the reason."""
    found = {}
    with tempfile.TemporaryDirectory(dir=directory) as probe:
        try:
            set_immutable(Path(probe), True)
            set_immutable(Path(probe), False)
        except OSError as error:
            found["read-only"] = f"no file of {directory} can be made immutable: {error.strerror}"
    if not any(_makes_groups(root, limit) for root, limit in _GROUPS):
        found["out of memory"] = "no memory cgroup can be made under /sys/fs/cgroup"
    return found


def _makes_groups(root: Path, limit: str) -> bool:
    probe = root / f"dppo-night-probe-{os.getpid()}"
    try:
        probe.mkdir()
        try:
            return (probe / limit).exists()
        finally:
            probe.rmdir()
    except OSError:
        return False
