"""The directories under checkpoints/: listing them, moving one aside, removing one.

Nothing here is collective; rank 0 does it. Only a checkpoint that this run wrote and that newer good ones replace is
ever deleted. Whatever is damaged, belongs to another run or is in the way is moved to `aside/`.
"""

from __future__ import annotations

import re
import shutil
from itertools import chain, count
from pathlib import Path

from dppo_megatron.checkpoint.manifest import Manifest, read_manifest, step_name
from dppo_megatron.files import move_into

ASIDE = "aside"

_NAME = re.compile(r"step_([0-9]{6,20})")
_LEFT_OVER = re.compile(r"step_[0-9]{6,20}(\.incomplete\.[0-9a-f]{8}|\.removed)")
_REPLACED = re.compile(r"(step_[0-9]{6,20})\.replaced")


def named(root: Path) -> list[tuple[int, Path]]:
    """Everything under `root` with a checkpoint's name, by step; its contents have not been checked.

    A symbolic link counts: people move old checkpoints to another disk and link to them.
    """
    if not root.is_dir():
        return []
    matches = [(_NAME.fullmatch(path.name), path) for path in root.iterdir()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def read_own(path: Path, run: str) -> Manifest | str:
    """The manifest of a checkpoint of `run`, or the reason why it is none; the files listed in it are not checked."""
    if not path.exists():
        return "it is a link to something that is not there"
    if not path.is_dir():
        return "it is not a directory"
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        return manifest
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
    """Remove half-written and half-removed checkpoints that crashes have left; other names stay."""
    if not root.is_dir():
        return
    for path in root.iterdir():
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif match := _REPLACED.fullmatch(path.name):  # a crash between two renames
            whole = path.with_name(match[1])
            if not whole.exists() and not whole.is_symlink():
                path.rename(whole)


def remove(path: Path) -> None:
    """Remove a checkpoint; of a link only the link."""
    if path.is_symlink():
        path.unlink()
        return
    doomed = path.with_name(path.name + ".removed")
    path.rename(doomed)  # renamed first, so that a half-removed one never has a checkpoint's name
    shutil.rmtree(doomed, ignore_errors=True)


def point_at(link: Path, name: str) -> None:
    """Make `link` point at the sibling `name`. A convenience for users: resuming ignores it."""
    aside = link.with_name(f"{link.name}.new")
    aside.unlink(missing_ok=True)
    aside.symlink_to(name)
    aside.replace(link)
