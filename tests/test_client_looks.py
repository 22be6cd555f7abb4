"""A client whose requests are looked at for a checkpoint, and its aborts, at servers that hang or break."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_fleet import groups, work_of

from dppo_megatron.rollout.client.buffer import CompletionBuffer
from dppo_megatron.rollout.client.connections import ServerConnections
from dppo_megatron.rollout.client.messages import Arrived, ServerAddress
from dppo_megatron.rollout.client.process import Client
from dppo_megatron.rollout.in_flight import collected
from dppo_megatron.rollout.servers.dialects import VLLMDialect
from dppo_megatron.rollout.servers.http import Peer, Stale
from dppo_megatron.rollout.servers.wire import (
    NOT_BEGUN,
    Expected,
    GenerateRequest,
    Sampled,
    Submit,
)


def test_one_that_hangs_holds_a_checkpoint_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rollouts are looked at together: the one that is on other servers is kept. What has ended too late to be seen
    goes on like the others."""
    monkeypatch.setattr("dppo_megatron.rollout.client.process._INTERRUPT_S", 0.3)
    one = Sampled(np.array([5, 6], np.int32), np.zeros(2, np.float32), "abort", (("r.1", 0, 2),))

    async def look() -> dict[int, dict[tuple[int, int], Sampled]]:
        ends: dict[str, asyncio.Event] = {"a": asyncio.Event(), "b": asyncio.Event()}
        asked: list[tuple[str, int]] = []

        class Two:
            async def abort(self, server: str, group: GenerateRequest) -> None:
                if server == "b":
                    ends["b"].set()

            async def generate(self, submit: Submit) -> list[Sampled]:
                asked.append((submit.server, len(submit.group.prompt_ids)))
                await ends[submit.server].wait()
                ends[submit.server].clear()
                return [one] * submit.group.count

        client: Any = object.__new__(Client)
        client._attempts, client._begun, client._interrupted, client._tasks = {}, {}, set(), set()
        client._seen, client._failed_s = {}, {}
        client._loop, client._buffer, client._servers = asyncio.get_running_loop(), CompletionBuffer(), Two()
        for number, server in ((7, "a"), (8, "b")):
            client._handle(Submit(number, 0, server, groups(1)[0], Expected(19, 1, 2), 60.0, b"", number, 0))
        await client._look([7, 8])
        ends["a"].set()
        async with asyncio.timeout(20.0):
            while len(asked) < 4:
                await asyncio.sleep(0)
        assert sorted(asked) == [("a", 1), ("a", 3), ("b", 1), ("b", 3)]
        for attempt in client._attempts.values():
            attempt.task.cancel()
        found: dict[int, dict[tuple[int, int], Sampled]] = client._seen
        return found

    assert asyncio.run(look()) == {8: {(0, 0): one}}
    asked: list[tuple[int, tuple[int, ...]]] = []

    def take(rollout: int, looks_at: tuple[int, ...]) -> list[Arrived]:
        asked.append((rollout, looks_at))
        return []

    collected([replace(work_of(groups(1)), order=order, number=order) for order in (4, 5)], take)
    assert asked == [(4, (4, 5)), (5, ())]


@pytest.mark.parametrize(("after_s", "asked"), [(0.1, 3), (60.0, 1)])
def test_a_connection_that_breaks_in_mid_request_is_a_failure(after_s: float, asked: int) -> None:
    """A proxy that ends what takes a minute: asked again unsaid, until a short one comes, no label would tell of it."""
    times, sent = list[float](), list[Any]()

    async def attempt() -> None:
        class Breaks:
            async def abort(self, server: str, group: GenerateRequest) -> None: ...

            async def generate(self, submit: Submit) -> list[Sampled]:
                times.append(after_s)
                raise Stale("closed")

        client: Any = object.__new__(Client)
        client._attempts, client._begun, client._interrupted, client._tasks = {}, {}, set(), set()
        client._seen, client._failed_s, client._send, client._servers = {}, {}, sent.append, Breaks()
        client._loop = SimpleNamespace(time=lambda: sum(times))
        client._handle(Submit(1, 0, "a", groups(1)[0], Expected(19, 1, 2), 600.0, b"", 7, 0))
        await client._attempts[1].task

    asyncio.run(attempt())
    assert len(times) == asked and [one.kind for one in sent] == ["unreachable"]


def test_a_server_is_not_told_again_before_it_has_answered() -> None:
    """Of 2,000 requests, each told anew after 0.02, 0.04, ... s, it would have 10,000 calls before them all."""
    told: list[str] = []

    async def look() -> None:
        answers, ended = asyncio.Event(), asyncio.Event()

        class Slow:
            async def abort(self, server: str, group: GenerateRequest) -> None:
                told.append(group.request_id)
                await answers.wait()
                ended.set()

            async def generate(self, submit: Submit) -> list[Sampled]:
                await ended.wait()
                ended.clear()
                return [NOT_BEGUN] * submit.group.count

        client: Any = object.__new__(Client)
        client._attempts, client._begun, client._interrupted, client._tasks = {}, {}, set(), set()
        client._seen, client._failed_s = {}, {}
        client._loop, client._buffer, client._servers = asyncio.get_running_loop(), CompletionBuffer(), Slow()
        client._handle(Submit(1, 0, "a", groups(1)[0], Expected(19, 1, 2), 60.0, b"", 7, 0))
        looking = asyncio.create_task(client._look([7]))
        await asyncio.sleep(0.5)
        answers.set()
        await looking
        assert client._seen == {7: {}}
        client._attempts[1].task.cancel()

    asyncio.run(look())
    assert len(told) == 1


def test_aborts_at_servers_that_hang_hold_up_no_others() -> None:
    """What is late at the others would never be told, time out with all of its tokens, and mark them out."""

    async def end() -> None:
        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        connections, group = ServerConnections(4), groups(1)[0]
        servers = [await asyncio.start_server(each, "127.0.0.1", 0) for each in (*[hang] * 8, answer)]
        *hung, well = [f"http://127.0.0.1:{one.sockets[0].getsockname()[1]}" for one in servers]
        connections.add([ServerAddress(Peer(url), VLLMDialect()) for url in (*hung, well)])
        told = [asyncio.create_task(connections.abort(url, group)) for url in hung for _ in range(200)]
        await asyncio.sleep(0.1)
        await asyncio.wait_for(connections.abort(well, group), 10.0)
        for task in told:
            task.cancel()
        await asyncio.gather(*told, return_exceptions=True)
        await connections.close()

    asyncio.run(end())
