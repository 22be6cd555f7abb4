"""Servers that are started here: by the first rank of each node of a job, or by `dppo-megatron serve` elsewhere.

`JobServers`: calls are collective, and nothing happens between calls. Rank 0 uses the servers of all nodes.

    first rank of node n    starts servers, waits for them    at each weight sync: restarts those that ended or hang
    rank 0                  gets their addresses              reports which of them hang

A node does not restart a server on its own, because a server that shares its GPU with the actor would take memory in
the middle of an update. Addresses and keys pass between ranks, so a restart does not wait for a shared file system.

`serve`: starts servers on a machine that does not train, registers them, and restarts those that fail. The trainer
finds them with `servers/directory.py` and `Membership` in `servers/connect.py`.

    main thread     start all -> wait until each is ready -> register it -> every 5 s: heartbeat; restart dead servers
    SIGTERM, ^C     remove the registrations, then end the servers
    kill -9         the kernel ends the servers; their heartbeat stops, and the trainer drops them after 60 s
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from dppo_megatron.children import ignore_signals
from dppo_megatron.config.paths import check_writable
from dppo_megatron.config.rollout import LOOPBACK
from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import barrier, from_rank_zero, gather_all, on_every_rank
from dppo_megatron.progress import progress
from dppo_megatron.rollout.client.remote import Nodes
from dppo_megatron.rollout.servers.connect import Launched, make_server
from dppo_megatron.rollout.servers.directory import HEARTBEAT_S, Registration, RegistryEntry
from dppo_megatron.rollout.servers.member import HUNG_S
from dppo_megatron.rollout.servers.server_process import LaunchedServer, address_toward, make_servers, stop_all
from dppo_megatron.texts import log, show
from dppo_megatron.types import RunAborted, UserError

_READY_S = 5.0
_CHECK_S = 0.5
"""Interval between two checks of a server that is starting."""
_MOST_STARTS = 3
"""`serve` ends when a server that was once ready has failed this many starts in a row."""


class JobServers:
    """The servers of a job that launches them itself. Without `has_actor`, its ranks use no GPUs."""

    def __init__(self, config: Config, nodes: Nodes, *, has_actor: bool = True) -> None:
        self._config, self._nodes, self._has_actor = config, nodes, has_actor
        self.local: list[LaunchedServer] = []
        """The servers that this rank has started."""

    def start(self) -> list[Launched]:
        """Start the servers of all nodes, and return them when all answer. Raises UserError on all ranks if a server of
        any node cannot be started or does not answer: a run without one node's servers would work, but slowly."""
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
            error = server.last_error()
            log_file = f"(its log: {server.log}{f', last error: {error}' if error else ''})"
            try:
                server.start()
                why[server.url] = f"{'does not answer' if hangs else 'had ended'} {log_file}"
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
        """Run `action` on the first rank of each node. If it fails on one, all ranks raise UserError; an unexpected
        error is raised as it is where it occurs."""
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


def serve(config: Config, host: str) -> None:
    """Serve on `host`, a name or address, until SIGTERM or SIGINT. Raises UserError for an address, directory or server
    that cannot be used, and RunAborted if a server that was ready before no longer starts."""
    check_writable("run_dir", config.run_dir, directory=True)  # for the servers' logs
    address = _resolved(host)
    check_network([address], config)
    directory = Path(config.rollout.servers.registry_dir)
    check_writable("rollout.servers.registry_dir", directory, directory=True)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"{host}-{os.getpid()}-"
    with ExitStack() as undo:
        should_end = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            undo.callback(signal.signal, number, signal.getsignal(number))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: should_end.set())
        ignore_signals()
        servers = make_servers(config, address, name=name, has_actor=False)
        undo.callback(stop_all, servers)
        for server in servers:
            server.start()
        served = [Served(server, config, directory, f"{name}{index}") for index, server in enumerate(servers)]
        for one in served:
            undo.callback(one.withdraw)  # before stop_all: trainers must send nothing to a server that is about to end
        with progress("rollout servers", len(served), f"started ({servers[0].log})") as advance:
            while any(one.is_starting for one in served) and not should_end.wait(_CHECK_S):
                for one in served:
                    one.check()
                advance(sum(not one.is_starting for one in served))
        while not should_end.wait(_CHECK_S if any(one.is_starting for one in served) else HEARTBEAT_S):
            for one in served:
                one.check()
    log("serve: ended")


class Served:
    def __init__(self, server: LaunchedServer, config: Config, directory: Path, name: str) -> None:
        self._server, self._directory, self._name = server, directory, name
        self._entry = RegistryEntry(server.url, server.api_key, config.rollout.engine)
        self._probe = partial(make_server(config.rollout, server.url, server.api_key, 0).healthy, timeout_s=_READY_S)
        self._timeout_s = config.rollout.limits.start_timeout_s
        self._hung_s = HUNG_S
        if config.rollout.engine == "sglang":  # SGLang 0.5.23 does not answer while it loads weights
            self._hung_s = max(HUNG_S, config.rollout.limits.sync_timeout_s)  # as long as trainers wait for a sync
        self._registration: Registration | None = None
        self._was_ready = False
        self._starts = 1
        """Consecutive starts since the server was last ready."""
        self._silent_since = math.inf
        self._deadline = time.monotonic() + self._timeout_s

    @property
    def is_starting(self) -> bool:
        """Whether it has not been registered since its last start."""
        return self._registration is None

    def check(self) -> None:
        """Register it when it is ready, then send its heartbeat; restart it when it has ended or hangs."""
        server = self._server
        if not server.is_running:
            self._restart(f"ended with code {server.exit_code}")
        elif self._registration is not None:
            if server.is_ready(self._probe, math.inf, self._timeout_s):
                self._silent_since = math.inf
            else:  # from its first failed check, not its last good one: this process itself may have been suspended
                self._silent_since = min(self._silent_since, time.monotonic())
                if time.monotonic() - self._silent_since > self._hung_s:
                    return self._restart(f"has not answered for {self._hung_s:.0f} s")
            self._registration.beat()
        elif server.is_ready(self._probe, self._deadline, self._timeout_s):
            self._was_ready, self._starts, self._silent_since = True, 0, math.inf
            try:
                self._registration = Registration(self._directory, self._name, self._entry)
            except OSError as error:
                raise UserError(f"the address of {server.url} cannot be written: {error}") from None
            log(f"serve: {server.url} is ready; its address is in {self._directory}")

    def withdraw(self) -> None:
        if self._registration is not None:
            self._registration.remove()
            self._registration = None

    def _restart(self, problem: str) -> None:
        server = self._server
        self.withdraw()
        if not self._was_ready or self._starts >= _MOST_STARTS:
            text = server.with_log(f"{problem} before it was ready")
            raise RunAborted(text) if self._was_ready else UserError(text)
        log(f"serve: the rollout server at {server.url} {problem}; starting it again")
        self._starts, self._deadline = self._starts + 1, time.monotonic() + self._timeout_s
        server.start()


def _resolved(host: str) -> str:
    """The address of `host`, by which other machines reach it. Raises UserError if it cannot be such an address."""
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host}: no such host: {error}") from None
    parsed = ip_address(address)
    # loopback counts only if it was asked for: Debian resolves a machine's own name to 127.0.1.1
    if parsed.is_unspecified or (parsed.is_loopback and host not in (address, *LOOPBACK)):
        raise UserError(f"--host {host} is {address} on this machine: give an address by which the trainer reaches it")
    return address
