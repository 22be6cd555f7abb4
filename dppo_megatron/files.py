"""Reads and writes files in directories where other users may write: a run on a shared file system, or under /tmp.

There, anybody can put a link in place of a file, even of one that is about to be written. So a new file replaces an
existing one without opening it, an existing file is opened without following links and written only if it has no second
name, and a directory to write to must not be a link. Whoever can swap whole directories has the files in them anyway.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_LINK = "it is a symbolic link, which is not followed here"


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor of the file `path`, as from `os.open`.

    Raises:
        OSError: it cannot be opened, is a link, or is not a regular file; or it is opened to be written, but has a
            second name (a hard link), or belongs neither to this user nor to the directory's owner.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)  # a pipe would block
    except OSError as error:
        raise OSError(errno.ELOOP, _LINK, str(path)) if error.errno == errno.ELOOP else error from None
    except ValueError:  # a NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    reason = _not_ours(os.fstat(descriptor), path.parent, written=bool(flags & (os.O_WRONLY | os.O_RDWR)))
    if not reason:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, reason, str(path))


def _not_ours(status: os.stat_result, directory: Path, *, written: bool) -> str:
    if not stat.S_ISREG(status.st_mode):
        return "it is not a file"
    if written and status.st_nlink > 1:
        return "it has a second name, a hard link, and would change there too"
    # Not checked for root: on a file server that squashes root, root's own files belong to another user.
    if written and os.geteuid() and status.st_uid not in (os.geteuid(), os.stat(directory).st_uid):
        return "it belongs to another user than this process and than its directory"
    return ""


def open_to_read(path: Path) -> IO[bytes]:
    """The file `path`. Raises OSError as `open_own`."""
    return open(open_own(path, os.O_RDONLY), "rb")


def append_to(path: Path) -> IO[bytes]:
    """The file `path`, made if missing, unbuffered. Raises OSError as `open_own`."""
    return open(open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b", buffering=0)


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = False) -> Iterator[IO[bytes]]:
    """A new file that is renamed to `path` when the block ends without an error. `durable`: fsync it first.

    Raises OSError if it cannot be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    aside.unlink(missing_ok=True)  # left by a process that was killed
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
    """Replace a file by `text` in UTF-8, in one step: readers see the old or the new content. Raises OSError."""
    with replacing(path, durable=durable) as file:
        file.write(text.encode())


def make_directory(path: Path) -> None:
    """Make a directory to write to, with its parents, unless it exists. Raises OSError if it is a link."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ENOTDIR, _LINK, str(path))


def remove_tree(path: Path) -> None:
    """Remove a directory, or a link but not its target. What cannot be removed stays."""
    with suppress(OSError):
        path.unlink()  # fails for a directory
    shutil.rmtree(path, ignore_errors=True)


def move_into(folder: Path, path: Path, names: Iterable[str]) -> Path:
    """Move `path`, not a link's target, to the first free one of `names` in `folder`; returns it. Raises OSError."""
    make_directory(folder)
    target = next(folder / name for name in names if not os.path.lexists(folder / name))
    if not path.is_symlink():
        return path.rename(target)
    target.symlink_to(os.path.realpath(path))  # a relative link would be wrong in another directory
    path.unlink()
    return target
