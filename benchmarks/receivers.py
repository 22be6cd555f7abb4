"""Servers that take weights and generate nothing, each in a process of its own: for sync benchmarks and tests.

The process runs the receiving end of vLLM's workers (`in_engine/dppo_wire.py`, or a mapping of the trainer's memory)
and hashes what arrives. Calls go over a pipe instead of HTTP, and fail in the same ways: the process is killed, hangs,
or answers with an error.

    trainer                                   receiver process
    PipeServer.receive ── ("receive", bytes) ──▶ ChainReceiver.receive ... digest
                       ◀── ("answer", ...) ────

Processes are forked from a server process that has imported torch, so that starting one takes milliseconds.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence, Set
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from dppo_megatron.rollout.servers.http import Refused, Unreachable
from dppo_megatron.rollout.servers.protocol import (
    CHUNK_BYTES,
    DeviceMemory,
    GroupRendezvous,
    InFlight,
    Offer,
    TensorNote,
)

_IN_ENGINE = Path(__file__).resolve().parents[1] / "dppo_megatron" / "rollout" / "servers" / "in_engine"
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["torch", "torch.distributed", "receivers"])


class _Address:
    """The part of a server's connection that the fleet uses."""

    def __init__(self, url: str) -> None:
        self.url = url

    def close(self) -> None:
        """Nothing is kept open between calls."""


class PipeServer:
    """The trainer's side of one receiver.

    Args:
        dies_at: the process kills itself when this bucket arrives, counted from 0 over its whole life.
        hangs_at: at this bucket it stops (SIGSTOP).
    """

    replicas = world_size = 1
    shows_checksums = True
    runs_our_receiver = True

    def __init__(self, number: int, dies_at: int = -1, hangs_at: int = -1, answer_s: float = 0.0) -> None:
        self.http: Any = _Address(f"pipe://127.0.0.1:{number}")
        self.calls: list[str] = []
        self._arguments = {"dies_at": dies_at, "hangs_at": hangs_at, "answer_s": answer_s}
        self._lock = threading.Lock()
        self.start()

    def start(self, **arguments: Any) -> None:
        """Start the process, or start it again after it has ended."""
        self._arguments |= arguments
        self._pipe, theirs = _FORK.Pipe()
        self.process: Any = _FORK.Process(target=_serve, args=(theirs, self._arguments), daemon=True)
        self.process.start()
        theirs.close()

    def stop(self) -> None:
        """End the process."""
        self.process.kill()  # SIGKILL ends a stopped process too
        self.process.join()

    def healthy(self, *, timeout_s: float) -> None:
        """A process that hangs gives no answer."""
        self._call("healthy", timeout_s)

    def pause(self, in_flight: InFlight, *, timeout_s: float) -> None:
        """Nothing runs here."""
        self._call("pause", timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        """Nothing waits here."""
        self._call("resume", timeout_s)

    def sleep(self, awake: Set[DeviceMemory], *, keeps: bool = False, timeout_s: float) -> None:
        """Only records the call."""
        self._call("sleep", timeout_s)

    def wake(self, what: DeviceMemory, *, timeout_s: float) -> None:
        """Only records the call."""
        self.calls.append(f"wake {what}")

    def join_group(self, rendezvous: GroupRendezvous, first_rank: int, *, timeout_s: float) -> None:
        """Join as the receiver in vLLM does."""
        seconds = rendezvous.joining.total_seconds(), rendezvous.timeout.total_seconds()
        place = rendezvous.host, rendezvous.store.port, first_rank, rendezvous.world_size
        self._call("join", timeout_s, *place, *seconds, rendezvous.secret)

    def begin_update(self, *, timeout_s: float) -> None:
        """Discard what an earlier update has left."""
        self._call("begin", timeout_s)

    def receive(self, tensors: Sequence[TensorNote], *, timeout_s: float) -> None:
        """One bucket by broadcast."""
        self._call("receive", timeout_s, _num_bytes(tensors))

    def receive_shared(self, offers: Sequence[Offer], tensors: Sequence[TensorNote], *, timeout_s: float) -> None:
        """One bucket from memory of the trainer."""
        self._call("map", timeout_s, _num_bytes(tensors), offers[0])

    def end_update(self, version: str, *, timeout_s: float) -> None:
        """Make what was received the new weights."""
        self._call("end", timeout_s, version)

    def weights_version(self, *, timeout_s: float) -> str:
        """The version of the last complete update."""
        return str(self._call("version", timeout_s))

    def checksums(self, *, timeout_s: float) -> list[dict[str, str]]:
        """`all`: SHA-256 of all bytes of the last complete update."""
        return [{"all": str(self._call("digest", timeout_s))}]

    def _call(self, name: str, timeout_s: float, *arguments: Any) -> Any:
        """Make one call at a time, as a real server's worker does."""
        deadline = time.monotonic() + timeout_s
        self.calls.append(name)
        if not self._lock.acquire(timeout=timeout_s):
            raise Unreachable(f"{self.http.url}: busy for {timeout_s:g} s")
        try:
            while self._pipe.poll(0):  # the answer to an earlier call that timed out
                self._pipe.recv()
            self._pipe.send((name, arguments))
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                raise Unreachable(f"{self.http.url}: no answer in {timeout_s:g} s")
            kind, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise Unreachable(f"{self.http.url}: connection closed ({type(error).__name__})") from None
        finally:
            self._lock.release()
        if kind == "error":
            raise Refused(500, answer)
        return answer


def _num_bytes(tensors: Sequence[TensorNote]) -> int:
    return sum(math.prod(note.shape) * getattr(torch, note.dtype).itemsize for note in tensors)


class _Receiver:
    """The process's side."""

    def __init__(self, dies_at: int, hangs_at: int, answer_s: float) -> None:
        self._dies_at, self._hangs_at, self._answer_s = dies_at, hangs_at, answer_s
        self._chain: Any = None
        self._num_buckets, self._version = 0, "none"
        self._digest, self._whole = hashlib.sha256(), ""

    def join(
        self, host: str, port: int, rank: int, world_size: int, joining_s: float, timeout_s: float, secret: str
    ) -> None:
        import torch.distributed as dist
        from dppo_wire import ChainReceiver as Link  # type: ignore[import-not-found]

        self._chain = None
        joining, timeout = timedelta(seconds=joining_s), timedelta(seconds=timeout_s)
        store = dist.TCPStore(host, port, world_size, False, joining, wait_for_workers=False)  # type: ignore[attr-defined]
        self._chain = Link(store, rank, world_size, joining, timeout, CHUNK_BYTES, secret)

    def begin(self) -> None:
        self._digest = hashlib.sha256()

    def receive(self, num_bytes: int) -> None:
        self._maybe_fail()
        try:
            memory = self._chain.receive(num_bytes)
        except RuntimeError:
            self._chain = None
            raise
        self._digest.update(memory.numpy().data)

    def map(self, num_bytes: int, offer: dict[str, Any]) -> None:
        self._maybe_fail()
        memory = torch.from_file(offer["path"], shared=True, size=offer["bytes"], dtype=torch.uint8)
        self._digest.update(memory[:num_bytes].numpy().data)

    def end(self, version: str) -> None:
        self._version, self._whole = version, self._digest.hexdigest()

    def version(self) -> str:
        return self._version

    def digest(self) -> str:
        time.sleep(self._answer_s)
        return self._whole

    def healthy(self) -> None: ...

    pause = resume = sleep = healthy

    def _maybe_fail(self) -> None:
        bucket, self._num_buckets = self._num_buckets, self._num_buckets + 1
        if bucket == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if bucket == self._hangs_at:
            os.kill(os.getpid(), signal.SIGSTOP)


def _serve(pipe: Connection, arguments: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(_IN_ENGINE))
    receiver = _Receiver(**arguments)
    while True:
        try:
            name, call_arguments = pipe.recv()
        except EOFError:  # the trainer has exited
            return
        try:
            answer = "answer", getattr(receiver, name)(*call_arguments)
        except Exception as error:
            answer = "error", f"{type(error).__name__}: {error}"
        pipe.send(answer)
