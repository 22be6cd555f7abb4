"""What is left of the trainer's interpreter while 1 Mtok/s arrive.

Torch's calls a second in three settings, in turn: alone; while the answers arrive in another process, whose rank 0 asks
and is told as this one's would be; and while they arrive here. The servers and the client take as many cores in the
second as in the third, so what the third has less is what the trainer's process loses: on a machine with fewer cores
than busy processes torch slows down beside any load, whoever it belongs to.

Beside it the CPU time of rank 0's other threads: they can hold the interpreter for no longer than they run.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from plane.canned import COUNT, Canned
from plane.clients import Intake
from plane.common import Bar, cpu_s

_TOKENS = 3000
_GROUPS_PER_S = 1e6 / (COUNT * _TOKENS)
_SERVERS = 22
"""Each answers one group after another, so that together they send so many a second."""


@dataclass(frozen=True)
class _Meanwhile:
    """What came of one setting."""

    calls_per_s: float
    mtok_per_s: float
    others_cpu_s: float = 0.0
    """Of this process's other threads, for a million tokens."""


def run(smoke: bool) -> list[Bar]:
    """The part's bars."""
    seconds, rounds = (2.0, 1) if smoke else (6.0, 5)
    torch.set_num_threads(1)
    alone, elsewhere, here = [], [], []
    for _ in range(rounds):
        alone.append(_calls(seconds / 3, threading.Event()))
        elsewhere.append(_elsewhere(seconds))
        here.append(_here(seconds))
        print(
            f"          torch calls a second: {alone[-1]:,.0f} alone, {elsewhere[-1].calls_per_s:,.0f} while"
            f" {elsewhere[-1].mtok_per_s:.2f} Mtok/s arrive elsewhere, {here[-1].calls_per_s:,.0f} while"
            f" {here[-1].mtok_per_s:.2f} arrive here",
            flush=True,
        )
    kept = [mine.calls_per_s / theirs.calls_per_s for mine, theirs in zip(here, elsewhere, strict=True)]
    of_alone = [mine.calls_per_s / calls for mine, calls in zip(here, alone, strict=True)]
    print(f"          of those alone: {statistics.median(of_alone):.3f} here, over those with the same load elsewhere:")
    print(f"          {', '.join(f'{share:.3f}' for share in sorted(kept))}")
    left = 1 - statistics.median(one.others_cpu_s for one in here)
    return [
        Bar("gil", "interpreter left to the main thread at 1 Mtok/s", left, 0.95, at_least=True, is_time=True),
        Bar("gil", "torch calls kept, over the same load elsewhere", statistics.median(kept), 0.95, "", True, True),
    ]


def _here(seconds: float) -> _Meanwhile:
    """Answers arrive in this process, in a thread."""
    intake = _intake()
    try:
        groups, done = int(_GROUPS_PER_S * seconds), threading.Event()
        thread = threading.Thread(target=_take_in, args=(intake, groups, done))
        began_s, all_s, main_s = time.monotonic(), cpu_s(), time.thread_time()
        thread.start()
        calls = _calls(10 * seconds, done)
        mtok, wall_s = groups * COUNT * _TOKENS / 1e6, time.monotonic() - began_s
        others_s = (cpu_s() - all_s) - (time.thread_time() - main_s)
        thread.join()
        return _Meanwhile(calls, mtok / wall_s, others_s / mtok)
    finally:
        intake.close()


def _elsewhere(seconds: float) -> _Meanwhile:
    """The same in a process of their own."""
    ours, theirs = multiprocessing.Pipe()
    groups, done = int(_GROUPS_PER_S * seconds), threading.Event()
    process = multiprocessing.get_context("fork").Process(target=_take_in_there, args=(groups, theirs))
    process.start()
    ours.recv()  # it is ready

    def wait() -> None:
        ours.recv()  # in the kernel, without the interpreter
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    began_s = time.monotonic()
    ours.send(True)
    calls = _calls(10 * seconds, done)
    wall_s = time.monotonic() - began_s
    thread.join()
    process.join()
    return _Meanwhile(calls, groups * COUNT * _TOKENS / 1e6 / wall_s)


def _take_in_there(groups: int, pipe: Connection) -> None:
    intake = _intake()
    pipe.send(True)
    pipe.recv()
    _take_in(intake, groups, threading.Event())
    pipe.send(True)
    intake.close()


def _intake() -> Intake:
    return Intake(Canned("vllm", _TOKENS, _SERVERS / _GROUPS_PER_S), _SERVERS, 1)


def _take_in(intake: Intake, groups: int, done: threading.Event) -> None:
    for _ in intake.fleet.run(intake.work(groups)):
        pass
    done.set()


def _calls(seconds: float, done: threading.Event) -> float:
    """Small operations a second until `done`, at most so long."""
    a, count = torch.ones(64, 64), 0
    began = time.monotonic()
    while time.monotonic() - began < seconds and not done.is_set():
        for _ in range(200):
            a = torch.clamp(a + 1.0, max=2.0)
        count += 400
    return count / (time.monotonic() - began)
