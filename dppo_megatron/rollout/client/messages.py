"""The messages between the trainer and its rollout clients: a handshake that proves the job's key, then msgpack.

They travel over a unix socket on one machine and over TCP between nodes. Before anything is decoded, both ends prove
that they hold the key (HMAC-SHA256 of both ends' nonces); the ranks share the key through the job's process group. Only
the handshake is authenticated: later messages are neither signed nor encrypted, like torch's connections between ranks.
"""

from __future__ import annotations

import hmac
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from dppo_megatron.frames import framed, read_frame
from dppo_megatron.rollout.servers.dialects import AnyDialect
from dppo_megatron.rollout.servers.http import Peer, keep_alive
from dppo_megatron.rollout.servers.wire import AttemptFailed, Completed, Graded, Sampled, Submit, version_number
from dppo_megatron.types import Completion, Grade, GradeTask


class ClientHello(msgspec.Struct, frozen=True, tag=True):
    """A client's first message to rank 0."""

    node: int
    sockets: int
    """How many it may open: the hard limit on open files, less the files it needs itself."""


class ServerAddress(msgspec.Struct, frozen=True):
    """How a client reaches one server. `peer.url` identifies the server."""

    peer: Peer
    dialect: AnyDialect


class Servers(msgspec.Struct, frozen=True, tag=True):
    """Servers to which rank 0 will have the client send requests."""

    servers: list[ServerAddress]


class EndRequests(msgspec.Struct, frozen=True, tag=True):
    tickets: list[int]
    drops: bool
    """True: close the connections and discard the completions. False: have the servers abort, and keep their tokens."""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """What was sampled of a completion before: its tokens are not sampled again."""

    key: tuple[int, int, int]
    """Rollout, group, position in the group."""
    sampled: bytes
    """A pickled `Sampled`."""


class Over(msgspec.Struct, frozen=True, tag=True):
    """A rollout of which nothing is wanted any more."""

    rollout: int


class ClientLost(msgspec.Struct, frozen=True, tag=True):
    text: str


class TakeShare(msgspec.Struct, frozen=True):
    """A rank requests its share of a rollout's ready groups: every `shares`-th group from number `share` on."""

    share: int
    shares: int
    rollout: int = 0
    copies: bool = False
    """Instead: copies of what the latest look has seen of the rollout, finished or not."""
    looks_at: tuple[int, ...] = ()
    """Rollouts to look at before (`Client._look`)."""


ToClient = Servers | Submit | EndRequests | Begun | Over
FromClient = ClientHello | Completed | Graded | AttemptFailed | ClientLost

ENCODER = msgspec.msgpack.Encoder()
TO_CLIENT = msgspec.msgpack.Decoder(ToClient)
FROM_CLIENT = msgspec.msgpack.Decoder(FromClient)
TAKE = msgspec.msgpack.Decoder(TakeShare)

_NONCE_BYTES = 32


class HandshakeFailed(Exception):
    """The other end does not hold the job's key."""


def connect(address: str, timeout_s: float) -> socket.socket:
    """A socket connected to `address`: the path of a unix socket, or host:port."""
    if address.startswith("/"):
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(timeout_s)
        peer.connect(address)
        return peer
    host, _, port = address.rpartition(":")
    peer = socket.create_connection((host, int(port)), timeout=timeout_s)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(peer)  # idle during updates
    return peer


def handshake(peer: socket.socket, key: bytes, *, listens: bool) -> None:
    """Prove to the other end that this end holds the key, and check its proof. Raises HandshakeFailed if that is wrong,
    OSError if the other end does not answer or has closed the connection."""
    own = os.urandom(_NONCE_BYTES)
    peer.sendall(own)
    theirs = _receive_exactly(peer, _NONCE_BYTES)
    nonces = own + theirs if listens else theirs + own
    # each proof contains its end's role, so a proof cannot be reflected to the end that made it
    listener, caller = (hmac.digest(key, role + nonces, "sha256") for role in (b"listens", b"connects"))
    peer.sendall(listener if listens else caller)
    if not hmac.compare_digest(_receive_exactly(peer, 32), caller if listens else listener):
        raise HandshakeFailed("wrong key")


def send(peer: socket.socket, message: bytes) -> None:
    peer.sendall(framed(message))


def receive(peer: socket.socket) -> bytes:
    """Read one message; blocks. Raises ConnectionError at the end of the stream."""
    message = read_frame(partial(_receive_exactly, peer))
    assert message is not None, "_receive_exactly raises at the end of the stream"
    return message


def _receive_exactly(peer: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = peer.recv(min(1 << 20, size - len(received)))
        if not piece:
            raise ConnectionError("the other end has closed the connection")
        received += piece
    return bytes(received)


@dataclass(frozen=True, slots=True)
class Arrived:
    """One completion on its way from the client to a rank."""

    index: int
    """Index of its group in the rollout."""
    position: int
    sampled: Sampled
    text: str
    grade: Grade | None
    """The grading hook's; None: not graded in the client."""

    @property
    def completion(self) -> Completion:
        return completion_of(self.sampled, self.text)


def take_over(peer: socket.socket) -> Iterator[Arrived]:
    """Receive a share. Raises ConnectionError if it is incomplete."""
    while message := receive(peer):
        yield pickle.loads(message)


def completion_of(one: Sampled, text: str) -> Completion:
    ids = one.token_ids.astype(np.int64)
    return Completion(ids, one.logprobs, one.finish_reason, text, tuple(spans_of(one)), one.experts)


def spans_of(sampled: Sampled) -> list[tuple[int, int]]:
    """(weights version, tokens sampled under it), in order."""
    return [(version_number(version), end - start) for version, start, end in sampled.weights_versions]


class Hook(Protocol):
    """Grades completions in the client's process."""

    def submit(self, tasks: Sequence[GradeTask]) -> Future[list[Grade]]:
        """One grade per task, in order; a failed grading is a grade with a `failure`. Does not wait."""

    def close(self) -> None: ...


HookFactory = Callable[[], Hook]
