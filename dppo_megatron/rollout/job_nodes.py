"""Servers on the job's own machines: the first rank of each starts and ends those there, rank 0 uses all of them.

    first rank of node n    starts, waits for answers    at each weight sync: starts again what has ended or hangs
    rank 0                  is told their addresses      says which of them hang; asks them, as any other server

All calls are collective, and nothing happens between them: unlike `dppo-megatron serve` (`serve.py`), a machine does
not start a server again by itself, since one that shares its GPU with the actor would take memory in the middle of an
update. And no key is in a file, nor does a restart wait for a shared file system to show it. The kernel ends the
servers with the ranks that have started them.
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
    """The servers of a job that starts them; without `has_actor` its ranks have no GPUs."""

    def __init__(self, config: Config, nodes: Nodes, *, has_actor: bool = True) -> None:
        self._config, self._nodes, self._has_actor = config, nodes, has_actor
        self.here: list[LaunchedServer] = []
        """Those that this rank has started."""

    def start(self) -> list[Launched]:
        """Start all, machine by machine; returns them when they answer.

        Raises:
            UserError: on all ranks, if a server of one machine cannot be started or does not come; there, any other
                error as it is. A run without the servers of one machine would work, at a fraction of its speed.
        """
        hosts = listening_addresses(self._nodes)
        check_network(hosts, self._config)
        self._on_each_machine(partial(self._start, hosts))
        self._on_each_machine(self._await)
        return gather_all([Launched(one.url, one.api_key, one.node, one.visible_devices) for one in self.here])

    def restart(self, hanging: Collection[str]) -> dict[str, str]:
        """Start those again that have ended or no longer listen, and those whose address is in `hanging`. Returns why,
        by address, on every rank."""
        why = {}
        for server in self.here:
            hangs = server.is_running
            if hangs and not server.has_closed() and server.url not in hanging:
                continue
            try:
                server.start()
                why[server.url] = f"{'does not answer' if hangs else 'had ended'} (its log: {server.log})"
            except UserError as error:  # it has started before, so the next sync tries again
                show(f"rollout: {error}")
        return dict(gather_all(list(why.items())))

    def await_started(self, starting: Collection[str]) -> None:
        """Return when none of those is still starting; one that fails at it is left alone."""
        for server in self.here:
            if server.url in starting:
                with suppress(UserError):
                    self._await_one(server)
        barrier()

    def end(self, out: Collection[str]) -> None:
        """End those at these addresses, and what they have started, until `restart`: one that does not answer keeps its
        device memory as long as it lives. Returns when that is free on every machine."""
        ended = [server for server in self.here if server.url in out]
        for server in ended:
            show(f"rollout: the launched server {server.url} is out; it is ended, for its memory, until the next sync")
        stop_all(ended)
        barrier()

    def close(self) -> None:
        """End those of this machine."""
        stop_all(self.here)

    def _start(self, hosts: Sequence[str]) -> None:
        node, name = self._nodes.node, f"node{self._nodes.node}_" if self._nodes.node else ""
        self.here = make_servers(self._config, hosts[node], node, name, has_actor=self._has_actor)
        for server in self.here:
            server.start()

    def _await(self) -> None:
        with progress("rollout servers", len(self.here), f"started ({self.here[0].log})") as advance:
            for done, server in enumerate(self.here):
                self._await_one(server, lambda done=done: advance(done))  # type: ignore[misc]
                advance(done + 1)

    def _await_one(self, server: LaunchedServer, tick: Callable[[], None] = lambda: None) -> None:
        rollout = self._config.rollout
        asked = make_server(rollout, server.url, server.api_key, 0)

        def ask() -> None:
            tick()
            asked.healthy(timeout_s=_READY_S)

        server.wait_ready(ask, rollout.limits.start_timeout_s)

    def _on_each_machine(self, action: Callable[[], None]) -> None:
        """On the first rank of each. Whatever goes wrong on one: the others wait for it below."""
        failed: Exception | None = None
        try:
            if self._nodes.is_first:
                action()
        except Exception as error:
            failed = error
        is_users = isinstance(failed, UserError | OSError)
        text = str(failed) if is_users else f"{type(failed).__name__}: {failed}"
        where = f"{socket.gethostname()} (rank {self._nodes.rank}): " if self._nodes.rank else ""
        problems = gather_all([] if failed is None else [where + text])
        if failed is not None and not is_users:
            raise failed  # a fault of this program: keep its traceback
        if problems:
            raise on_every_rank(UserError(problems[0]))


def listening_addresses(nodes: Nodes) -> list[str]:
    """By machine of the job, the address by which the others reach it; loopback if there is one machine. Collective."""
    if nodes.count == 1:
        return ["127.0.0.1"]
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    toward_master = gather_all([(nodes.node, address_toward(master))])
    found = dict(reversed(toward_master))  # the first rank of each machine decides
    # Rank 0's machine may know itself by a loopback name (Debian's 127.0.1.1): what another one sees of it is right.
    found[0] = from_rank_zero(lambda: address_toward(found[1]))
    return [found[node] for node in range(nodes.count)]


def check_network(addresses: Sequence[str], config: Config) -> None:
    """Raise UserError for servers that would listen on a network which the user has not allowed."""
    outside = [address for address in addresses if address not in LOOPBACK and not ip_address(address).is_loopback]
    if outside and not config.rollout.servers.allow_remote_endpoints:
        raise UserError(
            f"rollout servers on several machines listen on their network ({', '.join(outside)}), over plain HTTP, with"
            " a key; set rollout.servers.allow_remote_endpoints=true if that network is yours"
        )
