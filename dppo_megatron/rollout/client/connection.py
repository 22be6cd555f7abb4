"""Sockets between processes of one job that have shown each other its key.

Used over a unix socket on one machine and over TCP between nodes. Before anything is decoded both ends prove that they
hold the key (HMAC-SHA256 of both ends' nonces), which travels through the job's own process group. The proof is made
once: what follows is neither signed nor encrypted, as torch's own connections between ranks are not either.
"""

from __future__ import annotations

import hmac
import os
import socket
from functools import partial

from dppo_megatron.frames import framed, read_frame

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
    peer.sendall(framed(message))


def receive(peer: socket.socket) -> bytes:
    """One message; blocks. Raises ConnectionError at the end of the stream."""
    message = read_frame(partial(_exactly, peer))
    assert message is not None, "_exactly raises at the end"
    return message


def _proof(key: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(key, role + b"".join(nonces), "sha256")


def _exactly(peer: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = peer.recv(min(1 << 20, size - len(found)))
        if not piece:
            raise ConnectionError("the other end has closed the connection")
        found += piece
    return bytes(found)
