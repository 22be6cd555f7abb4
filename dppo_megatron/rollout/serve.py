"""Servers of a machine that does not train: started, announced, watched, and taken away again.

    main thread     start all -> wait until each is ready -> announce it -> every 5 s: heartbeat; restart the dead
    SIGTERM, ^C     remove the addresses, then end the servers
    kill -9         the kernel ends the servers; their heartbeat stops, and the trainer drops them after 60 s

The trainer's part is `servers/directory.py` and `Membership` in `servers/connect.py`.
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
_LOOK_S = 0.5
"""Between two looks at a server that is starting."""
_MOST_STARTS = 3
"""Starts in a row after which a server that ends again before it was ready ends this command."""


def serve(config: Config, host: str) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        host: name or address to listen on.

    Raises:
        UserError: the address or directory cannot be used, or a server cannot be started.
        RunAborted: a server ends at every start.
    """
    check_writable("run_dir", config.run_dir, directory=True)  # for the servers' logs
    address = _resolved(host)
    check_network([address], config)
    directory = Path(config.rollout.servers.registry_dir)
    check_writable("rollout.servers.registry_dir", directory, directory=True)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"{host}-{os.getpid()}-"
    with ExitStack() as undo:
        asked_to_end = _listen(undo)
        servers = make_servers(config, address, name=name, has_actor=False)
        undo.callback(stop_all, servers)
        for server in servers:
            server.start()
        served = [Served(server, config, directory, f"{name}{index}") for index, server in enumerate(servers)]
        for one in served:
            undo.callback(one.withdraw)  # before stop_all: a trainer must not ask a server that is about to end
        with progress("rollout servers", len(served), f"started ({servers[0].log})") as advance:
            while any(one.is_starting for one in served) and not asked_to_end.wait(_LOOK_S):
                for one in served:
                    one.look()
                advance(sum(not one.is_starting for one in served))
        while not asked_to_end.wait(_LOOK_S if any(one.is_starting for one in served) else HEARTBEAT_S):
            for one in served:
                one.look()
    log("serve: ended")


class Served:
    """One server of this command: starting, announced, or ended."""

    def __init__(self, server: LaunchedServer, config: Config, directory: Path, name: str) -> None:
        self._server, self._directory, self._name = server, directory, name
        self._entry = RegistryEntry(server.url, server.api_key, config.rollout.engine)
        self._ask = partial(make_server(config.rollout, server.url, server.api_key, 0).healthy, timeout_s=_READY_S)
        self._timeout_s = config.rollout.limits.start_timeout_s
        self._patience_s = HUNG_S
        if config.rollout.engine == "sglang":  # does not answer while it loads weights (0.5.23); trainers wait so long
            self._patience_s = max(HUNG_S, config.rollout.limits.sync_timeout_s)
        self._registration: Registration | None = None
        self._was_ready = False
        self._starts = 1
        """In a row, without having been ready."""
        self._silent_since = math.inf
        self._deadline = time.monotonic() + self._timeout_s

    @property
    def is_starting(self) -> bool:
        """Not announced since its last start."""
        return self._registration is None

    def look(self) -> None:
        """Announce it when it is ready, show that it lives, start it again when it has ended or hangs."""
        server = self._server
        if not server.is_running:
            self._start_again(f"ended with code {server.exit_code}")
        elif self._registration is not None:
            if server.is_ready(self._ask, math.inf, self._timeout_s):
                self._silent_since = math.inf
            else:  # counted from its first silence: this process may itself have stood still
                self._silent_since = min(self._silent_since, time.monotonic())
                if time.monotonic() - self._silent_since > self._patience_s:
                    return self._start_again(f"has not answered for {self._patience_s:.0f} s")
            self._registration.beat()
        elif server.is_ready(self._ask, self._deadline, self._timeout_s):
            self._was_ready, self._starts, self._silent_since = True, 0, math.inf
            try:
                self._registration = Registration(self._directory, self._name, self._entry)
            except OSError as error:
                raise UserError(f"the address of {server.url} cannot be written: {error}") from None
            log(f"serve: {server.url} is ready; its address is in {self._directory}")

    def withdraw(self) -> None:
        """Take its file out of the registry, so that no trainer asks it."""
        if self._registration is not None:
            self._registration.remove()
            self._registration = None

    def _start_again(self, problem: str) -> None:
        server = self._server
        self.withdraw()
        if not self._was_ready or self._starts >= _MOST_STARTS:
            text = server.with_log(f"{problem} before it was ready")
            raise RunAborted(text) if self._was_ready else UserError(text)
        log(f"serve: the rollout server at {server.url} {problem}; starting it again")
        self._starts, self._deadline = self._starts + 1, time.monotonic() + self._timeout_s
        server.start()


def _listen(undo: ExitStack) -> threading.Event:
    """Set by SIGTERM and SIGINT."""
    asked_to_end = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    for number, handler in before.items():
        undo.callback(signal.signal, number, handler)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked_to_end.set())
    ignore_signals()
    return asked_to_end


def _resolved(host: str) -> str:
    """An address that the registry may name. Raises UserError: Debian gives a machine's own name 127.0.1.1."""
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host}: no such host: {error}") from None
    found = ip_address(address)
    if found.is_unspecified or (found.is_loopback and host not in (address, *LOOPBACK)):
        raise UserError(f"--host {host} is {address} on this machine: give an address by which the trainer reaches it")
    return address
