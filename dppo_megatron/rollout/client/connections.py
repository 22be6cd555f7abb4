"""The client's connections to servers: requests within the limit on open files, aborts on connections of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from dppo_megatron.rollout.client import messages
from dppo_megatron.rollout.servers.http import ERROR_BYTES, OurFault, Refused, Transport, Unreachable
from dppo_megatron.rollout.servers.wire import NOT_BEGUN, Call, GenerateRequest, Sampled, Submit, checked

OWN_FILES = 160
"""Open files that the client needs in addition to the sockets of its requests."""
_ABORT_S = 30.0
_ABORTS, _ABORTS_EACH = 128, 12
"""Connections for aborts, among `OWN_FILES`, and to one server: aborts at one that hangs hold up no others'."""


class ServerConnections:
    """Sends requests to servers over at most `sockets` connections at a time. Made and used in a running event loop."""

    def __init__(self, sockets: int) -> None:
        self._transport, self._sockets = Transport(sockets), sockets
        self._aborts = Transport(_ABORTS, _ABORTS_EACH)
        """Their own connections: after a look each completion has one, for which the abort that frees it would wait."""
        self._servers: dict[str, messages.ServerAddress] = {}
        self._running: set[str] = set()
        """Ids of requests in flight that have not been aborted."""

    def add(self, servers: list[messages.ServerAddress]) -> None:
        """Add servers; one with a known address replaces the previous server there."""
        for address in servers:
            self._servers[address.peer.url] = address
            self._transport.know(address.peer)
            self._aborts.know(address.peer)

    async def generate(self, submit: Submit) -> list[Sampled]:
        """The completions of a group, checked. If the request is aborted before its last round is posted, that is not
        posted and the completions are empty: the server could not abort a request that reaches it after the abort.
        Raises Unreachable (Stale, BadAnswer), Refused, OurFault."""
        server, group = self._servers[submit.server], submit.group
        answers: list[bytes] = []
        self._running.add(group.request_id)
        try:
            async with asyncio.timeout(submit.timeout_s):
                for calls in server.dialect.rounds(group):
                    if group.request_id not in self._running:
                        return [NOT_BEGUN] * group.count
                    answers = await self._post_all(server, calls, group.answer_bytes)
        except TimeoutError:
            raise Unreachable(f"{server.peer.url}: no complete answer after {submit.timeout_s:g} s") from None
        except OurFault as error:
            limit = f"it opens at most {self._sockets}, because of its limit on open files (ulimit -n)"
            raise OurFault(f"the rollout client can open no more connections ({error}); {limit}") from None
        finally:
            self._running.discard(group.request_id)
        return checked(server.dialect.read(answers, group), group, submit.expected)

    async def abort(self, server: str, group: GenerateRequest) -> None:
        """Have the server abort a request. Failures are ignored: health probes find a server that hangs."""
        self._running.discard(group.request_id)
        address = self._servers[server]
        with contextlib.suppress(Unreachable, Refused, OurFault):
            for call in address.dialect.abort_calls(group):
                await self._aborts.repeat(address.peer, "POST", call.path, call.body, ERROR_BYTES, _ABORT_S)

    async def close(self) -> None:
        await asyncio.gather(self._transport.close(), self._aborts.close())

    async def _post_all(self, server: messages.ServerAddress, calls: Sequence[Call], max_bytes: int) -> list[bytes]:
        """The answers to `calls`, in order. The first failure cancels the other calls."""
        peer, post = server.peer, self._transport.request
        if len(calls) == 1:
            return [bytes(await post(peer, "POST", calls[0].path, calls[0].body, max_bytes))]
        posts = [asyncio.ensure_future(post(peer, "POST", call.path, call.body, max_bytes)) for call in calls]
        try:
            return [bytes(answer) for answer in await asyncio.gather(*posts)]
        finally:
            for task in posts:
                task.cancel()
