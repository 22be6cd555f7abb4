"""One group asked of one server over HTTP, from its first byte to its last, in an event loop with thousands of others.

aiohttp keeps the connections. What is ours is what a trainer must be sure of: a deadline for the whole call, a cap on
the answer, no redirects, no decompression (a small answer can unpack to gigabytes), and a server that closes an idle
connection has not failed (`Stale`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from dppo_megatron.rollout.client.messages import Address
from dppo_megatron.rollout.servers.http import (
    OUR_ERRORS,
    BadAnswer,
    NotProven,
    Refused,
    Unreachable,
    brief,
    excerpt,
    retry_after_s,
)
from dppo_megatron.rollout.servers.identity import Question
from dppo_megatron.rollout.servers.intake import Ask
from dppo_megatron.rollout.servers.wire import Call, GenerateRequest, Sampled, checked

_ERROR_BYTES = 64 << 10
_IDLE_S = 4.0
"""uvicorn, which both engines use, closes connections that have been idle for five seconds."""
_ABORT_S = 30.0
_READERS = 8
"""Answers that are read at a time."""
_PATIENCE_S, _SLOW_BYTES = 0.5, 256 << 10
"""A body that brings less in this time is slow."""


STALE_TRIES = 3
"""Of one attempt over kept connections. The first break tells the loop of all others that were closed by then."""


class OurFault(Exception):
    """This machine has run out of something: no server is to blame."""


class Stale(Unreachable):
    """A kept connection broke before an answer. Most often it had been closed while idle; but the server may have read
    the request, so whoever asks again does so under another id: SGLang refuses one that it has."""


class _Slot:
    """The right to read an answer's body, until it is read or turns out to be slow.

    An answer of 48,000 tokens is 8 MB, and a thousand may come at once: those that wait stay at the servers. A slow one
    must not keep the fast ones waiting: it loses its slot and is read beside them, since what trickles takes no memory.
    """

    def __init__(self, slots: asyncio.Semaphore, content: bytearray) -> None:
        self._slots, self._content = slots, content
        self._seen = 0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        self._timer = asyncio.get_running_loop().call_later(_PATIENCE_S, self._look)

    async def __aexit__(self, *_: object) -> None:
        self._give_back()

    def _look(self) -> None:
        if len(self._content) - self._seen < _SLOW_BYTES:
            self._give_back()
        else:
            self._seen = len(self._content)
            self._timer = asyncio.get_running_loop().call_later(_PATIENCE_S, self._look)

    def _give_back(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._slots.release()


class _ToServers(aiohttp.TCPConnector):
    """Connections whose other end has proven that it is the server, where that can (`servers/identity.py`)."""

    provers: dict[tuple[str | None, int], Address]

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.provers = {}

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        """Documented as what a connector of one's own overrides."""
        made = await super()._create_connection(req, traces, timeout)
        server, transport = self.provers.get(_place(str(req.url))), made.transport
        if server is None:
            return made
        assert transport is not None
        question, reader = Question(server.api_key, transport.get_extra_info("peername")), asyncio.StreamReader()
        transport.set_protocol(asyncio.StreamReaderProtocol(reader))
        try:
            transport.write(question.request)
            with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                if question.is_answered_by(await reader.readuntil(b"\r\n\r\n")):
                    transport.set_protocol(made)
                    return made
            raise NotProven(server.url)
        finally:
            if transport.get_protocol() is not made:
                transport.abort()


def _place(url: str) -> tuple[str | None, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or 80


class Asker:
    """Asks servers. Made and used in a running event loop.

    Args:
        sockets: that may be open at a time.
    """

    def __init__(self, sockets: int) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        self._connector = _ToServers(limit=sockets, keepalive_timeout=_IDLE_S)
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
            auto_decompress=False,
            trace_configs=[trace],
        )
        self._reading = asyncio.Semaphore(_READERS)
        self._sockets = sockets
        self._servers: dict[int, Address] = {}

    def know(self, servers: list[Address]) -> None:
        """The servers that may be asked, by their numbers."""
        self._servers |= {address.server: address for address in servers}
        self._connector.provers |= {_place(address.url): address for address in servers if address.proves}

    async def ask(self, ask: Ask) -> list[Sampled]:
        """The completions of a group, checked.

        Raises:
            Unreachable (Stale among them), Refused, BadAnswer, OurFault.
        """
        server = self._servers[ask.server]
        answers: list[bytes] = []
        try:
            async with asyncio.timeout(ask.timeout_s):
                for calls in server.dialect.rounds(ask.group):
                    answers = await self._post_all(server, calls, ask.group.answer_bytes)
        except TimeoutError:
            raise Unreachable(f"{server.url}: no complete answer after {ask.timeout_s:g} s") from None
        return checked(server.dialect.read(answers, ask.group), ask.group, ask.expected)

    async def end(self, server: int, group: GenerateRequest) -> None:
        """Have the server end a request; who cannot be reached has ended it, or will be found hung by its probe. All
        workers of a router are told: nobody else knows which of them has it."""
        address = self._servers[server]
        workers = [msgspec.structs.replace(address, url=url) for url in address.workers or [address.url]]
        await asyncio.gather(*(self._end_at(worker, group) for worker in workers))  # none waits for one that hangs

    async def _end_at(self, worker: Address, group: GenerateRequest) -> None:
        for call in worker.dialect.abort_calls(group):
            try:
                async with asyncio.timeout(_ABORT_S):
                    await self._post_again(worker, call)
            except (Unreachable, Refused, OurFault, TimeoutError):
                return

    async def _post_again(self, server: Address, call: Call) -> None:
        """A call that may be made more than once."""
        for left in reversed(range(STALE_TRIES)):
            try:
                await self._post(server, call, _ERROR_BYTES)
                return
            except Stale:
                if not left:
                    raise

    async def close(self) -> None:
        """Cut all connections."""
        await self._session.close()

    async def _post_all(self, server: Address, calls: Sequence[Call], max_bytes: int) -> list[bytes]:
        """Their answers, in order. The first that fails ends the others."""
        if len(calls) == 1:
            return [bytes(await self._post(server, calls[0], max_bytes))]
        posts = [asyncio.ensure_future(self._post(server, call, max_bytes)) for call in calls]
        try:
            return [bytes(answer) for answer in await asyncio.gather(*posts)]
        finally:
            for post in posts:
                post.cancel()

    async def _post(self, server: Address, call: Call, max_bytes: int) -> bytearray:
        """The body of a 2xx answer."""
        flags = SimpleNamespace(reused=False)
        try:
            return await self._exchange(server, call, max_bytes, flags)
        except (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError) as error:
            kind = Stale if flags.reused else Unreachable
            raise kind(f"{server.url}{call.path}: {brief(error, server.api_key)}") from None
        except Exception as error:
            raise self._told(error, server, call) from None

    async def _exchange(self, server: Address, call: Call, max_bytes: int, flags: SimpleNamespace) -> bytearray:
        key = server.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self._session.post(
            server.url + call.path, data=call.body, headers=headers, allow_redirects=False, trace_request_ctx=flags
        ) as response:
            good = 200 <= response.status < 300
            limit = max_bytes if good else _ERROR_BYTES
            content = bytearray()
            async with _Slot(self._reading, content):
                async for part in response.content.iter_any():
                    content += part
                    if len(content) > limit:
                        response.close()
                        if good:
                            raise BadAnswer(f"{server.url}{call.path}: an answer of more than {max_bytes} bytes")
                        break
            if not good:
                said = excerpt(bytes(content), key)  # a proxy may send our headers back
                raise Refused(response.status, said, retry_after_s(response.headers.get("Retry-After")))
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise BadAnswer(f"{server.url}{call.path}: an encoding that was not asked for")
            return content

    def _told(self, error: Exception, server: Address, call: Call) -> Exception:
        """Whatever a server can make the client raise, as one of the three kinds of failure."""
        if isinstance(error, (Unreachable, Refused)):
            return error
        if isinstance(error, OSError) and error.errno in OUR_ERRORS:
            return OurFault(
                f"the rollout client can open no more connections ({error.strerror}); it keeps to {self._sockets}, for"
                " its limit on open files (ulimit -n)"
            )
        return Unreachable(f"{server.url}{call.path}: {brief(error, server.api_key)}")


async def _note_reuse(session: aiohttp.ClientSession, context: Any, parameters: Any) -> None:
    context.trace_request_ctx.reused = True
