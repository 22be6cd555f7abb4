"""Several servers as one: which of them answer, which have the present weights, and who has room for a request.

    rank 0, rollout thread: Dispatch.run --> live, began, ended, rests, failed     (dispatch.py: who gets which request)
            probe threads:  GET health ----> answers, or the member is out
            main thread:    trains, or waits in `finish` for the rollout thread; a weight sync takes its turn there:
                            expects(new) for all, took(new) for each

The rules:

- A server that refuses connections, breaks one, answers what cannot be so, or does not answer its health probe is out.
- A server that answers again is stale: it gets no request before it has had a complete weight sync.
- Members keep their number whoever comes and goes: the rollout clients know servers by it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.rollout.servers.dispatch import Dispatch, Work
from dppo_megatron.rollout.servers.health_file import HealthFile
from dppo_megatron.rollout.servers.intake import Intake
from dppo_megatron.rollout.servers.launch import ServerProcess
from dppo_megatron.rollout.servers.member import Member, OwnedLock
from dppo_megatron.rollout.servers.protocol import Server
from dppo_megatron.spans import Spans
from dppo_megatron.types import UserError

_ANSWER_S = 30.0
_READY_S = 5.0
_FIRST_REST_S, _LONGEST_REST_S = 0.5, 30.0


@dataclass
class _Probe:
    """The health probe of one server that is under way, or was."""

    begun: float = -math.inf
    answer: Future[None] | None = None


class Fleet:
    """All servers of a run.

    Args:
        say: takes one line for the person who watches.
        intake: has the servers asked; set before the first `run`.
        processes: the processes of `servers`, if the trainer has started them.
        clock: seconds that only grow.
        threads: where questions to servers wait for their answers.
        health_file: is told how the servers are, for people who watch.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        config: RolloutConfig,
        say: Callable[[str], None],
        intake: Intake | None = None,
        processes: Sequence[ServerProcess] = (),
        clock: Callable[[], float] = time.monotonic,
        threads: Executor | None = None,
        health_file: HealthFile | None = None,
    ) -> None:
        self.lock = OwnedLock()
        """Held by whoever changes a member; never across a call to a server."""
        self.members = [
            Member(server, self.lock, clock, process) for server, process in zip_longest(servers, processes)
        ]
        self.say = say
        self.intake = intake
        self.recruit: Callable[[Fleet], None] | None = None
        """Lets servers in and go; called where a server that is back could be used at once."""
        self.spans = Spans()
        """Gets requests by server, and gradings, while it is on."""
        self._config, self._clock, self._health_file = config, clock, health_file
        self._threads = threads or ThreadPoolExecutor(max_workers=max(32, len(servers)), thread_name_prefix="probe")
        self._expected = ""
        self._probing: dict[str, _Probe] = {member.name: _Probe() for member in self.members}
        self.places = {member.name: place for place, member in enumerate(self.members)}
        """Number of each member: it keeps it whoever comes and goes."""
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="launcher")
        """Its thread lives as long as the trainer: the kernel ends a server with the thread that has started it."""
        self._next_ticket = 0
        self._busy: dict[str, int] = {}
        """How often in a row each server has said that it has too much to do."""

    @property
    def live(self) -> list[Member]:
        """Servers with the present weights."""
        return [member for member in self.members if member.state == "live"]

    def health(self) -> dict[str, str]:
        """live, or the state and its reason, by address."""
        return {member.name: member.condition for member in self.members}

    def expect(self, version: str) -> None:
        """Only servers that have taken `version` are live from now on."""
        with self.lock:
            self._expected = version
            for member in self.members:
                member.expects(version)

    def mark_out(self, member: Member, reason: str) -> None:
        """No more requests; those in flight are cut and go elsewhere."""
        with self.lock:
            news = member.failed(reason)
        if news:
            self.say(f"rollout: {member.name} is out: {reason}")
        member.server.http.close()

    def revive(self) -> None:
        """Ask every server that is out whether it is back, all at once; those that are become stale. Who has come since
        is among the members now."""
        if self.recruit is not None:
            self.recruit(self)
        timeout_s = min(_ANSWER_S, self._config.limits.probe_timeout_s)
        out = [member for member in self.members if member.state == "out" and member.may_be_asked]
        asked = [(member, self._threads.submit(member.server.healthy, timeout_s=timeout_s)) for member in out]
        for member, answer in asked:
            if answer.exception() is None:
                self._is_back(member)

    def let_in(self, server: Server) -> tuple[int, Member]:
        """A server that has come, as a member with its number: stale, until the next weight sync. One that has the
        address of a member takes its place."""
        url = server.http.url
        with self.lock:
            place = self.places.setdefault(url, len(self.members))
            self._probing[url] = _Probe()  # an earlier question was to whoever had the address before
            if place == len(self.members):
                self.members.append(Member(server, self.lock, self._clock))
                self.members[place].expects(self._expected)
            else:
                self.members[place].replaced_by(server)
            self.members[place].answers()
        return place, self.members[place]

    def let_go(self, member: Member, reason: str) -> None:
        """Its owner has taken it away: no more requests and no more questions."""
        with self.lock:
            news = member.left(reason)
        if news:
            self.say(f"rollout: {member.name}: {reason}")
            member.server.http.close()

    def may_return(self, member: Member) -> None:
        """Its owner offers it."""
        with self.lock:
            member.may_return()

    def restart_dead(self) -> None:
        """Start the trainer's own servers that have ended again; they come back by answering a probe."""
        for member in self.members:
            own = member.process
            if own is not None and not own.is_running and self._starter.submit(own.start_if_ended).result():
                self.say(f"rollout: the launched server {member.name} had ended; it is started again")
                with self.lock:
                    member.restarted()

    def wait_for_starting(self, timeout_s: float) -> None:
        """Return when no launched server is still starting; one that fails at it stays out."""
        for member in self.members:
            if member.process is not None and member.process.is_starting:
                with contextlib.suppress(UserError):
                    member.process.wait_ready(lambda m=member: m.server.healthy(timeout_s=_READY_S), timeout_s)  # type: ignore[misc]

    def run(self, work: Work) -> Iterator[int]:
        """Yields the index of each group as it lands, each once; ends when all are ready.

        Raises:
            NeedsWeights: no live server, but at least one to sync.
            GuardStop: a request or the whole fleet has been waited for long enough.
        """
        return Dispatch(self, work, self._config.limits, self._clock).run()

    def close(self) -> None:
        """Cut every connection, end the threads and the trainer's own servers."""
        for member in self.members:
            member.server.http.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._starter.shutdown(wait=False, cancel_futures=True)
        for member in self.members:
            if member.process is not None:
                member.process.stop()

    def ticket(self) -> int:
        """A number for one attempt."""
        self._next_ticket += 1
        return self._next_ticket

    def rest(self, member: Member, wanted_s: float | None) -> None:
        """It has too much to do: no requests for as long as it asks, else twice as long as the last time."""
        times = self._busy[member.name] = self._busy.get(member.name, 0) + 1
        own_s = min(_LONGEST_REST_S, _FIRST_REST_S * 2.0 ** min(times - 1, 16))
        with self.lock:
            member.rests(own_s if wanted_s is None else min(_LONGEST_REST_S, wanted_s))

    def delivered(self, member: Member) -> None:
        """A good answer."""
        self._busy.pop(member.name, None)
        with self.lock:
            member.delivered()

    def probe_all(self) -> None:
        """Start the health probes that are due and act on those that have come back."""
        now = self._clock()
        for member in self.members:
            probe = self._probing[member.name]
            if probe.answer is not None and probe.answer.done():
                error, probe.answer = probe.answer.exception(), None
                if error is None and member.state == "out":
                    self._is_back(member)
                elif error is not None and member.state != "out":
                    self.mark_out(member, f"no answer to its health probe: {error}")
            due = now - probe.begun > self._config.limits.probe_every_s
            if probe.answer is None and due and (member.state != "out" or member.may_be_asked):
                probe.begun = now
                timeout_s = self._config.limits.probe_timeout_s
                probe.answer = self._threads.submit(member.server.healthy, timeout_s=timeout_s)
        if self._health_file is not None:
            self._health_file.write(self.members)

    def _is_back(self, member: Member) -> None:
        with self.lock:
            member.answers()
        # a probe that was begun while it hung would say so after it has come back
        self._probing[member.name].answer = None
        self.say(f"rollout: {member.name} answers again; it gets requests after a weight sync")
