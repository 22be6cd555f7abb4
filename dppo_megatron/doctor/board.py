"""What each rank has found so far, where rank 0 can read it although the rank hangs.

A wrong interface, or a rank that never comes, leaves the others inside a library's call that knows no limit of ours. So
findings travel through torch's store, which needs only MASTER_ADDR and MASTER_PORT, and not through the process group
that is on trial.

    every rank   ── state: stage, rows ──▶  store  ◀── reads all, prints ──  a thread of rank 0
                 ── stop: a fault ──────▶          ── reported ───────────▶  a thread of every other rank

Rank 0's thread waits until all are done, or until the limit; after a fault only a little longer, for what the others
see of it. Then whoever still hangs is ended by its own thread.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from dppo_megatron.doctor.rows import Row, report_of
from dppo_megatron.launched import launched_rank, launched_world_size
from dppo_megatron.types import GuardStop

_TICK_S, _OTHERS_S, _EXIT_S = 0.1, 5.0, 10.0
"""Between two looks; for what others see of a fault; for rank 0's report after the limit."""

Report = Callable[[list[Row], dict[int, str]], None]


@dataclass(frozen=True, slots=True)
class _State:
    host: str
    stage: str
    is_done: bool
    rows: list[Row]


class Board:
    """This rank's findings, and on rank 0 those of all.

    Args:
        limit_s: from now to the report.
        report: takes the rows and each rank's host; called once, in a thread of rank 0.

    Raises:
        GuardStop: nobody answers at MASTER_ADDR.
    """

    def __init__(self, limit_s: float, report: Report) -> None:
        self.rank, self.size = launched_rank(), launched_world_size()
        self._until, self._limit_s, self._report = time.monotonic() + limit_s, limit_s, report
        self._stage, self._rows, self._is_done, self._code = "", list[Row](), False, 2
        self._store = self._reach()
        self._post()
        self._thread = threading.Thread(target=self._watch, name="report", daemon=True)
        self._thread.start()

    @property
    def left_s(self) -> float:
        """Seconds to the limit; never 0, which stores take for no limit."""
        return max(0.1, self._until - time.monotonic())

    def begin(self, stage: str) -> None:
        """What this rank does from now on."""
        self._stage = stage
        self._post()

    def add(self, rows: Sequence[Row]) -> None:
        """Findings, told at once."""
        self._rows += rows
        self._post()

    def stop(self, problem: str) -> None:
        """This rank cannot go on, and nobody need wait for it."""
        self.add([Row(self._stage, "fault", problem)])
        self._store.set("stop", "")

    def others(self, mine: str) -> list[str]:
        """What every rank says in this stage, in rank order. Collective. Raises GuardStop naming those that do not."""
        keys = [f"{self._stage}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], mine)
        try:
            self._store.wait(keys, timedelta(seconds=self.left_s / 2))
        except RuntimeError:
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            raise GuardStop(
                f"{len(missing)} of {self.size} ranks did not come (rank {', '.join(missing)}): were they started with"
                " this WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and what does their own output say?"
            ) from None
        return [self._store.get(key).decode() for key in keys]

    def end(self) -> int:
        """Wait for the report; the exit code."""
        self._is_done = True
        self._post()
        self._thread.join()
        return self._code

    def _reach(self) -> Any:
        if self.size == 1:
            return HashStore()
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
        timeout = timedelta(seconds=self.left_s / 2)
        try:
            return TCPStore(host, port, None, serves, timeout, wait_for_workers=False, multi_tenant=True)
        except RuntimeError as error:
            message = (
                f"rank {self.rank} on {socket.gethostname()} reaches nobody at MASTER_ADDR={host}, MASTER_PORT={port}"
                f" ({str(error).splitlines()[0]}): is rank 0 there, and the port open?"
            )
            if self.rank:  # the command line says what rank 0 raises
                print(f"stopped: {message}", file=sys.stderr, flush=True)
            raise GuardStop(message) from None

    def _post(self) -> None:
        state = _State(socket.gethostname(), self._stage, self._is_done, self._rows)
        self._store.set(f"state/{self.rank}", msgspec.json.encode(state).decode())
        if self._is_done:
            self._store.set(f"done/{self.rank}", "")

    def _watch(self) -> None:
        """The thread. Its connection is its own: the other may be inside a call."""
        try:
            store = self._store.clone() if self.size > 1 else self._store
            if self.rank == 0:
                self._wait_for_all(store)
                self._code = self._tell(store)
                store.set("reported", "")
            else:
                store.wait(["reported"], timedelta(seconds=self.left_s + _EXIT_S))
                self._code = 0
        except RuntimeError as error:
            print(f"rank {self.rank}: rank 0 has not reported: {str(error).splitlines()[0]}", file=sys.stderr)
        if not self._is_done:
            sys.stdout.flush()
            os._exit(self._code)

    def _wait_for_all(self, store: Any) -> None:
        done, until = [f"done/{rank}" for rank in range(self.size)], self._until
        while not store.check(done) and time.monotonic() < until:
            if until == self._until and store.check(["stop"]):
                until = min(until, time.monotonic() + _OTHERS_S)
            time.sleep(_TICK_S)

    def _tell(self, store: Any) -> int:
        """Print the report; the exit code."""
        known = [rank for rank in range(self.size) if store.check([f"state/{rank}"])]
        states = {rank: msgspec.json.decode(store.get(f"state/{rank}"), type=_State) for rank in known}
        hosts = {rank: state.host for rank, state in states.items()}
        found = {rank: list(state.rows) for rank, state in states.items()}
        if not store.check(["stop"]):
            for rank, state in states.items():
                if not state.is_done:
                    found[rank].append(Row(state.stage, "fault", f"still there after {self._limit_s:g} s (--limit-s)"))
        rows = list(report_of(found, hosts))
        self._report(rows, hosts)
        return 2 if any(row.verdict == "fault" for row in rows) else 0
