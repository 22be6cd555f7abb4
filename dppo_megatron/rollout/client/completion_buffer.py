"""The completions that a client keeps until a rank takes them, and how they change hands: a message each.

A rank's share of a rollout comes over the unix socket of its node, completion after completion, an empty message behind
the last. So neither end holds more than one of them twice, and a client that dies in between is noticed.
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
    """One a completion; empty until it may be taken."""
    grades: Sequence[Grade | None] = ()
    """One a completion, None for what was aborted or stopped early; or none: nothing was graded."""
    rollout: int = 0
    number: int = 0
    """In the order in which the rollout's groups have landed here, which decides the share. The index in the rollout
    cannot: of two clients one may have all even ones."""
    first: int = 0
    """Position in the group of its first completion here; what lands later takes the place of what was aborted."""


class CompletionBuffer:
    """Held groups by ticket. The event loop puts; the hand-over thread takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[int, BufferedGroup] = {}
        self._numbers: dict[int, dict[int, int]] = {}
        """Of each rollout's groups by their index: what is asked for again of one goes where the rest goes."""

    def put(self, ticket: int, group: BufferedGroup) -> None:
        """Hold a group that has landed. Groups are numbered in that order."""
        with self._lock:
            numbers = self._numbers.setdefault(group.rollout, {})
            group.number = numbers.setdefault(group.index, len(numbers))
            self._groups[ticket] = group

    def drop(self, tickets: Sequence[int]) -> None:
        """Forget the groups of these tickets, where it has them."""
        with self._lock:
            for ticket in tickets:
                self._groups.pop(ticket, None)

    def __contains__(self, ticket: int) -> bool:
        with self._lock:
            return ticket in self._groups

    def settle(self, ticket: int, texts: list[str], grades: Sequence[Grade | None]) -> bool:
        """It may be taken from now on. Returns whether it is still wanted."""
        with self._lock:
            if ticket in self._groups:
                self._groups[ticket].texts, self._groups[ticket].grades = texts, grades
            return ticket in self._groups

    def take(self, share: int, shares: int, rollout: int = 0) -> list[BufferedGroup]:
        """What is ready of a rollout and belongs to a share, in the order of the groups; it is held no longer."""
        with self._lock:
            ready = [(ticket, one) for ticket, one in self._groups.items() if one.texts and one.rollout == rollout]
            mine = [ticket for ticket, one in ready if one.number % shares == share]
            taken = sorted((self._groups.pop(ticket) for ticket in mine), key=lambda group: group.index)
            if not any(one.rollout == rollout for one in self._groups.values()):
                self._numbers.pop(rollout, None)
            return taken


@dataclass(frozen=True, slots=True)
class Arrived:
    """One completion on its way to the rank that holds it."""

    index: int
    """Of its group in the rollout."""
    position: int
    """In its group."""
    sampled: Sampled
    text: str
    grade: Grade | None
    """The hook's; None: not graded there."""

    @property
    def completion(self) -> Completion:
        return completion_of(self.sampled, self.text)


def hand_over(peer: socket.socket, groups: Sequence[BufferedGroup]) -> None:
    """Send a share. Pickled: both ends are this job's, and have shown its key."""
    for group in groups:
        for position, (one, text) in enumerate(zip(group.sampled, group.texts, strict=True)):
            grade = group.grades[position] if group.grades else None
            send(peer, pickle.dumps(Arrived(group.index, group.first + position, one, text, grade)))
    send(peer, b"")


def take_over(peer: socket.socket) -> Iterator[Arrived]:
    """The completions of a share. Raises ConnectionError if it is not whole."""
    while message := receive(peer):
        yield pickle.loads(message)


def completion_of(one: Sampled, text: str) -> Completion:
    """As the loop knows it."""
    ids = one.token_ids.astype(np.int64)
    return Completion(ids, one.logprobs, one.finish_reason, text, tuple(spans_of(one)), one.experts)


def spans_of(sampled: Sampled) -> list[tuple[int, int]]:
    """(weights version, tokens sampled under it), in order."""
    return [(version_number(version), end - start) for version, start, end in sampled.weights_versions]


class Hook(Protocol):
    """Grades completions in the client's process."""

    def submit(self, tasks: Sequence[GradeTask]) -> Future[list[Grade]]:
        """One grade a task, in their order; a grading that fails is a grade with a `failure`. Does not wait."""

    def close(self) -> None: ...


HookFactory = Callable[[], Hook]
