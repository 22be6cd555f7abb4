"""A fleet over fake servers, with a clock of the test's.

A fake server is its health; fake clients are a function from an `Submit` to what comes of it. Nothing here sleeps: when
nothing happens they let the clock go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, cast

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.rollout.servers.dialects import VLLMDialect
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.http import Unreachable
from dppo_megatron.rollout.servers.rollout_work import Work
from dppo_megatron.rollout.servers.wire import (
    AttemptFailed,
    Completed,
    Event,
    Expected,
    GenerateRequest,
    Graded,
    Sampled,
    Submit,
)
from support.logged import logged_lines
from support.settings import rollout_config


@dataclass
class FakeServer:
    """Healthy, or not."""

    name: str
    healthy_now: bool = True
    replicas: int = 1
    dialect: VLLMDialect = field(default_factory=VLLMDialect)

    @property
    def http(self) -> Any:
        return self

    @property
    def url(self) -> str:
        return self.name

    def healthy(self, *, timeout_s: float) -> None:
        if not self.healthy_now:
            raise Unreachable("no answer")

    def close(self) -> None: ...


class Inline(Executor):
    """Questions are answered before `submit` returns."""

    def submit(self, action: Callable[..., Any], /, *arguments: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(action(*arguments, **more))
        except Exception as error:
            future.set_exception(error)
        return future


def answered(ask: Submit, reason: str = "stop", length: int = 2) -> Completed:
    count = ask.group.count
    return Completed(ask.ticket, [length] * count, [reason] * count, [(1, length * count)])


def broken(ask: Submit, text: str = "connection reset") -> AttemptFailed:
    return AttemptFailed(ask.ticket, "unreachable", text)


@dataclass
class World:
    """Servers, a clock, and `reply`: what comes of an attempt now; None if nothing yet."""

    reply: Callable[[Submit], Event | None] = answered
    now: float = 0.0
    asked: list[Submit] = field(default_factory=list)
    open: dict[int, Submit] = field(default_factory=dict)
    kept: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Server, rollout, group and position of what was given to a client before an attempt."""
    cancelled: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    late: list[Event] = field(default_factory=list)
    """Events that were on their way when their ticket was cancelled."""
    said: list[str] = field(default_factory=logged_lines)
    capacity: int = 1000
    clients: dict[str, int] = field(default_factory=dict)
    """Server -> the client that asks it; all the same one's else."""

    def fleet(self, count: int = 2, **limits: Any) -> Fleet:
        config = rollout_config({f"limits.{name}": value for name, value in limits.items()})
        self.servers = [FakeServer(name) for name in "abcdefgh"[:count]]
        given: Any = (self.servers, config, self, (), lambda: self.now, Inline())
        fleet = Fleet(*given)
        synced(fleet)
        return fleet

    def client_of(self, server: str) -> int:
        return self.clients.get(server, 0)

    def room(self, server: str) -> int:
        return self.capacity

    def gone(self, servers: Collection[str]) -> None: ...

    def ask(self, ask: Submit) -> None:
        self.asked.append(ask)
        self.open[ask.ticket] = ask

    def keep(self, server: str, key: tuple[int, int, int], sampled: Sampled) -> None:
        self.kept.append((server, *key))

    def end(self, tickets: Sequence[int]) -> None:
        self.ended += tickets

    def cancel(self, tickets: Sequence[int]) -> None:
        self.cancelled += tickets
        for ticket in tickets:
            if self.open.pop(ticket, None) is not None:
                self.late.append(Completed(ticket, [2], ["stop"], [(1, 2)]))

    def events(self, timeout_s: float) -> list[Event]:
        found, self.late = self.late, []
        for ask in list(self.open.values()):
            event = self.reply(ask)
            if event is not None:
                del self.open[ask.ticket]
                found += [event, Graded(ask.ticket)] if isinstance(event, Completed) else [event]
        if not found:
            self.now += timeout_s
        return found


class _NoRollouts:
    def gone(self, servers: Collection[str]) -> None: ...


def fleet_of(servers: Sequence[Any], config: RolloutConfig, **more: Any) -> Fleet:
    """Without rollouts: for weight syncs, probes, and servers that come and leave."""
    return Fleet(servers, config, cast(Any, _NoRollouts()), **more)


def synced(fleet: Fleet, version: str = "1") -> None:
    """What a weight sync does to the members that answer."""
    fleet.revive()
    fleet.expect(version)
    with fleet.lock:
        for member in fleet.members:
            member.synced(version)


def groups(*counts: int, tokens: int = 4) -> list[GenerateRequest]:
    return [GenerateRequest(f"1-{i}-0", (1,), count, 0, max_tokens=tokens) for i, count in enumerate(counts)]


def work_of(requests: Sequence[GenerateRequest], **values: Any) -> Work:
    """Of training."""
    return Work(list(requests), Expected(19, 1, 2), **{"may_lose": True} | values)


def nothing_in_flight(fleet: Fleet) -> bool:
    return all((m.groups, m.completions, m.outstanding_tokens) == (0, 0, 0) for m in fleet.members)
