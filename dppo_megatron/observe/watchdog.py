"""What ends a run early: a signal that asks it to stop after the current step, or a rank that dies or is stopped.

A collective whose peer is gone fails at once or waits for the process group's timeout, and does not name the missing
rank. Here a thread of each rank increments a key in the job's store; if a key stays the same for too long, every other
rank prints whose key that is and exits. A rank whose main thread hangs still increments its key and is not detected.
Rank 0 watches all others and the others watch rank 0, so the store's load grows with the number of ranks only.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

from dppo_megatron.texts import show

_STOP = "watchdog/stop"
_ASK_TO_STOP = (signal.SIGTERM, signal.SIGUSR1)
"""SIGUSR1 is the warning before the time limit that jobs request from Slurm (`sbatch --signal=B:USR1@300`,
examples/slurm/requeue.sbatch). Slurm sends it to every process of a step, so servers, clients and graders ignore it."""

_ONE_REQUEST_S = 5.0
"""Signals within this time of the first are the same request: Slurm sends SIGTERM to torchrun and to the ranks, and
torchrun forwards it to the ranks a second time."""


class Watchdog:
    """Runs from `start` to `stop`.

    Args:
        store: torch's key-value store of the job; the watchdog opens a second connection to it.
        timeout_s: silence after which a rank counts as dead.
        leave: prints its argument and ends this process. Tests replace it.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        timeout_s: float,
        leave: Callable[[str], None] | None = None,
    ) -> None:
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=timeout_s))
        self._rank, self._timeout_s, self._leave = rank, timeout_s, leave or _leave
        self._watched = list(range(1, world_size)) if rank == 0 else [0]
        self._interval_s = min(5.0, timeout_s / 10)
        self._last_beats: dict[int, tuple[bytes, float]] = {}  # rank -> value of its key, and when it was first seen
        self._last_check = 0.0
        self._done = threading.Event()
        self._unanswered = 0
        """Intervals since the store last answered."""
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._store_thread = threading.Thread(target=self._watch_store, name="watchdog of the store", daemon=True)

    def start(self) -> None:
        self._beat(0)
        self._thread.start()
        self._store_thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def silent(self) -> list[str]:
        """Names of the watched ranks that have been silent for three intervals."""
        now = time.monotonic()
        return [self._name(rank) for rank, (_, at) in self._last_beats.items() if now - at > 3 * self._interval_s]

    def wait_for_silence(self) -> list[str]:
        """After an error: wait until a rank that has just died would count as silent; returns the silent ranks."""
        deadline = time.monotonic() + 5 * self._interval_s
        while not self.silent() and time.monotonic() < deadline:
            time.sleep(self._interval_s / 2)
        return self.silent()

    def _run(self) -> None:
        count = 0
        while not self._done.wait(self._interval_s):
            count += 1
            try:
                self._beat(count)
                self._check_ranks()
                reason = self._store.get(_STOP).decode() if self._store.check([_STOP]) else ""
            except Exception as error:
                if self._done.is_set():
                    return
                reason = f"rank 0, which keeps the job's store, cannot be reached: {error}".splitlines()[0]
            self._unanswered = 0
            if reason:
                self._leave(reason)
                return

    def _watch_store(self) -> None:
        """Notice that `_run` hangs: a call to a store whose process is stopped never returns (torch 2.13)."""
        while not self._done.wait(self._interval_s):
            self._unanswered += 1  # not measured in time: a job that was stopped as a whole must survive that
            if self._unanswered * self._interval_s > self._timeout_s:
                self._leave(f"rank 0, which keeps the job's store, has given no sign of life for {self._timeout_s:g} s")
                return

    def _beat(self, count: int) -> None:
        self._store.set(self._key(self._rank), f"{count} {socket.gethostname()} {os.getpid()}")

    def _check_ranks(self) -> None:
        now, before = time.monotonic(), self._last_check
        self._last_check = now
        if now - before > 3 * self._interval_s:  # this process was stopped, and perhaps the whole job: start afresh
            self._last_beats = {rank: (value, now) for rank, (value, _) in self._last_beats.items()}
        for rank in self._watched:
            value = self._store.get(self._key(rank)) if self._store.check([self._key(rank)]) else b""
            if rank not in self._last_beats or self._last_beats[rank][0] != value:
                self._last_beats[rank] = (value, now)
        for rank, (_, at) in self._last_beats.items():
            if now - at > self._timeout_s:
                self._store.set(_STOP, f"{self._name(rank)} has given no sign of life for {now - at:.0f} s")

    def _name(self, rank: int) -> str:
        host, _, pid = self._last_beats[rank][0].decode().partition(" ")[2].partition(" ")
        return f"rank {rank} (host {host}, process {pid})"

    def _key(self, rank: int) -> str:
        return f"watchdog/{rank}"


def _leave(reason: str) -> None:
    show(f"watchdog: {reason}; stopping", file=sys.stderr)
    os._exit(1)  # the main thread may be inside a collective that never returns


class StopRequests:
    """Remembers the first signal received between `listen` and `restore`. A later SIGTERM ends the process as usual."""

    def __init__(self) -> None:
        self.received = ""
        """Name of the signal; empty if none was received."""
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Install the handlers; does nothing outside the main thread, where Python does not allow it."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in _ASK_TO_STOP}

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._since = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGTERM and time.monotonic() - self._since > _ONE_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
