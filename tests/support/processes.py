"""Processes beside the test: one that holds something until it is killed, whether one lives, what is waited for."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def in_child(hold: Callable[[], object]) -> int:
    """A process that calls `hold` and then waits to be killed; returns its id once `hold` has returned."""
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            kept = hold()
            os.write(done, b"x")
            signal.pause()
            del kept
        finally:
            os._exit(1)
    os.close(done)
    assert os.read(ready, 1) == b"x", "it did not get what it was to hold"
    os.close(ready)
    return child


def kill(child: int) -> None:
    """SIGKILL."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@contextmanager
def holding(hold: Callable[[], object]) -> Iterator[int]:
    """Inside the block, another process holds what `hold` returns; yields its id."""
    child = in_child(hold)
    try:
        yield child
    finally:
        kill(child)


def running(process: int) -> bool:
    """Whether a process exists after a minute and is no zombie (an orphan's parent may be slow to collect it)."""
    for _ in range(1200):
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except FileNotFoundError:
            return False
        time.sleep(0.05)
    return True


def patient(seconds: float) -> float:
    """A limit that a hang should meet and a busy machine should not: longer as the machine is overloaded."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def until(holds: Callable[[], object], what: str = "", seconds: float = 60, said: Callable[[], str] = str) -> None:
    """Return when it holds; else fail with `what` and what `said` returns."""
    deadline = time.monotonic() + patient(seconds)
    while not holds():
        assert time.monotonic() < deadline, f"{what}\n{said()}"
        time.sleep(0.02)


def is_gone(group: int) -> bool:
    """Whether no process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def command_line(process: int) -> bytes:
    """Of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def processes_of(*words: str) -> list[int]:
    """Those whose command line holds every word."""
    found = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [one for one in found if all(word.encode() in command_line(one) for word in words)]


def free_port() -> int:
    """A port that nothing listens on at the moment, below those that outgoing connections get: a client that tries such
    a one before its server listens may be given it, and answer itself."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("100 ports in a row are taken")
