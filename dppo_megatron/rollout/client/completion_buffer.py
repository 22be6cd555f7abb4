"""The completions that a client keeps until a rank takes them, and how they change hands: one memory file, no copies.

A share is written end to end into an anonymous file whose descriptor goes over the unix socket. The rank maps it and
makes its arrays views of it, so 8 bytes a token are held once, and nothing is pickled.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dppo_megatron.frames import framed
from dppo_megatron.rollout.client.messages import ENCODER, SHARE_HEADER, ShareGroup, ShareHeader, receive
from dppo_megatron.rollout.servers.wire import Sampled, version_number
from dppo_megatron.types import Completion


@dataclass
class BufferedGroup:
    index: int
    sampled: Sequence[Sampled]
    texts: list[bytes] = field(default_factory=list)
    """One a completion; empty until it may be taken."""
    grades: bytes = b""
    number: int = 0
    """In the order in which the client's groups have landed, which decides the share. The index in the rollout cannot:
    of two clients one may have all even ones."""


class CompletionBuffer:
    """Held groups by ticket. The event loop puts; the hand-over thread takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[int, BufferedGroup] = {}
        self._landed = 0

    def put(self, ticket: int, group: BufferedGroup) -> None:
        with self._lock:
            group.number, self._landed = self._landed, self._landed + 1
            self._groups[ticket] = group

    def drop(self, tickets: Sequence[int]) -> None:
        with self._lock:
            for ticket in tickets:
                self._groups.pop(ticket, None)

    def __contains__(self, ticket: int) -> bool:
        with self._lock:
            return ticket in self._groups

    def settle(self, ticket: int, texts: list[bytes], grades: bytes) -> bool:
        """It may be taken from now on. Returns whether it is still wanted."""
        with self._lock:
            if ticket in self._groups:
                self._groups[ticket].texts, self._groups[ticket].grades = texts, grades
            return ticket in self._groups

    def take(self, share: int, shares: int) -> list[BufferedGroup]:
        """What is ready and belongs to a share, in the order of the groups; it is held no longer."""
        with self._lock:
            mine = [ticket for ticket, group in self._groups.items() if group.texts and group.number % shares == share]
            return sorted((self._groups.pop(ticket) for ticket in mine), key=lambda group: group.index)


@dataclass(frozen=True, slots=True)
class Arrived:
    """One completion on the rank that holds it."""

    index: int
    """Of its group in the rollout."""
    position: int
    """In its group."""
    completion: Completion
    grades: bytes
    """Of its whole group; see `ShareGroup.grades`."""


def hand_over(peer: socket.socket, groups: Sequence[BufferedGroup]) -> None:
    """Send a share: its header, then the descriptor of the memory file."""
    completions = [one for group in groups for one in group.sampled]
    num_tokens = sum(len(one.token_ids) for one in completions)
    num_bytes = 8 * num_tokens + sum(len(text) for group in groups for text in group.texts)
    header = ShareHeader([_header_of(group) for group in groups], num_tokens, num_bytes)
    descriptor = os.memfd_create("dppo-completions", os.MFD_CLOEXEC)
    try:
        os.truncate(descriptor, max(1, num_bytes))
        with mmap.mmap(descriptor, max(1, num_bytes)) as memory:
            at = 0
            for kind in ("token_ids", "logprobs"):
                for one in completions:
                    array = getattr(one, kind)
                    memory[at : at + array.nbytes] = array.data.cast("B") if array.nbytes else b""
                    at += array.nbytes
            for group in groups:
                for text in group.texts:
                    memory[at : at + len(text)] = text
                    at += len(text)
        peer.sendall(framed(ENCODER.encode(header)))
        socket.send_fds(peer, [b"."], [descriptor])
    finally:
        os.close(descriptor)


def take_over(peer: socket.socket) -> Iterator[Arrived]:
    """The completions of a share, as views of the memory that came with it."""
    handed: ShareHeader = SHARE_HEADER.decode(receive(peer))
    _, [descriptor], _, _ = socket.recv_fds(peer, 1, 1)
    try:
        memory = mmap.mmap(descriptor, max(1, handed.num_bytes))
    finally:
        os.close(descriptor)
    token_ids = np.frombuffer(memory, np.int32, handed.num_tokens)
    logprobs = np.frombuffer(memory, np.float32, handed.num_tokens, offset=4 * handed.num_tokens)
    at, text_at = 0, 8 * handed.num_tokens
    for group in handed.groups:
        for position, length in enumerate(group.lengths):
            text = memory[text_at : text_at + group.text_bytes[position]].decode()
            text_at += group.text_bytes[position]
            arrays = token_ids[at : at + length], logprobs[at : at + length]
            completion = completion_of(*arrays, group.reasons[position], group.spans[position], text)
            yield Arrived(group.index, position, completion, group.grades)
            at += length


def completion_of(
    token_ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    reason: str,
    spans: Sequence[tuple[int, int]],
    text: str,
) -> Completion:
    """As the loop knows it, from what came over the wire."""
    return Completion(
        token_ids=token_ids.astype(np.int64),
        logprobs=logprobs,
        finish_reason="stop" if reason == "stop" else "length",
        text=text,
        weights_spans=tuple(spans),
    )


def spans_of(sampled: Sampled) -> list[tuple[int, int]]:
    """(weights version, tokens sampled under it), in order."""
    return [(version_number(version), end - start) for version, start, end in sampled.weights_versions]


def _header_of(group: BufferedGroup) -> ShareGroup:
    return ShareGroup(
        group.index,
        [len(one.token_ids) for one in group.sampled],
        [one.finish_reason for one in group.sampled],
        [spans_of(one) for one in group.sampled],
        [len(text) for text in group.texts],
        group.grades,
    )
