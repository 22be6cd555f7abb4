"""What makes a checkpoint complete: a list of its files with their sizes and SHA-256 sums, written last.

Files are summed by the ranks that wrote them and checked by all ranks together, so that neither end waits for one
rank to read a whole checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

FILE = "manifest.json"
_FORMAT = "dppo_megatron checkpoint 1"
_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a complete checkpoint."""

    step: int
    fingerprint: str
    """Of the settings that a continuation must share."""
    config: dict[str, Any]
    """All settings of the run."""
    world_size: int
    files: dict[str, tuple[int, str]]
    """Name to size in bytes and SHA-256."""
    versions: dict[str, str]
    """Of what wrote it."""
    data: dict[str, Any] = field(default_factory=dict)
    """Of the problems it was trained and evaluated on (`data.fingerprint`); empty in older checkpoints."""


def step_name(step: int) -> str:
    """Name of the directory of a step's checkpoint."""
    return f"step_{step:06d}"


def complete(root: Path) -> list[tuple[int, Path]]:
    """The checkpoints under `root` that were given their name, by step; their files are not looked at."""
    if not root.is_dir():
        return []
    named = [(_NAME.fullmatch(path.name), path) for path in root.iterdir()]
    return sorted((int(match[1]), path) for match, path in named if match and not path.is_symlink())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of `directory`."""
    text = json.dumps({"format": _FORMAT} | asdict(manifest), indent=1)
    (directory / FILE).write_text(text + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> Manifest | str:
    """The manifest of a checkpoint, or what is wrong with it."""
    try:
        raw = json.loads((directory / FILE).read_text(encoding="utf-8"))
        if raw.pop("format") != _FORMAT:
            return f"its {FILE} has another format"
        raw["files"] = {name: (int(size), str(checksum)) for name, (size, checksum) in raw["files"].items()}
        return Manifest(**raw)
    except FileNotFoundError:
        return f"it holds no {FILE}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {FILE} cannot be read ({error!r})"


def sums(directory: Path, names: list[str]) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of files of `directory`."""
    return {name: ((directory / name).stat().st_size, _sha256(directory / name)) for name in names}


def faults(directory: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the files of a checkpoint, one line a file; the same on every rank. Collective."""
    mine = sorted(manifest.files.items())[dist.get_rank() :: dist.get_world_size()]
    parts: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, [fault for name, entry in mine if (fault := _fault(directory / name, *entry))])
    return [line for part in parts for line in part]


def _fault(path: Path, size: int, checksum: str) -> str:
    try:
        if path.stat().st_size != size:
            return f"{path.name} has {path.stat().st_size} bytes instead of {size}"
        return "" if _sha256(path) == checksum else f"{path.name} has another checksum than when it was written"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
