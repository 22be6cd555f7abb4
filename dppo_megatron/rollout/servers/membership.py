"""Servers that come and go while a run goes on.

At every weight sync, and while the run waits for any server, the addresses are read again: from a directory, or from
routers. A new server is asked to describe itself; if it fits it becomes a stale member, so that the following sync
brings it the newest weights before its first request. One that has left is asked nothing more; its requests went
elsewhere already. One that does not fit, or does not answer yet, stops nothing.

A server that was out and that this job has not started is checked the same way when it is back (`inspect`): it may have
been started again with other arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dppo_megatron.config.schema import Config
from dppo_megatron.rollout.servers.connect import ConnectedServers, check_entry, check_server, described, make_server
from dppo_megatron.rollout.servers.directory import RegistryEntry
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.http import BadAnswer, NotProven, Refused, Unreachable
from dppo_megatron.rollout.servers.in_engine import dppo_nccl
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import Server
from dppo_megatron.texts import log
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture

_ASK_S = 10.0


class Membership:
    """Keeps a fleet's members those that have an address now, and fit.

    Args:
        known: the connection that was made at start, and where addresses are read.
        introduce: makes a new member known to the rollout clients, or one that is asked in another dialect now.
    """

    def __init__(
        self, known: ConnectedServers, config: Config, architecture: Architecture, introduce: Callable[[Member], None]
    ) -> None:
        self._known, self._config, self._architecture = known, config, architecture
        self._introduce = introduce
        self._rejected: set[tuple[str, str]] = set()
        """(address, key) of those that were found not to fit."""
        self._busy = threading.Lock()

    def inspect(self, member: Member) -> None:
        """A server is back. Raises Unreachable or Refused if it cannot be asked, UserError if it does not fit."""
        asked_as = member.server.dialect
        self._check(member.server)
        if member.server.dialect != asked_as:
            self._introduce(member)

    def update(self, fleet: Fleet) -> None:
        """Add new servers and drop those that have left; returns at once while another thread does it."""
        if self._known.addresses is None or not self._busy.acquire(blocking=False):
            return
        try:
            self._update(fleet, self._known.addresses())
        except (OSError, UserError) as error:  # a file system that hangs, a file of another user
            log(f"rollout: the addresses of servers cannot be read: {error}")
        finally:
            self._busy.release()

    def _update(self, fleet: Fleet, entries: dict[str, RegistryEntry]) -> None:
        for member in fleet.members:
            if member.name in entries and member.server.http.api_key == entries[member.name].api_key:
                with fleet.lock:
                    member.may_return()
            else:
                fleet.let_go(member, "it has left")
        here = {(member.name, member.server.http.api_key) for member in fleet.members}
        for url, entry in entries.items():
            if (url, entry.api_key) not in here:
                self._try(fleet, entry)

    def _try(self, fleet: Fleet, entry: RegistryEntry) -> None:
        config = self._config
        try:
            check_entry(entry, config.rollout)
            server = make_server(config.rollout, entry.url, entry.api_key, self._architecture.vocab_size)
            server.healthy(timeout_s=_ASK_S)
            self._check(server)
        except (BadAnswer, NotProven, UserError) as error:
            return self._reject(entry, str(error))
        except Refused as error:
            return self._reject(entry, f"{entry.url} answers with {error}")
        except Unreachable:
            return  # asked again at the next sync
        self._introduce(fleet.let_in(server))
        log(f"rollout: {entry.url} has come; it gets requests after a weight sync")

    def _check(self, server: Server) -> None:
        """Have it describe itself. Raises as `inspect`."""
        url, channel = server.http.url, self._known.channel
        info = described(server, _ASK_S)
        check_server(url, info, self._config, self._architecture)
        if channel not in info.channels:
            raise UserError(f"{url} is not started for weight sync over {channel}")
        if channel == "nccl" and (unequal := dppo_nccl.difference(info.nccl)):
            raise UserError(f"{url}: {unequal}")

    def _reject(self, entry: RegistryEntry, why: str) -> None:
        """Log it once; it is asked again at the next sync, since its owner may mend it."""
        one = entry.url, entry.api_key
        if one not in self._rejected:
            log(f"rollout: a new server is not used yet: {why}")
        self._rejected.add(one)
