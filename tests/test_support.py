"""The tests' own tools, where a fault of theirs once looked like one of the trainer."""

from __future__ import annotations

import gc
import os
import threading

from support.launch import run_ranks


class _OwnedByParent:
    """Garbage whose destructor waits for a thread of the process that made it, as a process group's does."""

    def __init__(self) -> None:
        self.owner, self.cycle = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            threading.Event().wait()


def test_a_rank_leaves_the_garbage_of_earlier_tests_alone() -> None:
    """Collected in a forked rank, it would wait for a thread that the fork left behind."""
    gc.disable()
    try:
        _OwnedByParent()
        assert run_ranks(gc.collect, 1, timeout_s=20) is not None
    finally:
        gc.enable()
