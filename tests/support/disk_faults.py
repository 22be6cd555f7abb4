"""What a disk can do to a program: refuse, fail once, be full, or lose its program to a kill, at the n-th change.

Modes mean nothing to root, and mounts are not everybody's. Python tells its audit hooks of every file that is opened,
renamed, made and removed, before it happens, and a hook that raises takes its place. So every single change of a
procedure can be the one that fails. A full disk is a limit on the size of files: what is written fails, not its name.
"""

from __future__ import annotations

import errno
import functools
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Kind = Literal["read-only", "fails once", "dies", "full"]
KINDS: tuple[Kind, ...] = ("read-only", "fails once", "dies", "full")

_PATHS = {"open": 1, "os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.truncate": 1, "os.symlink": 2}
"""Events that change something, and how many paths they have."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Killed(BaseException):
    """The process is dead: no handler of it may change a file any more."""


class _Disk:
    """The disk under `root`; one for the process, because hooks cannot be removed."""

    def __init__(self) -> None:
        self.root = ""
        self.kind: Kind | None = None
        self.left = 0
        self.struck = ""
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.kind is None or event not in _PATHS:
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
            return
        if not any(str(path).startswith(self.root) for path in arguments[: _PATHS[event]]):
            return
        self.left -= 1
        if self.left > 0 or (self.kind == "fails once" and self.left < 0):
            return
        self.struck = self.struck or f"{event} {arguments[: _PATHS[event]]}".replace(self.root, "")
        if self.kind == "dies":
            raise Killed
        number = errno.EROFS if self.kind == "read-only" else errno.EIO
        raise OSError(number, os.strerror(number), str(arguments[0]))


@functools.cache
def _disk() -> _Disk:
    return _Disk()


@contextmanager
def disk_fault(root: Path, kind: Kind, at: int) -> Iterator[_Disk]:
    """Trouble with everything under `root` inside the block; `struck` of what it yields says what it has hit.

    Args:
        at: the change, from 1, that is the first or only one to fail; for "full", bytes that a file may have.
    """
    disk = _disk()
    disk.root, disk.left, disk.struck = str(root), at, ""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.getsignal(signal.SIGXFSZ)
    try:
        if kind == "full":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (at, before[1]))
        else:
            disk.kind = kind
        yield disk
    finally:
        disk.kind = None
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
