"""Progress on a real terminal (a pty) and in a pipe, with the clock in the test's hand."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import queue
import re
import struct
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TextIO

import pytest

from dppo_megatron.convert import hf_to_megatron, megatron_to_hf
from dppo_megatron.observe.progress_display import Progress, RunProgress, duration
from dppo_megatron.progress import Advance, progress, shown_by
from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3

_MARK = "\x06"
STILL = 0
"""No thread looks at a clock that only the test moves."""


@pytest.fixture(autouse=True, scope="module")
def progress_is_shown() -> Iterator[None]:
    """Other tests have it switched off (conftest.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DPPO_PROGRESS", raising=False)
        yield


class Clock:
    """Seconds, as the test says."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Terminal:
    """A pty of 100 columns."""

    stream: TextIO
    """The end that is a terminal to who writes to it."""
    person: int
    """The end where somebody would sit."""

    def seen(self) -> str:
        """What was written since the last call. The kernel hands it over when it likes, so a mark is sent after it."""
        self.stream.write(_MARK)
        self.stream.flush()
        found = b""
        while not found.endswith(_MARK.encode()):
            found += os.read(self.person, 1 << 16)
        return found.decode().removesuffix(_MARK)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    person, program = pty.openpty()
    fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with os.fdopen(program, "w", encoding="utf-8") as stream:
        yield Terminal(stream, person)
    os.close(person)


def test_lines_in_a_pipe_grow_rarer() -> None:
    """100 answers at 4 s each: from 5 s on, then half as long again as it has taken, and a minute at most."""
    clock, out = Clock(), io.StringIO()
    with Progress("evaluation", 100, "answers", stream=out, clock=clock, beat_s=STILL) as progress:
        for done in range(1, 101):
            clock.now += 4.0
            progress(done, done * 50)
    lines = out.getvalue().splitlines()
    shown = [int(re.fullmatch(r"evaluation: (\d+) of 100 .*", line).group(1)) for line in lines[:-1]]  # type: ignore[union-attr]
    assert shown == [2, 4, 6, 9, 14, 21, 32, 47, 62, 77, 92]
    assert lines[0] == "evaluation: 2 of 100 answers, 12 tokens/s, about 7 min left"
    assert lines[-1] == "evaluation: 100 answers in 7 min, 12 tokens/s"


def test_nothing_is_done_yet() -> None:
    """A server that starts: how long it has been waited for."""
    clock, out = Clock(), io.StringIO()
    with Progress("rollout servers", 2, "started", stream=out, clock=clock, beat_s=STILL) as progress:
        for _ in range(80):
            clock.now += 0.5
            progress(0)
    assert out.getvalue().splitlines()[0] == "rollout servers: 0 of 2 started, waiting for 5 s"


def test_what_is_short_leaves_no_trace(terminal: Terminal) -> None:
    for to in (terminal.stream, out := io.StringIO()):
        clock = Clock()
        with Progress("converting", 3, "tensors", stream=to, clock=clock, beat_s=STILL) as progress:
            for done in range(1, 4):
                clock.now += 0.6
                progress(done)
    assert terminal.seen() == "" and out.getvalue() == ""


def test_a_bar_on_a_terminal(terminal: Terminal) -> None:
    """From two seconds on, drawn in one line and wiped at the end, for a line that stays."""
    clock = Clock()
    with Progress("SFT", 10, "steps", stream=terminal.stream, clock=clock, beat_s=STILL) as progress:
        clock.now += 1.9
        progress(1)
        assert terminal.seen() == ""
        clock.now += 4.1
        progress(3)
        assert "SFT: 3 of 10 steps, about 14 s left" in terminal.seen()
        clock.now += 0.01  # not drawn again: a terminal over SSH is slow
        progress(4)
        assert terminal.seen() == ""
        clock.now += 1.0
        progress(5)
        again = terminal.seen()
        assert again.startswith("\r") and "\n" not in again and "5 of 10" in again
        clock.now += 5.0
        progress(10)
    end = terminal.seen()
    assert end.endswith("SFT: 10 steps in 12 s\r\n")
    assert "\x1b[2K" in end  # wiped
    assert "\x1b[?25" not in again + end, "a run that is killed would leave the terminal without a cursor"


def test_nothing_is_counted(terminal: Terminal) -> None:
    """Megatron writes a checkpoint: how long it has taken. And rows of a file whose number nobody knows."""
    for to in (terminal.stream, out := io.StringIO()):
        clock = Clock()
        with Progress("saving", 0, "", stream=to, clock=clock, beat_s=STILL) as progress:
            clock.now += 6.0
            progress.note("")
        with Progress("reading", 0, "rows", stream=to, clock=clock, beat_s=STILL) as progress:
            for done in (48_000, 91_000):
                clock.now += 5.0
                progress(done)
    assert out.getvalue().splitlines() == [
        "saving: 6 s",
        "saving: done in 6 s",
        "reading: 48,000 rows, 5 s",
        "reading: 91,000 rows, 10 s",
        "reading: 91,000 rows in 10 s",
    ]
    seen = terminal.seen()
    assert "saving: 6 s" in seen and "saving: done in 6 s\r\n" in seen and "\x1b[2K" in seen
    assert seen.endswith("reading: 91,000 rows in 10 s\r\n")


def test_a_call_that_blocks_is_not_silent() -> None:
    """Until its first line is there, the thread that works does nothing."""
    said: queue.Queue[str] = queue.Queue()
    later = partial(next, count(0.0, 10.0))  # a clock that jumps whenever it is read
    with Progress("saving", 0, "", stream=io.StringIO(), clock=later, say=said.put, beat_s=1e-3):
        assert said.get(timeout=120) == "saving: 10 s"


def test_phases_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing in a log before a minute, and no closing line: the step has its own."""
    clock = Clock()
    run = RunProgress(20, visible=True, clock=clock)
    for seconds in (50.0, 70.0):
        with run.phases(7) as tell:
            tell("rollout")
            clock.now += seconds
            tell("update")
    assert re.fullmatch(r"step 7: (rollout|update), 70 s\n", capsys.readouterr().out), (
        "said by whichever thread is first"
    )


def test_a_failure_is_not_called_done(terminal: Terminal) -> None:
    for to in (terminal.stream, out := io.StringIO()):
        clock = Clock()
        with (
            pytest.raises(ValueError, match="disk"),
            Progress("converting", 10, "tensors", stream=to, clock=clock, beat_s=STILL) as progress,
        ):
            clock.now += 6.0
            progress(3)
            raise ValueError("disk")
    assert " in " not in out.getvalue() + terminal.seen()


METRICS = {
    "reward/mean": 0.5,
    "prune/completions_generated": 8,
    "prune/completions_trained": 4,
    "train/grad_norm": 1.0,
    "time/step_s": 2.0,
}


@pytest.mark.parametrize("to_a_file", [False, True])
def test_a_part_of_a_run_below_its_bar(to_a_file: bool, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines go above both bars, which stay, whoever prints them; to a file where stdout is one."""
    clock, out = Clock(), io.StringIO() if to_a_file else terminal.stream
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    monkeypatch.setattr(sys, "stdout", out)
    run = RunProgress(20, visible=True, clock=clock)
    assert "0 of 20 steps" in terminal.seen()
    for step in (11, 12):
        clock.now += 30.0
        run.step(step, METRICS)
    assert "12 of 20 steps, about 4 min left  reward 0.500  generated 8" in terminal.seen()
    with run.part("evaluation", 5, "answers") as advance:
        clock.now += 4.0
        advance(4)
        print("by a library", file=sys.stderr)
        run.say("a line")
    seen = terminal.seen()
    both = r"(?s)12 of 20 steps.*evaluation: 4 of 5 answers, about 1 s left"
    assert re.search(both + (".*" if to_a_file else ".*a line\r\n.*") + both.removeprefix("(?s)"), seen), seen
    assert "by a library\r\n" in seen and ("a line" in seen) != to_a_file
    run.close()
    run.say("the end")
    if isinstance(out, io.StringIO):
        assert out.getvalue() == "a line\nevaluation: 4 answers in 4 s\nthe end\n"
    assert sys.stdout is out and sys.stderr is terminal.stream


def test_a_terminal_that_cannot_redraw_gets_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    clock = Clock()
    with Progress("converting", 9, "tensors", stream=terminal.stream, clock=clock, beat_s=STILL) as progress:
        clock.now += 6.0
        progress(3)
    assert terminal.seen() == "converting: 3 of 9 tensors, about 12 s left\r\nconverting: 3 tensors in 6 s\r\n"


def test_a_rank_that_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    clock, out = Clock(), io.StringIO()
    with Progress("evaluation", 2, "answers", stream=out, clock=clock, visible=False, beat_s=STILL) as progress:
        clock.now += 100.0
        progress(1)
    RunProgress(3, visible=False).say("a line")
    assert out.getvalue() == "" and capsys.readouterr().out == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (720, "12 min"), (12_000, "3 h 20 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_conversion_counts_to_its_end(tmp_path: Path) -> None:
    """Both ways, with --verify: every display ends at its total, and never goes back."""
    seen: dict[str, list[int]] = {}
    totals: dict[str, int] = {}

    @contextmanager
    def display(what: str, total: int, unit: str) -> Iterator[Advance]:
        key = f"{what} {len(seen)}"
        seen[key], totals[key] = [], total
        yield lambda done, tokens=0: seen[key].append(done)

    write_tiny_qwen3(tmp_path / "model", seed=0)
    with shown_by(display):
        hf_to_megatron(tmp_path / "model", tmp_path / "megatron", verify=True)
        megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", verify=True)
    first, second = (f"flushing {tmp_path / name} to the disk {place}" for name, place in (("megatron", 2), ("hf", 4)))
    assert list(seen) == ["converting 0", "verifying 1", first, "converting 3", second, "verifying 5"]
    for key, counts in seen.items():
        assert counts == list(range(1, totals[key] + 1)), key


def test_threads_report_to_who_has_opened_the_task() -> None:
    """A thread has none of its owner's context: it takes the task that is open, or the context."""
    shown: list[tuple[str, int]] = []

    @contextmanager
    def display(what: str, total: int, unit: str) -> Iterator[Advance]:
        yield lambda done, tokens=0: shown.append((what, done))

    def work() -> None:
        with progress("in the thread", 1, "answers") as advance:
            advance(1)

    with shown_by(display), ThreadPoolExecutor(1) as thread, progress("evaluation", 2, "answers") as advance:
        thread.submit(advance, 2).result()
        thread.submit(copy_context().run, work).result()
    work()  # after the block nothing is shown
    assert shown == [("evaluation", 2), ("in the thread", 1)]
