"""Completions in the client between their answer and the rank that takes them, and how they are sent to it."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from dppo_megatron.rollout.client import messages
from dppo_megatron.rollout.servers.wire import Sampled
from dppo_megatron.types import Grade


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
        with self._lock:
            numbers = self._numbers.setdefault(group.rollout, {})
            group.number = numbers.setdefault(group.index, len(numbers))
            self._groups[ticket] = group

    def drop(self, tickets: Sequence[int]) -> None:
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

    def sampled(self, rollout: int) -> dict[tuple[int, int], Sampled]:
        """All completions of a rollout, by group and position, ended or as long as they were when they were aborted."""
        with self._lock:
            groups = [group for group in self._groups.values() if group.rollout == rollout]
        each = ((group.index, place, one) for group in groups for place, one in enumerate(group.sampled, group.first))
        return {(index, place): one for index, place, one in each if len(one.token_ids)}

    def take(self, share: int, shares: int, rollout: int = 0) -> list[BufferedGroup]:
        """Remove and return a share of a rollout's ready groups, ordered by index."""
        with self._lock:
            ready = [(t, one) for t, one in self._groups.items() if one.rollout == rollout and one.texts]
            mine = [ticket for ticket, group in ready if group.number % shares == share]
            taken = sorted((self._groups.pop(ticket) for ticket in mine), key=lambda group: group.index)
            if not any(group.rollout == rollout for group in self._groups.values()):
                self._numbers.pop(rollout, None)
            return taken


def hand_over(peer: socket.socket, groups: Sequence[BufferedGroup]) -> None:
    """Send a share: a message per completion, so that at most one is in memory twice, then an empty one, whose absence
    shows that the client has died. Pickle is safe here: both ends have proven that they hold the job's key."""
    for group in groups:
        for position, (one, text) in enumerate(zip(group.sampled, group.texts, strict=True)):
            grade = group.grades[position] if group.grades else None
            messages.send(peer, pickle.dumps(messages.Arrived(group.index, group.first + position, one, text, grade)))
    messages.send(peer, b"")
