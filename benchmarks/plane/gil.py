"""What is left of the trainer's interpreter while 1 Mtok/s arrive.

Judged by the CPU time of rank 0's other threads: they can hold the interpreter for no longer than they run. Torch's
calls a second, alone and meanwhile, are printed beside it; on a machine whose cores the servers and the client share
they fall for reasons that have nothing to do with the interpreter.
"""

from __future__ import annotations

import threading
import time

import torch

from plane.canned import COUNT, Canned
from plane.clients import Intake
from plane.common import Bar, cpu_s

_TOKENS = 3000
_GROUPS_PER_S = 1e6 / (COUNT * _TOKENS)


def run(smoke: bool) -> list[Bar]:
    """The part's bars."""
    seconds = 2.0 if smoke else 15.0
    torch.set_num_threads(1)
    alone = _calls(2.0 if smoke else 5.0, threading.Event())
    # one answer after another from each server: so many a second
    servers, delay_s = 22, 22 / _GROUPS_PER_S
    intake = Intake(Canned("vllm", _TOKENS, delay_s), servers, 1)
    try:
        work = intake.work(int(_GROUPS_PER_S * seconds))
        done = threading.Event()

        def take_in() -> None:
            for _ in intake.fleet.run(work):
                pass
            done.set()

        thread = threading.Thread(target=take_in)
        began, all_s, main_s = time.monotonic(), cpu_s(), time.thread_time()
        thread.start()
        meanwhile = _calls(10 * seconds, done)
        wall_s = time.monotonic() - began
        others_s = (cpu_s() - all_s) - (time.thread_time() - main_s)
        thread.join()
        rate = len(work.groups) * COUNT * _TOKENS / wall_s / 1e6
        left = 1 - others_s / wall_s * (1.0 / rate)
        print(f"          torch calls a second: {alone:,.0f} alone, {meanwhile:,.0f} while {rate:.2f} Mtok/s arrive")
        return [Bar("gil", "interpreter left to the main thread at 1 Mtok/s", left, 0.95, at_least=True, is_time=True)]
    finally:
        intake.close()


def _calls(seconds: float, done: threading.Event) -> float:
    """Small operations a second until `done`, at most so long."""
    a, count = torch.ones(64, 64), 0
    began = time.monotonic()
    while time.monotonic() - began < seconds and not done.is_set():
        for _ in range(200):
            a = torch.clamp(a + 1.0, max=2.0)
        count += 400
    return count / (time.monotonic() - began)
