"""Several servers as one: who gets which request, what a failure means, and when waiting ends.

Runs on one rank, with one thread for each request in flight: threads only wait for a socket, and a server that is
found hung can have all its sockets cut from outside, which frees them. The rules:

- A group goes to the live server with the fewest outstanding tokens, of those with room for its completions:
  `max_concurrent_sequences` counts completions, so a group of one takes an eighth of the room of a group of eight.
- A server that refuses connections, breaks one, or does not answer its health probe is out; its groups are queued
  again under the same request id, and only the first answer to an id is kept. With a seed (vLLM) the second attempt
  samples the same completion, so a failure does not favour short ones.
- A server that answers again is stale: it gets no request before it has had a complete weight sync.
- Every wait has an end: `request_timeout_s` for one request, `engine_wait_s` for a fleet with nobody left.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.rollout.engine import Sampling
from dppo_megatron.rollout.servers.http import Refused, Unreachable
from dppo_megatron.rollout.servers.launch import LaunchedServer
from dppo_megatron.rollout.servers.member import Member, OwnedLock
from dppo_megatron.rollout.servers.protocol import GenerateRequest, Sampled, Server
from dppo_megatron.types import GuardStop, UserError

_TICK_S = 0.2
_ANSWER_S = 30.0
_READY_S = 5.0


class NeedsWeights(Exception):
    """Servers answer, but none has the present weights: sync, then `Fleet.run` the same work again."""


@dataclass
class Work:
    """The groups of one rollout and what has come back; survives a `NeedsWeights`."""

    groups: Sequence[GenerateRequest]
    samplings: Sequence[Sampling]
    """How each group is sampled."""
    versions: frozenset[str]
    """Weights versions that a completion may have: a server that was restarted unseen has another."""
    may_be_cut: bool = True
    """`rollout.limits.straggler_share` applies. Not to an evaluation: cut completions would count as wrong."""
    done: dict[int, list[Sampled]] = field(default_factory=dict)
    retries: int = 0
    given_up: bool = False
    """Nobody wants the rest any more: `Fleet.run` ends its requests and returns."""
    cut: bool = False
    """The straggler rule has ended the rest."""
    cut_completions: int = 0

    def cost(self, index: int) -> int:
        """Tokens that group `index` may come to."""
        group = self.groups[index]
        return len(group.prompt_ids) + group.count * self.samplings[index].max_completion_tokens


@dataclass
class _Probe:
    """The health probe of one server that is under way, or was."""

    begun: float = 0.0
    answer: Future[None] | None = None


@dataclass
class _Attempt:
    index: int
    member: Member
    started: float


class Fleet:
    """All servers of a run.

    Args:
        say: takes one line for the person who watches.
        max_groups: groups in flight on one server, each of which holds a thread and a socket. How many completions
            are, `config.limits.max_concurrent_sequences` says.
        processes: the processes of `servers`, if the trainer has started them.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        config: RolloutConfig,
        say: Callable[[str], None],
        max_groups: int,
        processes: Sequence[LaunchedServer] = (),
    ) -> None:
        self.lock = OwnedLock()
        """Held by whoever changes a member; never across a call to a server."""
        self.members = [
            Member(server, self.lock, process=process) for server, process in zip_longest(servers, processes)
        ]
        self.say = say
        self._config = config
        self._max_groups = max_groups
        self._threads = ThreadPoolExecutor(max_workers=len(servers) * (max_groups + 1), thread_name_prefix="rollout")
        self._probes = ThreadPoolExecutor(max_workers=len(servers), thread_name_prefix="probe")
        self._probing: dict[str, _Probe] = {member.name: _Probe() for member in self.members}
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="launcher")
        """Its thread lives as long as the trainer: the kernel ends a server with the thread that has started it."""

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
        """Ask every server that is out whether it is back, all at once; those that are become stale."""
        timeout_s = min(_ANSWER_S, self._config.limits.probe_timeout_s)
        out = [member for member in self.members if member.state == "out" and member.may_be_asked]
        asked = [(member, self._probes.submit(member.server.healthy, timeout_s=timeout_s)) for member in out]
        for member, answer in asked:
            if answer.exception() is None:
                self._is_back(member)

    def restart_dead(self) -> None:
        """Start the trainer's own servers that have ended again; they come back by answering a probe."""
        for member in self.members:
            if member.process is not None and not member.process.is_running:
                self.say(f"rollout: the launched server {member.name} has ended; starting it again")
                self._starter.submit(member.process.start).result()
                with self.lock:
                    member.restarted()

    def wait_for_starting(self, timeout_s: float) -> None:
        """Return when no launched server is still starting; one that fails at it stays out."""
        for member in self.members:
            if member.process is not None and member.process.is_starting:
                with contextlib.suppress(UserError):
                    member.process.wait_ready(lambda m=member: m.server.healthy(timeout_s=_READY_S), timeout_s)  # type: ignore[misc]

    def run(self, work: Work) -> Iterator[tuple[int, list[Sampled]]]:
        """Yields (group index, its completions) as they finish, each index once.

        Raises:
            NeedsWeights: no live server, but at least one to sync.
            GuardStop: a request or the whole fleet has been waited for long enough.
        """
        pending = deque(index for index in range(len(work.groups)) if index not in work.done)
        attempts: dict[Future[list[Sampled]], _Attempt] = {}
        try:
            while (pending or attempts) and not work.given_up:
                self._assign(work, pending, attempts)
                if not attempts:
                    self._wait_for_anyone(work, pending)
                    continue
                finished, _ = wait(attempts, timeout=_TICK_S, return_when=FIRST_COMPLETED)
                for future in finished:
                    attempt = attempts.pop(future)
                    sampled = self._settle(future, attempt, work)
                    if sampled is None:
                        pending.appendleft(attempt.index)
                    elif attempt.index not in work.done:
                        work.done[attempt.index] = sampled
                        yield attempt.index, sampled
                self._probe()
                self._cut_stragglers(work, attempts, pending)
                self._watch(work, attempts)
            if work.given_up:
                self._abort(work, attempts)
        finally:
            for attempt in attempts.values():
                self._account(work, attempt.index, attempt.member, -1)
            if attempts:  # left early: whoever still waits for a socket is set free
                for member in self.members:
                    member.server.http.close()

    def close(self) -> None:
        """Cut every connection and end the threads."""
        for member in self.members:
            member.server.http.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._probes.shutdown(wait=False, cancel_futures=True)
        self._starter.shutdown(wait=False, cancel_futures=True)
        for member in self.members:
            if member.process is not None:
                member.process.stop()

    def _is_back(self, member: Member) -> None:
        with self.lock:
            member.answers()
        self.say(f"rollout: {member.name} answers again; it gets requests after a weight sync")

    def _assign(self, work: Work, pending: deque[int], attempts: dict[Future[list[Sampled]], _Attempt]) -> None:
        while pending:
            free = [member for member in self.live if self._has_room(member, work.groups[pending[0]])]
            if not free:
                return
            index = pending.popleft()
            member = min(free, key=lambda m: m.outstanding_tokens)
            self._account(work, index, member, +1)
            future = self._threads.submit(
                member.server.generate,
                work.groups[index],
                work.samplings[index],
                timeout_s=self._config.limits.request_timeout_s + _ANSWER_S,
            )
            attempts[future] = _Attempt(index, member, time.monotonic())

    def _has_room(self, member: Member, group: GenerateRequest) -> bool:
        """A group that is larger than the whole room goes alone: it could go nowhere else."""
        room = self._config.limits.max_concurrent_sequences - member.completions
        return member.groups < self._max_groups and (group.count <= room or member.groups == 0)

    def _account(self, work: Work, index: int, member: Member, sign: int) -> None:
        """Add a group to what `member` has in flight, or take it away."""
        with self.lock:
            (member.began if sign > 0 else member.ended)(work.cost(index), work.groups[index].count)

    def _settle(self, future: Future[list[Sampled]], attempt: _Attempt, work: Work) -> list[Sampled] | None:
        """The completions of one attempt; None if it has to be made again."""
        member = attempt.member
        self._account(work, attempt.index, member, -1)
        group = work.groups[attempt.index]
        try:
            sampled = future.result()
        except Unreachable as error:
            self.mark_out(member, str(error))
        except Refused as error:
            if 400 <= error.status < 500:
                raise GuardStop(f"{member.name} refused request {group.request_id}: {error}") from None
            self.mark_out(member, str(error))
        else:
            problem = _incomplete(sampled, group)
            if problem:
                raise GuardStop(f"{member.name}, request {group.request_id}: {problem}")
            foreign = {span[0] for one in sampled for span in one.weights_versions} - work.versions
            if foreign:
                self.mark_out(member, f"it generated with weights '{foreign.pop()}', which this run has not sent")
                work.retries += 1
                return None
            sampled = [_as_it_ended(one, work.samplings[attempt.index]) for one in sampled]
            ended = sum(one.finish_reason == "abort" for one in sampled)
            if not ended:
                return sampled
            if work.cut and all(len(one.token_ids) for one in sampled):
                work.cut_completions += ended
                return sampled
        work.retries += 1
        return None

    def _wait_for_anyone(self, work: Work, pending: deque[int]) -> None:
        deadline = time.monotonic() + self._config.limits.engine_wait_s
        self.say(
            "rollout: no server with the present weights; waiting up to"
            f" {self._config.limits.engine_wait_s:g} s for one"
        )
        while not self.live and not work.given_up:
            if any(member.state == "stale" for member in self.members):
                raise NeedsWeights
            if time.monotonic() > deadline:
                states = "; ".join(f"{name} {state}" for name, state in self.health().items())
                ids = [work.groups[index].request_id for index in pending]
                raise GuardStop(
                    f"all {len(self.members)} rollout servers have been gone for rollout.limits.engine_wait_s ="
                    f" {self._config.limits.engine_wait_s:g} s ({states}); waiting requests: {_listed(ids)}"
                )
            time.sleep(_TICK_S)
            self.restart_dead()
            self.revive()

    def _probe(self) -> None:
        """Start the health probes that are due and act on those that have come back."""
        now = time.monotonic()
        for member in self.members:
            probe = self._probing[member.name]
            if probe.answer is not None and probe.answer.done():
                error, probe.answer = probe.answer.exception(), None
                if error is None and member.state == "out":
                    self._is_back(member)
                elif error is not None and member.state != "out":
                    self.mark_out(member, f"no answer to its health probe: {error}")
            if probe.answer is None and now - probe.begun > self._config.limits.probe_every_s:
                probe.begun = now
                probe.answer = self._probes.submit(member.server.healthy, timeout_s=self._config.limits.probe_timeout_s)

    def _cut_stragglers(self, work: Work, attempts: dict[Future[list[Sampled]], _Attempt], pending: deque[int]) -> None:
        total = sum(group.count for group in work.groups)
        finished = sum(len(sampled) for sampled in work.done.values())
        if (
            not work.may_be_cut
            or work.cut
            or pending
            or not attempts
            or finished < self._config.limits.straggler_share * total
        ):
            return
        work.cut = True
        self._abort(work, attempts)

    def _abort(self, work: Work, attempts: dict[Future[list[Sampled]], _Attempt]) -> None:
        """Have the servers end what is in flight."""
        for member in self.live:
            groups = [work.groups[a.index] for a in attempts.values() if a.member is member]
            if groups:
                try:
                    member.server.abort(groups, timeout_s=_ANSWER_S)
                except (Unreachable, Refused) as error:
                    self.mark_out(member, str(error))

    def _watch(self, work: Work, attempts: dict[Future[list[Sampled]], _Attempt]) -> None:
        now = time.monotonic()
        late = [a for a in attempts.values() if now - a.started > self._config.limits.request_timeout_s]
        if late:
            names = [f"{work.groups[a.index].request_id} on {a.member.name}" for a in late]
            raise GuardStop(
                f"{len(late)} requests (step-prompt-completion) have run longer than rollout.limits.request_timeout_s ="
                f" {self._config.limits.request_timeout_s:g} s: {_listed(names)}"
            )


def _as_it_ended(one: Sampled, sampling: Sampling) -> Sampled:
    """An abort can meet a completion at its last token, and is then no abort."""
    if one.finish_reason != "abort" or not len(one.token_ids):
        return one
    if int(one.token_ids[-1]) in sampling.stop_token_ids:
        return replace(one, finish_reason="stop")
    return replace(one, finish_reason="length") if len(one.token_ids) == sampling.max_completion_tokens else one


def _incomplete(sampled: Sequence[Sampled], group: GenerateRequest) -> str:
    """What is wrong with an answer that came with status 200; empty if nothing."""
    if len(sampled) != group.count:
        return f"{len(sampled)} completions for {group.count} asked"
    for one in sampled:
        if len(one.logprobs) != len(one.token_ids):
            return f"{len(one.logprobs)} log-probabilities for {len(one.token_ids)} tokens"
    return ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f", and {len(names) - 8} more" if len(names) > 8 else "")
