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

import secrets
from typing import Any

from dppo_megatron.rollout.servers.in_engine.dppo_vllm_guard import PROOF_HEADER, PROOF_PATH, proof

LARGEST_ANSWER = 8192


class Question:
    """What the other end of one new connection is asked.

    Args:
        peer: the connection's other end, as of `getpeername`.
    """

    def __init__(self, key: str, peer: Any) -> None:
        nonce = secrets.token_hex(32).encode()
        self.request = b"GET %s?%s HTTP/1.1\r\nHost: server\r\n\r\n" % (PROOF_PATH.encode(), nonce)
        self._wanted = b"\r\n%s: %s\r\n" % (PROOF_HEADER, proof(key, nonce, peer[:2]))

    def is_answered_by(self, head: bytes) -> bool:
        """Whether the head of the answer, up to its empty line, has the proof."""
        return head.startswith(b"HTTP/1.1 204 ") and self._wanted in head.lower()
