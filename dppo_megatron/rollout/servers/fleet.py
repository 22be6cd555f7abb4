"""All servers of a run and their states: which of them answer, and which have the current weights.

    rank 0, rollout thread: dispatch --> live, began, ended, back_off, failed     (dispatch.py: who gets which request)
            probe threads:  GET health ----> answers, or the member is out
            main thread:    trains, or waits in `finish` for the rollout thread; runs the weight syncs:
                            set_target(new) for all, synced(new) for each

member.py has the states of a server.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import Condition

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.rollout.servers.health_file import HealthFile
from dppo_megatron.rollout.servers.http import NotProven
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import Server
from dppo_megatron.rollout.servers.wire import RolloutClients
from dppo_megatron.spans import recorder
from dppo_megatron.texts import log
from dppo_megatron.types import UserError

_REVIVE_S = 30.0
"""Timeout for probes of servers that are out: the sync or the rollout waits for them."""


@dataclass
class _Probe:
    """The last health probe of one server. Its answer may be read much later, in the next rollout, and counts only if
    the server's state and number of outages are still those at the time of the probe (`asked_in`)."""

    begun: float = -math.inf
    asked_in: tuple[str, int] = ("", 0)
    answer: Future[None] | None = None


class Fleet:
    """All servers of a run.

    Args:
        clients: send requests to the servers.
        are_own: this job has started the servers.
        clock: monotonic seconds.
        threads: where probes wait for answers.
        update_membership: adds and removes servers; called when a server that is back could be used at once.
        inspect: called in a probe's thread for a server that was out and that this job has not started, since another
            server may have its address by now. Raises UserError if this run cannot use it.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        config: RolloutConfig,
        clients: RolloutClients,
        are_own: bool = False,
        clock: Callable[[], float] = time.monotonic,
        threads: Executor | None = None,
        health_file: HealthFile | None = None,
        update_membership: Callable[[Fleet], None] = lambda fleet: None,
        inspect: Callable[[Member], None] = lambda member: None,
    ) -> None:
        self.lock = Condition()
        """Held to change a member; never during a call to a server."""
        self.members = [Member(server, self.lock, clock, are_own) for server in servers]
        self.clients = clients
        self.spans = recorder()  # for the rollout thread, whose own context has no recorder
        self._update_membership, self._inspect = update_membership, inspect
        self.limits, self.clock, self._health_file = config.limits, clock, health_file
        self._threads = threads or ThreadPoolExecutor(max_workers=max(32, len(servers)), thread_name_prefix="probe")
        self.expected = ""
        """The weights version that a live server has."""
        self._probes: dict[str, _Probe] = {member.name: _Probe() for member in self.members}
        self._syncing = frozenset[str]()
        self.tickets = count(1)

    @property
    def live(self) -> list[Member]:
        return [member for member in self.members if member.state == "live"]

    @property
    def reach(self) -> int:
        """Most live servers of one client: the number of parts that a group may have."""
        per_client = Counter(self.clients.client_of(member.name) for member in self.live)
        return max(per_client.values(), default=1)

    def health(self) -> dict[str, str]:
        """Address -> live, or the state and its reason."""
        return {member.name: member.condition for member in self.members}

    def expect(self, version: str) -> None:
        with self.lock:
            self.expected = version
            for member in self.members:
                member.set_target(version)

    @contextmanager
    def taking_weights(self, members: Iterable[Member]) -> Iterator[None]:
        """These receive weights in the block and are not probed."""
        self._syncing = frozenset(member.name for member in members)
        try:
            yield
        finally:
            self._syncing = frozenset()

    def mark_out(self, member: Member, reason: str) -> None:
        """Send it no more requests, and close its connections; what was in flight there is retried elsewhere."""
        with self.lock:
            is_new = member.failed(reason)
        if is_new:
            log(f"rollout: {member.name} is out: {reason}")
        member.server.http.close()

    def revive(self) -> None:
        """Have `update_membership` add servers; then probe all that are out. Those that answer become stale."""
        self._update_membership(self)
        self._write_health()  # a sync that waits for servers has no rounds of probes
        self._probe_out([one for one in self.members if one.state == "out" and one.may_be_asked])

    def _probe_out(self, out: Sequence[Member]) -> None:
        timeout_s = min(_REVIVE_S, self.limits.probe_timeout_s)
        probes = [(member, self._threads.submit(self._probe, member, timeout_s)) for member in out]
        for member, answer in probes:
            self._apply_probe(member, answer.exception())

    def add(self, server: Server) -> Member:
        """Add a server, stale until the next weight sync; if a member has its address, as that member's new server."""
        url = server.http.url
        with self.lock:
            self._probes[url] = _Probe()  # an earlier probe was of the server that had the address before
            member = next((known for known in self.members if known.name == url), None)
            if member is None:
                member = Member(server, self.lock, self.clock)
                member.set_target(self.expected)
                self.members.append(member)
            else:
                member.replaced_by(server)
            member.answered()
        return member

    def mark_left(self, member: Member, reason: str) -> None:
        """Its owner has withdrawn it: no more requests and no more probes."""
        with self.lock:
            is_new = member.removed(reason)
        if is_new:
            log(f"rollout: {member.name}: {reason}")
            member.server.http.close()

    def hanging(self) -> list[str]:
        """Addresses of the job's own servers that hang. Each is probed once more: none is while the actor trains."""
        start_s = self.limits.start_timeout_s
        self._probe_out([member for member in self.members if member.hangs(start_s)])
        return [member.name for member in self.members if member.hangs(start_s)]

    def starting(self) -> list[str]:
        """Addresses of servers that this job has restarted and that may still become ready in time."""
        start_s = self.limits.start_timeout_s
        return [member.name for member in self.members if member.is_starting and not member.hangs(start_s)]

    def restarted(self, why: Mapping[str, str]) -> None:
        """The servers at these addresses were restarted; `why` by address."""
        for member in self.members:
            if member.name in why:
                log(f"rollout: the launched server {member.name} {why[member.name]}; it is restarted")
                with self.lock:
                    self._probes[member.name] = _Probe()  # an earlier probe was of the previous process
                    member.restarted()

    def close(self) -> None:
        for member in self.members:
            member.server.http.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def probe_all(self) -> None:
        """Start the health probes that are due, and apply the answers that have arrived.

        Servers that receive weights are not probed: a sync has its own timeout, and SGLang does not answer while it
        loads weights from disk (0.5.23). Marked out, it would lose that sync and its requests in flight.
        """
        now = self.clock()
        for member in self.members:
            probe = self._probes[member.name]
            if probe.answer is not None and probe.answer.done():
                error, probe.answer = probe.answer.exception(), None
                if probe.asked_in == (member.state, member.outages):
                    self._apply_probe(member, error)
            due = now - probe.begun > self.limits.probe_every_s
            may_be_asked = member.name not in self._syncing and (member.state != "out" or member.may_be_asked)
            if probe.answer is None and due and may_be_asked:
                probe.begun, probe.asked_in = now, (member.state, member.outages)
                probe.answer = self._threads.submit(self._probe, member, self.limits.probe_timeout_s)
        self._write_health()

    def _write_health(self) -> None:
        if self._health_file is not None:
            self._health_file.write(self.members)

    def _probe(self, member: Member, timeout_s: float) -> None:
        """Raises Unreachable or Refused, or UserError for a server that is back but cannot be used by this run."""
        member.server.healthy(timeout_s=timeout_s)
        if member.state == "out" and not member.is_own:
            self._inspect(member)

    def _apply_probe(self, member: Member, error: BaseException | None) -> None:
        if member.state != "out":
            if error is not None:
                self.mark_out(member, f"no answer to its health probe: {error}")
        elif error is None:
            self._mark_back(member)
        elif isinstance(error, (UserError, NotProven)):
            if member.reason != str(error):
                log(f"rollout: {member.name} answers again and is not used: {error}")
            with self.lock:
                member.reject(str(error))

    def _mark_back(self, member: Member) -> None:
        with self.lock:
            member.answered()
        # discard the answer of a probe begun while the server hung: it may fail only now, and mark it out again
        self._probes[member.name].answer = None
        log(f"rollout: {member.name} answers again; it gets requests after a weight sync")
