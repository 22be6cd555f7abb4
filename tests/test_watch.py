"""`dppo-megatron watch`: what is shown of each kind of run, that only new lines are read, and a real terminal."""

from __future__ import annotations

import errno
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.fake_fleet import fleet_of
from support.job import REPOSITORY
from support.record import write_record

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.evaluation import follow as follow_module
from dppo_megatron.rollout.servers import health_file
from dppo_megatron.rollout.servers.health_file import HEALTH, HealthFile, read_health
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.runs import run_record
from dppo_megatron.workbench.runs.run_record import read_run
from dppo_megatron.workbench.runs.sample_rows import LEGEND
from dppo_megatron.workbench.watch.frame import BLOCKS, Latest, frame, seconds_left, sparkline


def _shown(run: Path) -> str:
    latest = Latest(run)
    latest.look()
    with open(os.devnull, "w", encoding="utf-8") as file:
        console = Console(width=120, record=True, file=file, color_system="truecolor")
        console.print(frame(latest, 120))
    return console.export_text()


def _running(run: Path) -> Path:
    """As a trainer leaves it while it works: no summary, and a heartbeat that stays fresh however long a test takes."""
    (run / "summary.json").unlink(missing_ok=True)
    (run / "lock.json").write_text("{}")
    os.utime(run / "lock.json", (time.time() + 1e6,) * 2)
    return run


@pytest.mark.parametrize("state", ["finished", "running", "crashed", "stopped"])
def test_every_state_of_a_run(tmp_path: Path, state: str) -> None:
    run = write_record(tmp_path / "run", 40)
    if state != "finished":
        (run / "summary.json").unlink()
    if state in ("running", "crashed"):
        _running(run)
        config = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(config.replace("\nsteps: 40", "\nsteps: 100"))
    if state == "crashed":
        os.utime(run / "lock.json", (1, 1))
    said = _shown(run)
    assert f"run  {state}" in said and ("about" in said) == (state == "running")
    assert f"step 40 of {100 if state in ('running', 'crashed') else 40}" in said
    assert ("ended without" in said) == (state == "crashed")
    for part in (
        "hf, pruning dppo / dppo",
        "reward",
        "time per step",
        "50% of completions trained on",
        "math pass@1",
        "60.0% (step 40)",
    ):
        assert part in said
    assert "samples of step 40" in said and "problem 0: what is 6 * 7?" in said
    assert "warning: rollout/stragglers changes the expected gradient (bias 25 %): cut 40 (step 1-40)" in said


def test_sets_have_their_whole_names(tmp_path: Path) -> None:
    """A name may have slashes: `mine/easy` beside `mine/hard`."""
    run = write_record(tmp_path / "run", 5)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    scores = {"eval/mine/easy/pass@1": 0.5, "eval/mine/hard/pass@1": 0.25}
    (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | scores)]) + "\n")
    said = _shown(run)
    assert "mine/easy pass@1  50.0%" in said and "mine/hard pass@1  25.0%" in said


def test_a_run_that_has_no_step_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    assert "no step yet" in _shown(_running(run))
    assert main(["watch", str(tmp_path)]) == 2
    assert "holds neither run.json nor metrics.jsonl" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert main(["watch", str(run), "--every", "0"]) == 2


def test_once_prints_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where nobody asked for it, but the output is no terminal; then without a single escape sequence."""
    run = _running(write_record(tmp_path / "run", 5))
    for extra in (["--once"], []):
        assert main(["watch", str(run), *extra]) == 0
        said = capsys.readouterr().out
        assert said.count("step 5 of 5") == 1 and "\x1b" not in said


def test_what_a_model_wrote_is_no_command(tmp_path: Path) -> None:
    """Escape sequences, bells and overrides of the writing direction would reach the terminal."""
    run = write_record(tmp_path / "run", 3, text="[red]so[/red]\x1b]0;taken\x07 \x1b[2J\u202e\nend")
    said = _shown(run)
    assert "[red]so[/red]" in said and "end" in said
    assert not set(said) & set("\x1b\x07\u202e")


def test_without_blocks_where_a_terminal_has_none(tmp_path: Path) -> None:
    """Question marks, and no end."""
    command = [sys.executable, "-m", "dppo_megatron", "watch", str(write_record(tmp_path / "run", 9))]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0 and b"step 9 of 9" in done.stdout and b"???" in done.stdout, done.stderr


def test_samples_by_their_ends(tmp_path: Path) -> None:
    """The answer is there; with the words of the report's legend, and wrong is wrong at a reward of .06 too."""
    said = _shown(write_record(tmp_path / "run", 3, text="so it is " * 200 + "#### 42"))
    lines = [line for line in said.splitlines() if ", 6 tokens" in line]
    assert len(lines) == 4 and all(line.rstrip().endswith(" so it is #### 42") for line in lines)
    assert LEGEND in said
    assert lines[0].startswith(" ■ 1.00 right  weight 2.00 (certain), 6 tokens")
    assert lines[1].startswith(" □ failed ") and lines[2].startswith(" □ 0.06 wrong  pruned (score)")


# ------------------------------------------------------------------------------------------------- following


def test_what_was_followed_is_what_the_report_reads(tmp_path: Path) -> None:
    """Whichever way the lines come in, torn or whole: the same columns, ledger and steps as in one go."""
    whole = write_record(tmp_path / "whole", 30)
    data = (whole / "metrics.jsonl").read_bytes()
    part = tmp_path / "part"
    part.mkdir()
    shutil.copy(whole / "config.yaml", part)
    (part / "metrics.jsonl").touch()
    follow = Latest(part)
    for start in range(0, len(data), 4001):
        with open(part / "metrics.jsonl", "ab") as file:
            file.write(data[start : start + 4001])
        record = follow.look()
    expected = read_run(whole)
    assert record.steps == expected.steps and record.ledger == expected.ledger and record.notes == []
    for key in record.columns:
        assert record.columns[key] == expected.columns[key], key
    assert record.columns["rollout/truncated_share"] == expected.columns["rollout/truncated_share"]
    assert record.columns["eval/math/pass@1"] == expected.columns["eval/math/pass@1"]


def test_only_new_lines_are_read(tmp_path: Path) -> None:
    """What was read is not read again: a change to it, of equal length, is not seen."""
    run = write_record(tmp_path / "run", 50)
    follow = Latest(run)
    before = list(follow.look().columns["reward/mean"])
    path = run / "metrics.jsonl"
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.write(b"x" * size)
        file.seek(0, os.SEEK_END)
        file.write(json.dumps({"step": 51, "reward/mean": 0.25}).encode() + b"\n")
    record = follow.look()
    assert record.steps[-1] == 51 and record.columns["reward/mean"] == [*before, 0.25] and record.notes == []


@pytest.mark.parametrize("how", ["replaced", "truncated"])
def test_a_resume_takes_lines_away(tmp_path: Path, how: str) -> None:
    run = write_record(tmp_path / "run", 20)
    follow = Latest(run)
    assert follow.look().steps[-1] == 20
    path = run / "metrics.jsonl"
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:11])
    if how == "replaced":
        (run / "aside").write_bytes(kept)
        (run / "aside").replace(path)
    else:
        path.write_bytes(kept)
    record = follow.look()
    assert record.steps == list(range(11)) and all(len(values) == 11 for values in record.columns.values())


def test_damage_is_counted(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run", 5)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\n[]\n{"step": true}\n{"step": 6}\n{"step": 7, "rew')
    record = Latest(run).look()
    assert record.steps[-1] == 6 and record.notes == ["metrics.jsonl: 3 damaged lines are left out"]


@pytest.mark.parametrize("ledger", ["5", '{"name": 1}', '[{"name": [1]}]', '[7, {"name": "a", "kept_fraction": "x"}]'])
def test_values_of_another_kind_are_gaps(tmp_path: Path, ledger: str) -> None:
    run = write_record(tmp_path / "run", 5)
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        line = '{"step": 6, "rollout/truncated_count": "many", "prune/completions_generated": 8, "prune/ledger": %s}\n'
        file.write(line % ledger)
    record = Latest(run).look()
    assert record.steps[-1] == 6 and record.columns["rollout/truncated_share"][-1] is None
    assert all(len(one["label"]) == len(record.steps) and one["kept"][-1] is None for one in record.ledger)


# ------------------------------------------------------------------------------------------------- servers


class _Server:
    """As much of a server as its member asks."""

    class http:
        url = "http://127.0.0.1:1234"

        @staticmethod
        def close() -> None:
            """Nothing is open."""

    @staticmethod
    def healthy(*, timeout_s: float) -> None:
        """Always."""


class _NoAnswer(Executor):
    """Probes that never come back, so that only the test changes a state."""

    def submit(self, *_: Any, **__: Any) -> Future[Any]:  # type: ignore[override]
        return Future()


def test_the_health_of_servers(tmp_path: Path) -> None:
    """From the fleet's own states to the picture; and nothing is written where no run is."""
    run = _running(write_record(tmp_path / "run", 3))
    (run / "run.json").write_text("{}")
    fleet = fleet_of([_Server()], RolloutConfig(), threads=_NoAnswer(), health_file=HealthFile(run))
    [member] = fleet.members
    fleet.expect("1")
    with fleet.lock:
        member.synced("1")
    fleet.probe_all()
    assert [one.state for one in read_health(run / HEALTH)[0]] == ["live"]
    fleet.mark_out(member, "it broke \x1b[2Jthe connection")
    with pytest.MonkeyPatch.context() as patch:  # a sync that waits for servers has no rounds of probes
        patch.setattr(fleet, "_probe_out", lambda out: None)
        fleet.revive()
    fleet.close()
    [server] = read_health(run / HEALTH)[0]
    assert (server.state, server.outages) == ("out", 1)
    said = _shown(run)
    assert "http://127.0.0.1:1234" in said and "out it broke \\x1b[2Jthe connection" in said
    HealthFile(tmp_path).write(fleet.members)
    assert not (tmp_path / HEALTH).exists()
    (run / HEALTH).write_text('{"servers": [{}]}')
    assert read_health(run / HEALTH) == ([], 0.0)


def test_the_health_is_written_by_one_thread_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout's and a weight sync's: else one would rename the other's new file before it is complete."""
    (tmp_path / "run.json").write_text("{}")
    file, inside, seen = HealthFile(tmp_path), list[str](), list[int]()

    def write(path: Path, text: str) -> None:
        inside.append(text)
        time.sleep(0.02)
        seen.append(len(inside))
        inside.pop()

    monkeypatch.setattr(health_file, "write_text", write)
    health = {"name": "a", "state": "out", "reason": "", "outages": 1, "completions": 0, "asleep": False}
    states = [SimpleNamespace(**health, condition=state) for state in "abcd"]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda one: file.write([cast(Any, one)]), states))
    assert seen == [1] * 4


# ------------------------------------------------------------------------------------------------- numbers


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e9, 1e9) | st.none(), max_size=300), st.integers(1, 80))
def test_a_sparkline_has_its_extremes(values: list[float | None], width: int) -> None:
    drawn = sparkline(values, width)
    present = [one for one in values if one is not None]
    assert len(drawn) <= width and bool(drawn) == bool(present)
    if present and len(values) <= width:
        assert drawn[values.index(min(present))] == BLOCKS[0]
        if max(present) > min(present):
            assert drawn[values.index(max(present))] == BLOCKS[-1]
        assert all((one is None) == (character == " ") for one, character in zip(values, drawn, strict=True))


def test_time_left(tmp_path: Path) -> None:
    record = Latest(_running(write_record(tmp_path / "run", 30))).look()
    record.columns["time/step_s"] = [9.0] * 11 + [2.0] * 11 + [100.0] * 2 + [2.0] * 7
    assert seconds_left(record, 130) == 200.0


# ------------------------------------------------------------------------------------------------- a terminal


class _Terminal:
    """The command in a terminal of its own."""

    def __init__(self, run: Path) -> None:
        try:
            master, slave = pty.openpty()
        except OSError as error:
            pytest.skip(f"no pseudo-terminal can be opened here: {error}")
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "110", "LINES": "50"}
        environment |= {"PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1"}
        command = [sys.executable, "-m", "dppo_megatron", "watch", str(run), "--every", "0.1"]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self._master, self.seen = master, b""

    def __enter__(self) -> _Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:  # a test that failed
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def wait_for(self, text: str) -> None:
        """Until it is on the screen; the test's own time limit ends this."""
        self.read(lambda: text.encode() in self.seen)

    def read(self, until: Callable[[], bool]) -> None:
        while not until():
            select.select([self._master], [], [])
            try:
                part = os.read(self._master, 65536)
            except OSError:  # Linux says so when the last writer has closed its end
                part = b""
            self.seen += part
            if not part:
                assert until(), self.seen[-2000:].decode(errors="replace")

    def ended(self) -> int:
        while True:  # what it still writes must be read, or it would wait for ever
            ready, _, _ = select.select([self._master], [], [], 0.1)
            if ready:
                try:
                    self.seen += os.read(self._master, 65536)
                except OSError:
                    break
            elif self.process.poll() is not None:
                break
        return self.process.wait()


def _append(run: Path, row: dict[str, float]) -> None:
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def test_in_a_real_terminal(tmp_path: Path) -> None:
    """The picture follows the record."""
    run = _running(write_record(tmp_path / "run", 5))
    with _Terminal(run) as terminal:
        terminal.wait_for("step 5 of 5")
        assert b"\x1b[?1049h" in terminal.seen  # the alternate screen: the shell's own is not written over
        _append(run, {"step": 6, "reward/mean": 0.5, "time/step_s": 1.0})
        terminal.wait_for("step 6 of 5")


def test_in_a_real_terminal_until_the_run_ends(tmp_path: Path) -> None:
    run = _running(write_record(tmp_path / "run", 5))
    with _Terminal(run) as terminal:
        terminal.wait_for("step 5 of 5")
        (run / "summary.json").write_text("{}")
        (run / "lock.json").unlink()
        assert terminal.ended() == 0
        assert "finished" in terminal.seen.rpartition(b"\x1b[?1049l")[2].decode()


def test_a_trainer_whose_clock_is_behind_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats look five minutes old. One look sees the next of them; `eval --follow` counts from its own first
    look, and by its own clock."""
    run, ended = _running(write_record(tmp_path / "run", 5)), threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            os.utime(run / "lock.json", (time.time() - 300,) * 2)

    os.utime(run / "lock.json", (time.time() - 300,) * 2)
    (run / "run.json").write_text('{"format": "dppo_megatron run 1", "run": "x"}')
    asked = list[Callable[[], str]]()
    monkeypatch.setattr(follow_module, "follow", lambda _, __, status: [asked.append(status) or status()])
    assert main(["eval", "--follow", str(run)]) == 0 and "running" in capsys.readouterr().out
    now = time.monotonic()
    monkeypatch.setattr(run_record, "time", SimpleNamespace(monotonic=lambda: now + 70, time=time.time))
    assert asked[0]() == "crashed"
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert main(["watch", str(run), "--once"]) == 0 and "run  running" in capsys.readouterr().out
        assert asked[0]() == "running"
    finally:
        ended.set()
        thread.join()


def test_a_file_server_that_fails_over_ends_no_follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`eval --follow` looks every two seconds of a night whether the run goes on, and which checkpoints there are."""
    run = _running(write_record(tmp_path / "run", 5))
    (run / "checkpoints" / "step_000002").mkdir(parents=True)
    follower = SimpleNamespace(_root=run / "checkpoints", _is_done=lambda _: False, _is_complete=lambda _: True)

    def left() -> list[int]:
        return [step for step, _ in follow_module._Follower.left(cast(Any, follower))]

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stale)
        assert run_record.run_status(run, [0.0, 0.0]) == "running" and left() == []
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", stale)
        patch.setattr(os, "scandir", stale)
        assert left() == []
    assert left() == [2]


@pytest.mark.parametrize("closed", ["checkpoints", "."])
def test_who_may_not_look_into_a_run_does_not_follow_it_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """That does not pass, as what a file server says while it fails over."""
    run = _running(write_record(tmp_path / "run", 5))
    (run / "checkpoints").mkdir()
    follower = SimpleNamespace(_root=run / "checkpoints", _is_done=lambda _: False, _is_complete=lambda _: True)
    looks = {
        "checkpoints": lambda: follow_module._Follower.left(cast(Any, follower)),
        ".": lambda: run_record.run_status(run, [0.0, 0.0]),
    }

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    for call in ("stat", "listdir", "scandir"):
        monkeypatch.setattr(os, call, denied)
    with pytest.raises(PermissionError):
        looks[closed]()


def test_control_c_is_no_fault(tmp_path: Path) -> None:
    with _Terminal(_running(write_record(tmp_path / "run", 5))) as terminal:
        terminal.wait_for("step 5 of 5")
        os.kill(terminal.process.pid, signal.SIGINT)
        assert terminal.ended() == 130
        assert b"Traceback" not in terminal.seen
