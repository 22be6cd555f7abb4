"""One rollout over a fleet: which server gets which request, what a failed attempt means, and when waiting ends.

Runs on rank 0 and decides from scalars; the rollout clients hold the sockets and the tokens.

    rank 0, rollout thread            rollout client (one a node)              servers
    Dispatch.run -- Submit(ticket) -> one    task a ticket ---- POST -----------> generate
         <- Completed|AttemptFailed - typed decoding, check <-- answer --------
         <------ Graded ------------- decoded, graded
      waits for: events, a tick        waits for: sockets, graders

The rules:

- A group goes to the live server or router with the fewest outstanding tokens, of those with room for its completions:
  `max_concurrent_sequences` counts completions, so a group of one takes an eighth of the room of a group of eight.
  It is for one engine: a server of four data-parallel replicas has room for four times as many.
- Groups of a server that has gone out are queued again, and only the first answer to each is kept. With a seed (vLLM)
  the second attempt samples the same completion, so a failure does not favour short ones; without, `Work.resent`.
- Every wait has an end: `request_timeout_s` for a request since its first try and `_MOST_FAILURES` for the answers to
  it that went wrong, `engine_wait_s` for a fleet without a live server. Each ends in one message with the request's id.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dppo_megatron.randomness import generator
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.intake import AttemptFailed, Completed, Event, Graded, Submit
from dppo_megatron.rollout.servers.member import Endpoint
from dppo_megatron.rollout.servers.wire import Expected, GenerateRequest
from dppo_megatron.texts import log
from dppo_megatron.types import RunAborted

_TICK_S = 0.2
_ANSWER_S = 30.0
"""A client waits longer than the limit by this, so that `_check_deadlines` comes first and names the late request."""
_MOST_FAILURES = 4
"""Answers to one request that went wrong, on any server: then it is the request. Attempts that are lost because another
one's failure has marked their server out do not count."""
_MOST_ABORTS = 8
"""A weight sync with in_flight=abort ends a request once; after eight aborts the server is at fault."""
BUSY = (408, 429, 503)
_NOT_THE_SERVER = (401, 403, 404, 405)
"""The server was started again with another key or without this project's paths; another one may answer."""


class NeedsWeights(Exception):
    """Servers answer, but none has the present weights: sync, then `dispatch` the same work again."""


def grouped(
    requests: Sequence[Request], sampling: Sampling, size: int, stop_ids: tuple[int, ...] = ()
) -> tuple[list[GenerateRequest], list[list[int]]]:
    """Consecutive completions of one prompt as one group of at most `size`, so that they share a prefill.

    How requests are grouped changes no completion: completion i of a prompt has the prompt's seed + i.

    Args:
        stop_ids: tokens that end every completion, beside those of its sampling.

    Returns:
        The groups, and the positions in `requests` of each one's completions.

    Example:
        completions (prompt 7: 0, 1, 2), (prompt 9: 0), size 2  ->  groups of 2, 1 and 1; places [0, 1], [2], [3]
    """
    places: list[list[int]] = []
    latest: dict[tuple[str, int, int], list[int]] = {}
    for place, request in enumerate(requests):
        prompt = request.stream, request.step, request.prompt.index
        group = latest.get(prompt)
        follows = group is not None and requests[group[-1]].completion_index + 1 == request.completion_index
        if group is not None and follows and len(group) < size:
            group.append(place)
        else:
            latest[prompt] = [place]
            places.append(latest[prompt])
    groups = []
    for members in places:
        first = requests[members[0]]
        how = first.sampling or sampling
        draw = generator(how.seed, first.purpose, first.step, first.prompt.index, 0).integers(1 << 30)
        groups.append(
            GenerateRequest(
                request_id=first.id,
                prompt_ids=first.prompt.token_ids,
                count=len(members),
                seed=int(draw) + first.completion_index,
                max_tokens=how.max_completion_tokens,
                temperature=how.temperature,
                top_p=how.top_p,
                top_k=how.top_k,
                stop_token_ids=(*stop_ids, *how.stop_token_ids),
                reads_logprobs=how.reads_logprobs,
            )
        )
    return groups, places


@dataclass
class Work:
    """The groups of one rollout and what has come back; survives a `NeedsWeights`."""

    groups: Sequence[GenerateRequest]
    expected: Expected
    prompts: Sequence[bytes] = ()
    """For the grading hook, one a group; empty: nothing is graded."""
    allow_straggler_abort: bool = True
    """`rollout.limits.finish_fraction` applies. Not to an evaluation: aborted completions would count as wrong."""
    done: dict[int, Completed] = field(default_factory=dict)
    landed: dict[int, int] = field(default_factory=dict)
    """The ticket that brought each group's answer -> the group."""
    ready: set[int] = field(default_factory=set)
    """Groups that are decoded and graded."""
    first_asked: dict[int, float] = field(default_factory=dict)
    failures: dict[int, list[str]] = field(default_factory=dict)
    """What went wrong with each group, one line an answer."""
    aborts: dict[int, int] = field(default_factory=dict)
    resent: set[int] = field(default_factory=set)
    """Groups that were lost while a server without seeds sampled them: long ones are lost more often."""
    retries: int = 0
    given_up: bool = False
    """The rest is not wanted any more: `dispatch` ends its requests and returns."""
    stragglers_ended: bool = False
    """The straggler rule has aborted the rest."""
    stragglers_aborted: int = 0

    @property
    def is_complete(self) -> bool:
        return len(self.ready) == len(self.groups)


@dataclass
class _Attempt:
    index: int
    member: Endpoint
    began_s: float
    """On the clock of the spans."""
    outages: int
    """The member's then. With the next outage the attempt is lost, also if the member is back already."""


def dispatch(fleet: Fleet, work: Work) -> Iterator[int]:
    """Yields the index of each group as it lands, each once; ends when all are ready.

    Raises:
        NeedsWeights: no live server, but at least one to sync.
        RunAborted: a request or the whole fleet has been waited for long enough.
    """
    return Dispatch(fleet, work).run()


class Dispatch:
    """One call of `dispatch`: what is pending and what is in flight."""

    def __init__(self, fleet: Fleet, work: Work) -> None:
        assert fleet.intake is not None
        self._fleet, self._work, self._intake = fleet, work, fleet.intake
        self._limits, self._clock = fleet.limits, fleet.clock
        self._pending = deque(index for index in range(len(work.groups)) if index not in work.done)
        self._attempts: dict[int, _Attempt] = {}
        self._checked_s, self._outages = -math.inf, -1
        self._landed_s: dict[int, float] = {}  # ticket -> when its answer came, on the clock of the spans

    def run(self) -> Iterator[int]:
        """See `dispatch`. What is still in flight when it ends, or is closed, is cancelled."""
        work = self._work
        try:
            while not work.is_complete and not work.given_up:
                self._fleet.follow_routers()
                self._assign()
                if self._pending and not self._attempts and not self._fleet.live:
                    self._wait_for_anyone()
                    continue
                for event in self._intake.events(_TICK_S):
                    if (landed := self._settle(event)) is not None:
                        yield landed
                self._drop_the_lost()
                self._abort_stragglers()
                if self._check_deadlines():
                    self._fleet.probe_all()
            if work.given_up:
                self._intake.end(list(self._attempts))
        finally:
            self._intake.cancel(list(self._attempts))
            for ticket in list(self._attempts):
                self._forget(ticket)

    def _assign(self) -> None:
        while self._pending:
            group = self._work.groups[self._pending[0]]
            free = [asked for asked in self._fleet.targets_for(group) if self._has_room(asked, group)]
            if not free:
                return
            self._ask(min(free, key=lambda asked: asked.outstanding_tokens / asked.width), self._pending.popleft())

    def _ask(self, member: Endpoint, index: int) -> None:
        work, ticket = self._work, next(self._fleet.tickets)
        group, now = work.groups[index], self._clock()
        left_s = work.first_asked.setdefault(index, now) + self._limits.request_timeout_s - now
        with self._fleet.lock:
            member.began(group.cost, group.count)
        self._attempts[ticket] = _Attempt(index, member, self._fleet.spans.clock(), member.outages)
        prompt = work.prompts[index] if work.prompts else b""
        self._intake.ask(Submit(ticket, index, member.name, group, work.expected, left_s + _ANSWER_S, prompt))

    def _has_room(self, member: Endpoint, group: GenerateRequest) -> bool:
        """A group that is larger than the whole room goes alone: it could go nowhere else."""
        room = self._limits.max_concurrent_sequences * member.width - member.completions
        fits = group.count <= room or member.groups == 0
        return member.is_free and fits and member.groups < self._intake.room(member.name)

    def _forget(self, ticket: int) -> _Attempt:
        attempt = self._attempts.pop(ticket)
        group = self._work.groups[attempt.index]
        with self._fleet.lock:
            attempt.member.ended(group.cost, group.count)
        return attempt

    def _settle(self, event: Event) -> int | None:
        """The group that has landed, if one has. Tickets that are no longer wanted are passed over."""
        if isinstance(event, Graded):
            if event.ticket in self._work.landed:
                index = self._work.landed[event.ticket]
                self._work.ready.add(index)
                now = self._fleet.spans.clock()
                self._show("grading", index, self._landed_s.pop(event.ticket, now), now, event.ticket)
            return None
        if event.ticket not in self._attempts:
            return None
        attempt = self._forget(event.ticket)
        landed_s = self._landed_s[event.ticket] = self._fleet.spans.clock()
        self._show(f"requests {attempt.member.name}", attempt.index, attempt.began_s, landed_s, event.ticket)
        if isinstance(event, AttemptFailed):
            self._failed(attempt, event)
            return None
        aborted = event.reasons.count("abort")
        if aborted and not (self._work.stragglers_ended and all(event.lengths)):
            self._aborted(attempt, event.ticket)
            return None
        self._work.stragglers_aborted += aborted
        self._work.done[attempt.index] = event
        self._work.landed[event.ticket] = attempt.index
        with self._fleet.lock:
            attempt.member.delivered()
        return attempt.index

    def _show(self, track: str, index: int, began_s: float, ended_s: float, ticket: int) -> None:
        spans = self._fleet.spans
        if spans.on:
            spans.add(track, self._work.groups[index].request_id, began_s, ended_s, ticket)

    def _again(self, attempt: _Attempt, *, was_sampled: bool = True) -> None:
        self._work.retries += 1
        self._pending.appendleft(attempt.index)
        if was_sampled and not attempt.member.server.dialect.seeded:
            self._work.resent.add(attempt.index)

    def _failed(self, attempt: _Attempt, event: AttemptFailed) -> None:
        """Raises RunAborted for a failure that another server would repeat."""
        member, request_id = attempt.member, self._work.groups[attempt.index].request_id
        if event.kind == "ours":
            raise RunAborted(f"request {request_id}: {event.text}")
        turned_away = event.kind == "refused" and (event.status in BUSY or event.status < 500)
        self._again(attempt, was_sampled=not turned_away)
        if event.kind == "refused" and event.status in BUSY:
            with self._fleet.lock:
                return member.back_off(event.retry_after_s)
        if event.kind == "refused" and 400 <= event.status < 500 and event.status not in _NOT_THE_SERVER:
            raise RunAborted(f"{member.name} refused request {request_id}: {event.text}")
        self._blame(attempt, event.text)

    def _aborted(self, attempt: _Attempt, ticket: int) -> None:
        """Aborted by a weight sync, or by the server unasked."""
        self._intake.cancel([ticket])  # drops what it brought
        self._again(attempt)
        aborts = self._work.aborts[attempt.index] = self._work.aborts.get(attempt.index, 0) + 1
        if aborts > _MOST_ABORTS:
            self._blame(attempt, f"it has ended the request {aborts} times, unasked")

    def _blame(self, attempt: _Attempt, why: str) -> None:
        """A failure of this server, and one of this request's few."""
        work, member = self._work, attempt.member
        if member.outages != attempt.outages:  # it broke many connections at once, and another's failure came first
            return
        said = work.failures.setdefault(attempt.index, [])
        said.append(f"{member.name}: {why}")
        self._fleet.mark_out(member, why)
        if len(said) >= _MOST_FAILURES:
            raise RunAborted(
                f"request {work.groups[attempt.index].request_id} has failed {len(said)} times: {'; '.join(said)}"
            )

    def _drop_the_lost(self) -> None:
        """Attempts on servers that have gone out go elsewhere; a probe, an answer or a sync may have marked them."""
        outages = sum(member.outages for member in self._fleet.endpoints)
        if outages == self._outages:
            return
        self._outages = outages
        lost = [ticket for ticket, attempt in self._attempts.items() if attempt.member.outages != attempt.outages]
        self._intake.cancel(lost)
        for ticket in reversed(lost):
            self._again(self._forget(ticket))

    def _wait_for_anyone(self) -> None:
        fleet, wait_s = self._fleet, self._limits.engine_wait_s
        deadline = self._clock() + wait_s
        log(f"rollout: no server with the present weights; waiting up to {wait_s:g} s for one")
        while not fleet.live and not self._work.given_up:
            if any(member.state == "stale" for member in fleet.members):
                raise NeedsWeights
            if self._clock() > deadline:
                states = "; ".join(f"{name} {state}" for name, state in fleet.health().items())
                ids = [self._work.groups[index].request_id for index in self._pending]
                raise RunAborted(
                    f"all {len(fleet.members)} rollout servers have been gone for rollout.limits.engine_wait_s ="
                    f" {wait_s:g} s ({states}); waiting requests: {_listed(ids)}"
                )
            for event in self._intake.events(_TICK_S):
                self._settle(event)
            self._check_deadlines()
            fleet.restart_dead()
            fleet.revive()

    def _abort_stragglers(self) -> None:
        work, share = self._work, self._limits.finish_fraction
        if share == 1 or not work.allow_straggler_abort or work.stragglers_ended or self._pending or not self._attempts:
            return
        total = sum(group.count for group in work.groups)
        if sum(work.groups[index].count for index in work.done) >= share * total:
            work.stragglers_ended = True
            self._intake.end(list(self._attempts))

    def _check_deadlines(self) -> bool:
        now, limit_s = self._clock(), self._limits.request_timeout_s
        if now - self._checked_s < _TICK_S:  # thousands may wait, and events come by the hundred
            return False
        self._checked_s = now
        waiting = [*self._pending, *(attempt.index for attempt in self._attempts.values())]
        where = {attempt.index: f" on {attempt.member.name}" for attempt in self._attempts.values()}
        asked = self._work.first_asked
        if late := [index for index in waiting if now - asked.get(index, now) > limit_s]:
            names = [f"{self._work.groups[index].request_id}{where.get(index, '')}" for index in late]
            raise RunAborted(
                f"{len(late)} requests (step-prompt-completion) have waited longer than"
                f" rollout.limits.request_timeout_s = {limit_s:g} s since their first try: {_listed(names)}"
            )
        return True


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f", and {len(names) - 8} more" if len(names) > 8 else "")
