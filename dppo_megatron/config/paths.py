"""Where the package's own files are, and checks that a path can be read or written, before any work is done.

Errors name the setting. An output directory is tested by writing to it, because permissions do not show a full or
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
    """A file of configs/ or examples/, or a table in docs/: beside the package in a checkout, inside it in a wheel.

    Example: `shipped("configs", "quickstart.yaml")`.
    """
    checkout = _PACKAGE.parent.joinpath(*parts)
    return checkout if checkout.exists() else _PACKAGE.joinpath("shipped", *parts)


def with_paths(text: str) -> str:
    """`text`, where each docs/page.md becomes an absolute path if the package is installed from a wheel."""
    docs = shipped("docs")
    if docs.parent == _PACKAGE.parent:
        return text
    return re.sub(r"(?<![\w/.-])docs/(?=\w+\.md)", lambda _: f"{docs}/", text)  # but not as the end of a user's path


def shipped_config(name: str) -> Path | None:
    """The shipped config of this name: `h100/qwen3_8b_8gpus_dppo`, `quickstart.yaml`, `configs/quickstart.yaml`."""
    plain = Path(name.removeprefix("configs/").removesuffix(".yaml") + ".yaml")
    path = shipped("configs") / plain
    # os.path.isfile: Path.is_file raises for a name that is too long
    return path if not plain.is_absolute() and ".." not in plain.parts and os.path.isfile(path) else None


def nearest_config(name: str) -> str:
    """A hint for an error message: the shipped config that `name` may have meant, else how to see all of them."""
    folder = shipped("configs")
    known = [str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml")]
    close = difflib.get_close_matches(name.removeprefix("configs/").removesuffix(".yaml"), known, n=1)
    return f"did you mean the shipped '{close[0]}'?" if close else "`dppo-megatron init DIR` copies the shipped ones"


def working_directory(where: str | Path) -> str:
    """The directory in which the trainer of a run was started, from which relative paths in the run's files start.
    `where`: a file or checkpoint of the run. Empty if that is the current one, is unknown, or `where` is of no run."""
    return _working_directory(where)[0]


def import_as_in(where: str) -> None:
    """Find the user's own modules where the run at `where` found them; installed ones go first. Not for another user's
    run, whose file would then decide which modules this user imports."""
    base, owner = _working_directory(where)
    if base and owner == os.geteuid() and base not in sys.path:
        sys.path.append(base)


def _working_directory(where: str | Path) -> tuple[str, int]:
    """`working_directory`, and the owner of the run.json that names it."""
    try:
        path = Path(where).resolve(strict=True)
        run = next(one for one in (path, *path.parents[:3]) if (one / "run.json").is_file())
        with open(run / "run.json", encoding="utf-8") as file:
            began, owner = json.load(file), os.fstat(file.fileno()).st_uid
        base, inside = os.path.normpath(run / began["working_dir"]), Path(began.get("directory", "..")).parts
        # A run directory below the working directory: both may have been moved together.
        if inside and inside[0] != ".." and run.parts[-len(inside) :] == inside:
            base = str(run.parents[len(inside) - 1])
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, StopIteration):
        return "", -1
    return "" if base == str(Path.cwd().resolve()) else base, owner


def check_file(key: str, path: str) -> None:
    """Raise `UserError` unless `path` is a file that can be opened. `key` is the setting or option, for the message."""
    check_path(key, path, "file")
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise UserError(f"{key} = '{shown(path)}': cannot be read: {error.strerror}") from None


def check_path(key: str, path: str, wanted: Literal["file", "directory", "either"]) -> None:
    """Raise `UserError` unless `path` is what is wanted. Pipes and devices are refused: they may never end."""
    what, setting = "directory" if wanted == "directory" else "file", f"{key} = '{shown(path)}'"
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{setting}: no such {what} (working directory: {Path.cwd()})") from None
    except (OSError, ValueError) as error:  # too long, not permitted, a NUL
        raise UserError(f"{setting}: cannot be read: {_reason(error)}") from None
    kind = "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "device or a pipe"
    if kind not in ("file", "directory") or wanted not in (kind, "either"):
        raise UserError(f"{setting}: is a {kind}, not a {what}")


def check_model(path: str, key: str = "model.hf_path") -> None:
    """Raise `UserError` unless `path` is a directory; the message says how to get the model."""
    try:
        check_path(key, path, "directory")
    except UserError as error:
        made = "; `dppo-megatron quickstart` makes this one, and trains on it" if "task_seed" in path else ""
        raise UserError(f"{error}{made}{how_to_download(path)}") from None


KNOWN_SETS = {
    "train": ("gsm8k", "math", "dapo-math-17k", "deepscaler"),
    "test": ("gsm8k", "math", "math500", "aime24", "aime25", "amc23", "minerva", "olympiadbench"),
}
"""The sets that `dppo-megatron data NAME` writes, by its files; `data.known` has the rest about them."""


def check_set(key: str, path: str) -> None:
    """Raise `UserError` unless `path` is a file or a directory; the message says how to get a known set."""
    try:
        check_path(key, path, "either")
    except UserError as error:
        folder, name = os.path.split(shown(path))
        part, known = name.removesuffix(".jsonl"), os.path.basename(folder)
        is_known = name.endswith(".jsonl") and known in KNOWN_SETS.get(part, ()) and not os.path.lexists(path)
        made = f"; `dppo-megatron data {known} --out {folder}` writes it" if is_known else ""
        if not os.path.lexists(path) and (path.startswith("[") or "*" in path):
            section = "data.eval_sets" if key.startswith("data.eval") else "data.train_sets"
            made = f"; it is one path: name a directory of parts, or each of several files in {section}.NAME.path"
        raise UserError(f"{error}{made}") from None


def how_to_download(path: str) -> str:
    """The end of the message for a path that does not exist; empty unless it may be a name on the Hugging Face hub."""
    own = path.rpartition("/")[2]
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) or os.path.lexists(path):
        return ""
    return f"; if it is a model on the hub: `hf download {path} --local-dir {own}`, and give {own}"


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
    """Turn an OSError in the block into a UserError that names `what`. The error of a write to a full disk names no
    file, and would be taken for one of stdout."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be written: {_reason(error)}") from None


def json_reason(error: Exception) -> str:
    """Why a text is not usable JSON, for an error message; `error` is what `json.loads` raised. Of a single line only
    the column is named: it is line 1 to `json`, or line 2 at its end, and another one of its file."""
    message = str(error).partition("\n")[0]
    if isinstance(error, json.JSONDecodeError) and "\n" not in (line := error.doc.rstrip()):
        message = f"{error.msg}: column {min(error.pos, len(line)) + 1}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if "integer string conversion" in message:
        return "a number has more than 4,300 digits; write it as text, in quotes"
    return message[:300]


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, as `object_pairs_hook` of `json.loads`. Raises ValueError for a repeated key."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {json.dumps(next(name for name in names if names.count(name) > 1))} appears twice")
    return entries


def shown(path: str | Path) -> str:
    """The path as messages show it: shortened, and without values from the environment."""
    return shortened(escaped(path) if isinstance(path, str) else str(path), 200)


def in_short(value: object, longest: int = 160) -> str:
    """`value` as Python writes it, on one line of ASCII or printable text, shortened in the middle."""
    return shortened(repr(value), longest)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
