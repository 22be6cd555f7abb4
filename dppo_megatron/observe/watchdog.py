"""What ends a run early: a signal asks for the end of the step; a rank that dies or is stopped is named, and the others
stop instead of waiting for it. Of a rank whose main thread goes no further the thread here still gives signs of life.

A collective whose peer is gone fails at once or waits for the process group's timeout, and does not name the
missing rank. Here a thread of each rank increments a key in the job's store. Rank 0 watches all others and the others
watch rank 0, so the load on the store grows with the number of ranks and not with its square.
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
"""SIGUSR1 is what jobs request from Slurm (`sbatch --signal=B:USR1@300`, examples/slurm/requeue.sbatch). Slurm sends it
to every process of a step, so servers, clients and graders ignore it."""

_ONE_REQUEST_S = 5.0
"""Signals in this time are one request: Slurm sends SIGTERM to torchrun and to the ranks, and torchrun passes its own
on to them."""


class Watchdog:
    """Runs from `start` to `stop`.

    Args:
        store: torch's key-value store of the job; this opens a second connection.
        timeout_s: silence after which a rank counts as dead.
        leave: ends this process with a message. Tests replace it.
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
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._looked = 0.0
        self._done = threading.Event()
        self._unanswered = 0
        """Intervals since the store last answered."""
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._second = threading.Thread(target=self._watch_store, name="watchdog of the store", daemon=True)

    def start(self) -> None:
        self._show(0)
        self._thread.start()
        self._second.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def silent(self) -> list[str]:
        """Names of the watched ranks that have been silent for three intervals."""
        now = time.monotonic()
        return [self._name(rank) for rank, (_, at) in self._heard.items() if now - at > 3 * self._interval_s]

    def wait_for_silence(self) -> list[str]:
        """After an error: wait until a rank that has just died counts as silent; returns the silent ranks."""
        deadline = time.monotonic() + 5 * self._interval_s
        while not self.silent() and time.monotonic() < deadline:
            time.sleep(self._interval_s / 2)
        return self.silent()

    def _run(self) -> None:
        count = 0
        while not self._done.wait(self._interval_s):
            count += 1
            try:
                self._show(count)
                self._look()
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
        """A call to a store whose process is stopped never returns, whatever its timeout (torch 2.13)."""
        while not self._done.wait(self._interval_s):
            self._unanswered += 1  # counted and not timed: a job that was stopped as a whole goes on
            if self._unanswered * self._interval_s > self._timeout_s:
                self._leave(f"rank 0, which keeps the job's store, has given no sign of life for {self._timeout_s:g} s")
                return

    def _show(self, count: int) -> None:
        self._store.set(self._key(self._rank), f"{count} {socket.gethostname()} {os.getpid()}")

    def _look(self) -> None:
        now, before = time.monotonic(), self._looked
        self._looked = now
        if now - before > 3 * self._interval_s:  # this process was stopped, and the others perhaps with it
            self._heard = {rank: (sign, now) for rank, (sign, _) in self._heard.items()}
        for rank in self._watched:
            sign = self._store.get(self._key(rank)) if self._store.check([self._key(rank)]) else b""
            if rank not in self._heard or self._heard[rank][0] != sign:
                self._heard[rank] = (sign, now)
        for rank, (_, at) in self._heard.items():
            if now - at > self._timeout_s:
                self._store.set(_STOP, f"{self._name(rank)} has given no sign of life for {now - at:.0f} s")

    def _name(self, rank: int) -> str:
        host, _, pid = self._heard[rank][0].decode().partition(" ")[2].partition(" ")
        return f"rank {rank} (host {host}, process {pid})"

    def _key(self, rank: int) -> str:
        return f"watchdog/{rank}"


def _leave(reason: str) -> None:
    show(f"watchdog: {reason}; stopping", file=sys.stderr)
    os._exit(1)  # the main thread may be inside a collective that never returns


class StopRequests:
    """Remembers the first of the signals, from `listen` to `restore`. A later SIGTERM ends the process as usual."""

    def __init__(self) -> None:
        self.received = ""
        """Name of the signal; empty if none came."""
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Install the handlers; does nothing outside the main thread, where Python does not allow it."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in _ASK_TO_STOP}

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._since = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGTERM and time.monotonic() - self._since > _ONE_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
