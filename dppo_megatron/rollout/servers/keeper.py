"""Servers on the job's other machines: the first rank there starts and watches them, rank 0 asks for restarts.

    rank 0 (fleet, sync)                     torch's store                   first rank of node n, keeper thread
                                       <---- state: 1 start, runs -----      starts them
    RemoteServer.is_running (reads) -------> state: 1 start, code -9 <-----  sees that one has ended
    RemoteServer.start() ------------------> wanted: 2 starts ------------>  starts it again
      waits for: nothing                                                     waits for: its tick

The store is the job's own, as the watchdog's: no port more, and a rank that is inside a collective can still be asked.
What is asked is a number of starts and not an event, so it does not matter how often or how late it is read.

The kernel ends a server with the thread that has started it. The keeper's thread therefore starts all of them, and
whatever ends it (the run, its rank's death, a store that is gone with rank 0) frees the machine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dppo_megatron.rollout.servers.launch import LaunchedServer, ServerProcess, stop_all
from dppo_megatron.texts import show
from dppo_megatron.types import UserError

_TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class Announced:
    """What rank 0 is told of a server on another machine."""

    node: int
    index: int
    url: str
    api_key: str = field(repr=False)
    visible_devices: str | None
    where: str


class RemoteServer(ServerProcess):
    """A server of another machine, seen from rank 0.

    Args:
        store: torch's key-value store of the job.
        job: part of the store's keys that this engine has for itself.
    """

    def __init__(self, announced: Announced, store: Any, job: str) -> None:
        self.url, self.api_key, self.node = announced.url, announced.api_key, announced.node
        self.where = f"{announced.where} on node {announced.node}"
        self.is_starting = True
        self._visible_devices = announced.visible_devices
        self._store, self._keys = store, _Keys(job, announced.node, announced.index)
        self._wanted = 1

    @property
    def visible_devices(self) -> str | None:
        """See `ServerProcess`."""
        return self._visible_devices

    @property
    def is_running(self) -> bool:
        """As its node has last told; one that was asked to start again counts as running."""
        state = self._state()
        return state["starts"] < self._wanted or state["code"] is None

    @property
    def exit_code(self) -> int | None:
        """See `ServerProcess`."""
        state = self._state()
        return state["code"] if state["starts"] >= self._wanted else None

    def start(self) -> None:
        """Ask its node for one start more."""
        self._wanted, self.is_starting = self._wanted + 1, True
        self._store.set(self._keys.wanted, str(self._wanted))

    def tail(self) -> str:
        """Told when it has ended; a server that hangs has its log on its node."""
        return str(self._state()["tail"])

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._store.get(self._keys.state))
        return state


class Keeper:
    """Starts and watches the servers of this machine, from `begin` to `close`.

    Args:
        servers: not started yet.
        store, job: as for `RemoteServer`.
    """

    def __init__(self, servers: Sequence[LaunchedServer], node: int, store: Any, job: str) -> None:
        self._servers, self._store = servers, store
        self._keys = [_Keys(job, node, index) for index in range(len(servers))]
        self._starts = [0] * len(servers)
        self._told: list[str] = [""] * len(servers)
        self._begun, self._done = threading.Event(), threading.Event()
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def begin(self) -> list[Announced]:
        """Start all; returns what rank 0 must know. Raises UserError if one cannot be started."""
        self._thread.start()
        self._begun.wait()
        if self._problem is not None:
            raise self._problem
        return [
            Announced(server.node, index, server.url, server.api_key, server.visible_devices, server.where)
            for index, server in enumerate(self._servers)
        ]

    def close(self) -> None:
        """End all, and the thread."""
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            for index in range(len(self._servers)):
                self._start(index)
                self._tell(index)
        except Exception as error:
            self._problem = error
            self._done.set()
        self._begun.set()
        try:
            while not self._done.wait(_TICK_S):
                for index in range(len(self._servers)):
                    self._obey(index)
                    self._tell(index)
        except Exception as error:  # rank 0 has gone, and the store with it
            show(f"rollout: the servers of this node end, since rank 0 cannot be reached: {error}")
        stop_all(self._servers)

    def _obey(self, index: int) -> None:
        key = self._keys[index].wanted
        if self._store.check([key]) and int(self._store.get(key)) > self._starts[index]:
            try:
                self._start(index)
            except UserError as error:  # it has started before: told as an end, and asked for again
                show(f"rollout: {error}")

    def _start(self, index: int) -> None:
        self._starts[index] += 1
        self._servers[index].start()

    def _tell(self, index: int) -> None:
        """Its state, if that is news."""
        server = self._servers[index]
        code = server.exit_code
        state = {"starts": self._starts[index], "code": code, "tail": "" if code is None else server.tail()}
        if (text := json.dumps(state)) != self._told[index]:
            self._store.set(self._keys[index].state, text)
            self._told[index] = text


class _Keys:
    """Of one server, in the store."""

    def __init__(self, job: str, node: int, index: int) -> None:
        self.state = f"servers/{job}/{node}/{index}/state"
        self.wanted = f"servers/{job}/{node}/{index}/wanted"
