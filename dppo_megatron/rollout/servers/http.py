"""JSON over HTTP to an engine's server, with the two things a trainer needs and a convenience library hides.

Every request can be cut from outside (`close`), so that a server found hung frees the threads that wait for it; and
the two kinds of failure stay apart: `Unreachable` (nobody answers: try elsewhere) and `Refused` (an answer that says
no: trying again will not help). The standard library is enough for that. Nothing but JSON is read from the network.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

from dppo_megatron.types import UserError


class Unreachable(Exception):
    """No complete answer: refused, reset, timed out, or cut by `Http.close`."""


class Refused(Exception):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


def clean_key(key: str, where: str) -> str:
    """An API key without the white space around it: mounted secrets end in a newline.

    Raises:
        UserError: it cannot stand in a header. The message names `where` it came from and shows nothing of it.
    """
    key = key.strip()
    if any(not "!" <= character <= "~" for character in key):
        raise UserError(f"the API key in {where} holds white space or a character outside ASCII, which no header may")
    return key


class Http:
    """One server's address. Thread-safe; a connection belongs to one request at a time and is kept for the next.

    Args:
        url: http(s)://host:port, with an optional path prefix.
        api_key: sent as a bearer token; appears in no message and no repr.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.url = url.rstrip("/")
        self._prefix = parts.path.rstrip("/")
        self._host, self._port, self._tls = parts.hostname, parts.port, parts.scheme == "https"
        self._headers = {"Content-Type": "application/json"}
        self._key = api_key = clean_key(api_key, f"the request to {self.url}")
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._cuts = 0

    def __repr__(self) -> str:
        return f"Http({self.url})"

    def get(self, path: str, *, timeout_s: float) -> Any:
        """The decoded JSON answer (None for an empty one). Raises Unreachable or Refused."""
        return self._request("GET", path, None, timeout_s)

    def post(self, path: str, body: Any = None, *, timeout_s: float) -> Any:
        """As `get`, with a JSON body."""
        return self._request("POST", path, {} if body is None else body, timeout_s)

    def close(self) -> None:
        """Cut every connection. Requests in flight raise Unreachable in their own threads."""
        with self._lock:
            connections = [*self._idle, *self._busy]
            self._idle.clear()
            self._cuts += 1
        for connection in connections:
            with contextlib.suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _request(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        payload = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        cuts = self._cuts
        connection, reused = self._take(timeout_s)
        try:
            try:
                status, content = self._exchange(connection, method, path, payload)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                # a kept connection that the server has closed meanwhile: nothing was processed, once more afresh
                if not reused or cuts != self._cuts:
                    raise
                self._drop(connection)
                connection = self._fresh(timeout_s)
                status, content = self._exchange(connection, method, path, payload)
        except (OSError, http.client.HTTPException) as error:
            self._drop(connection)
            raise Unreachable(f"{self.url}{path}: {type(error).__name__}: {error}") from None
        with self._lock:
            self._busy.discard(connection)
            self._idle.append(connection)
        if status >= 400:
            said = _excerpt(content)  # a proxy may send our headers back
            raise Refused(status, said.replace(self._key, "***") if self._key else said)
        if not content:
            return None
        try:
            return json.loads(content)
        except ValueError:
            return content.decode(errors="replace")

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, payload: bytes | None
    ) -> tuple[int, bytes]:
        connection.request(method, self._prefix + path, payload, self._headers)
        response = connection.getresponse()
        return response.status, response.read()

    def _take(self, timeout_s: float) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            if self._idle:
                connection = self._idle.pop()
                self._busy.add(connection)
                if connection.sock is not None:
                    connection.sock.settimeout(timeout_s)
                    return connection, True
                connection.timeout = timeout_s
                return connection, False
        return self._fresh(timeout_s), False

    def _fresh(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout_s)
        with self._lock:
            self._busy.add(connection)
        return connection

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        connection.close()
        with self._lock:
            self._busy.discard(connection)


def _excerpt(content: bytes) -> str:
    """The message of an error body: FastAPI's and both engines' forms of it."""
    text = content.decode(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        return text[:500]
    for key in ("error", "detail", "message"):
        inner = body.get(key) if isinstance(body, dict) else None
        if isinstance(inner, dict):
            inner = inner.get("message", inner)
        if inner:
            return str(inner)[:500]
    return text[:500]
