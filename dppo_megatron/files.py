"""Files in directories where others may write: a run's on a shared file system, one under /tmp, a downloaded model.

There anybody can put a link in the place of a file that is about to be written, appended to or copied. So a new file
never opens what has its name but replaces it; a file that is written in place is opened without following a link and
has one name only; and a directory that is written to is no link itself. Whoever may write into a directory while we do
can still exchange the directory as a whole: its files are then theirs, as they were before.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_LINK = "it is a symbolic link, which is not followed here"


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor of the file `path`, as of `os.open`.

    Raises:
        OSError: it cannot be opened, is a link or no file; or is to be written and has a second name (a hard link).
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)  # a pipe would block
    except OSError as error:
        raise OSError(errno.ELOOP, _LINK, str(path)) if error.errno == errno.ELOOP else error from None
    status = os.fstat(descriptor)
    reason = "" if stat.S_ISREG(status.st_mode) else "it is not a file"
    if flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
        reason = reason or "it has a second name (a hard link), so another file would change with it"
    if reason:
        os.close(descriptor)
        raise OSError(errno.EINVAL, reason, str(path))
    return descriptor


def append_to(path: Path) -> IO[bytes]:
    """The file `path`, made if missing, unbuffered: every write goes to its end. Raises OSError as `open_own`."""
    return open(open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b", buffering=0)


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = False) -> Iterator[IO[bytes]]:
    """A new file that gets the name `path` when the block has ended well; whatever had the name is replaced.

    Args:
        durable: its bytes are on the disk before it has the name.

    Raises:
        OSError: it cannot be written.
    """
    aside = path.with_name(f".{path.name}.new")  # one name: what a kill leaves is removed by the next
    with suppress(FileNotFoundError):
        aside.unlink()
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file anew, in one piece, as UTF-8. Raises OSError."""
    with replacing(path, durable=durable) as file:
        file.write(text.encode())


def make_directory(path: Path) -> None:
    """Make a directory to write to, with its parents, unless it is there. Raises OSError for a link in its place."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ENOTDIR, _LINK, str(path))


def remove_tree(path: Path) -> None:
    """Remove a directory, of a link only the link; what cannot be removed stays."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def is_inside(path: Path, directory: Path) -> bool:
    """Whether `path` leads, by whatever links, to a file of `directory`, or of the cache that it is a snapshot of.

    Hugging Face's cache has links of one form: snapshots/REVISION/NAME -> ../../blobs/HASH.
    """
    home, target = directory.resolve(), path.resolve()
    blobs = home.parent.parent / "blobs"
    return target.is_relative_to(home) or (home.parent.name == "snapshots" and target.parent == blobs)
