"""Servers on the job's own machines: the first rank of each starts and watches them there, rank 0 uses all of them.

    rank 0 (fleet, sync)                     torch's store                   first rank of node n, supervisor's thread
                                       <---- state: 1 start, runs -----      starts them
    RemoteServer.is_running (reads) -------> state: 1 start, code -9 <-----  sees that one has ended
    RemoteServer.start() ------------------> wanted: 2 starts ------------>  starts it again
      waits for: nothing                                                     waits for: its tick

The store is the job's own, as the watchdog's: no port more, and a rank that is inside a collective can still be asked.
What is asked is a number of starts and not an event, so it does not matter how often or how late it is read.

Unlike `dppo-megatron serve` (`serve.py`), a machine here does not start a server again by itself: one that shares its
GPU with the actor would take memory in the middle of an update. And no key is in a file, nor does a restart wait for a
shared file system to show it. `Fleet.restart_dead` starts rank 0's own servers again.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist

from dppo_megatron.config.rollout import LOOPBACK
from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import from_rank_zero, gather_all
from dppo_megatron.rollout.client.remote import Nodes
from dppo_megatron.rollout.servers.connect import make_servers
from dppo_megatron.rollout.servers.server_process import LaunchedServer, ServerProcess, address_toward, stop_all
from dppo_megatron.texts import show
from dppo_megatron.types import UserError

_TICK_S = 0.5


def launch_everywhere(config: Config, nodes: Nodes) -> tuple[list[ServerProcess], NodeSupervisor | None]:
    """Servers on all machines of the job, started but not ready yet. Collective.

    Returns:
        On rank 0 all servers, machine by machine, else nothing; and on the other machines' first ranks the supervisor
        of those of their machine, to be closed.

    Raises:
        UserError: on all ranks, with none left, if a server cannot be started on one of them; there, any other error as
            it is. A run without the servers of one machine would work, at a fraction of its speed.
    """
    hosts = _listening_addresses(config, nodes)
    job = from_rank_zero(lambda: secrets.token_hex(8))
    own: list[LaunchedServer] = []
    supervisor: NodeSupervisor | None = None
    announced: list[RemoteServer] = []
    problem, failed = "", None
    try:
        if nodes.is_first:
            name = f"node{nodes.node}_" if nodes.node else ""
            own = make_servers(config, hosts[nodes.node], nodes.node, name)
            if nodes.rank == 0:
                for server in own:
                    server.start()
            else:
                supervisor = NodeSupervisor(own, _store(), job)
                announced = supervisor.begin()
    except Exception as error:  # whatever it is: the other ranks wait below
        failed = error
        text = str(error) if isinstance(error, (UserError, OSError)) else f"{type(error).__name__}: {error}"
        problem = f"{socket.gethostname()} (rank {nodes.rank}): {text}" if nodes.rank else text
    except BaseException:  # Ctrl-C: nobody else knows of these yet
        stop_all(own)
        raise
    reports = gather_all([(problem, announced)])  # in the order of ranks, and so of machines
    if problems := [said for said, _ in reports if said]:
        if supervisor is not None:
            supervisor.close()
        else:
            stop_all(own)
        if failed is not None and not isinstance(failed, (UserError, OSError)):
            raise failed  # a fault of this program: keep its traceback
        raise UserError(problems[0])
    if nodes.rank != 0:
        return [], supervisor
    store = _store() if nodes.count > 1 else None
    return [*own, *(replace(one, store=store) for _, there in reports for one in there)], None


def _listening_addresses(config: Config, nodes: Nodes) -> list[str]:
    """By machine of the job, the address by which the others reach it; loopback if there is one machine. Collective.

    Raises:
        UserError: that address is on a network, and rollout.servers.allow_remote_endpoints is not set.
    """
    if nodes.count == 1:
        return ["127.0.0.1"]
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    toward_master = gather_all([(nodes.node, address_toward(master))])
    found = dict(reversed(toward_master))  # the first rank of each machine decides
    # Rank 0's machine may know itself by a loopback name (Debian's 127.0.1.1): what another one sees of it is right.
    found[0] = from_rank_zero(lambda: address_toward(found[1]))
    addresses = [found[node] for node in range(nodes.count)]
    check_network(addresses, config)
    return addresses


def check_network(addresses: Sequence[str], config: Config) -> None:
    """Raise UserError for servers that would listen on a network which the user has not allowed."""
    outside = [address for address in addresses if address not in LOOPBACK and not ip_address(address).is_loopback]
    if outside and not config.rollout.servers.allow_remote_endpoints:
        raise UserError(
            f"rollout servers on several machines listen on their network ({', '.join(outside)}), over plain HTTP, with"
            " a key; set rollout.servers.allow_remote_endpoints=true if that network is yours"
        )


def _store() -> Any:
    """A second connection to the job's store: the trainer's may be blocked in a wait for hours."""
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]


@dataclass
class RemoteServer(ServerProcess):
    """A server of another machine, seen from rank 0.

    Args:
        keys: what its keys in the store begin with.
        store: torch's key-value store of the job, on rank 0.
    """

    url: str
    api_key: str = field(repr=False)
    node: int
    where: str
    visible_devices: str | None
    keys: str
    store: Any = None
    is_starting: bool = True
    _wanted: int = 1

    @property
    def exit_code(self) -> int | None:
        """As its node last reported; one that was asked to start again counts as running."""
        state = self._state()
        return state["code"] if state["starts"] >= self._wanted else None

    def start(self) -> None:
        """Ask its node for one start more."""
        self._wanted, self.is_starting = self._wanted + 1, True
        self.store.set(f"{self.keys}/wanted", str(self._wanted))

    def tail(self) -> str:
        """As reported when it ended; the log of a server that hangs is on its node."""
        return str(self._state()["tail"])

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.store.get(f"{self.keys}/state"))
        return state


class NodeSupervisor:
    """Starts and watches the servers of this machine, from `begin` to `close`, in a thread.

    The servers end with that thread: with the run, the death of its rank, or the loss of the store with rank 0.

    Args:
        servers: not started yet.
        store: torch's key-value store of the job.
        job: part of its keys in the store: a process may make several engines.
    """

    def __init__(self, servers: Sequence[LaunchedServer], store: Any, job: str) -> None:
        self.servers, self._store = servers, store
        self._keys = [f"servers/{job}/{server.node}/{index}" for index, server in enumerate(servers)]
        self._told: dict[str, str] = {}
        self._begun, self._done = Future[None](), threading.Event()
        self._thread = threading.Thread(target=self._run, name="node supervisor", daemon=True)

    def begin(self) -> list[RemoteServer]:
        """Start all; returns them as rank 0 will see them. Raises UserError if one cannot be started."""
        self._thread.start()
        self._begun.result()
        return [
            RemoteServer(one.url, one.api_key, one.node, f"{one.where} on node {one.node}", one.visible_devices, keys)
            for one, keys in zip(self.servers, self._keys, strict=True)
        ]

    def close(self) -> None:
        """End all, and the thread."""
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            for server in self.servers:
                server.start()
            self._look()
            self._begun.set_result(None)
            while not self._done.wait(_TICK_S):
                self._look()
        except Exception as error:
            if not self._begun.done():
                self._begun.set_exception(error)
            else:
                show(f"rollout: the servers of this node end, since rank 0 cannot be reached: {error}")
        stop_all(self.servers)

    def _look(self) -> None:
        """Start again what rank 0 asks for, and report what has changed."""
        for server, keys in zip(self.servers, self._keys, strict=True):
            if self._store.check([f"{keys}/wanted"]) and int(self._store.get(f"{keys}/wanted")) > server.starts:
                try:
                    server.start()
                except UserError as error:  # reported as an end; it has started before, so rank 0 asks again
                    show(f"rollout: {error}")
            code = server.exit_code
            state = {"starts": server.starts, "code": code, "tail": "" if code is None else server.tail()}
            if (text := json.dumps(state)) != self._told.get(keys):
                self._store.set(f"{keys}/state", text)
                self._told[keys] = text
