"""Demands the server's key at every path, since vLLM's own check protects only generation and the model list.

In development mode vLLM accepts weights, and calls of its workers' methods, from any program that reaches the port: its
key protects /v1, /v2, /inference and /cohere only (0.32.0). This is vLLM's public way to add such a check:

    VLLM_API_KEY=... vllm serve ... --middleware dppo_vllm_guard.RequireKey

One path needs no key: there the server proves to a client that it has the key (`proof`), before the client sends it.

Imports nothing of the package, because it runs in the engine's environment.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

PROOF_PATH = "/dppo_proof"
"""GET PROOF_PATH?NONCE is answered with 204 and the header PROOF_HEADER."""
PROOF_HEADER = b"dppo-proof"
_NONCE_DIGITS = 64


def proof(key: str, nonce: bytes, address: tuple[str, int]) -> bytes:
    """The HMAC that proves possession of `key`, in hexadecimal digits. `address` is the server's end of the connection,
    as both kernels report it: one that relays to another server with the same key gets a proof for that address."""
    return hmac.new(key.encode(), b"%s %s %d" % (nonce, address[0].encode(), address[1]), "sha256").hexdigest().encode()


class RequireKey:
    """ASGI middleware: 401 for a request without `Authorization: Bearer` and the key in the variable `variable`."""

    def __init__(self, app: App, variable: str = "VLLM_API_KEY") -> None:
        key = os.environ.get(variable, "")
        if not key:
            raise RuntimeError(f"dppo_vllm_guard.RequireKey: the environment variable {variable} is not set")
        self._app, self._key, self._wanted = app, key, f"Bearer {key}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == PROOF_PATH and len(scope["query_string"]) == _NONCE_DIGITS:
            headers = [(PROOF_HEADER, proof(self._key, scope["query_string"], scope["server"]))]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        if scope["type"] in ("http", "websocket"):
            authorization = dict(scope.get("headers") or []).get(b"authorization", b"")
            if not hmac.compare_digest(authorization, self._wanted):
                await _refuse(scope["type"], send)
                return
        await self._app(scope, receive, send)


async def _refuse(kind: str, send: Send) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"error": "this server requires its key"}'})
