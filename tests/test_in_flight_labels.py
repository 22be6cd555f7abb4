"""Servers that die, refuse and abort around checkpoints, and runs that resume from these: what was sampled twice is
labelled. Real clients, dispatch and state, over servers of the test's, on its clock."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_fleet import Inline, World, synced

from dppo_megatron.rollout.client import messages
from dppo_megatron.rollout.client.buffer import CompletionBuffer
from dppo_megatron.rollout.client.process import Client
from dppo_megatron.rollout.in_flight import packed, restore
from dppo_megatron.rollout.servers.dialects import VLLMDialect
from dppo_megatron.rollout.servers.dispatch import Dispatch, NeedsWeights
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.http import Refused, Unreachable
from dppo_megatron.rollout.servers.rollout_work import Work
from dppo_megatron.rollout.servers.wire import Event, Expected, GenerateRequest, Sampled, Submit, checked

LIMIT, STOP, PROMPT = 12, 1, (5, 6)
Place = tuple[int, int]


class Killed(Exception):
    """The trainer is, by SIGKILL."""


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time the test makes pass."""

    now = 0.0

    def time(self) -> float:
        return self.now


@dataclass
class Running:
    """A request at a server."""

    server: str
    group: GenerateRequest
    places: list[Place]
    answer: asyncio.Future[str]
    tokens: list[list[int]]
    versions: list[int]
    """Of each tick."""
    waits: int
    """Ticks until it is begun."""
    aborts_in: int = -1
    """Ticks until it obeys an abort; below 0: it has none to obey."""

    def is_over(self, index: int) -> bool:
        own = self.tokens[index]
        return len(own) >= self.group.limit(index) or STOP in own

    def path(self, index: int) -> list[int]:
        return [*self.group.prompt_ids[len(PROMPT) :], *self.tokens[index]]


class Servers:
    """All servers, as both clients reach them. A token a tick; a seeded token is a function of its request's seed, its
    number there and the weights, another one of nothing."""

    def __init__(self, draw: random.Random, *, seeded: bool) -> None:
        self.draw, self.seeded, self.version = draw, seeded, 1
        self.running: list[Running] = []
        self.dead: set[str] = set()
        self.lost: dict[Place, list[list[int]]] = defaultdict(list)
        """What was sampled of a completion by each attempt whose answer never came."""
        self.cut: dict[Place, list[int]] | None = None
        """During a look: what was sampled of completions when their requests obeyed an abort."""
        self.ended: set[int] = set()
        """Tickets that rank 0 has had ended."""
        self.went_on: list[int] = []
        """Those of them that were asked for again."""

    async def generate(self, submit: Submit) -> list[Sampled]:
        group = submit.group
        self.went_on += self.ended & {submit.ticket}
        if submit.server in self.dead:
            raise Unreachable("refused")
        first = int(group.request_id.partition(".")[0].rpartition("-")[2])
        places = [(submit.index, first + index) for index in range(group.count)]
        loop = asyncio.get_running_loop()
        one = Running(
            submit.server, group, places, loop.create_future(), [[] for _ in places], [], self.draw.choice((0, 0, 5))
        )
        self.running.append(one)
        try:
            reason = await one.answer
        except BaseException:
            for index, place in enumerate(places):
                self.lost[place].append(one.path(index))
            raise
        finally:
            self.running.remove(one)
        return checked([self._sampled(one, index, reason) for index in range(group.count)], group, submit.expected)

    async def abort(self, server: str, group: GenerateRequest) -> None:
        for one in self.running:
            if one.group.request_id == group.request_id and one.aborts_in < 0:
                one.aborts_in = self.draw.choice((0, 0, 1, 4))

    def tick(self) -> None:
        for one in [one for one in self.running if not one.answer.done()]:
            one.waits -= 1
            if one.waits < 0:
                one.versions.append(self.version)
                for index in [index for index in range(one.group.count) if not one.is_over(index)]:
                    one.tokens[index].append(self._token(one, index))
            if all(map(one.is_over, range(one.group.count))):
                one.answer.set_result("stop")
            elif one.aborts_in == 0:
                self._end(one)
            one.aborts_in -= one.aborts_in > 0

    def abort_one(self) -> None:
        """A server does so on its own, and what it had sampled is not used."""
        if waiting := [one for one in self.running if not one.answer.done() and one.aborts_in < 0 and any(one.tokens)]:
            self._end(self.draw.choice(waiting))

    def _end(self, one: Running) -> None:
        """Outside of looks nobody wants its tokens."""
        for index, place in enumerate(one.places):
            if self.cut is not None and place not in self.cut:
                self.cut[place] = one.path(index)
            elif not one.is_over(index):
                self.lost[place].append(one.path(index))
        one.answer.set_result("abort")

    def fail_all(self, server: str) -> None:
        for one in [one for one in self.running if one.server == server and not one.answer.done()]:
            one.answer.set_exception(Unreachable("reset"))

    def break_one(self) -> None:
        """Its server is out for it, with all others there: some of these may end before their clients are told."""
        if waiting := [one for one in self.running if not one.answer.done()]:
            self.draw.choice(waiting).answer.set_exception(Unreachable("reset"))

    def refuse_one(self) -> None:
        """One that has waited."""
        if waiting := [one for one in self.running if not one.answer.done() and one.waits >= 0]:
            self.draw.choice(waiting).answer.set_exception(Refused(429, "queue"))

    def _token(self, one: Running, index: int) -> int:
        key = f"{one.group.seed + index} {len(one.tokens[index])} {self.version}"
        drawn = zlib.crc32(key.encode()) if self.seeded else self.draw.getrandbits(32)
        return STOP if drawn % 9 == 0 else 2 + drawn % 17

    def _sampled(self, one: Running, index: int, reason: str) -> Sampled:
        ids, count = one.tokens[index], len(one.tokens[index])
        edges = [at for at in range(1, count) if one.versions[at] != one.versions[at - 1]]
        spans = zip([0, *edges], [*edges, count], strict=True) if count else ()
        versions = tuple((f"r.{one.versions[start]}", start, end) for start, end in spans)
        why: Any = ("stop" if STOP in ids else "length") if one.is_over(index) else reason
        return Sampled(np.array(ids, np.int32), np.full(count, -1.0, np.float32), why, versions)


@dataclass
class Trainer:
    """Rank 0 from a start to a kill: two clients with two servers each, and what happens to them in `events`."""

    servers: Servers
    loop: Clock
    work: Work
    happens: Callable[[Trainer], None]
    world: World = field(default_factory=World)
    queue: list[tuple[float, Event]] = field(default_factory=list)
    """What clients have sent to rank 0, and when."""
    saved: tuple[dict[str, Any], dict[Place, list[list[int]]], int] | None = None
    """State, what had been lost by then, and the weights' version."""

    def __post_init__(self) -> None:
        self.world.clients = {"a": 0, "b": 0, "c": 1, "d": 1}
        self.clients = [self._client() for _ in range(2)]
        self.fleet: Fleet = self.world.fleet(4, max_concurrent_sequences=3, request_timeout_s=9.0)
        self.fleet.clients = self  # type: ignore[assignment]
        for one in self.world.servers:
            one.dialect = VLLMDialect(seeded=self.servers.seeded)
        synced(self.fleet, f"r.{self.servers.version}")

    def _client(self) -> Client:
        client: Any = object.__new__(Client)
        client._attempts, client._begun, client._seen, client._failed_s = {}, {}, {}, {}
        client._interrupted, client._tasks, client._buffer = set(), set(), CompletionBuffer()
        client._loop, client._servers, client._send = self.loop, self.servers, self._receive
        client._text_thread, client._hook, client._setup = Inline(), None, SimpleNamespace(detokenizer=None)
        found: Client = client
        return found

    def sync(self) -> None:
        """Brings the next weights to all servers, and those that were out are back."""
        self.servers.version += 1
        self.servers.dead.clear()
        for one in self.world.servers:
            one.healthy_now = True
        synced(self.fleet, f"r.{self.servers.version}")

    def kill_servers(self) -> None:
        """One, or a node's."""
        for name in self.servers.draw.choice(("a", "b", "c", "d", "ab", "cd")):
            self.servers.dead.add(name)
            self.world.servers["abcd".index(name)].healthy_now = False
            self.servers.fail_all(name)

    def look(self) -> None:
        """As `ServerEngine.in_flight`, while servers go on, and anything may happen."""
        self.work.was_seen, self.servers.cut, found = True, {}, []
        before = deepcopy(self.servers.lost)
        looks = [self.loop.create_task(client._look([self.work.number])) for client in self.clients]
        while not all(look.done() for look in looks):
            self._tick()
        for look, client in zip(looks, self.clients, strict=True):
            look.result()
            found += client._seen.get(self.work.number, {}).items()
        state, cut, self.servers.cut = packed(self.work, found), self.servers.cut, None
        tokens = np.split(state["tokens"].numpy(), np.cumsum(state["lengths"])[:-1]) if state["lengths"] else []
        kept, lost = dict(zip(state["places"], map(np.ndarray.tolist, tokens), strict=True)), self.servers.lost
        if all(self.work.number in client._seen for client in self.clients):
            for place in kept.keys() & cut.keys():
                is_sure = place[0] not in state["resent"] and lost[place] == before[place]
                assert not is_sure or kept[place] == cut[place], f"{place} was seen later than others"
        else:  # all of one's are drawn anew, or from what an earlier checkpoint had
            before = defaultdict(list, {place: before[place] for place, _ in found})
        for place, own in kept.items():
            before[place].append(own)
        self.saved = state, before, self.servers.version

    def _tick(self) -> None:
        self.loop.now += 0.3
        self.world.now = self.loop.now
        self.happens(self)
        self.servers.tick()
        self.loop.run_until_complete(_settled())

    # what `Dispatch` asks of the clients

    def client_of(self, server: str) -> int:
        return self.world.client_of(server)

    def room(self, server: str) -> int:
        return 1000

    def gone(self, servers: Collection[str]) -> None: ...

    def _tell(self, client: int, message: messages.ToClient) -> None:
        sent = messages.TO_CLIENT.decode(messages.ENCODER.encode(message))

        async def handle() -> None:
            self.clients[client]._handle(sent)

        self.loop.run_until_complete(handle())

    def ask(self, ask: Submit) -> None:
        self._tell(self.client_of(ask.server), ask)

    def keep(self, server: str, key: tuple[int, int, int], sampled: Sampled) -> None:
        self._tell(self.client_of(server), messages.Begun(key, pickle.dumps(sampled)))

    def end(self, tickets: Sequence[int]) -> None:
        self.servers.ended.update(tickets)
        for client in range(2):
            self._tell(client, messages.EndRequests(list(tickets), False))

    def cancel(self, tickets: Sequence[int]) -> None:
        for number, client in enumerate(self.clients):
            for group in [one for ticket, one in client._buffer._groups.items() if ticket in tickets]:
                for place, one in enumerate(group.sampled, group.first):
                    if one.finish_reason != "abort":  # ended before its server was out, and rank 0 has not heard of it
                        self.servers.lost[group.index, place].append(one.token_ids.tolist())
            self._tell(number, messages.EndRequests(list(tickets), True))

    def events(self, timeout_s: float) -> list[Event]:
        self._tick()
        if not self.queue or (self.loop.now - self.queue[0][0] < 0.4 and self.servers.draw.random() < 0.5):
            return []
        found, self.queue = self.queue, []
        return [event for _, event in found]

    def _receive(self, event: Event) -> None:
        self.queue.append((self.loop.now, event))


async def _settled() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


def work_of(number: int) -> Work:
    groups = [
        GenerateRequest(f"1-{i}-0", PROMPT, 4, 100 * i, max_tokens=LIMIT, stop_token_ids=(STOP,)) for i in range(4)
    ]
    work = Work(groups, Expected(19, 1, 99, "r"), may_lose=True, may_split=True, number=number, digest="d")
    work.spread(2, 3)
    return work


def completed(trainer: Trainer) -> dict[Place, list[int]]:
    """All completions of its work, after any number of weight syncs. Raises Killed."""
    while not trainer.work.is_complete:
        with contextlib.suppress(NeedsWeights):
            for _ in Dispatch(trainer.fleet, [trainer.work]).run():
                pass
            break
        trainer.sync()
    taken = [group for client in trainer.clients for group in client._buffer.take(0, 1, trainer.work.number)]
    each = ((group.index, place, one) for group in taken for place, one in enumerate(group.sampled, group.first))
    return {(index, place): one.token_ids.tolist() for index, place, one in each if one.finish_reason != "abort"}


def something(trainer: Trainer) -> None:
    """Happens now and then."""
    servers, case = trainer.servers, trainer.servers.draw.random()
    if case < 0.06:
        trainer.kill_servers()
    elif case < 0.08:
        trainer.sync()
    elif case < 0.10:
        servers.refuse_one()
    elif case < 0.12:
        servers.abort_one()
    elif case < 0.14:
        servers.break_one()
    elif case < 0.22 and servers.cut is None:
        trainer.look()
    elif case < 0.26 and trainer.saved and servers.cut is None:
        raise Killed


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_what_is_sampled_twice_is_labelled(seed: int, seeded: bool) -> None:
    """If an attempt was lost and its tokens are not those that the completion has in the end, the group is in the row
    `rollout/resent`: over servers, clients, weights, checkpoints and resumes."""
    loop = Clock()
    servers = Servers(random.Random(seed), seeded=seeded)
    trainer = Trainer(servers, loop, work_of(1), something)
    try:
        for number in range(2, 9):
            try:
                found = completed(trainer)
                break
            except Killed:
                assert trainer.saved is not None
                loop.run_until_complete(_settled())
                state, servers.lost, servers.version = trainer.saved
                servers.dead.clear()
                servers.ended.clear()
                assert not servers.running
                trainer = Trainer(servers, loop, work_of(number), something)
                restore(trainer.work, state, "r")
        else:
            return
    finally:
        loop.run_until_complete(_settled())
        loop.close()
    assert not servers.went_on
    late = {place for index in trainer.work.ended for place in trainer.work.completions_of(index)}
    places = {(group, place) for group in range(4) for place in range(4)}
    assert places - found.keys() <= late | trainer.work.missing.keys()
    for place in found:
        for lost in servers.lost.get(place, ()):
            common = min(len(lost), len(found[place]))
            assert lost[:common] == found[place][:common] or place[0] in trainer.work.resent, (
                place,
                lost,
                found[place],
            )
