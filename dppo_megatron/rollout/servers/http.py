"""JSON over HTTP to an engine's server, with what a trainer needs and a convenience library hides.

For questions, pausing and weights: a few calls at a time, from threads. Completions come through the rollout clients
(`rollout/client`), which have thousands in flight. What both have in common:

- A deadline is for a whole call: connecting, sending, and every byte of the answer. A server that gives a byte now and
  then keeps nobody.
- An answer has a size that it may not pass, and only 2xx is success: a redirect is a wrong address, not weights.
- An answer is decoded as the type that the caller names, with the bounds in it: no value of a server's is read that
  was not checked.
- Three kinds of failure: `Unreachable` (nobody answers: try elsewhere), `Refused` (an answer that says no), and
  `BadAnswer` (it says yes, and what it says cannot be so).

Every request can be cut from outside (`close`), so that a server found hung frees the threads that wait for it.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from dppo_megatron.rollout.servers.identity import LARGEST_ANSWER, Question
from dppo_megatron.types import GuardStop, UserError

T = TypeVar("T")

MAX_ANSWER_BYTES = 64 << 20
"""Of questions and weight calls; checksums of a large model are a few MB."""
OUR_ERRORS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL))
"""The trainer's own machine has run out of something: no server is to blame."""


class Unreachable(Exception):
    """No complete answer: refused, reset, timed out, or cut by `Http.close`."""


class Refused(Exception):
    """The server answered with another status than 2xx."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.retry_after_s = retry_after_s
        """What the server asks for with 429 or 503."""


class NotProven(Unreachable):
    """Whoever answers at a server's address is not that server (`identity.py`)."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"{url}: what answers there does not prove that it is this server, so nothing is sent to it; another"
            " program may have taken its port"
        )


class BadAnswer(Unreachable):
    """An answer with status 2xx that is not what was asked for: as good as none."""


def clean_key(key: str, where: str) -> str:
    """An API key without the white space around it: mounted secrets end in a newline.

    Raises:
        UserError: it cannot stand in a header. The message names `where` it came from and shows nothing of it.
    """
    key = key.strip()
    if any(not "!" <= character <= "~" for character in key):
        raise UserError(f"the API key in {where} holds white space or a character outside ASCII, which no header may")
    return key


class Done(msgspec.Struct):
    """The answer to a command: nothing, null, or an object. One that says no, with whatever status, is `Refused`."""

    success: bool = True
    error: Any = None
    detail: Any = None
    message: Any = None

    def said(self, otherwise: str) -> str:
        """Why not: FastAPI's and both engines' forms of it."""
        found = self.error or self.detail or self.message
        return str(found.get("message", found) if isinstance(found, dict) else found or otherwise)


class Http:
    """One server's address. Thread-safe; a connection belongs to one request at a time and is kept for the next.

    Args:
        url: http(s)://host:port, with an optional path prefix.
        api_key: sent as a bearer token; appears in no message and no repr.
        proves: whether the other end of each connection must prove that it has the key before anything is sent; None:
            if the first one does. Not over TLS, where a certificate does it, and not without a key.
    """

    def __init__(self, url: str, api_key: str = "", *, proves: bool | None = False) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.url = url.rstrip("/")
        self._prefix = parts.path.rstrip("/")
        self._host, self._port, self._tls = parts.hostname, parts.port, parts.scheme == "https"
        self._headers = {"Content-Type": "application/json"}
        self.api_key = clean_key(api_key, f"the request to {self.url}")
        if self.api_key:
            self._headers["Authorization"] = f"Bearer {self.api_key}"
        self.proves = proves if self.api_key and not self._tls else False
        self._lock = threading.Lock()
        self._idle: list[_Plain | _Secure] = []
        self._busy: set[_Plain | _Secure] = set()
        self._cuts = 0

    def __repr__(self) -> str:
        return f"Http({self.url})"

    def get(self, path: str, kind: type[T], *, timeout_s: float) -> T:
        """The answer as `kind`, a struct of msgspec's. Raises Unreachable, Refused or BadAnswer."""
        return self._decoded(path, kind, self._request("GET", path, None, timeout_s, MAX_ANSWER_BYTES))

    def find(self, path: str, kind: type[T], *, timeout_s: float) -> T | None:
        """As `get`; None from a server without that path (404)."""
        try:
            return self.get(path, kind, timeout_s=timeout_s)
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def post(self, path: str, kind: type[T], body: Any, *, timeout_s: float) -> T:
        """As `get`, with a JSON body."""
        payload = json.dumps(body, separators=(",", ":")).encode()
        return self._decoded(path, kind, self._request("POST", path, payload, timeout_s, MAX_ANSWER_BYTES))

    def do(self, path: str, body: Any = None, *, timeout_s: float) -> None:
        """A command. Raises as `get`."""
        self.post(path, Done, body or {}, timeout_s=timeout_s)

    def exchange(self, path: str, payload: bytes, *, timeout_s: float, max_bytes: int) -> bytes:
        """Bytes for bytes. Raises as `get`."""
        return self._request("POST", path, payload, timeout_s, max_bytes)

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

    def _decoded(self, path: str, kind: type[T], content: bytes) -> T:
        content = content.strip()
        try:
            answer = decoded(msgspec.json.Decoder(kind), b"{}" if content in (b"", b"null") else content)
        except BadAnswer as error:
            raise BadAnswer(f"{self.url}{path}: {error}") from None
        if isinstance(answer, Done) and (answer.error or not answer.success):
            raise Refused(409, f"{path}: {hidden(answer.said('it says no'), self.api_key)[:500]}")
        return answer

    def _request(self, method: str, path: str, payload: bytes | None, timeout_s: float, max_bytes: int) -> bytes:
        deadline, cuts = time.monotonic() + timeout_s, self._cuts
        connection, reused = self._take(deadline)
        try:
            try:
                response, content = self._exchange(connection, method, path, payload, max_bytes)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                # a kept connection that the server has closed meanwhile: nothing was processed, once more afresh
                if not reused or cuts != self._cuts:
                    raise
                self._drop(connection)
                connection = self._fresh(deadline)
                response, content = self._exchange(connection, method, path, payload, max_bytes)
        except (BadAnswer, NotProven):
            self._drop(connection)
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a header that is no header
            self._drop(connection)
            if isinstance(error, OSError) and error.errno in OUR_ERRORS:
                raise GuardStop(f"the trainer cannot open a connection to {self.url}: {error}") from None
            raise Unreachable(f"{self.url}{path}: {brief(error, self.api_key)}") from None
        with self._lock:
            self._busy.discard(connection)
            self._idle.append(connection)
        if not 200 <= response.status < 300:
            said = excerpt(content, self.api_key)  # a proxy may send our headers back
            raise Refused(response.status, said, retry_after_s(response.headers.get("Retry-After")))
        return content

    def _exchange(
        self, connection: _Plain | _Secure, method: str, path: str, payload: bytes | None, max_bytes: int
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection.request(method, self._prefix + path, payload, self._headers)
        response = connection.getresponse()
        content = bytearray()
        while part := response.read(min(1 << 20, max_bytes + 1 - len(content))):
            content += part
            if len(content) > max_bytes:
                raise BadAnswer(f"{self.url}{path}: an answer of more than {max_bytes} bytes")
        if response.length:
            raise Unreachable(f"{self.url}{path}: the answer ended {response.length} bytes early")
        return response, bytes(content)

    def _take(self, deadline: float) -> tuple[_Plain | _Secure, bool]:
        with self._lock:
            if self._idle:
                connection = self._idle.pop()
                self._busy.add(connection)
                reused = connection.sock is not None
                _set_deadline(connection, deadline)
                return connection, reused
        return self._fresh(deadline), False

    def _fresh(self, deadline: float) -> _Plain | _Secure:
        if self._tls:
            context = ssl.create_default_context()
            context.sslsocket_class = _SecureSocket
            connection: _Plain | _Secure = _Secure(self._host, self._port, context=context)
        else:
            connection = _Plain(self._host, self._port)
            connection.prove = self._prove
        _set_deadline(connection, deadline)
        with self._lock:
            self._busy.add(connection)
        return connection

    def _prove(self, connection: _Plain) -> None:
        if self.proves is False:
            return
        question = Question(self.api_key, connection.sock.getpeername())
        connection.sock.sendall(question.request)
        head = b""
        with connection.sock.makefile("rb") as answer:
            while not head.endswith(b"\r\n\r\n") and (line := answer.readline(LARGEST_ANSWER - len(head))):
                head += line
        if question.is_answered_by(head):
            self.proves = True
            return
        if self.proves:
            raise NotProven(self.url)
        self.proves = False  # a server without our check: its address is its user's word
        connection.sock.close()
        connection.connect()

    def _drop(self, connection: _Plain | _Secure) -> None:
        connection.close()
        with self._lock:
            self._busy.discard(connection)


class _Deadline(socket.socket):
    """Mixed into a socket: what is left of the call's time, and not a whole time limit, for every read."""

    deadline = math.inf

    def recv_into(self, *arguments: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the whole call has taken too long")
        self.settimeout(left)
        return super().recv_into(*arguments)


class _PlainSocket(_Deadline):
    pass


class _SecureSocket(_Deadline, ssl.SSLSocket):
    pass


class _Plain(http.client.HTTPConnection):
    """A connection whose socket keeps the deadline."""

    deadline = math.inf
    prove: Callable[[_Plain], None]
    """Raises NotProven."""

    def connect(self) -> None:
        super().connect()
        plain = self.sock
        self.sock = _PlainSocket(plain.family, plain.type, plain.proto, fileno=plain.detach())
        _set_deadline(self, self.deadline)
        self.prove(self)


class _Secure(http.client.HTTPSConnection):
    """The same over TLS."""

    deadline = math.inf

    def connect(self) -> None:
        super().connect()
        _set_deadline(self, self.deadline)


def _set_deadline(connection: _Plain | _Secure, deadline: float) -> None:
    left = max(0.001, deadline - time.monotonic())
    connection.timeout, connection.deadline = left, deadline
    if isinstance(connection.sock, _Deadline):
        connection.sock.deadline = deadline
        connection.sock.settimeout(left)


def decoded(decoder: msgspec.json.Decoder[T], content: bytes) -> T:
    """Raises BadAnswer for what is not of the decoder's type."""
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswer(f"its answer cannot be read: {brief(error)}") from None


def retry_after_s(header: str | None) -> float | None:
    """Seconds that a Retry-After header asks for; None without one that counts seconds."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def brief(error: BaseException, key: str = "") -> str:
    """An error in a line, without `key`: libraries quote what they could not read, which may be a whole answer."""
    text = " ".join(hidden(str(error), key).split())
    return f"{type(error).__name__}: {text[:200]}"


def excerpt(content: bytes, key: str = "") -> str:
    """The message of an error body, without `key`."""
    text = content.decode(errors="replace")
    with contextlib.suppress(BadAnswer):
        text = decoded(msgspec.json.Decoder(Done), content).said(text)
    return hidden(text, key)[:500]


def hidden(text: str, key: str) -> str:
    """`text` with *** for `key`, also where it is quoted. To be called before text is cut: half a key is one too."""
    for form in (key, json.dumps(key)[1:-1], repr(key)[1:-1]):
        text = text.replace(form, "***") if form else text
    return text
