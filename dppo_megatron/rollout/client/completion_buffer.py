"""The completions that a client keeps until a rank takes them, and the transfer of a rank's share.

A share travels over the unix socket of its node, one message per completion, followed by an empty message. So at most
one completion is in memory twice, and a missing empty message shows that the client has died.
"""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from dppo_megatron.rollout.client.messages import receive, send
from dppo_megatron.rollout.servers.wire import Sampled, version_number
from dppo_megatron.types import Completion, Grade, GradeTask


@dataclass
class BufferedGroup:
    index: int
    sampled: Sequence[Sampled]
    texts: list[str] = field(default_factory=list)
    """One per completion; empty until the group is ready to be taken."""
    grades: Sequence[Grade | None] = ()
    """One per completion, None if it was aborted or stopped early; empty if nothing was graded."""
    rollout: int = 0
    number: int = 0
    """Order of arrival at this client within the rollout; decides whose share the group is in. The index in the rollout
    cannot decide that: of two clients, one may have all even indices."""
    first: int = 0
    """Position in the group of the first completion here: aborted completions of a group are requested again alone."""


class CompletionBuffer:
    """Groups by ticket. The event loop puts them in; the hand-over thread takes them out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[int, BufferedGroup] = {}
        self._numbers: dict[int, dict[int, int]] = {}
        """Rollout -> group index -> number. Completions of a group that are requested again go to the same share."""

    def put(self, ticket: int, group: BufferedGroup) -> None:
        """Store a group that has arrived, and number it."""
        with self._lock:
            numbers = self._numbers.setdefault(group.rollout, {})
            group.number = numbers.setdefault(group.index, len(numbers))
            self._groups[ticket] = group

    def drop(self, tickets: Sequence[int]) -> None:
        """Discard the groups of these tickets, as far as they are here."""
        with self._lock:
            for ticket in tickets:
                self._groups.pop(ticket, None)

    def __contains__(self, ticket: int) -> bool:
        with self._lock:
            return ticket in self._groups

    def mark_ready(self, ticket: int, texts: list[str], grades: Sequence[Grade | None]) -> bool:
        """Mark a group as ready to be taken. Returns False if it was dropped meanwhile."""
        with self._lock:
            if ticket in self._groups:
                self._groups[ticket].texts, self._groups[ticket].grades = texts, grades
            return ticket in self._groups

    def take(self, share: int, shares: int, rollout: int = 0) -> list[BufferedGroup]:
        """Remove and return a share of a rollout's ready groups, ordered by index."""
        with self._lock:
            ready = [(ticket, group) for ticket, group in self._groups.items() if group.texts]
            ready = [(ticket, group) for ticket, group in ready if group.rollout == rollout]
            mine = [ticket for ticket, group in ready if group.number % shares == share]
            taken = sorted((self._groups.pop(ticket) for ticket in mine), key=lambda group: group.index)
            if not any(group.rollout == rollout for group in self._groups.values()):
                self._numbers.pop(rollout, None)
            return taken


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


def hand_over(peer: socket.socket, groups: Sequence[BufferedGroup]) -> None:
    """Send a share. Pickle is safe here: both ends have proven that they hold the job's key."""
    for group in groups:
        for position, (one, text) in enumerate(zip(group.sampled, group.texts, strict=True)):
            grade = group.grades[position] if group.grades else None
            send(peer, pickle.dumps(Arrived(group.index, group.first + position, one, text, grade)))
    send(peer, b"")


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
