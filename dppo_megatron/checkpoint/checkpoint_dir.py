"""The directories under checkpoints/, and the manifest in each, which lists its files with sizes and SHA-256 sums.

The manifest is written last, so a directory with one is complete. It has a checksum of itself. Each rank hashes the
files that it wrote, and the ranks share the work of verifying. Only `faults` is collective; `sums` runs on each rank,
the rest on rank 0. Whatever is damaged, of another run or in the way is moved to `aside/`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

from dppo_megatron.distributed import gather_all, on_every_rank, share
from dppo_megatron.files import move_into
from dppo_megatron.types import UserError

T = TypeVar("T")

ASIDE = "aside"

_NAME = re.compile(r"step_([0-9]{6,20})")
_LEFT_OVER = re.compile(r"step_[0-9]{6,20}(\.incomplete\.[0-9a-f]{8}|\.removed)")
FILE = "manifest.json"
LOOP = "loop.pt"
"""File with the loop's own state; the other files are Megatron's and the model's."""

_FORMAT = "dppo_megatron checkpoint 2"
_TRY_AFTER_S = (0.0, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a complete checkpoint."""

    step: int
    run: str
    """The run that wrote it: the id in its run.json."""
    config: dict[str, Any]
    world_size: int
    files: dict[str, tuple[int, str]]
    """Name to size in bytes and SHA-256."""
    versions: dict[str, str]
    data: dict[str, Any]
    """Fingerprint of the training and evaluation problems (`data.summary`)."""


def step_name(step: int) -> str:
    """Name of the directory of a step's checkpoint."""
    return f"step_{step:06d}"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest with a checksum of itself. All other files must be complete."""
    raw = {"format": _FORMAT} | asdict(manifest)
    text = json.dumps(raw | {"sha256": _own_sum(raw)}, indent=1)
    (directory / FILE).write_text(text + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> Manifest | str:
    """The manifest of a checkpoint, or what is wrong with the manifest; the files that it lists are not checked. Raises
    UserError if it cannot be read for now."""
    return _patiently(directory / FILE, _read_manifest)


def _read_manifest(path: Path) -> Manifest | str:
    try:
        if path.exists() and not path.is_file():  # on a pipe, reading would block
            return f"its {FILE} is not a file"
        raw = json.loads(path.read_text(encoding="utf-8"))
        own_sum = raw.pop("sha256", None)
        if raw["format"] != _FORMAT:
            return f"its {FILE} has another format"
        if own_sum != _own_sum(raw):
            return f"its {FILE} has another checksum than when it was written"
        del raw["format"]
        raw["files"] = {name: (int(size), str(checksum)) for name, (size, checksum) in raw["files"].items()}
        return Manifest(**raw)
    except FileNotFoundError:
        return f"it holds no {FILE}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its {FILE} cannot be read ({type(error).__name__}: {error})"


def _patiently(path: Path, read: Callable[[Path], T]) -> T | str:
    """`read(path)`, or that there is no such file. Any other error of the file system says nothing about the file: a
    server may be failing over. The file is then tried again, and at last UserError is raised."""
    for wait_s in _TRY_AFTER_S:
        time.sleep(wait_s)
        try:
            return read(path)
        except OSError as error:
            reason = str(error.strerror)
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return f"{path.name} cannot be read ({reason})"
    raise UserError(
        f"'{path}' cannot be read now ({reason}). The checkpoint may be whole, so it stays where it is: start again"
        " when it can be read, or move it away"
    )


def sums(directory: Path, names: list[str]) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of files of `directory`."""
    return {name: ((directory / name).stat().st_size, _sha256(directory / name)) for name in names}


def faults(directory: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the files of a checkpoint, a line for each fault; the same on every rank. Collective. Raises
    UserError if a file cannot be read for now."""
    mine: list[str | UserError] = []
    try:
        for name, entry in share(sorted(manifest.files.items())):
            mine.append(_patiently(directory / name, partial(_fault, *entry)))
    except UserError as error:
        mine.append(error)
    found = gather_all(mine)
    for unread in (one for one in found if isinstance(one, UserError)):
        raise on_every_rank(unread)
    return [str(fault) for fault in found if fault]


def _fault(size: int, checksum: str, path: Path) -> str:
    if path.stat().st_size != size:
        return f"{path.name} has {path.stat().st_size} bytes instead of {size}"
    if not path.is_file():
        return f"{path.name} is not a file"
    return "" if _sha256(path) == checksum else f"{path.name} has another checksum than when it was written"


def _own_sum(raw: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def named(root: Path) -> list[tuple[int, Path]]:
    """Everything under `root` with a checkpoint's name, as (step, path), sorted by step. Contents are not checked.

    A symbolic link counts: people move old checkpoints to another disk and link to them.
    """
    if not root.is_dir():
        return []
    matches = [(_NAME.fullmatch(path.name), path) for path in root.iterdir()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def read_own(path: Path, run: str) -> Manifest | str:
    """The manifest of a checkpoint of `run`, or why `path` is not one; the files that it lists are not checked."""
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        if not path.exists():
            return "it is a link whose target does not exist"
        return manifest if path.is_dir() else "it is not a directory"
    if step_name(manifest.step) != path.name:
        return f"it is the checkpoint of step {manifest.step} under another name"
    if manifest.run != run:
        seed = f" (seed {manifest.config['seed']})" if "seed" in manifest.config else ""
        return f"it is of another run: {manifest.run}{seed}, and this run is {run}"
    return manifest


def put_aside(path: Path) -> Path:
    """Move a directory that is not a good checkpoint of this run to `aside/`; returns its new path."""
    return move_into(path.parent / ASIDE, path, chain([path.name], (f"{path.name}.{n}" for n in count(1))))


def sweep(root: Path) -> None:
    """Remove half-written and half-removed checkpoints that crashes have left, and nothing else."""
    for path in root.glob("step_*"):
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint; if it is a link, only the link."""
    if path.is_symlink():
        path.unlink()
        return
    renamed = path.with_name(path.name + ".removed")
    path.rename(renamed)  # first, so that a half-removed directory never has a checkpoint's name
    shutil.rmtree(renamed, ignore_errors=True)


def point_at(link: Path, name: str) -> None:
    """Make `link` point at the sibling `name`. A convenience for users; a resume ignores it."""
    temporary = link.with_name(f"{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    temporary.replace(link)
