"""A server proves its identity before anything is sent to it: neither the key nor a request.

Anybody can read a launched server's port in its command line before it is bound. Another user's program that binds it
first would get the key with the first health probe, and its completions would be trained on.

    new connection  --- GET /dppo_proof?NONCE ------------------------------------------------------>  our check in the
    use or close it <-- HMAC-SHA256(key, NONCE, address and port of the server's end) ---------------  server's process

Asked once for each connection: a connection stays with the process that accepted it. So starts, restarts, outages and
new servers need no further rule, whether a server runs here, on another node or under `serve`. /proc/net/tcp could show
that the listening socket is our child's, but for this machine only, and only for that moment.

A man in the middle between two machines still reads and writes what follows: it is plain HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any

from dppo_megatron.rollout.servers.in_engine.dppo_vllm_guard import PROOF_HEADER, PROOF_PATH, proof

_LARGEST_ANSWER = 8192


async def is_proven(made: Any, key: str) -> bool:
    """Whether the other end of `made`, a new connection of aiohttp's, has the server's key; else it is closed."""
    transport, nonce = made.transport, secrets.token_hex(32).encode()
    wanted = b"\r\n%s: %s\r\n" % (PROOF_HEADER, proof(key, nonce, transport.get_extra_info("peername")[:2]))
    reader = asyncio.StreamReader(limit=_LARGEST_ANSWER)
    transport.set_protocol(asyncio.StreamReaderProtocol(reader))
    try:
        transport.write(b"GET %s?%s HTTP/1.1\r\nHost: server\r\n\r\n" % (PROOF_PATH.encode(), nonce))
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"HTTP/1.1 204 ") and wanted in head.lower():
                transport.set_protocol(made)
                return True
        return False
    finally:
        if transport.get_protocol() is not made:
            transport.abort()
