"""Harm a run directory at random, and find out by comparing bytes what of it is left unharmed.

The damages know nothing of how checkpoints are checked. What must come of them is judged against a copy that was never
harmed: a checkpoint is unharmed if every file that it had is there with every byte it had, and a line of a record is
unharmed if it still stands in the file as a line.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from dppo_megatron.checkpoint.checkpoint_dir import read_manifest, write_manifest

RECORDS = ("metrics.jsonl", "trace.jsonl")
FILES = ("run.json", "config.yaml", *RECORDS, "lock.json")
NEWER = (
    *("summary.json", ".summary.json.new", "servers.json", "report.html"),
    *("trackers/wandb.json", "timeline/step_000001.json.gz", "eval/results.json", "compare.json", "hf/config.json"),
    *(".config.yaml.new", ".run.json.new", ".metrics.jsonl.new", "checkpoints/latest.new", "old/metrics.0001.jsonl"),
)
DIRECTORIES = ("checkpoints", "checkpoints/aside", "old", "samples", "prompts")


def harm(run_dir: Path, rng: random.Random, tried: Counter[str] | None = None) -> list[str]:
    """One to eight damages; what they were. `tried` counts by name those that have changed something."""
    told = []
    for _ in range(rng.randint(1, 8)):
        damage, before = rng.choice(DAMAGES), {} if tried is None else listed(run_dir)
        told.append(damage(run_dir, rng))
        if tried is not None and listed(run_dir) != before:
            tried[name_of(damage)] += 1
    return told


def name_of(damage: Callable[[Path, random.Random], str]) -> str:
    """As a night counts it."""
    return damage.__name__.strip("_").replace("_", " ")


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
    """The lines of a record, by step, that still stand in it as lines."""
    data = (run_dir / name).read_bytes() if (run_dir / name).is_file() else b""
    found = {line.strip(b" \t\r") for line in data.split(b"\n")}
    lines = (original / name).read_bytes().splitlines()
    if name == "trace.jsonl":
        lines = lines[1:]
        return {step: line for step, line in enumerate(lines, start=1) if line in found}
    return {step: line for step, line in enumerate(lines) if line in found}


def obstructed(run_dir: Path) -> list[str]:
    """Names in the place of which something stands that is neither the file nor the directory that belongs there, or a
    link to one."""

    def wrong(names: Sequence[str], kind: Callable[[Path], bool]) -> list[str]:
        there = [run_dir / name for name in names if os.path.lexists(run_dir / name)]
        return [str(path.relative_to(run_dir)) for path in there if path.is_symlink() or not kind(path)]

    files, folders = wrong(FILES, Path.is_file), wrong(DIRECTORIES, Path.is_dir)
    return files + folders


def listed(run_dir: Path) -> dict[str, bytes | str]:
    """Everything in a directory: what each file holds, and where each link points."""
    return {
        str(path.relative_to(run_dir)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(run_dir.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def _same(mine: Path, theirs: Path) -> bool:
    if not mine.is_file():
        return False
    if theirs.name == "manifest.json":  # a line more or less at its end changes nothing of what it says
        return mine.read_bytes().strip() == theirs.read_bytes().strip()
    return mine.read_bytes() == theirs.read_bytes()


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
        _remove(path)
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
    names = sorted({path.name for path in one.iterdir() if (other / path.name).is_file() and path.is_file()})
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
    _copied(path, copy)
    config = manifest.config | {"seed": 77}
    number = int(target.name.removeprefix("step_"))
    write_manifest(copy, dataclasses.replace(manifest, run="f" * 32, config=config, step=number))
    _remove(target)
    copy.rename(target)
    return f"foreign {target}"


def _stray(run_dir: Path, rng: random.Random) -> str:
    """Something of a checkpoint's name that is none, or a name that nobody gives."""
    name = rng.choice(["step_000900", "step_000005", "step_1", "step_00000A", "step_000003.bak", "notes"])
    path = run_dir / "checkpoints" / name
    if path.parent.is_dir() and not os.path.lexists(path):
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


def _link_all(run_dir: Path, rng: random.Random) -> str:
    """All checkpoints, a record or another file on another disk, with a link in its place, in absolute or relative."""
    name = rng.choice(["checkpoints", "metrics.jsonl", "trace.jsonl", "run.json", "config.yaml", "samples"])
    path, elsewhere = run_dir / name, run_dir / f"moved_{name}"
    if os.path.lexists(path) and not path.is_symlink() and not elsewhere.exists():
        path.rename(elsewhere)
        path.symlink_to(rng.choice([str(elsewhere), elsewhere.name]))
    return f"link {path}"


def _link_file(run_dir: Path, rng: random.Random) -> str:
    """A file of a checkpoint is a link: to itself elsewhere, to a copy of another one's, to nothing, to itself."""
    if (path := _any_checkpoint(run_dir, rng)) is None or not (files := list(path.iterdir())):
        return "no file to link"
    file, kind = rng.choice(sorted(files)), rng.randrange(4)
    other = _any_checkpoint(run_dir, rng)
    if file.is_symlink() or not file.is_file() or (kind == 1 and other == path):
        return "no file to link"
    elsewhere = run_dir / f"file_{rng.randrange(10**9)}"
    file.rename(elsewhere)
    if kind == 1 and ((other or path) / file.name).is_file():
        shutil.copy((other or path) / file.name, elsewhere)
    targets = [elsewhere, elsewhere, Path("/nonexistent"), Path(file.name)]
    file.symlink_to(targets[kind])
    return f"link {file} to {targets[kind]}"


def _foreign_link(run_dir: Path, rng: random.Random) -> str:
    """A checkpoint of another run is linked to, newer than all or in the place of one."""
    told = _foreign(run_dir, rng)
    return told if told.startswith("nothing") else f"{told}, {_link(run_dir, rng)}"


def _odd_file(run_dir: Path, rng: random.Random) -> str:
    """A directory, a pipe, or a link to nothing or to itself in the place of a file or directory."""
    inside = [] if (whole := _any_checkpoint(run_dir, rng)) is None else sorted(whole.iterdir())
    known = [run_dir / name for name in (*FILES, *DIRECTORIES, "summary.json", "checkpoints/latest.new")]
    path = rng.choice(rng.choice([known, inside or known]))
    elsewhere = run_dir / f"was_{rng.randrange(10**9)}"
    if os.path.lexists(path):
        path.rename(elsewhere)
    match rng.randrange(4) if path.parent.is_dir() else -1:
        case 0:
            path.mkdir()
        case 1:
            os.mkfifo(path)
        case 2:
            path.symlink_to("/nonexistent/x")
        case 3:
            path.symlink_to(path.name)
    return f"odd {path}"


def _latest(run_dir: Path, rng: random.Random) -> str:
    latest = run_dir / "checkpoints" / "latest"
    if latest.is_symlink() or latest.is_file():
        latest.unlink()
    if not latest.exists() and latest.parent.is_dir() and rng.random() < 0.7:
        latest.mkdir()
    return "latest"


def _left_over(run_dir: Path, rng: random.Random) -> str:
    if (path := _any_checkpoint(run_dir, rng)) is None:
        return "nothing is left over"
    name = rng.choice(["step_000009.incomplete.01234567", f"{path.name}.removed"])
    if not os.path.lexists(path.with_name(name)):
        _copied(path, path.with_name(name))
    return f"left over {name}"


def _copied(path: Path, target: Path) -> None:
    """A copy, without what cannot be copied: pipes and links to nothing."""
    target.mkdir()
    for file in path.iterdir():
        if file.is_file():
            shutil.copy(file, target / file.name)


def _remove(path: Path) -> None:
    """Whatever it is; of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _no_checkpoints(run_dir: Path, rng: random.Random) -> str:
    """Somebody needed room."""
    if rng.random() < 0.5:
        for path in sorted((run_dir / "checkpoints").glob("step_*")):
            _remove(path)
    return "no checkpoints"


def _samples(run_dir: Path, rng: random.Random) -> str:
    """Steps of the samples in one file, as a long run has them, which may be damaged; and a file of somebody else."""
    folder = run_dir / "samples"
    files = sorted(folder.glob("steps_*-*.rank0000.parquet")) if folder.is_dir() else []
    if len(files) < 2:
        return "no samples to harm"
    if rng.random() < 0.3:
        (folder / rng.choice(["notes.txt", "steps_000009.parquet.bak"])).write_text("mine")
    merged = folder / f"{files[0].name[:12]}-{files[-1].name[13:]}"
    merged.write_bytes(b"PAR1 is how it begins" if rng.random() < 0.4 else _joined(files))
    for file in files:
        if file != merged:
            file.unlink()
    return f"samples: {merged}"


def _joined(files: list[Path]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    try:
        pq.write_table(pa.concat_tables([pq.ParquetFile(file).read() for file in files]), sink)
    except (OSError, ValueError):  # one of them is damaged
        return b""
    return bytes(sink.getvalue())


def _newer_file(run_dir: Path, rng: random.Random) -> str:
    """What is not read for a resume is garbled or of the wrong kind: no reason to stop, and none to fail."""
    path = run_dir / rng.choice(NEWER)
    if path.parent.is_dir() or not os.path.lexists(path.parent):
        path.parent.mkdir(exist_ok=True)
        if not path.is_dir() and (path.is_file() or not os.path.lexists(path)):
            path.write_bytes(rng.choice([b"", b"5", b"[" * 100_000, b"\xff\xfe", b'{"x": "y"}', rng.randbytes(50)]))
    return f"newer {path}"


def _lock(run_dir: Path, rng: random.Random) -> str:
    """What a trainer has left that is long gone, or garbage."""
    path = run_dir / "lock.json"
    if os.path.lexists(path):
        return "a lock is there"
    gone = b'{"host": "elsewhere", "pid": 1, "since": "yesterday", "boot": "x", "process_start": "5"}'
    path.write_bytes(rng.choice([gone, gone[:40], b"", b"5", b"[" * 100_000, b"\xff", rng.randbytes(80)]))
    os.utime(path, (1, 1))
    return "a lock of one who has gone"


def _whole_record(run_dir: Path, rng: random.Random) -> str:
    """A record with other line ends, without its last one, with a huge or empty part, in another order."""
    path = run_dir / rng.choice(RECORDS)
    if not path.is_file():
        return "no record to harm"
    data, kind = path.read_bytes(), rng.randrange(7)
    match kind:
        case 0:
            data = data.replace(b"\n", b"\r\n")
        case 1:
            data = data.removesuffix(b"\n")
        case 2:
            data = b""
        case 3:  # as after a power cut
            at = rng.choice([0, len(data)])
            data = data[:at] + b"\0" * 8192 + data[at:]
        case 4:
            data += b'{"step": 2, "x": "' + b"x" * 3_000_000 + rng.choice([b'"}\n', b""])
        case 5:
            data = b"".join(line + b"\n" for line in reversed(data.splitlines()))
        case 6:
            data = data.replace(b"\n", b"\n\n") + rng.randbytes(200).replace(b"{", b"[")
    path.write_bytes(data)
    return f"record {path.name}: whole, kind {kind}"


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
    _no_checkpoints,
    _rename_checkpoint,
    _swap_checkpoints,
    _swap_files,
    _foreign,
    _stray,
    _stray,
    _link,
    _link_all,
    _link_file,
    _foreign_link,
    _odd_file,
    _latest,
    _left_over,
    _samples,
    _newer_file,
    _lock,
    _whole_record,
    _record_line,
    _record_line,
    _record_line,
)
