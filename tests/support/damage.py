"""Harm a run directory at random, and find out by comparing bytes what of it is left unharmed.

The damages know nothing of how checkpoints are checked. What must come of them is judged against a copy that was never
harmed: a checkpoint is unharmed if every file that it had is there with every byte it had, and a line of a record is
unharmed if its bytes are still in the file.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from dppo_megatron.checkpoint.manifest import read_manifest, write_manifest

RECORDS = ("metrics.jsonl", "trace.jsonl")


def harm(run_dir: Path, rng: random.Random) -> list[str]:
    """One to eight damages; what they were."""
    return [rng.choice(DAMAGES)(run_dir, rng) for _ in range(rng.randint(1, 8))]


def unharmed_steps(run_dir: Path, original: Path) -> list[int]:
    """The steps whose checkpoint stands under its own name with all of its bytes."""
    return [
        int(whole.name.removeprefix("step_"))
        for whole in sorted((original / "checkpoints").glob("step_*"))
        if all(
            _same(run_dir / "checkpoints" / whole.name / file.relative_to(whole), file)
            for file in whole.rglob("*")
            if file.is_file()
        )
    ]


def unharmed_lines(run_dir: Path, original: Path, name: str) -> dict[int, bytes]:
    """The lines of a record, by step, whose bytes are still in it."""
    data = (run_dir / name).read_bytes() if (run_dir / name).is_file() else b""
    lines = (original / name).read_bytes().splitlines()
    if name == "trace.jsonl":
        lines = lines[1:]
        return {step: line for step, line in enumerate(lines, start=1) if line in data}
    return {step: line for step, line in enumerate(lines) if line in data}


def _same(mine: Path, theirs: Path) -> bool:
    return mine.is_file() and mine.read_bytes() == theirs.read_bytes()


def _any_file(run_dir: Path, rng: random.Random) -> Path | None:
    files = [path for path in sorted(run_dir.rglob("*")) if path.is_file() and path.stat().st_size]
    checkpoint_files = [path for path in files if "checkpoints" in path.parts]
    return rng.choice(rng.choice([files, checkpoint_files]) or files) if files else None


def _any_checkpoint(run_dir: Path, rng: random.Random) -> Path | None:
    found = [path for path in sorted((run_dir / "checkpoints").glob("step_*")) if path.is_dir()]
    return rng.choice(found) if found else None


def _flip(run_dir: Path, rng: random.Random) -> str:
    if (path := _any_file(run_dir, rng)) is None:
        return "nothing to flip"
    data = bytearray(path.read_bytes())
    position = rng.randrange(len(data))
    data[position] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"flip {path} at {position}"


def _truncate(run_dir: Path, rng: random.Random) -> str:
    if (path := _any_file(run_dir, rng)) is None:
        return "nothing to truncate"
    size = rng.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"truncate {path} to {size}"


def _extend(run_dir: Path, rng: random.Random) -> str:
    if (path := _any_file(run_dir, rng)) is None:
        return "nothing to extend"
    with open(path, "ab") as file:
        file.write(rng.choice([b"\0" * 64, b"x", b"\n", rng.randbytes(50)]))
    return f"extend {path}"


def _delete(run_dir: Path, rng: random.Random) -> str:
    if (path := _any_file(run_dir, rng)) is not None:
        path.unlink()
    return f"delete {path}"


def _delete_checkpoint(run_dir: Path, rng: random.Random) -> str:
    if (path := _any_checkpoint(run_dir, rng)) is not None:
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    return f"delete {path}"


def _rename_checkpoint(run_dir: Path, rng: random.Random) -> str:
    path = _any_checkpoint(run_dir, rng)
    target = run_dir / "checkpoints" / f"step_{rng.choice([0, 2, 3, 7, 900]):06d}"
    if path is not None and not target.exists() and not target.is_symlink():
        path.rename(target)
    return f"rename {path} to {target}"


def _swap_checkpoints(run_dir: Path, rng: random.Random) -> str:
    one, other = _any_checkpoint(run_dir, rng), _any_checkpoint(run_dir, rng)
    if one is not None and other is not None and one != other:
        between = one.with_name("between")
        one.rename(between)
        other.rename(one)
        between.rename(other)
    return f"swap {one} and {other}"


def _swap_files(run_dir: Path, rng: random.Random) -> str:
    """The same file of two checkpoints."""
    one, other = _any_checkpoint(run_dir, rng), _any_checkpoint(run_dir, rng)
    if one is None or other is None:
        return "nothing to swap"
    names = sorted({path.name for path in one.iterdir()} & {path.name for path in other.iterdir()})
    if not names:
        return "nothing to swap"
    name = rng.choice(names)
    mine, theirs = (one / name).read_bytes(), (other / name).read_bytes()
    (one / name).write_bytes(theirs)
    (other / name).write_bytes(mine)
    return f"swap {name} of {one} and {other}"


def _foreign(run_dir: Path, rng: random.Random) -> str:
    """A whole and consistent checkpoint of another run, newer than all or in the place of one."""
    if (path := _any_checkpoint(run_dir, rng)) is None or isinstance(manifest := read_manifest(path), str):
        return "nothing to make foreign"
    target = run_dir / "checkpoints" / f"step_{rng.choice([manifest.step, 4, 5, 900]):06d}"
    copy = run_dir / "foreign"
    shutil.copytree(path, copy)
    config = manifest.config | {"seed": 77}
    number = int(target.name.removeprefix("step_"))
    write_manifest(copy, dataclasses.replace(manifest, run="f" * 32, config=config, step=number))
    target.unlink() if target.is_symlink() else shutil.rmtree(target, ignore_errors=True)
    copy.rename(target)
    return f"foreign {target}"


def _stray(run_dir: Path, rng: random.Random) -> str:
    """Something of a checkpoint's name that is none, or a name that nobody gives."""
    name = rng.choice(["step_000900", "step_000005", "step_1", "step_00000A", "step_000003.bak", "notes"])
    path = run_dir / "checkpoints" / name
    if not path.exists() and not path.is_symlink():
        match rng.randrange(4):
            case 0:
                path.mkdir()
            case 1:
                path.write_text("a file")
            case 2:
                path.mkdir()
                (path / "manifest.json").write_text(rng.choice(["5", "[" * 100_000, "{}", '{"format": []}']))
            case _:
                path.symlink_to(rng.choice(["/nonexistent", "."]))
    return f"stray {path}"


def _link(run_dir: Path, rng: random.Random) -> str:
    """A checkpoint moved to another disk, with a link in its place."""
    path = _any_checkpoint(run_dir, rng)
    if path is not None and not path.is_symlink():
        elsewhere = run_dir / f"elsewhere_{rng.randrange(10**9)}"
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
    return f"link {path}"


def _latest(run_dir: Path, rng: random.Random) -> str:
    latest = run_dir / "checkpoints" / "latest"
    if latest.is_symlink() or latest.is_file():
        latest.unlink()
    if not latest.exists() and rng.random() < 0.7:
        latest.mkdir()
    return "latest"


def _left_over(run_dir: Path, rng: random.Random) -> str:
    if (path := _any_checkpoint(run_dir, rng)) is None:
        return "nothing is left over"
    name = rng.choice(["step_000009.incomplete.01234567", f"{path.name}.removed"])
    shutil.copytree(path, path.with_name(name), dirs_exist_ok=True)
    return f"left over {name}"


def _record_line(run_dir: Path, rng: random.Random) -> str:
    """Lines of a record garbled, inserted, doubled, dropped, joined and shuffled."""
    path = run_dir / rng.choice(RECORDS)
    if not path.is_file():
        return "no record to harm"
    lines = path.read_bytes().splitlines()
    place, kind = rng.randrange(len(lines) + 1), rng.randrange(6)
    match kind:
        case 0:
            rubbish = [b"5", b"[" * 100_000, b"{}", b"null", b'{"step": -1}', b'{"step": "2"}', b"\0" * 30, b"\xff\xfe"]
            lines.insert(place, rng.choice([*rubbish, b'{"step": 2}', b'{"step": 1e400}', b"9" * 6000]))
        case 1 if lines:
            lines.insert(place, rng.choice(lines))
        case 2 if lines:
            del lines[place - 1]
        case 3 if place:
            line = bytearray(lines[place - 1])
            digits = [index for index, byte in enumerate(line) if chr(byte).isdigit()]
            if digits:
                line[rng.choice(digits)] = ord(str(rng.randrange(10)))  # still JSON, and another number
            lines[place - 1] = bytes(line)
        case 4:
            rng.shuffle(lines)
        case 5 if len(lines) > 1:
            at = rng.randrange(len(lines) - 1)
            lines[at : at + 2] = [lines[at] + rng.choice([b"", b"\x8a", b" "]) + lines[at + 1]]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return f"record {path.name}: kind {kind} at {place}"


DAMAGES: tuple[Callable[[Path, random.Random], str], ...] = (
    _flip,
    _flip,
    _truncate,
    _extend,
    _delete,
    _delete_checkpoint,
    _rename_checkpoint,
    _swap_checkpoints,
    _swap_files,
    _foreign,
    _stray,
    _stray,
    _link,
    _latest,
    _left_over,
    _record_line,
    _record_line,
    _record_line,
)
