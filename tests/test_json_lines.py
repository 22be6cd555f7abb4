"""metrics.jsonl and trace.jsonl: full disks and quotas, stale descriptors, damage, kills, and a bounded size."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import random
import resource
import shutil
import signal
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from support.cases import Choose
from support.disk_faults import Killed, disk_fault
from support.launch import run_ranks
from support.logged import logged_lines

from dppo_megatron.config.schema import Config
from dppo_megatron.observe import json_lines
from dppo_megatron.observe.json_lines import OLD, JsonLines, rewind
from dppo_megatron.observe.run_directory import RunDirectory


def _write_on_a_full_disk(run_dir: Path) -> dict[str, Any]:
    """On a rank: three lines, of which the second and third find no room until there is some again."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said = logged_lines()
    files = RunDirectory(run_dir)
    files.open_record(Config(), {"format": "x"}, None, {})
    files.write("metrics.jsonl", {"step": 0})
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, -1))
    files.write("metrics.jsonl", {"step": 1})
    files.write("metrics.jsonl", {"step": 2})
    try:
        files.sync()
        synced = True
    except OSError:
        synced = False
    meanwhile = (run_dir / "metrics.jsonl").read_text()
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    files.write("metrics.jsonl", {"step": 3})
    sums = files.sync()["metrics.jsonl"]
    files.close()
    return {"said": said, "synced": synced, "meanwhile": meanwhile, "sums": sums}


def test_lines_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    """Training continues, no half line is in the file, and in the end no line is missing."""
    seen = run_ranks(_write_on_a_full_disk, 1, tmp_path)[0]
    assert seen["meanwhile"] == '{"step": 0}\n' and not seen["synced"]
    first, second = seen["said"]
    assert "metrics.jsonl cannot be written (File too large)" in first and second.endswith("no line is lost")
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
    assert rewind(tmp_path / "metrics.jsonl", 3, seen["sums"])[0] == []


@pytest.mark.parametrize("every_s", [0.0, 1e9])
@pytest.mark.parametrize("notices", ["write", "sync"])
def test_lines_wait_too_where_a_full_quota_is_reported_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notices: str, every_s: float
) -> None:
    """A client of NFS takes a write into memory; when the server has no room for it, it drops it, and fsync says so:
    of the line itself, or of all lines since the last that was forced to the disk."""
    path, at_the_server = tmp_path / "metrics.jsonl", {"size": 0, "is_full": False}

    def fsync(descriptor: int) -> None:
        if at_the_server["is_full"]:
            os.ftruncate(descriptor, at_the_server["size"])
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        at_the_server["size"] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(json_lines, "_FORCED_EVERY_S", every_s)
    lines = JsonLines(path)
    lines.write({"step": 1})
    at_the_server["is_full"] = True
    for step in (2, 3):
        with pytest.raises(OSError, match="quota") if not every_s else contextlib.nullcontext():
            lines.write({"step": step})
    monkeypatch.setattr(json_lines, "_FORCED_EVERY_S", 0.0)
    with pytest.raises(OSError, match="quota"):
        lines.write({"step": 4}) if notices == "write" else lines.sync()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]
    at_the_server["is_full"] = False
    lines.write({"step": 5})
    lines.close()
    assert rewind(path, 5, lines.sums) == ([], lines.sums)
    expected = [1, 2, 3, 4, 5] if notices == "write" else [1, 2, 3, 5]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == expected


@pytest.mark.parametrize("arrived", [True, False])
def test_lines_that_were_not_forced_before_a_failover(tmp_path: Path, arrived: bool) -> None:
    """A client of NFS drops what it had not yet sent when the file becomes stale; each line is there once."""
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in range(4):
        lines.write({"step": step})
    os.dup2(gone := os.memfd_create("stale"), lines._file.fileno())
    os.close(gone)
    if not arrived:
        os.truncate(path, len(b'{"step": 0}\n'))
    lines.write({"step": 4})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3, 4]


def test_a_record_whose_last_bytes_find_no_room_keeps_no_lock(tmp_path: Path) -> None:
    """NFS may say so only when the file is closed."""
    said, files = logged_lines(), RunDirectory(tmp_path)
    files.open_record(Config(), {"format": "x"}, None, {})
    for step in (1, 2):
        files.write("metrics.jsonl", {"step": step})
    os.close(files._lines["metrics.jsonl"]._file.fileno())
    files.close()
    assert not (tmp_path / "lock.json").exists()
    assert "metrics.jsonl ends 1 lines early" in said[-1] and "Bad file descriptor" in said[-1]


def test_a_line_that_waits_does_not_go_into_another_trainers_record(tmp_path: Path) -> None:
    said, files = logged_lines(), RunDirectory(tmp_path)
    files.open_record(Config(), {"format": "x"}, None, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonLines, "_write_waiting", lambda self: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
        files.write("metrics.jsonl", {"step": 1})
    for name in ("lock.json", "metrics.jsonl"):
        (tmp_path / name).unlink()
        (tmp_path / name).write_text("{}\n")
    files.close()
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"
    assert "metrics.jsonl ends 1 lines early" in said[-1] and "was replaced while this trainer ran" in said[-1]


def _exchanged(lines: JsonLines, path: Path, flags: int) -> None:
    """The descriptor leads to `path` instead."""
    os.dup2(other := os.open(path, flags), lines._file.fileno())
    os.close(other)


LOSE = {
    "replaced": lambda lines, path: os.replace(shutil.copy(path, path.with_name("copy")), path),
    "another file": lambda lines, path: _exchanged(lines, Path(os.devnull), os.O_RDWR),
    "no writing": lambda lines, path: _exchanged(lines, path, os.O_RDONLY),
    "half a line": lambda lines, path: path.open("a").write('{"st') and _exchanged(lines, path, os.O_RDONLY),
}


@pytest.mark.parametrize("how", LOSE)
@pytest.mark.parametrize("last", ["line", "sync"])
def test_a_record_that_was_replaced_or_became_stale_is_opened_again(tmp_path: Path, how: str, last: str) -> None:
    """By an editor, or as a file server that fails over leaves a descriptor: no line is missing, also at a save."""
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in range(2):
        lines.write({"step": step})
    LOSE[how](lines, path)
    said = lines.write({"step": 2}) if last == "line" else lines.sync()
    said += [*lines.write({"step": 3}), *lines.sync()]
    assert said == [f"{path} was opened again"]
    lines.close()
    rewind(path, 3, lines.sums)
    expected = [0, 1, 2, 3] if last == "line" else [0, 1, 3]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == expected


def test_a_line_with_another_digit_is_noticed(tmp_path: Path) -> None:
    """It is JSON and has its step; only the checksum in the checkpoint tells."""
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in range(4):
        lines.write({"step": step, "reward": 0.25})
    lines.close()
    path.write_text(path.read_text().replace('{"step": 1, "reward": 0.25}', '{"step": 1, "reward": 0.75}'))
    said, kept = rewind(path, 2, {step: lines.sums[step] for step in range(3)})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 2] and kept.keys() == {0, 2}
    assert any("the lines of 1 finished steps are lost (1)" in line for line in said)
    assert '"reward": 0.75' in (tmp_path / "old" / "metrics.damaged.jsonl").read_text()
    assert '"step": 3' in (tmp_path / "old" / "metrics.redone.jsonl").read_text()


@pytest.mark.parametrize("dropped", [{}, {"dropped_before": 7}], ids=["whole", "bounded"])
def test_a_header_without_a_step_is_replaced(tmp_path: Path, dropped: dict[str, int]) -> None:
    """A resume from before the first step may have other settings, which no line with the older ones contradicts."""
    path, old, new = tmp_path / "trace.jsonl", {"format": "x", "rate": 1} | dropped, {"format": "x", "rate": 2}
    rows = [{"step": 7, "x": 1}]
    for last_step, expected in ((7, [old, *rows]), (0, [new | dropped])):
        path.write_text("".join(json.dumps(row) + "\n" for row in (old, *rows)))
        rewind(path, last_step, None, new)
        assert [json.loads(line) for line in path.read_text().splitlines()] == expected


def _record(path: Path) -> tuple[list[bytes], dict[int, int]]:
    """Four lines, and their checksums."""
    lines = JsonLines(path)
    for step in range(4):
        lines.write({"step": step, "more": {"a": [step, "x"]}})
    lines.close()
    return path.read_bytes().splitlines(), lines.sums


@pytest.mark.parametrize("newline", [b"\r\n", b"\n\n", b" \n\t", b"\n5\n", b"\n{}\n"])
def test_lines_with_more_between_them_stay(tmp_path: Path, newline: bytes) -> None:
    """Byte for byte."""
    path = tmp_path / "metrics.jsonl"
    whole, sums = _record(path)
    path.write_bytes(newline.join(whole) + newline)
    said, _ = rewind(path, 3, sums)
    assert path.read_bytes().splitlines() == whole and not any("lost" in line for line in said)


@pytest.mark.parametrize("newline", [b"", b" ", b"\x8a", b"\0"])
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_two_lines_in_one_are_moved_whole(tmp_path: Path, newline: bytes, first: int, end: bytes) -> None:
    """Their newline was lost: both steps are reported, and the bytes are in `old/`, also at the end of the file."""
    path = tmp_path / "metrics.jsonl"
    whole, sums = _record(path)
    joined = whole[first] + newline + whole[first + 1]
    path.write_bytes(b"\n".join([*whole[:first], joined, *whole[first + 2 :]]) + end)
    said, kept = rewind(path, 3, sums)
    assert path.read_bytes().splitlines() == [*whole[:first], *whole[first + 2 :]] and len(kept) == 2
    assert (tmp_path / "old" / "metrics.damaged.jsonl").read_bytes() == joined + b"\n"
    assert any(f"the lines of 2 finished steps are lost ({first}, {first + 1})" in line for line in said)


class _Traced:
    """A trace as a loop writes it, over kills: what has to be in it is known from the rows alone."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        self.path, self.checkpoint, self.sums = path, 0, dict[int, int]()
        self.rows = [{"step": step, "x": "y" * rng.randrange(90)} for step in range(1, rng.randint(5, 60))]
        self.max_bytes = rng.choice([0, 300, 800, 2000])
        self.every = rng.randint(1, 9)

    def go_on(self) -> list[str]:
        """Resume from the checkpoint and run to the end; what is logged."""
        said, kept = rewind(self.path, self.checkpoint, self.sums, {"format": "x", "more": [1]}, self.max_bytes)
        lines = JsonLines(self.path, kept, self.max_bytes)
        for row in self.rows[self.checkpoint :]:
            said += lines.write(row)
            if row["step"] % self.every == 0:
                lines.sync()
                self.checkpoint, self.sums = row["step"], dict(lines.sums)
        lines.close()
        return said

    def tear(self, rng: random.Random) -> None:
        """The last line as a kill amid its write leaves it, if it was written since the checkpoint."""
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        if len(lines) > 1 and lines[-1].endswith(b"\n") and json.loads(lines[-1])["step"] > self.checkpoint:
            os.truncate(self.path, self.path.stat().st_size - rng.randint(0, len(lines[-1])))

    def check(self, where: str) -> None:
        """All lines from some step on, each once; without a bound from the first, else of half of it at least."""
        head, *lines = self.path.read_bytes().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines]
        first = rows[0]["step"]
        assert json.loads(head) | {"dropped_before": 0} == {"format": "x", "more": [1], "dropped_before": 0}, where
        assert rows == self.rows[first - 1 :], where
        size = self.path.stat().st_size
        assert not self.max_bytes or size <= self.max_bytes or len(lines) == 1, where
        if first > 1:
            assert self.max_bytes and len(json.dumps(self.rows[first - 2])) + size > self.max_bytes // 2, where


def test_a_kill_at_any_change_of_a_trace_loses_no_line_and_doubles_none(tmp_path: Path, cases: Choose) -> None:
    """At up to eight changes of its files one after another, with a torn line or none, with a bound or without."""
    kills, dropped, most_again = 0, 0, 0.0
    chosen = cases("trace", 60)
    for case in chosen:
        rng, where = random.Random(f"trace {case}"), f"trace {case}"
        run = _Traced(tmp_path / f"{case}" / "trace.jsonl", rng)
        run.path.parent.mkdir()
        for _ in range(rng.randint(0, 8)):
            with disk_fault(run.path.parent, "dies", rng.randint(1, 12)), contextlib.suppress(Killed):
                run.go_on()
                continue
            kills += 1
            run.tear(rng)
        said = run.go_on()
        assert not [line for line in said if "warning" in line], f"{where}: {said}"
        run.check(where)
        dropped += b"dropped_before" in run.path.read_bytes()
        redone = run.path.parent / OLD / "trace.redone.jsonl"
        again = redone.read_bytes().splitlines() if redone.exists() else []
        assert all(json.loads(line) in run.rows for line in again), where
        assert not run.max_bytes or len(again) < 2 or redone.stat().st_size <= run.max_bytes, where
        most_again = max(most_again, sum(map(len, again)) / (run.max_bytes or math.inf))
    seen = kills > len(chosen) and dropped > len(chosen) / 4 and most_again > 0.5
    assert chosen.are_few or seen, (kills, dropped, most_again)


def test_a_resume_parses_no_line_that_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long trace it keeps a few numbers a line, not the lines: 10,000 steps of 512 x 16 are 1.9 GB. Only what is
    behind the checkpoint is looked at."""
    path, parsed, sums = tmp_path / "trace.jsonl", list[bytes](), dict[int, int]()
    lines = JsonLines(path)
    for step in range(1, 1001):
        lines.write({"step": step, "x": "y" * 40_000})
        if step == 997:
            sums = dict(lines.sums)
    lines.close()
    as_usual = json_lines._parsed
    monkeypatch.setattr(json_lines, "_parsed", lambda line: (parsed.append(line), as_usual(line))[1])
    tracemalloc.start()
    said, kept = rewind(path, 997, sums)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(parsed) == 3 and len(kept) == 997 and "(3) moved to" in said[0]
    assert peak < 4e6 < path.stat().st_size  # of 40 MB: a block that is read, and 0.7 kB a line


def test_a_full_trace_loses_its_older_half_and_says_so_once(tmp_path: Path) -> None:
    """A resume from before what was dropped misses nothing; a run that was killed amid the copy leaves none behind."""
    config, said, sums = Config(), logged_lines(), dict[str, dict[int, int]]()
    config.observe.trace_max_gb = 1e-6
    for resumed in (None, 40):
        files = RunDirectory(tmp_path)
        left = tmp_path / ".trace.jsonl.1.new"
        left.write_text("half of a copy")
        files.open_record(config, {"format": "x"}, resumed, sums)
        assert not left.exists()
        for step in range(1 + (resumed or 0), 101):
            files.write("trace.jsonl", {"step": step, "x": "y" * 20})
            if step == 40:
                sums = files.sync()
        files.close()
        head, *rows = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
        assert head["dropped_before"] <= rows[0]["step"] and rows[-1]["step"] == 100
        assert 500 < (tmp_path / "trace.jsonl").stat().st_size <= 1000
    told = [line for line in said if "trace.jsonl" in line]
    assert [("is full" in line, "after step 40" in line) for line in told] == [
        (True, False),
        (False, True),
        (True, False),
    ]


# ------------------------------------------------------------------------------------------------------ checkpoints
