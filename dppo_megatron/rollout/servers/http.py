"""HTTP to an engine's server, with the limits and checks that a trainer needs.

aiohttp manages the connections. `Transport` is for an event loop with thousands of requests (`rollout/client`);
`Http` is for threads with a few calls at a time (server information, pausing, weights):

    thread of the caller    get, post, do --- waits for its answer ---.                 close: cancels all calls
    thread "servers"                one event loop for all servers of the process: connects, sends, reads

In addition to what aiohttp does:

- A deadline covers a whole call: connecting, sending, and every byte of the answer. Trickling bytes do not extend it.
- An answer has a maximum size, and only 2xx is success: a redirect means a wrong address. Nothing is decompressed: a
  small answer can unpack to gigabytes.
- A server that closes an idle connection has not failed (`Stale`).
- A call of `Http` ends when the server no longer listens. vLLM (0.32.0) stops listening when one of its engines has
  died, but never ends the calls that wait for that engine.
- The other end of a new connection must prove that it has the server's key before anything is sent to it
  (docs/security.md#a-server-proves-its-identity). A connection stays with the process that accepted it, so this covers
  starts, restarts and new servers. It is still plain HTTP: a man in the middle can read and change all that follows.
- An answer is decoded as the type that the caller names, with its bounds: no unchecked value of a server is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import math
import os
import re
import secrets
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from dppo_megatron.rollout.servers.in_engine.dppo_vllm_guard import PROOF_HEADER, PROOF_PATH, proof
from dppo_megatron.texts import one_line
from dppo_megatron.types import RunAborted, UserError

T = TypeVar("T")

MAX_ANSWER_BYTES = 64 << 20
"""Except completions, which have their own limit; checksums of a large model are a few MB."""
OUR_ERRORS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL))
STALE_TRIES = 3
"""Attempts of one call over kept connections. When one breaks, the event loop also drops all others closed by then."""
ERROR_BYTES = 64 << 10
_MAX_PROOF_BYTES = 8192
_BEFORE_HOST = re.compile(r'://[^\s/"]*@')
_IDLE_S = 4.0
"""uvicorn, which both engines use, closes connections that have been idle for five seconds."""
_LISTENS_S = 1.0
"""Interval of the checks that a server that has not answered yet still listens."""
_READERS = 8
"""Answers that are read at the same time."""
_SLOW_S, _SLOW_BYTES = 0.5, 256 << 10
"""A body is slow if fewer bytes arrive in this time."""


class OurFault(Exception):
    """This machine lacks files, memory or ports (`OUR_ERRORS`): no server is at fault."""


class Unreachable(Exception):
    """No complete answer: refused, reset, timed out, or cancelled by `Http.close`."""


class Stale(Unreachable):
    """A kept connection broke before an answer. Usually it was closed while idle; but the server may have read the
    request, so completions are requested again under another id, since SGLang refuses an id that it has already."""


class Refused(Exception):
    """The server answered with a status other than 2xx."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.retry_after_s = retry_after_s
        """The server's Retry-After, usually with 429 or 503."""


class NotProven(Unreachable):
    """The program that answers at a server's address has not proven that it is that server (`_is_proven`)."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"{url}: what answers there does not prove that it is this server, so nothing is sent to it; another"
            " program may have taken its port"
        )


class BadAnswer(Unreachable):
    """An invalid answer with status 2xx, which counts as no answer."""


def clean_key(key: str, where: str) -> str:
    """An API key without surrounding white space: mounted secrets end in a newline. Raises UserError, which names the
    source, `where`, and no part of the key, if no header can hold it."""
    key = key.strip()
    if any(not "!" <= character <= "~" for character in key):
        raise UserError(f"the API key in {where} has white space or non-ASCII characters, which no header can hold")
    return key


class Done(msgspec.Struct):
    """The answer to a command: empty, null, or an object. success = false is `Refused`, even with status 2xx."""

    success: bool = True
    error: Any = None
    detail: Any = None
    message: Any = None

    def reason(self, default: str) -> str:
        """Why it failed, as FastAPI or either engine writes it; `default` if it gives no reason."""
        given = self.error or self.detail or self.message
        return str(given.get("message", given) if isinstance(given, dict) else given or default)


@dataclass
class Peer:
    """How a server is reached. `proves` and `api_key`: see `Http`."""

    url: str
    api_key: str = field(default="", repr=False)
    proves: bool | None = False


class Transport:
    """Requests to servers. Created and used in a running event loop. `sockets`: at most so many open, `each` of them to
    one server; 0: no limit."""

    def __init__(self, sockets: int = 0, each: int = 0) -> None:
        self.loop = asyncio.get_running_loop()
        self._connector = _ToPeers(limit=sockets, limit_per_host=each, keepalive_timeout=_IDLE_S)
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
            auto_decompress=False,
        )
        self._reading = asyncio.Semaphore(_READERS)

    def know(self, peer: Peer) -> None:
        """From now on, new connections to its address must be proven, if it `proves`."""
        if peer.proves is not False:
            self._connector.provers[_host_and_port(peer.url)] = peer

    async def request(self, peer: Peer, method: str, path: str, body: bytes | None, max_bytes: int) -> bytearray:
        """The body of a 2xx answer. Raises Unreachable (Stale among them), Refused, BadAnswer or OurFault."""
        connection = _Connection()
        _CONNECTION.set(connection)
        url = peer.url + path
        try:
            return await self._exchange(peer, method, url, body, max_bytes)
        except (Unreachable, Refused):
            raise
        except Exception as error:  # a server can make aiohttp raise anything
            if isinstance(error, OSError) and error.errno in OUR_ERRORS:
                raise OurFault(error.strerror) from None
            # aiohttp raises an OSError of its own for a reset, not ConnectionResetError
            broke = isinstance(error, aiohttp.ServerDisconnectedError | OSError)
            kind = Stale if broke and not connection.is_new else Unreachable
            raise kind(f"{url}: {brief(getattr(error, 'os_error', error), peer.api_key)}") from None

    async def repeat(
        self, peer: Peer, method: str, path: str, body: bytes | None, max_bytes: int, timeout_s: float
    ) -> bytearray:
        """As `request`, for calls that may be repeated: tries another connection if a kept one broke."""
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(STALE_TRIES - 1):
                    with contextlib.suppress(Stale):
                        return await self.request(peer, method, path, body, max_bytes)
                return await self.request(peer, method, path, body, max_bytes)
        except TimeoutError:
            raise Unreachable(f"{peer.url}{path}: no complete answer after {timeout_s:g} s") from None

    async def close(self) -> None:
        await self._session.close()

    async def _exchange(self, peer: Peer, method: str, url: str, body: bytes | None, max_bytes: int) -> bytearray:
        headers = {"Authorization": f"Bearer {peer.api_key}"} if peer.api_key else {}
        async with self._session.request(method, url, data=body, headers=headers, allow_redirects=False) as response:
            is_ok = 200 <= response.status < 300
            limit = max_bytes if is_ok else ERROR_BYTES
            content = bytearray()
            async with _read_slot(self._reading, content):
                async for part in response.content.iter_any():
                    content += part
                    if len(content) > limit:
                        response.close()
                        if is_ok:
                            raise BadAnswer(f"{url}: an answer of more than {max_bytes} bytes")
                        break
            if not is_ok:
                detail = excerpt(bytes(content), peer.api_key)  # without the key: a proxy may send our headers back
                raise Refused(response.status, detail, retry_after_s(response.headers.get("Retry-After")))
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise BadAnswer(f"{url}: an encoding that was not asked for")
            return content


class Http:
    """One server's address, for threads.

    Args:
        url: http(s)://host:port, with an optional path prefix.
        api_key: sent as a bearer token; appears in no message and no repr.
        proves: whether the other end of each connection must prove that it has the key before anything is sent; None:
            if it does so on the first connection. False over TLS, where a certificate proves it, and without a key.
    """

    def __init__(self, url: str, api_key: str = "", *, proves: bool | None = False) -> None:
        self.url = url.rstrip("/")
        self.api_key = clean_key(api_key, f"the request to {self.url}")
        can_prove = self.api_key and urlsplit(url).scheme != "https"
        self._peer = Peer(self.url, self.api_key, proves if can_prove else False)
        self._lock = threading.Lock()
        self._calls: set[Future[bytearray]] = set()
        self._transport: Transport | None = None
        self._drop: Callable[[], object] = lambda: None
        """Closes the transport; also called when this object is garbage-collected."""

    @property
    def proves(self) -> bool | None:
        return self._peer.proves

    def get(self, path: str, kind: type[T], *, timeout_s: float) -> T:
        """The answer as `kind`, a msgspec type. Raises Unreachable, Refused or BadAnswer."""
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
        payload = json.dumps(body, separators=(",", ":")).encode()
        return self._decoded(path, kind, self._request("POST", path, payload, timeout_s, MAX_ANSWER_BYTES))

    def do(self, path: str, body: Any = None, *, timeout_s: float) -> None:
        self.post(path, Done, body or {}, timeout_s=timeout_s)

    def exchange(self, path: str, payload: bytes, *, timeout_s: float, max_bytes: int) -> bytes:
        """Post `payload`; the body of the answer as bytes. Raises as `get`."""
        return self._request("POST", path, payload, timeout_s, max_bytes)

    def close(self) -> None:
        """Close every connection. Requests in flight raise Unreachable in their threads."""
        with self._lock:
            calls, self._transport = [*self._calls], None
            self._drop()
        for call in calls:
            call.cancel()

    def _decoded(self, path: str, kind: type[T], content: bytes) -> T:
        content = content.strip()
        try:
            answer = decoded(msgspec.json.Decoder(kind), b"{}" if content in (b"", b"null") else content)
        except BadAnswer as error:
            raise BadAnswer(f"{self.url}{path}: {error}") from None
        if isinstance(answer, Done) and (answer.error or not answer.success):
            reason = answer.reason("it reports a failure without a reason")
            raise Refused(409, f"{path}: {hidden(reason, self.api_key)[:500]}")
        return answer

    def _request(self, method: str, path: str, body: bytes | None, timeout_s: float, max_bytes: int) -> bytes:
        async def answer() -> bytearray:
            request = self._connected().repeat(self._peer, method, path, body, max_bytes, timeout_s)
            return await _while_it_listens(request, self.url, path)

        with self._lock:
            call = asyncio.run_coroutine_threadsafe(answer(), _loop_of(os.getpid()))
            self._calls.add(call)
        try:
            return bytes(call.result())
        except CancelledError:
            raise Unreachable(f"{self.url}{path}: the call was cancelled") from None
        except OurFault as error:
            raise RunAborted(f"the trainer cannot open a connection to {self.url}: {error}") from None
        finally:
            call.cancel()  # after a KeyboardInterrupt the call may still be running
            with self._lock:
                self._calls.discard(call)

    def _connected(self) -> Transport:
        """Called in the event loop. A forked child has its own loop, and so its own connections."""
        with self._lock:
            if self._transport is None or self._transport.loop is not asyncio.get_running_loop():
                self._transport = Transport()
                self._transport.know(self._peer)
                self._drop = weakref.finalize(self, _close, self._transport)
            return self._transport


def keep_alive(connection: Any) -> None:
    """Have the kernel send something every minute over a connection, a socket, that is idle: a completion of an hour
    is, and firewalls between machines forget such a connection (AWS's after 350 s, Google's after 10 min)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(AttributeError):  # not Linux: after two hours
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 60)


def listens(url: str) -> bool:
    """Whether something listens at `url`: False only if the connection is refused, not if it times out."""
    try:
        socket.create_connection(_host_and_port(url), _LISTENS_S).close()
    except OSError as error:
        return not isinstance(error, ConnectionRefusedError)
    return True


async def _while_it_listens(request: Coroutine[Any, Any, bytearray], url: str, path: str) -> bytearray:
    """The answer to `request`. Raises Unreachable if it is still pending and nothing listens at `url` any more."""
    pending = asyncio.ensure_future(request)
    try:
        while not (await asyncio.wait([pending], timeout=_LISTENS_S))[0]:
            if not await asyncio.to_thread(listens, url) and not pending.done():
                raise Unreachable(f"{url}{path}: no answer, and it no longer listens")
        return pending.result()
    finally:
        pending.cancel()


@functools.cache
def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of a process, by process id: a forked child has none of its parent's threads."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="servers", daemon=True).start()
    return loop


def _close(transport: Transport) -> None:
    """May be called in any thread; does not wait."""
    asyncio.run_coroutine_threadsafe(transport.close(), transport.loop)


@dataclass
class _Connection:
    is_new: bool = False
    """Opened for this request, not kept from an earlier one."""


_CONNECTION: ContextVar[_Connection] = ContextVar("connection")


class _ToPeers(aiohttp.TCPConnector):
    """A connector that has the other end of new connections prove that it is the server, for peers in `provers`."""

    provers: dict[tuple[str | None, int], Peer]

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.provers = {}

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        """The method that aiohttp documents for connectors to override."""
        _CONNECTION.get().is_new = True
        protocol = await super()._create_connection(req, traces, timeout)
        if protocol.transport is not None:  # else it has been closed again
            keep_alive(protocol.transport.get_extra_info("socket"))
        peer = self.provers.get(_host_and_port(str(req.url)))
        if peer is None or peer.proves is False:
            return protocol
        if await _is_proven(protocol, peer.api_key):
            peer.proves = True
            return protocol
        if peer.proves:
            raise NotProven(peer.url)
        peer.proves = False  # a server without our check: the address that the user gave is trusted
        return await self._create_connection(req, traces, timeout)


async def _is_proven(protocol: Any, key: str) -> bool:
    """Whether the other end of a new connection (aiohttp's `protocol`) has the server's key; if not, it is closed."""
    transport, nonce = protocol.transport, secrets.token_hex(32).encode()
    wanted = b"\r\n%s: %s\r\n" % (PROOF_HEADER, proof(key, nonce, transport.get_extra_info("peername")[:2]))
    reader = asyncio.StreamReader(limit=_MAX_PROOF_BYTES)
    transport.set_protocol(asyncio.StreamReaderProtocol(reader))
    try:
        transport.write(b"GET %s?%s HTTP/1.1\r\nHost: server\r\n\r\n" % (PROOF_PATH.encode(), nonce))
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"HTTP/1.1 204 ") and wanted in head.lower():
                transport.set_protocol(protocol)
                return True
        return False
    finally:
        if transport.get_protocol() is not protocol:
            transport.abort()


def _host_and_port(url: str) -> tuple[str | None, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


@contextlib.asynccontextmanager
async def _read_slot(slots: asyncio.Semaphore, content: bytearray) -> AsyncIterator[None]:
    """Holds one of `slots` while a body is read into `content`, or until the body turns out to be slow.

    An answer of 48,000 tokens is 8 MB, and a thousand may arrive at once: those without a slot stay at the servers. A
    slow one gives its slot up, so that it does not delay others, and is read on: at its rate it takes little memory.
    """
    loop, seen = asyncio.get_running_loop(), 0
    timer: asyncio.TimerHandle | None = None

    def check_rate() -> None:
        nonlocal seen, timer
        if len(content) - seen < _SLOW_BYTES:
            timer = None
            slots.release()
        else:
            seen, timer = len(content), loop.call_later(_SLOW_S, check_rate)

    await slots.acquire()
    timer = loop.call_later(_SLOW_S, check_rate)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
            slots.release()


def decoded(decoder: msgspec.json.Decoder[T], content: bytes) -> T:
    """Raises BadAnswer for content that is not of the decoder's type."""
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswer(f"its answer cannot be read: {brief(error)}") from None


def retry_after_s(header: str | None) -> float | None:
    """Seconds of a Retry-After header; None if there is none, or if it names a date."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def brief(error: BaseException, key: str = "") -> str:
    """An error in one short line, without `key`: libraries quote text that they cannot parse, even a whole answer."""
    return f"{type(error).__name__}: {one_line(hidden(str(error), key), 200)}"


def excerpt(content: bytes, key: str = "") -> str:
    text = content.decode(errors="replace")
    with contextlib.suppress(BadAnswer):
        text = decoded(msgspec.json.Decoder(Done), content).reason(text)
    return hidden(text, key)[:500]


def hidden(text: str, key: str) -> str:
    """`text` with *** for `key`, also in quoted forms, and for what a URL has before its host, such as a proxy's
    password. Call it before truncating: half a key is secret too."""
    for form in (key, json.dumps(key)[1:-1], repr(key)[1:-1]):
        text = text.replace(form, "***") if form else text
    return _BEFORE_HOST.sub("://***@", text)
