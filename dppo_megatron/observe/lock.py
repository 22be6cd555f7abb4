"""Allows one trainer per run directory: lock.json names the host and process that holds the lock.

The kernel's record lock (fcntl) ends with the process, and works over NFS and Lustre where their lock managers run. On
another host, or where record locks do not work, the heartbeat decides (docs/checkpoints.md). A file server may keep the
lock of a machine that has vanished (NFSv3 until that machine is back, NFSv4 for a lease of some 90 s). Then lock.json
is removed and created anew, but only after another half minute: the lock may belong to a trainer that is waiting for
the same dead holder.

POSIX record locks end as soon as the process closes any descriptor of the file, so this process reads lock.json through
the one descriptor. It opens the file a second time only if that one fails, and then locks it anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from dppo_megatron.files import open_own
from dppo_megatron.texts import log
from dppo_megatron.types import UserError

FILE = "lock.json"
_HEARTBEAT_S = 5.0
_STALE_S = 60.0
"""Twelve heartbeats: a stalled file system must not look like a dead trainer."""
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """Held from construction to `release`.

    Args:
        directory: the run directory; it must exist.
        stale_s: age of the heartbeat, in seconds, from which a trainer on another host counts as dead.

    Raises:
        UserError: another trainer holds the lock; the message names it.
        OSError: lock.json cannot be written.
    """

    def __init__(self, directory: Path, *, stale_s: float = _STALE_S, heartbeat_s: float = _HEARTBEAT_S) -> None:
        self._path, self._stale_s = directory / FILE, stale_s
        self.took_over = ""
        """The trainer that ended without releasing the lock, if any."""
        self._descriptor, kernel_locks = self._open()
        try:
            previous = _parse(os.pread(self._descriptor, 65536, 0))
            if previous and self._is_alive(self._descriptor, previous, kernel_locks):
                raise UserError(self._refusal(self._descriptor))
            self.took_over = _name(previous) if previous else self.took_over
            self.text = json.dumps(_describe_self()).encode()
            """What lock.json holds, different in every start."""
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, self.text, 0)
            os.fsync(self._descriptor)  # so that the job's other machines read it too
        except BaseException:
            os.close(self._descriptor)
            raise
        self._is_lock_lost = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(heartbeat_s,), name="run lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise UserError if the lock is no longer this process's: lock.json was removed or replaced."""
        how = "replaced"
        try:
            is_taken = not self._is_mine()
        except FileNotFoundError:  # another trainer may even have ended; without the directory, nothing is mounted here
            is_taken, how = os.path.isdir(self._path.parent), "removed"
        except OSError:
            is_taken = self._is_taken_anew()
        if self._is_lock_lost:
            self._lock_again()
        if is_taken:
            raise UserError(
                f"{self._path} was {how} while this trainer ran: another one may have begun to write to"
                f" '{self._path.parent}', so this one stops. Its checkpoints stay as they are"
            )

    def _is_mine(self) -> bool:
        is_same_file = os.stat(self._path).st_ino == os.fstat(self._descriptor).st_ino
        return is_same_file and os.pread(self._descriptor, 65536, 0) == self.text

    def _is_taken_anew(self) -> bool:
        """As `check` asks, through a new descriptor. On NFS the old one fails for ever if another machine has replaced
        the file (ESTALE), or the server has given the lock up (EIO): there is another trainer then, or the heartbeat
        goes on. A file system that does not answer at all is no sign of another trainer."""
        with contextlib.suppress(OSError):
            new = open_own(self._path, os.O_RDWR)
            os.dup2(new, self._descriptor, inheritable=False)  # the heartbeat's thread uses the same number
            os.close(new)
            self._lock_again()  # closing any descriptor has ended the lock
            return os.pread(self._descriptor, 65536, 0) != self.text
        return False

    def _lock_again(self) -> None:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._is_lock_lost = False
        except OSError:  # another trainer may have it until it sees a heartbeat of this one
            self._is_lock_lost = True

    def release(self) -> None:
        if self._done.is_set():
            return
        self._done.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if self._is_mine():
                self._path.unlink()
        os.close(self._descriptor)

    def _open(self) -> tuple[int, bool]:
        """A descriptor of the current lock.json, and whether this process holds the kernel's lock on it."""
        while True:
            descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                kernel_locks = self._lock(descriptor)
                if os.fstat(descriptor).st_ino == os.stat(self._path).st_ino:
                    return descriptor, kernel_locks
            except FileNotFoundError:
                pass  # just removed: by its holder, or by `_replace`, here or in another trainer
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _lock(self, descriptor: int) -> bool:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self._replace(descriptor)
            elif error.errno not in _NO_LOCKS_HERE:
                raise
            return False
        return True

    def _replace(self, descriptor: int) -> None:
        """Remove lock.json, which another process has locked, if the holder that it names is on another machine and
        shows no sign of life. Raises UserError if the holder may be running."""
        holder = _parse(os.pread(descriptor, 65536, 0))
        # Half as long again: a trainer that waits for the same holder may have the lock, and writes its name when done.
        is_here = holder.get("boot") == _boot_id()
        if not holder or is_here or self._is_alive(descriptor, holder, kernel_locks=False, extra_s=self._stale_s / 2):
            raise UserError(self._refusal(descriptor)) from None
        self.took_over = _name(holder)
        if os.stat(self._path).st_ino == os.fstat(descriptor).st_ino:  # else another trainer was faster
            self._path.unlink()

    def _is_alive(self, descriptor: int, holder: dict[str, Any], kernel_locks: bool, extra_s: float = 0.0) -> bool:
        """Whether the process that `holder` describes still runs, as far as can be known here. Waits for its next
        heartbeat until the last one is `stale_s` old, a quarter of that at least, and `extra_s` more."""
        if kernel_locks and holder.get("host") == socket.gethostname() and holder.get("boot") == _boot_id():
            return False  # this process holds the kernel's lock, so no other process of this machine does
        last_beat = os.fstat(descriptor).st_mtime_ns
        with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=f".{FILE}.") as probe:  # for the server's clock
            age_s = (os.fstat(probe.fileno()).st_mtime_ns - last_beat) / 1e9
        # A heartbeat in the future counts as now. Some file systems store the holder's clock, which may be minutes off:
        # so three heartbeats are awaited, however old the last one looks.
        left_s = max(self._stale_s / 4, self._stale_s - max(0.0, age_s)) + extra_s
        log(f"{self._path}: waiting up to {left_s:.2g} s for a sign of life of {_name(holder)}")
        deadline = time.monotonic() + left_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._stale_s / 10))
            if os.fstat(descriptor).st_mtime_ns != last_beat:
                return True
        return False

    def _beat(self, heartbeat_s: float) -> None:
        while not self._done.wait(heartbeat_s):
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)

    def _refusal(self, descriptor: int) -> str:
        holder = _parse(os.pread(descriptor, 65536, 0))  # it may have changed while this trainer waited
        return (
            f"run_dir = '{self._path.parent}' is being written by another trainer: {_name(holder)}."
            f" Wait for it or stop it, or choose another run_dir; if it is certain that it no longer runs, remove"
            f" {self._path}"
        )


def _describe_self() -> dict[str, Any]:
    described = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "boot": _boot_id(),
    }
    job = os.environ.get("SLURM_JOB_ID", "")
    attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
    return described | ({"slurm_job": job, "slurm_attempt": attempt} if job else {})


def _name(holder: dict[str, Any]) -> str:
    if "host" not in holder:
        return "one that has not yet written its name"
    attempt = f" (attempt {holder['slurm_attempt']})" if "slurm_attempt" in holder else ""
    job = f", Slurm job {holder['slurm_job']}{attempt}" if "slurm_job" in holder else ""
    return f"host {holder['host']}, process {holder.get('pid')}{job}, since {holder.get('since')}"


def _parse(data: bytes) -> dict[str, Any]:
    """The contents of lock.json; {} if it is empty, incomplete or no JSON object."""
    try:
        holder = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
