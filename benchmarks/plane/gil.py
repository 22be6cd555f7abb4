"""What is left of the trainer's interpreter while 1 Mtok/s arrive.

Measures torch calls per second in three settings, in turn: alone; while the answers arrive in another process, which
does what rank 0 would do here; and while they arrive here. The servers and the client take as many cores in the second
setting as in the third, so the difference of these two is what the trainer's process loses: on a machine with fewer
cores than busy processes, torch slows down beside any load.

What the kernel counts for the main thread (schedstat) splits the third setting's time in three: the thread runs, waits
for a core, or is blocked, which only another thread that holds the interpreter can cause. The CPU time of rank 0's
other threads is shown too: they can hold the interpreter for no longer than they run.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from dppo_megatron.rollout.servers.dispatch import dispatch
from plane.canned import COUNT, Canned
from plane.clients import Intake
from plane.common import Bar, cpu_s

_TOKENS = 3000
_GROUPS_PER_S = 1e6 / (COUNT * _TOKENS)
_SERVERS = 22
"""Each answers one group after another; their delay is chosen so that together they send `_GROUPS_PER_S`."""


@dataclass(frozen=True)
class _Setting:
    """The figures of one setting."""

    calls_per_s: float
    mtok_per_s: float
    others_cpu_s: float = 0.0
    """CPU seconds of this process's other threads, for a million tokens."""
    queued: float = 0.0
    """Share of the time in which the main thread waited for a core."""
    blocked: float = 0.0
    """Share of the time in which the main thread was blocked, at a million tokens a second."""


def run(smoke: bool) -> list[Bar]:
    """The part's bars."""
    seconds, rounds = (2.0, 1) if smoke else (3.0, 7)
    torch.set_num_threads(1)
    alone, elsewhere, here = [], [], []
    for _ in range(rounds):
        alone.append(_Setting(_calls(seconds / 3, threading.Event()), 0.0))
        elsewhere.append(_elsewhere(seconds))
        here.append(_here(seconds))
    kept = [mine.calls_per_s / theirs.calls_per_s for mine, theirs in zip(here, elsewhere, strict=True)]
    for name, figures in (("alone", alone), ("while they arrive elsewhere", elsewhere), ("here", here)):
        print(f"          torch calls a second, {name}: {_median(figures, 'calls_per_s'):,.0f}")
    print(f"          kept, over elsewhere: {', '.join(f'{share:.3f}' for share in sorted(kept))}")
    queued = f"{_median(here, 'queued'):.1%} of the time (elsewhere {_median(elsewhere, 'queued'):.1%})"
    print(f"          here, {_median(here, 'mtok_per_s'):.2f} Mtok/s: the main thread waits for a core {queued}")
    left = 1 - _median(here, "others_cpu_s")
    return [
        Bar("gil", "interpreter left to the main thread at 1 Mtok/s", left, 0.95, at_least=True, is_time=True),
        Bar("gil", "time in which it is not blocked", 1 - _median(here, "blocked"), 0.95, "", True, True),
        Bar("gil", "torch calls kept, over the same load elsewhere", statistics.median(kept), 0.95, "", True, True),
    ]


def _here(seconds: float) -> _Setting:
    """Answers arrive in this process, in a thread."""
    intake = _intake()
    try:
        groups, done = int(_GROUPS_PER_S * seconds), threading.Event()
        thread = threading.Thread(target=_take_in, args=(intake, groups, done))
        all_s, main_s, (ran_s, queued_s), began_s = cpu_s(), time.thread_time(), _main_thread_s(), time.monotonic()
        thread.start()
        calls = _calls(10 * seconds, done)
        mtok, wall_s = groups * COUNT * _TOKENS / 1e6, time.monotonic() - began_s
        ran_s, queued_s = _main_thread_s()[0] - ran_s, _main_thread_s()[1] - queued_s
        others_s = (cpu_s() - all_s) - (time.thread_time() - main_s)
        thread.join()
        blocked = max(0.0, wall_s - ran_s - queued_s) / mtok
        return _Setting(calls, mtok / wall_s, others_s / mtok, queued_s / wall_s, blocked)
    finally:
        intake.close()


def _elsewhere(seconds: float) -> _Setting:
    """Answers arrive in another process."""
    ours, theirs = multiprocessing.Pipe()
    groups, done = int(_GROUPS_PER_S * seconds), threading.Event()
    process = multiprocessing.get_context("fork").Process(target=_take_in_child, args=(groups, theirs))
    process.start()
    ours.recv()  # it is ready

    def wait() -> None:
        ours.recv()  # blocks in the kernel, without holding the interpreter
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    queued_s, began_s = _main_thread_s()[1], time.monotonic()
    ours.send(True)
    calls = _calls(10 * seconds, done)
    wall_s, queued_s = time.monotonic() - began_s, _main_thread_s()[1] - queued_s
    thread.join()
    process.join()
    return _Setting(calls, groups * COUNT * _TOKENS / 1e6 / wall_s, queued=queued_s / wall_s)


def _take_in_child(groups: int, pipe: Connection) -> None:
    intake = _intake()
    pipe.send(True)
    pipe.recv()
    _take_in(intake, groups, threading.Event())
    pipe.send(True)
    intake.close()


def _intake() -> Intake:
    return Intake(Canned("vllm", _TOKENS, _SERVERS / _GROUPS_PER_S), _SERVERS, 1)


def _take_in(intake: Intake, groups: int, done: threading.Event) -> None:
    for _ in dispatch(intake.fleet, intake.work(groups)):
        pass
    done.set()


def _main_thread_s() -> tuple[float, float]:
    """Seconds in which the calling thread has run, and in which it has waited for a core."""
    ran_ns, queued_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return int(ran_ns) / 1e9, int(queued_ns) / 1e9


def _median(figures: list[_Setting], name: str) -> float:
    values: list[float] = [getattr(one, name) for one in figures]
    return statistics.median(values)


def _calls(seconds: float, done: threading.Event) -> float:
    """Small operations per second until `done`, or for `seconds`."""
    a, count = torch.ones(64, 64), 0
    began = time.monotonic()
    while time.monotonic() - began < seconds and not done.is_set():
        for _ in range(200):
            a = torch.clamp(a + 1.0, max=2.0)
        count += 400
    return count / (time.monotonic() - began)
