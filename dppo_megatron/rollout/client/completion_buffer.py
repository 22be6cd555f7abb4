"""The completions that a client keeps until a rank takes them, and how they change hands: a message each.

A rank's share of a rollout comes over the unix socket of its node, completion after completion, an empty message behind
the last. So neither end holds more than one of them twice, and a client that dies in between is noticed.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from dppo_megatron.rollout.client.messages import ENCODER, receive, send
from dppo_megatron.rollout.servers.wire import Sampled, version_number
from dppo_megatron.types import Completion, Grade


@dataclass
class BufferedGroup:
    index: int
    sampled: Sequence[Sampled]
    texts: list[str] = field(default_factory=list)
    """One a completion; empty until it may be taken."""
    grades: Sequence[Grade] = ()
    """One a completion, or none: it was not graded."""
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
        """Hold a group that has landed. Groups are numbered in that order."""
        with self._lock:
            group.number, self._landed = self._landed, self._landed + 1
            self._groups[ticket] = group

    def drop(self, tickets: Sequence[int]) -> None:
        """Forget the groups of these tickets, where it has them."""
        with self._lock:
            for ticket in tickets:
                self._groups.pop(ticket, None)

    def __contains__(self, ticket: int) -> bool:
        with self._lock:
            return ticket in self._groups

    def settle(self, ticket: int, texts: list[str], grades: Sequence[Grade]) -> bool:
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


class Arrived(msgspec.Struct, frozen=True):
    """One completion on its way to the rank that holds it."""

    index: int
    """Of its group in the rollout."""
    position: int
    """In its group."""
    token_ids: bytearray
    """int32."""
    logprobs: bytearray
    """float32."""
    reason: str
    spans: list[tuple[int, int]]
    text: str
    grade: Grade | None
    """The hook's; None: not graded there."""

    @property
    def completion(self) -> Completion:
        arrays = np.frombuffer(self.token_ids, np.int32), np.frombuffer(self.logprobs, np.float32)
        return completion_of(*arrays, self.reason, self.spans, self.text)


_ARRIVED = msgspec.msgpack.Decoder(Arrived)


def hand_over(peer: socket.socket, groups: Sequence[BufferedGroup]) -> None:
    """Send a share."""
    for group in groups:
        for position, one in enumerate(group.sampled):
            arrays, spans = (bytearray(one.token_ids), bytearray(one.logprobs)), spans_of(one)
            grade = group.grades[position] if group.grades else None
            text = group.texts[position]
            send(peer, ENCODER.encode(Arrived(group.index, position, *arrays, one.finish_reason, spans, text, grade)))
    send(peer, b"")


def take_over(peer: socket.socket) -> Iterator[Arrived]:
    """The completions of a share. Raises ConnectionError if it is not whole."""
    while message := receive(peer):
        yield _ARRIVED.decode(message)


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
