"""Several servers as one: which of them answer, which have the present weights, and who has room for a request.

    rank 0, rollout thread: dispatch --> live, began, ended, back_off, failed     (dispatch.py: who gets which request)
            probe threads:  GET health ----> answers, or the member is out
            main thread:    trains, or waits in `finish` for the rollout thread; a weight sync takes its turn there:
                            set_target(new) for all, synced(new) for each

The rules:

- A server that refuses connections, breaks one, answers what cannot be so, or does not answer its health probe is out.
- A server that answers again is stale: it gets no request before it has had a complete weight sync.
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
from dppo_megatron.rollout.servers.member import Endpoint, Member
from dppo_megatron.rollout.servers.protocol import Server
from dppo_megatron.rollout.servers.router import Router, RouterServer
from dppo_megatron.rollout.servers.wire import GenerateRequest, RolloutClients
from dppo_megatron.spans import recorder
from dppo_megatron.texts import log
from dppo_megatron.types import UserError

_ANSWER_S = 30.0
"""At most, for a server that is out: the sync or the rollout waits meanwhile."""


@dataclass
class _Probe:
    """The health probe of one server that is under way, or was.

    Its answer may be read much later, in the next rollout. It is about the server that was asked, so it counts only
    while nothing has happened to that one: `asked` is its state then and how often it had been out.
    """

    begun: float = -math.inf
    asked: tuple[str, int] = ("", 0)
    answer: Future[None] | None = None


class Fleet:
    """All servers of a run.

    Args:
        clients: has the servers asked; needed for rollouts only.
        are_own: this job has started the servers.
        clock: seconds that only grow.
        threads: where questions to servers wait for their answers.
        health_file: gets the servers' states, for `watch`.
        routers: in front of some of the servers; requests for those go through them.
        update_membership: lets servers in and go; called where a server that is back could be used at once.
        inspect: checks a server that was out and that this job has not started: it may be another one by now. Raises
            UserError for one that does not fit. In the thread of a probe.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        config: RolloutConfig,
        clients: RolloutClients | None = None,
        are_own: bool = False,
        clock: Callable[[], float] = time.monotonic,
        threads: Executor | None = None,
        health_file: HealthFile | None = None,
        routers: Sequence[RouterServer] = (),
        update_membership: Callable[[Fleet], None] = lambda fleet: None,
        inspect: Callable[[Member], None] = lambda member: None,
    ) -> None:
        self.lock = Condition()
        """Held to change a member; never across a call to a server."""
        self.members = [Member(server, self.lock, clock, are_own) for server in servers]
        self.routers = [Router(router, self.lock, self.members, clock) for router in routers]
        self.clients = clients
        self.spans = recorder()  # kept here for the rollout thread, whose own context has none
        self._update_membership, self._inspect = update_membership, inspect
        self.limits, self.clock, self._health_file = config.limits, clock, health_file
        self._threads = threads or ThreadPoolExecutor(max_workers=max(32, len(servers)), thread_name_prefix="probe")
        self.expected = ""
        """The version that makes a server live."""
        self._probing: dict[str, _Probe] = {asked.name: _Probe() for asked in self.endpoints}
        self._taking = frozenset[str]()
        self.tickets = count(1)

    @property
    def live(self) -> list[Member]:
        """Servers with the present weights."""
        return [member for member in self.members if member.state == "live"]

    @property
    def endpoints(self) -> list[Endpoint]:
        """All servers and routers, live or not."""
        return [*self.members, *self.routers]

    def targets_for(self, group: GenerateRequest) -> list[Endpoint]:
        """Who may be asked for `group`: live routers that pass all of it on, and live servers behind none of them."""
        routers = [r for r in self.routers if r.state == "live" and r.server.dialect.carries(group)]
        behind = {name for router in routers for name in router.server.named}
        return [*routers, *(member for member in self.live if member.name not in behind)]

    @property
    def reach(self) -> int:
        """Most live servers that one client asks, itself or through a router: a group has as many parts."""
        assert self.clients is not None
        asked = Counter(self.clients.client_of(member.name) for member in self.live)
        behind = [len(router.server.named) for router in self.routers if router.state == "live"]
        return max([1, *asked.values(), *behind])

    def health(self) -> dict[str, str]:
        """live, or the state and its reason, by address."""
        return {asked.name: asked.condition for asked in self.endpoints}

    def expect(self, version: str) -> None:
        """Only servers that have taken `version` are live from now on."""
        with self.lock:
            self.expected = version
            for asked in self.endpoints:
                asked.set_target(version)

    @contextmanager
    def taking_weights(self, members: Iterable[Member]) -> Iterator[None]:
        """They take weights meanwhile, and are not probed."""
        self._taking = frozenset(member.name for member in members)
        try:
            yield
        finally:
            self._taking = frozenset()

    def mark_out(self, member: Endpoint, reason: str) -> None:
        """No more requests; those in flight are closed and go elsewhere."""
        with self.lock:
            news = member.failed(reason)
        if news:
            log(f"rollout: {member.name} is out: {reason}")
        member.server.http.close()

    def revive(self) -> None:
        """Have `update_membership` add servers; then ask all that are out if they are back: those become stale."""
        self._update_membership(self)
        self._ask([asked for asked in self.endpoints if asked.state == "out" and asked.may_be_asked])

    def _ask(self, out: Sequence[Endpoint]) -> None:
        """All at once whether they are back."""
        timeout_s = min(_ANSWER_S, self.limits.probe_timeout_s)
        asked = [(member, self._threads.submit(self._look_at, member, timeout_s)) for member in out]
        for member, answer in asked:
            self._has_answered(member, answer.exception())

    def let_in(self, server: Server) -> Member:
        """A server that has come, as a member: stale, until the next weight sync. One that has the address of a member
        takes its place."""
        url = server.http.url
        with self.lock:
            self._probing[url] = _Probe()  # an earlier question went to the server that had the address before
            member = next((known for known in self.members if known.name == url), None)
            if member is None:
                member = Member(server, self.lock, self.clock)
                member.set_target(self.expected)
                self.members.append(member)
            else:
                member.replaced_by(server)
            member.answered()
        return member

    def let_go(self, member: Member, reason: str) -> None:
        """Its owner has taken it away: no more requests and no more questions."""
        with self.lock:
            news = member.removed(reason)
        if news:
            log(f"rollout: {member.name}: {reason}")
            member.server.http.close()

    def hanging(self) -> list[str]:
        """The job's own servers that hang, by address. Each is asked once more: while the actor trains none is."""
        start_s = self.limits.start_timeout_s
        self._ask([member for member in self.members if member.hangs(start_s)])
        return [member.name for member in self.members if member.hangs(start_s)]

    def starting(self) -> list[str]:
        """Those that were started again and may still become ready in time, by address."""
        start_s = self.limits.start_timeout_s
        return [member.name for member in self.members if member.is_starting and not member.hangs(start_s)]

    def restarted(self, why: Mapping[str, str]) -> None:
        """The servers at these addresses were started again, and why."""
        for member in self.members:
            if member.name in why:
                log(f"rollout: the launched server {member.name} {why[member.name]}; it is started again")
                with self.lock:
                    self._probing[member.name] = _Probe()  # an earlier question was to the process before
                    member.restarted()

    def close(self) -> None:
        """Close every connection and end the threads."""
        for asked in self.endpoints:
            asked.server.http.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def probe_all(self) -> None:
        """Start the health probes that are due and act on those that have come back.

        Servers that take weights are not asked: a sync has a limit of its own. SGLang does not answer while it loads
        weights from disk (0.5.23): marked out, it would lose that sync and what it has in flight.
        """
        now = self.clock()
        for member in self.endpoints:
            probe = self._probing[member.name]
            if probe.answer is not None and probe.answer.done():
                error, probe.answer = probe.answer.exception(), None
                if probe.asked == (member.state, member.outages):
                    self._has_answered(member, error)
            due = now - probe.begun > self.limits.probe_every_s
            may_be_asked = member.name not in self._taking and (member.state != "out" or member.may_be_asked)
            if probe.answer is None and due and may_be_asked:
                probe.begun, probe.asked = now, (member.state, member.outages)
                probe.answer = self._threads.submit(self._look_at, member, self.limits.probe_timeout_s)
        if self._health_file is not None:
            self._health_file.write(self.endpoints)

    def _look_at(self, asked: Endpoint, timeout_s: float) -> None:
        """The health probe. Raises Unreachable or Refused, or UserError for a server that is back and another one."""
        asked.server.healthy(timeout_s=timeout_s)
        if isinstance(asked, Member) and asked.state == "out" and not asked.is_own:
            self._inspect(asked)

    def _has_answered(self, asked: Endpoint, error: BaseException | None) -> None:
        if asked.state != "out":
            if error is not None:
                self.mark_out(asked, f"no answer to its health probe: {error}")
        elif error is None:
            self._is_back(asked)
        elif isinstance(error, (UserError, NotProven)):
            if asked.reason != str(error):
                log(f"rollout: {asked.name} answers again and is not used: {error}")
            with self.lock:
                asked.reject(str(error))

    def _is_back(self, member: Endpoint) -> None:
        with self.lock:
            member.answered()
        # a probe that was begun while it hung may fail only now, and would mark it out again
        self._probing[member.name].answer = None
        waits_for = "after a weight sync" if isinstance(member, Member) else "when all of its workers do"
        log(f"rollout: {member.name} answers again; it gets requests {waits_for}")
