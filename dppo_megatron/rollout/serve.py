"""`dppo-megatron serve`: starts servers on a machine that does not train, registers them, and restarts those that fail.

    main thread     start all -> wait until each is ready -> register it -> every 5 s: heartbeat; restart dead servers
    SIGTERM, ^C     remove the registrations, then end the servers
    kill -9         the kernel ends the servers; their heartbeat stops, and the trainer drops them after 60 s

The trainer finds them with `servers/directory.py` and `Membership` in `servers/connect.py`.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from dppo_megatron.children import ignore_signals
from dppo_megatron.config.paths import check_writable
from dppo_megatron.config.rollout import LOOPBACK
from dppo_megatron.config.schema import Config
from dppo_megatron.progress import progress
from dppo_megatron.rollout.job_nodes import check_network
from dppo_megatron.rollout.servers.connect import make_server
from dppo_megatron.rollout.servers.directory import HEARTBEAT_S, Registration, RegistryEntry
from dppo_megatron.rollout.servers.member import HUNG_S
from dppo_megatron.rollout.servers.server_process import LaunchedServer, make_servers, stop_all
from dppo_megatron.texts import log
from dppo_megatron.types import RunAborted, UserError

_READY_S = 5.0
_CHECK_S = 0.5
"""Interval between two checks of a server that is starting."""
_MOST_STARTS = 3
"""The command ends when a server that was once ready has failed this many starts in a row."""


def serve(config: Config, host: str) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        host: name or address to listen on.

    Raises:
        UserError: the address or directory cannot be used, or a server cannot be started.
        RunAborted: a server that was ready before no longer starts.
    """
    check_writable("run_dir", config.run_dir, directory=True)  # for the servers' logs
    address = _resolved(host)
    check_network([address], config)
    directory = Path(config.rollout.servers.registry_dir)
    check_writable("rollout.servers.registry_dir", directory, directory=True)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"{host}-{os.getpid()}-"
    with ExitStack() as undo:
        should_end = _end_on_signals(undo)
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
    """One server of this command: starting, registered, or ended."""

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
        """Remove its file from the registry, so that no trainer uses it."""
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


def _end_on_signals(undo: ExitStack) -> threading.Event:
    """An event that SIGTERM and SIGINT set; `undo` restores the previous handlers."""
    should_end = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    for number, handler in before.items():
        undo.callback(signal.signal, number, handler)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: should_end.set())
    ignore_signals()
    return should_end


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
