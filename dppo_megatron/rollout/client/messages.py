"""What crosses the sockets between the trainer and its rollout clients: a proof of the job's key, then msgpack.

Used over a unix socket on one machine and over TCP between nodes. Before anything is decoded both ends prove that they
hold the key (HMAC-SHA256 of both ends' nonces), which travels through the job's own process group. The proof is made
once: what follows is neither signed nor encrypted, as torch's own connections between ranks are not either.
"""

from __future__ import annotations

import hmac
import os
import socket
from functools import partial

import msgspec

from dppo_megatron.frames import framed, read_frame
from dppo_megatron.rollout.servers.dialects import AnyDialect
from dppo_megatron.rollout.servers.http import Peer
from dppo_megatron.rollout.servers.wire import AttemptFailed, Completed, Graded, Submit


class ClientHello(msgspec.Struct, frozen=True, tag=True):
    """A client's first message to rank 0."""

    node: int
    sockets: int
    """That it may open: the hard limit on open files, less what it needs itself."""


class ServerAddress(msgspec.Struct, frozen=True):
    """One server, as a client asks it; known by its address."""

    peer: Peer
    dialect: AnyDialect
    workers: tuple[Peer, ...] = ()
    """Of a router: the servers behind it."""


class Servers(msgspec.Struct, frozen=True, tag=True):
    """The servers that the client will be asked to ask."""

    servers: list[ServerAddress]


class EndRequests(msgspec.Struct, frozen=True, tag=True):
    tickets: list[int]
    drops: bool
    """Their completions are not wanted, and the servers not told: the connections close."""


class ClientLost(msgspec.Struct, frozen=True, tag=True):
    text: str


class TakeShare(msgspec.Struct, frozen=True):
    """A rank of the client's node asks for its share of what is ready of a rollout: every `shares`-th group, from
    `share` on."""

    share: int
    shares: int
    rollout: int


ToClient = Servers | Submit | EndRequests
FromClient = ClientHello | Completed | Graded | AttemptFailed | ClientLost

ENCODER = msgspec.msgpack.Encoder()
TO_CLIENT = msgspec.msgpack.Decoder(ToClient)
FROM_CLIENT = msgspec.msgpack.Decoder(FromClient)
TAKE = msgspec.msgpack.Decoder(TakeShare)

_NONCE_BYTES = 32


class HandshakeFailed(Exception):
    """The other end does not hold the job's key."""


def connect(address: str, timeout_s: float) -> socket.socket:
    """A socket to `address`: a path, or host:port."""
    if address.startswith("/"):
        found = socket.socket(socket.AF_UNIX)
        found.settimeout(timeout_s)
        found.connect(address)
        return found
    host, _, port = address.rpartition(":")
    found = socket.create_connection((host, int(port)), timeout=timeout_s)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def handshake(peer: socket.socket, key: bytes, *, listens: bool) -> None:
    """Show the other end that this one holds the key. Raises HandshakeFailed unless it shows the same, OSError if it is
    silent or gone. The proof names its end, so that none can be sent back."""
    own = os.urandom(_NONCE_BYTES)
    peer.sendall(own)
    theirs = _exactly(peer, _NONCE_BYTES)
    nonces = own + theirs if listens else theirs + own
    listener, caller = (hmac.digest(key, role + nonces, "sha256") for role in (b"listens", b"connects"))
    peer.sendall(listener if listens else caller)
    if not hmac.compare_digest(_exactly(peer, 32), caller if listens else listener):
        raise HandshakeFailed("wrong key")


def send(peer: socket.socket, message: bytes) -> None:
    """One message; blocks until the kernel has it."""
    peer.sendall(framed(message))


def receive(peer: socket.socket) -> bytes:
    """One message; blocks. Raises ConnectionError at the end of the stream."""
    message = read_frame(partial(_exactly, peer))
    assert message is not None, "_exactly raises at the end"
    return message


def _exactly(peer: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = peer.recv(min(1 << 20, size - len(found)))
        if not piece:
            raise ConnectionError("the other end has closed the connection")
        found += piece
    return bytes(found)
