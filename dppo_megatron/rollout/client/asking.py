"""One group asked of one server, from its first byte to its last, in an event loop with thousands of others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from dppo_megatron.rollout.client.messages import Address
from dppo_megatron.rollout.servers.http import ERROR_BYTES, OurFault, Peer, Refused, Transport, Unreachable
from dppo_megatron.rollout.servers.intake import Ask
from dppo_megatron.rollout.servers.wire import Call, GenerateRequest, Sampled, checked

_ABORT_S = 30.0


class Asker:
    """Asks servers. Made and used in a running event loop.

    Args:
        sockets: that may be open at a time.
    """

    def __init__(self, sockets: int) -> None:
        self._transport, self._sockets = Transport(sockets), sockets
        self._servers: dict[int, Address] = {}

    def know(self, servers: list[Address]) -> None:
        """The servers that may be asked, by their numbers."""
        self._servers |= {address.server: address for address in servers}
        for address in servers:
            self._transport.know(_peer(address))

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
        except OurFault as error:
            raise OurFault(
                f"the rollout client can open no more connections ({error}); it keeps to {self._sockets}, for its limit"
                " on open files (ulimit -n)"
            ) from None
        return checked(server.dialect.read(answers, ask.group), ask.group, ask.expected)

    async def end(self, server: int, group: GenerateRequest) -> None:
        """Have the server end a request; who cannot be reached has ended it, or will be found hung by its probe. All
        workers of a router are told: nobody else knows which of them has it."""
        address = self._servers[server]
        workers = [msgspec.structs.replace(address, url=url) for url in address.workers or [address.url]]
        await asyncio.gather(*(self._end_at(worker, group) for worker in workers))  # none waits for one that hangs

    async def close(self) -> None:
        """Cut all connections."""
        await self._transport.close()

    async def _end_at(self, worker: Address, group: GenerateRequest) -> None:
        for call in worker.dialect.abort_calls(group):
            try:
                async with asyncio.timeout(_ABORT_S):
                    await self._transport.repeat(_peer(worker), "POST", call.path, call.body, ERROR_BYTES)
            except (Unreachable, Refused, OurFault, TimeoutError):
                return

    async def _post_all(self, server: Address, calls: Sequence[Call], max_bytes: int) -> list[bytes]:
        """Their answers, in order. The first that fails ends the others."""
        peer, post = _peer(server), self._transport.request
        if len(calls) == 1:
            return [bytes(await post(peer, "POST", calls[0].path, calls[0].body, max_bytes))]
        posts = [asyncio.ensure_future(post(peer, "POST", call.path, call.body, max_bytes)) for call in calls]
        try:
            return [bytes(answer) for answer in await asyncio.gather(*posts)]
        finally:
            for begun in posts:
                begun.cancel()


def _peer(address: Address) -> Peer:
    return Peer(address.url, address.api_key, address.proves)
