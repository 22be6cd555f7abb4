"""Servers on the job's own nodes: the first rank of each node starts and ends that node's servers; rank 0 uses all.

    first rank of node n    starts servers, waits for them    at each weight sync: restarts those that ended or hang
    rank 0                  gets their addresses              reports which of them hang; uses them like any server

All calls are collective, and nothing happens between calls: unlike `dppo-megatron serve` (`serve.py`), a node does not
restart a server on its own, because a server that shares its GPU with the actor would take memory in the middle of an
update. Addresses and keys pass between ranks, not through files, so a restart does not wait for a shared file system.
The kernel ends the servers with the rank that has started them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address

from dppo_megatron.config.rollout import LOOPBACK
from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import barrier, from_rank_zero, gather_all, on_every_rank
from dppo_megatron.progress import progress
from dppo_megatron.rollout.client.remote import Nodes
from dppo_megatron.rollout.servers.connect import Launched, make_server
from dppo_megatron.rollout.servers.server_process import LaunchedServer, address_toward, make_servers, stop_all
from dppo_megatron.texts import show
from dppo_megatron.types import UserError

_READY_S = 5.0


class JobServers:
    """The servers of a job that launches them itself. Without `has_actor`, its ranks use no GPUs."""

    def __init__(self, config: Config, nodes: Nodes, *, has_actor: bool = True) -> None:
        self._config, self._nodes, self._has_actor = config, nodes, has_actor
        self.local: list[LaunchedServer] = []
        """The servers that this rank has started."""

    def start(self) -> list[Launched]:
        """Start the servers of all nodes, and return them when all answer.

        Raises:
            UserError: on all ranks, if a server of any node cannot be started or does not answer: a run without one
                node's servers would work, but slowly. An unexpected error is raised as it is where it occurs.
        """
        hosts = listening_addresses(self._nodes)
        check_network(hosts, self._config)
        self._on_each_node(partial(self._start, hosts))
        self._on_each_node(self._await)
        return gather_all([Launched(one.url, one.api_key, one.node, one.visible_devices) for one in self.local])

    def restart(self, hanging: Collection[str]) -> dict[str, str]:
        """Restart servers that have ended or no longer listen, and those whose address is in `hanging`. Returns address
        -> reason of the restarted servers, on every rank."""
        why = {}
        for server in self.local:
            hangs = server.is_running
            if hangs and not server.has_closed() and server.url not in hanging:
                continue
            try:
                server.start()
                why[server.url] = f"{'does not answer' if hangs else 'had ended'} (its log: {server.log})"
            except UserError as error:  # not fatal: it did start once, and the next sync tries again
                show(f"rollout: {error}")
        return dict(gather_all(list(why.items())))

    def await_started(self, starting: Collection[str]) -> None:
        """Wait until no server at the addresses `starting` is still starting; a failed start is ignored."""
        for server in self.local:
            if server.url in starting:
                with suppress(UserError):
                    self._await_one(server)
        barrier()

    def end(self, out: Collection[str]) -> None:
        """End the servers at the addresses `out`, with their child processes, until `restart`: a server that does not
        answer keeps its device memory as long as it lives. Returns when the memory is free on every node."""
        ended = [server for server in self.local if server.url in out]
        for server in ended:
            show(f"rollout: the launched server {server.url} is out; ending it until the next sync, to free its memory")
        stop_all(ended)
        barrier()

    def close(self) -> None:
        stop_all(self.local)

    def _start(self, hosts: Sequence[str]) -> None:
        node, name = self._nodes.node, f"node{self._nodes.node}_" if self._nodes.node else ""
        self.local = make_servers(self._config, hosts[node], node, name, has_actor=self._has_actor)
        for server in self.local:
            server.start()

    def _await(self) -> None:
        with progress("rollout servers", len(self.local), f"started ({self.local[0].log})") as advance:
            for done, server in enumerate(self.local):
                self._await_one(server, lambda done=done: advance(done))  # type: ignore[misc]
                advance(done + 1)

    def _await_one(self, server: LaunchedServer, tick: Callable[[], None] = lambda: None) -> None:
        rollout = self._config.rollout
        client = make_server(rollout, server.url, server.api_key, 0)

        def probe() -> None:
            tick()
            client.healthy(timeout_s=_READY_S)

        server.wait_ready(probe, rollout.limits.start_timeout_s)

    def _on_each_node(self, action: Callable[[], None]) -> None:
        """Run `action` on the first rank of each node. If it fails on one, all ranks raise: see `start`."""
        failed: Exception | None = None
        try:
            if self._nodes.is_first:
                action()
        except Exception as error:  # of any kind: the other ranks wait in gather_all below
            failed = error
        is_users = isinstance(failed, UserError | OSError)
        text = str(failed) if is_users else f"{type(failed).__name__}: {failed}"
        where = f"{socket.gethostname()} (rank {self._nodes.rank}): " if self._nodes.rank else ""
        problems = gather_all([] if failed is None else [where + text])
        if failed is not None and not is_users:
            raise failed  # a bug in this program: keep its traceback
        if problems:
            raise on_every_rank(UserError(problems[0]))


def listening_addresses(nodes: Nodes) -> list[str]:
    """For each node, the address by which the other nodes reach it; loopback if there is only one node. Collective."""
    if nodes.count == 1:
        return ["127.0.0.1"]
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    toward_master = gather_all([(nodes.node, address_toward(master))])
    addresses = dict(reversed(toward_master))  # reversed, so that the first rank of each node decides
    # on rank 0's node MASTER_ADDR may resolve to loopback (Debian's 127.0.1.1), so look from there toward node 1
    addresses[0] = from_rank_zero(lambda: address_toward(addresses[1]))
    return [addresses[node] for node in range(nodes.count)]


def check_network(addresses: Sequence[str], config: Config) -> None:
    """Raise UserError if servers would listen on a network that the user has not allowed."""
    outside = [address for address in addresses if address not in LOOPBACK and not ip_address(address).is_loopback]
    if outside and not config.rollout.servers.allow_remote_endpoints:
        raise UserError(
            f"rollout servers on several machines listen on their network ({', '.join(outside)}), over plain HTTP, with"
            " a key; set rollout.servers.allow_remote_endpoints=true if that network is yours"
        )
