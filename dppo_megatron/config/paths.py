"""Where what comes with the package is, and checks that a path can be read or written, before any work is done.

Errors name the setting. An output directory is tested by writing to it: permissions say nothing about a full or
read-only disk. Nothing is left behind.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from dppo_megatron.config.references import escaped
from dppo_megatron.texts import shortened
from dppo_megatron.types import UserError

_PACKAGE = Path(__file__).parents[1]


def shipped(*parts: str) -> Path:
    """A file of configs/ or examples/, or a table in docs/: beside the package, in a wheel inside it (setup.py).

    Example: `shipped("configs", "quickstart.yaml")`.
    """
    checkout = _PACKAGE.parent.joinpath(*parts)
    return checkout if checkout.exists() else _PACKAGE.joinpath("shipped", *parts)


def with_paths(text: str) -> str:
    """In a checkout docs/ is where everybody looks for it; of a wheel's pages a message has the whole paths."""
    docs = shipped("docs")
    if docs.parent == _PACKAGE.parent:
        return text
    return re.sub(r"(?<![\w/.-])docs/(?=\w+\.md)", lambda _: f"{docs}/", text)  # not the end of a user's path


def shipped_config(name: str) -> Path | None:
    """The shipped config of this name: `h100/qwen3_8b_8gpus_dppo`, `quickstart.yaml`, `configs/quickstart.yaml`."""
    plain = Path(name.removeprefix("configs/").removesuffix(".yaml") + ".yaml")
    found = shipped("configs") / plain
    # os.path's, which is False for a name that is too long
    return found if not plain.is_absolute() and ".." not in plain.parts and os.path.isfile(found) else None


def nearest_config(name: str) -> str:
    """The name of the shipped config that `name` may have meant, else how to see them; for an error message."""
    folder = shipped("configs")
    known = [str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml")]
    close = difflib.get_close_matches(name.removeprefix("configs/").removesuffix(".yaml"), known, n=1)
    return f"did you mean the shipped '{close[0]}'?" if close else "`dppo-megatron init DIR` copies the shipped ones"


def working_directory(where: str | Path) -> str:
    """What relative paths in a file or checkpoint of a run are relative to: the directory in which its trainer was
    started. Empty if that is this one or is not known, and for what is no run's."""
    return _working_directory(where)[0]


def import_as_in(where: str) -> None:
    """Let the user's own modules be found where the run at `where` found them, after all that is installed. Not for
    another user's run: he would choose a directory whose modules this user then imports."""
    base, owner = _working_directory(where)
    if base and owner == os.geteuid() and base not in sys.path:
        sys.path.append(base)


def _working_directory(where: str | Path) -> tuple[str, int]:
    """And the user who says so."""
    try:
        path = Path(where).resolve(strict=True)
        run = next(one for one in (path, *path.parents[:3]) if (one / "run.json").is_file())
        with open(run / "run.json", encoding="utf-8") as file:
            began, owner = json.load(file), os.fstat(file.fileno()).st_uid
        base, inside = os.path.normpath(run / began["working_dir"]), Path(began.get("directory", "..")).parts
        if inside and inside[0] != ".." and run.parts[-len(inside) :] == inside:  # both may have been moved together
            base = str(run.parents[len(inside) - 1])
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, StopIteration):
        return "", -1
    return "" if base == str(Path.cwd().resolve()) else base, owner


def check_file(key: str, path: str) -> None:
    """Raise `UserError` unless there is a file that can be opened. `key` names the setting or option."""
    check_path(key, path, "file")
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise UserError(f"{key} = '{shown(path)}': cannot be read: {error.strerror}") from None


def check_path(key: str, path: str, wanted: Literal["file", "directory", "either"]) -> None:
    """Raise `UserError` unless there is what is wanted: a pipe can be read only once, and may never end."""
    what, setting = "directory" if wanted == "directory" else "file", f"{key} = '{shown(path)}'"
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{setting}: no such {what} (working directory: {Path.cwd()})") from None
    except (OSError, ValueError) as error:  # too long, not permitted, a NUL
        raise UserError(f"{setting}: cannot be read: {_reason(error)}") from None
    found = "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "device or a pipe"
    if found not in ("file", "directory") or wanted not in (found, "either"):
        raise UserError(f"{setting}: is a {found}, not a {what}")


def check_model(path: str, key: str = "model.hf_path") -> None:
    """Raise `UserError` unless the setting names a directory; the message says where a model is to be had."""
    try:
        check_path(key, path, "directory")
    except UserError as error:
        made = "; `dppo-megatron quickstart` makes this one, and trains on it" if "task_seed" in path else ""
        raise UserError(f"{error}{made}{how_to_download(path)}") from None


def how_to_download(path: str) -> str:
    """The end of a message about a path that is not there; empty unless it may be a name on the hub."""
    own = path.rpartition("/")[2]
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) or os.path.lexists(path):
        return ""
    return f"; a model of that name on the hub: `hf download {path} --local-dir {own}`, and give {own}"


def check_writable(key: str, path: str | Path, *, directory: bool) -> None:
    """Raise `UserError` unless a file or directory of this name can be written; its parents may be missing."""
    target = Path(path)
    if not str(path):
        raise UserError(f"{key} is empty; give it the path of a {'directory' if directory else 'file'}")
    try:
        os.lstat(target)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # too long, a parent that is a file, a NUL
        raise UserError(f"{key} = '{shown(path)}': cannot be written: {_reason(error)}") from None
    if target.exists() and target.is_dir() != directory:
        raise UserError(f"{key} = '{shown(path)}': is a {'file' if directory else 'directory'}")
    if target.exists() and not directory:
        if not os.access(target, os.W_OK):
            raise UserError(f"{key} = '{shown(path)}': cannot be written: Permission denied")
        return
    existing = target.absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(f"{key} = '{shown(path)}': cannot be written in {existing}: {_reason(error)}") from None


@contextmanager
def writing(what: str | Path) -> Iterator[None]:
    """Raise UserError, which names `what`, where it cannot be written in the block: the error of a write on a full disk
    names no file, and would be taken for one of stdout."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be written: {_reason(error)}") from None


def json_reason(error: Exception) -> str:
    """Why a text is not usable JSON, for an error message; `error` is what `json.loads` raised."""
    said = str(error).partition("\n")[0]
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if "integer string conversion" in said:
        return "a number has more than 4,300 digits; write it as text, in quotes"
    return said[:300]


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, as `object_pairs_hook` of `json.loads`. Raises ValueError for a key that stands twice in it."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {json.dumps(next(name for name in names if names.count(name) > 1))} stands twice")
    return found


def shown(path: str | Path) -> str:
    """The path as messages show it: shortened, and without values from the environment."""
    return shortened(escaped(path) if isinstance(path, str) else str(path), 200)


def in_short(value: object, longest: int = 160) -> str:
    """`value` as Python writes it, on one line of ASCII or printable text, shortened in the middle."""
    return shortened(repr(value), longest)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
