"""Length-prefixed messages over a socket, between processes of one job that have shown each other its key.

Used over a unix socket on one machine and over TCP between nodes. Before anything is decoded both ends prove that they
hold the key (HMAC-SHA256 of both ends' nonces), which travels through the job's own process group. The proof is made
once: what follows is neither signed nor encrypted, as torch's own connections between ranks are not either.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct

MAX_FRAME_BYTES = 256 << 20
_NONCE_BYTES = 32
_HEADER = struct.Struct(">I")


class HandshakeFailed(Exception):
    """Whoever is at the other end does not hold the job's key."""


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


def accept_handshake(peer: socket.socket, key: bytes) -> None:
    """The listening side. Raises HandshakeFailed, or OSError if the other end is silent or gone."""
    own = os.urandom(_NONCE_BYTES)
    peer.sendall(own)
    reply = _exactly(peer, _NONCE_BYTES + 32)
    theirs, proof = reply[:_NONCE_BYTES], reply[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"connects", own, theirs)):
        raise HandshakeFailed("wrong key")
    peer.sendall(_proof(key, b"listens", own, theirs))


def connect_handshake(peer: socket.socket, key: bytes) -> None:
    """The connecting side. Raises as `accept_handshake`."""
    theirs, own = _exactly(peer, _NONCE_BYTES), os.urandom(_NONCE_BYTES)
    peer.sendall(own + _proof(key, b"connects", theirs, own))
    if not hmac.compare_digest(_exactly(peer, 32), _proof(key, b"listens", theirs, own)):
        raise HandshakeFailed("wrong key")


def send(peer: socket.socket, message: bytes) -> None:
    """One message; blocks until the kernel has it."""
    peer.sendall(_HEADER.pack(len(message)) + message)


def receive(peer: socket.socket) -> bytes:
    """One message; blocks. Raises ConnectionError at the end of the stream."""
    (size,) = _HEADER.unpack(_exactly(peer, _HEADER.size))
    return _exactly(peer, _checked(size))


class FrameBuffer:
    """Messages out of the pieces that a socket gives.

    Example:
        buffer.feed(b"\\0\\0\\0\\2h")     # -> []
        buffer.feed(b"i\\0\\0\\0\\1!")     # -> [b"hi", b"!"]
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """The messages that are complete now."""
        self._held += piece
        found, at = [], 0
        while len(self._held) - at >= _HEADER.size:
            size = _checked(_HEADER.unpack_from(self._held, at)[0])
            if len(self._held) - at - _HEADER.size < size:
                break
            found.append(bytes(self._held[at + _HEADER.size : at + _HEADER.size + size]))
            at += _HEADER.size + size
        del self._held[:at]
        return found


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """One message. Raises asyncio.IncompleteReadError at the end of the stream."""
    (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return await reader.readexactly(_checked(size))


def framed(message: bytes) -> bytes:
    """As it goes over the socket."""
    return _HEADER.pack(len(message)) + message


def _proof(key: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(key, role + b"".join(nonces), "sha256")


def _checked(size: int) -> int:
    if size > MAX_FRAME_BYTES:
        raise ConnectionError(f"a message of {size} bytes")
    return size


def _exactly(peer: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = peer.recv(min(1 << 20, size - len(found)))
        if not piece:
            raise ConnectionError("the other end has closed the connection")
        found += piece
    return bytes(found)
