"""Rollouts over a fleet: which server gets which request, what a failed attempt means, and when waiting ends.

Runs on rank 0 and decides from scalars; the rollout clients hold the sockets and the tokens.

    rank 0, rollout thread            rollout client (one per node)            servers
    Dispatch.run -- Submit(ticket) -> one task per ticket ----- POST -----------> generate
         <- Completed|AttemptFailed - typed decoding, check <-- answer --------
         <------ Graded ------------- decoded, graded
      waits for: events, a tick        waits for: sockets, graders

docs/engines.md#failures has the rules for users. In addition:

- With several rollouts, the earliest step has priority: groups of a later step get only the room that no group of the
  earlier one can use. So they fill the servers while the earlier step's stragglers finish.
- `max_concurrent_sequences` counts completions: a group of one takes an eighth of the room of a group of eight.
- A training group is split into parts (`Work.spread`): completions of a hard prompt are long together, and a server
  that had all of them would finish last. A rank takes what its node's client holds, so all parts go to servers of one
  client, as long as at least half of them are live (else all parts would wait for those few) and one of them accepts
  requests. Parts that go to another client are joined with the rest of their group after the rollout (`Work.homes`).
- With a seed (vLLM) a retry samples the same completions, so a failure does not favour short ones; without a seed, or
  under newer weights, the group is recorded in `Work.resent`. Answers that arrive after a retry began are discarded.
- Every wait has a limit: `request_timeout_s` per request, from its first attempt, and `_MAX_FAILURES` failed answers
  to it. Without a live server the rollout pauses, and the next weight sync waits for one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.rollout_work import Work
from dppo_megatron.rollout.servers.wire import (
    AttemptFailed,
    Completed,
    Event,
    GenerateRequest,
    Graded,
    Submit,
    version_number,
)
from dppo_megatron.texts import log
from dppo_megatron.types import RunAborted

_TICK_S = 0.2
_CLIENT_GRACE_S = 30.0
"""A client's timeout is this much longer than the limit, so that `_check_deadlines` acts first, naming the request."""
_MAX_FAILURES = 4
"""After this many failures of one request, on any servers, the request itself is at fault. Attempts that were lost
because another request's failure marked their server out do not count."""
_MAX_ABORTS = 8
"""A weight sync with in_flight=abort aborts a request once; after eight aborts the server is at fault."""
BUSY = (408, 429, 503)
_LATE = "it has waited longer than rollout.limits.request_timeout_s since its first try"
_SERVER_CHANGED = (401, 403, 404, 405)
"""The server was restarted with another key or without this project's paths; another server may accept the request."""


class NeedsWeights(Exception):
    """No server has the current weights: run a weight sync, which waits for one, then `dispatch` the work again."""


@dataclass
class _Attempt:
    work: Work
    index: int
    member: Member
    began_s: float
    """On the clock of the spans."""
    outages: int
    """The server's outages when this attempt began. If it changes, the attempt is lost, even if the server is back."""
    version: str
    """The fleet's expected weights when this attempt began."""


def dispatch(fleet: Fleet, work: Work) -> Iterator[int]:
    """Yields the index of each group when its completions are decoded and graded, so that they can be taken. Raises
    NeedsWeights without a live server, and RunAborted for a request that has timed out or failed too often."""
    return Dispatch(fleet, [work]).run()


class Dispatch:
    """The requests of several rollouts in flight. `works` is read again in each round: another thread may add to it."""

    def __init__(self, fleet: Fleet, works: Collection[Work]) -> None:
        self._fleet, self._works, self._clients = fleet, works, fleet.clients
        self._limits, self._clock = fleet.limits, fleet.clock
        self._open: list[Work] = []
        """The incomplete rollouts, by priority."""
        self._attempts: dict[int, _Attempt] = {}
        self._checked_s, self._outages = -math.inf, -1
        self._landed_s: dict[int, float] = {}  # ticket -> when its answer arrived, on the clock of the spans

    def run(self) -> Iterator[int]:
        """See `dispatch`. Attempts in flight when it ends, or is closed, are cancelled."""
        try:
            while self._update_open():
                self._assign()
                if not self._attempts and not self._fleet.live and any(work.pending for work in self._open):
                    raise NeedsWeights
                for event in self._clients.events(_TICK_S):
                    if (ready := self._handle(event)) is not None:
                        yield ready
                self._requeue_lost()
                if self._check_deadlines():
                    self._fleet.probe_all()
        finally:
            self._cancel(list(self._attempts))

    def _update_open(self) -> bool:
        """Begin rollouts that were added, end those that are complete or given up. Returns whether any are left."""
        dropped = [one for one in self._open if one.given_up]
        for work in dropped:
            tickets = [ticket for ticket, attempt in self._attempts.items() if attempt.work is work]
            self._clients.end(tickets)
            self._cancel(tickets)
        for work in [one for one in list(self._works) if one not in self._open and one.is_wanted]:
            over = work.done.keys() | work.lost.keys()
            wanted = (index for index in range(len(work.groups)) if index not in over)
            work.pending = deque(sorted(wanted, key=work.part_of))
            self._open.append(work)
        for work in [one for one in self._open if one.is_complete and one not in dropped]:
            work.finished.set_result(None)
        # `given_up` may have been set since the first line; those requests are ended in the next round
        left = [one for one in self._open if not one.finished.done() and one not in dropped]
        self._open = sorted(left, key=lambda work: work.order)
        return bool(self._open)

    def _cancel(self, tickets: Sequence[int]) -> None:
        self._clients.cancel(tickets)
        for ticket in tickets:
            self._forget(ticket)

    def _assign(self) -> None:
        """Send pending requests. One that finds no room blocks those behind it, at its clients or everywhere; otherwise
        smaller ones would keep overtaking a large group."""
        targets = [(self._clients.client_of(one.name), one) for one in self._fleet.live]
        mostly_live = self._mostly_live_clients()
        full: set[int] = set()  # clients without room for a group whose parts must stay with them
        for work in self._open:
            waiting: list[int] = []
            while work.pending:
                index = work.pending[0]
                group, near = work.groups[index], mostly_live.intersection(work.near.get(work.part_of(index)[0], ()))
                if near and full.issuperset(near):
                    waiting.append(work.pending.popleft())
                    continue
                close = [(client, one) for client, one in targets if client in near and one.is_ready]
                free = [one for client, one in close or targets if client not in full and self._has_room(one, group)]
                if free:
                    least = min(free, key=lambda one: one.outstanding_tokens / one.width)
                    self._ask(least, work, work.pending.popleft())
                elif close:
                    full.update(client for client, _ in close)
                    waiting.append(work.pending.popleft())
                else:
                    break
            is_blocked = bool(work.pending)
            work.pending.extendleft(reversed(waiting))
            if is_blocked:
                return

    def _mostly_live_clients(self) -> set[int]:
        """Clients with at least half of their servers live: parts of a group that they have begun go to them."""
        all_of = Counter(self._clients.client_of(one.name) for one in self._fleet.members if not one.has_left)
        live_of = Counter(self._clients.client_of(one.name) for one in self._fleet.live)
        return {client for client, live in live_of.items() if 2 * live >= all_of[client]}

    def _ask(self, member: Member, work: Work, index: int) -> None:
        ticket = next(self._fleet.tickets)
        group, now = work.groups[index], self._clock()
        left_s = work.first_asked.setdefault(index, now) + self._limits.request_timeout_s - now
        with self._fleet.lock:
            member.took(group)
        version = self._fleet.expected
        self._attempts[ticket] = _Attempt(work, index, member, self._fleet.spans.clock(), member.outages, version)
        whole, first = work.part_of(index)
        client, each = self._clients.client_of(member.name), work.completions_of(index)
        for under, at in (work.lost_under[one] for one in each if one in work.lost_under):
            if under != version or (work.was_seen and at != client):
                work.resent.add(whole)
        self._count_near(work, index, member, 1)
        prompt = work.prompts[whole] if work.prompts else b""
        limit_s = left_s + _CLIENT_GRACE_S
        for one in each if work.kept else ():
            if (sampled := work.kept.get(one)) is not None:
                self._clients.keep(member.name, (work.number, *one), sampled)
        self._clients.ask(Submit(ticket, whole, member.name, group, work.expected, limit_s, prompt, work.number, first))

    def _has_room(self, member: Member, group: GenerateRequest) -> bool:
        """A group that is larger than the whole limit is sent to an idle server: it would fit nowhere else either."""
        room = self._limits.max_concurrent_sequences * member.width - member.completions
        fits = group.count <= room or member.groups == 0
        has_sockets = member.sockets + group.sockets <= self._clients.room(member.name) or member.groups == 0
        return member.is_ready and fits and has_sockets

    def _forget(self, ticket: int) -> _Attempt:
        attempt = self._attempts.pop(ticket)
        self._count_near(attempt.work, attempt.index, attempt.member, -1)
        with self._fleet.lock:
            attempt.member.took(attempt.work.groups[attempt.index], sign=-1)
        return attempt

    def _count_near(self, work: Work, index: int, member: Member, sign: int) -> None:
        """Count the completions of request `index` as held by the member's client; `sign` -1: no longer."""
        if work.may_split:
            near = work.near.setdefault(work.part_of(index)[0], Counter())
            near[client := self._clients.client_of(member.name)] += sign * work.groups[index].count
            if not near[client]:
                del near[client]

    def _handle(self, event: Event) -> int | None:
        """The index of the group that is ready, if one is. Tickets that are no longer wanted are ignored."""
        if isinstance(event, Graded):
            for work in self._open:
                if event.ticket in work.landed:
                    index = work.landed[event.ticket]
                    work.ready.add(index)
                    now = self._fleet.spans.clock()
                    landed_s = self._landed_s.pop(event.ticket, now)
                    name = work.groups[index].request_id
                    self._fleet.spans.add("grading", name, landed_s, now, event.ticket)
                    return index
            return None
        if event.ticket not in self._attempts:
            return None
        attempt = self._forget(event.ticket)
        work = attempt.work
        landed_s = self._landed_s[event.ticket] = self._fleet.spans.clock()
        track = f"requests {attempt.member.name}"
        self._fleet.spans.add(track, work.groups[attempt.index].request_id, attempt.began_s, landed_s, event.ticket)
        if isinstance(event, AttemptFailed):
            self._failed(attempt, event)
            return None
        each = work.completions_of(attempt.index)
        lost_under = {version_number(work.lost_under[one][0]) for one in each if one in work.lost_under}
        if "abort" in event.reasons and attempt.index not in work.ended and not self._aborted(attempt, event):
            return None
        if lost_under and any(version > min(lost_under) for version, _ in event.spans):
            work.resent.add(work.part_of(attempt.index)[0])  # there was a sync after the retry began
        work.done[attempt.index] = event
        work.landed[event.ticket] = attempt.index
        self._count_near(work, attempt.index, attempt.member, 1)
        with self._fleet.lock:
            attempt.member.delivered()
        return None

    def _retry(self, attempt: _Attempt, *, was_sampled: bool = True) -> None:
        work = attempt.work
        if attempt.index in work.ended:
            return self._give_up(work, attempt.index, _LATE)
        work.retries += 1
        work.pending.appendleft(attempt.index)
        if was_sampled:
            self._note_sampled(attempt, attempt.index)

    def _note_sampled(self, attempt: _Attempt, index: int) -> None:
        """The server may have begun to sample request `index`; a retry may then yield other completions."""
        work = attempt.work
        lost = attempt.version, self._clients.client_of(attempt.member.name)
        work.lost_under.update(dict.fromkeys(work.completions_of(index), lost))
        if not attempt.member.server.dialect.seeded:
            work.resent.add(work.part_of(index)[0])

    def _give_up(self, work: Work, index: int, why: str) -> None:
        log(f"rollout: request {work.groups[index].request_id} is given up: {why}")
        work.lost[index] = why
        if index in work.pending:
            work.pending.remove(index)

    def _failed(self, attempt: _Attempt, event: AttemptFailed) -> None:
        """Raises RunAborted for a failure that another server would repeat, unless the work may lose completions."""
        work, member, request_id = attempt.work, attempt.member, attempt.work.groups[attempt.index].request_id
        if event.kind == "ours":
            raise RunAborted(f"request {request_id}: {event.text}")
        is_refused = event.kind == "refused"
        if is_refused and 400 <= event.status < 500 and event.status not in (*BUSY, *_SERVER_CHANGED):
            if not work.may_lose:
                raise RunAborted(f"{member.name} refused request {request_id}: {event.text}")
            return self._give_up(work, attempt.index, f"{member.name} refused it: {event.text}")
        never_started = is_refused and (event.status in BUSY or event.status < 500) and self._is_one_call(attempt)
        self._retry(attempt, was_sampled=not never_started)
        if is_refused and event.status in BUSY:
            during_sync = attempt.version != self._fleet.expected and event.status == 503
            if during_sync and event.retry_after_s is None:  # vLLM 0.33 answers so while a sync has paused it
                return None
            with self._fleet.lock:
                return member.back_off(event.retry_after_s)
        if event.kind == "unreachable" and attempt.index in work.ended:
            deadline_s = work.first_asked[attempt.index] + self._limits.request_timeout_s
            if member.delivered_s > deadline_s:
                return None  # it answers other requests, so it does not hang: it only missed the abort of this one
        self._count_failure(attempt, event.text)

    def _is_one_call(self, attempt: _Attempt) -> bool:
        """Else the refusal of one call has ended others, which may have sampled."""
        work, group = attempt.work, attempt.work.groups[attempt.index]
        may_go_on = work.was_seen or work.kept
        return group.count == 1 or not (may_go_on or len(attempt.member.server.dialect.rounds(group)[-1]) > 1)

    def _aborted(self, attempt: _Attempt, event: Completed) -> bool:
        """A weight sync, or the server on its own, aborted completions. Returns whether the others are used: then only
        the aborted ones are requested again, with their own seeds."""
        work = attempt.work
        aborts = work.aborts[attempt.index] = work.aborts.get(attempt.index, 0) + 1
        rest = [place for place, reason in enumerate(event.reasons) if reason == "abort"]
        splits = work.may_split and aborts <= _MAX_ABORTS and len(rest) < len(event.reasons)
        work.completions_aborted += len(rest) if splits else len(event.reasons)
        if splits:
            work.retries += 1
            self._ask_for_rest(attempt, rest)
        else:
            self._clients.cancel([event.ticket])  # discards its completions
            self._retry(attempt)
        if aborts > _MAX_ABORTS:
            self._count_failure(attempt, f"it has aborted the request {aborts} times on its own")
        return splits

    def _ask_for_rest(self, attempt: _Attempt, places: Sequence[int]) -> None:
        work, group = attempt.work, attempt.work.groups[attempt.index]
        whole, first = work.part_of(attempt.index)
        for place in places:
            work.pending.append(index := len(work.groups))
            work.parts[index], work.first_asked[index] = (whole, first + place), work.first_asked[attempt.index]
            work.aborts[index] = work.aborts[attempt.index]
            work.groups.append(group.part(place, 1))
            self._note_sampled(attempt, index)

    def _count_failure(self, attempt: _Attempt, why: str) -> None:
        """Mark the server out and count the failure against the request, which has `_MAX_FAILURES`."""
        work, member = attempt.work, attempt.member
        if member.outages != attempt.outages:  # many connections broke at once: an earlier failure counted this outage
            return
        failures = work.failures.setdefault(attempt.index, [])
        failures.append(f"{member.name}: {why}")
        self._fleet.mark_out(member, why)
        if len(failures) >= _MAX_FAILURES:
            why = f"has failed {len(failures)} times: {'; '.join(failures)}"
            if not work.may_lose:
                raise RunAborted(f"request {work.groups[attempt.index].request_id} {why}")
            self._give_up(work, attempt.index, why)

    def _requeue_lost(self) -> None:
        """Retry attempts whose server has been marked out since, by a probe, another answer or a sync."""
        outages = sum(member.outages for member in self._fleet.members)
        if outages == self._outages:
            return
        self._outages = outages
        lost = [ticket for ticket, attempt in self._attempts.items() if attempt.member.outages != attempt.outages]
        self._clients.cancel(lost)
        for ticket in reversed(lost):
            self._retry(self._forget(ticket))

    def _check_deadlines(self) -> bool:
        now, limit_s = self._clock(), self._limits.request_timeout_s
        if now - self._checked_s < _TICK_S:  # thousands of requests may wait, and hundreds of events arrive per tick
            return False
        self._checked_s = now
        if now - min((asked_s for one in self._open for asked_s in one.first_asked.values()), default=now) <= limit_s:
            return True  # with 8,192 in flight the lists below take 4 ms, five times a second beside the training
        waiting = [(work, index, "") for work in self._open for index in work.pending]
        waiting += [(one.work, one.index, f" on {one.member.name}") for one in self._attempts.values()]
        late = [
            (work, index, where)
            for work, index, where in waiting
            if now - work.first_asked.get(index, now) > limit_s and index not in work.ended
        ]
        if ended := [each for each in late if each[0].may_lose]:
            log(f"rollout: {len(ended)} requests have waited longer than {limit_s:g} s and are ended: {_listed(ended)}")
            self._end_late([(work, index) for work, index, _ in ended])
        if late := [each for each in late if not each[0].may_lose]:
            raise RunAborted(
                f"{len(late)} requests (step-prompt-completion) have waited longer than"
                f" rollout.limits.request_timeout_s = {limit_s:g} s since their first try: {_listed(late)}"
            )
        return True

    def _end_late(self, late: Sequence[tuple[Work, int]]) -> None:
        """Have servers abort what runs, whose tokens so far are kept; give up what is still pending."""
        for work, index in late:
            work.ended.add(index)
            if index in work.pending:
                self._give_up(work, index, _LATE)
        self._clients.end([t for t, one in self._attempts.items() if (one.work, one.index) in late])


def _listed(late: Sequence[tuple[Work, int, str]]) -> str:
    names = [f"{work.groups[index].request_id}{where}" for work, index, where in late[:8]]
    return ", ".join(names) + (f", and {len(late) - 8} more" if len(late) > 8 else "")
