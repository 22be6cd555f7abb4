"""What the fleet asks of the rollout clients, and what they report: scalars, never tokens.

A protocol, since the clients (`rollout/client`) import this package; the other intake is a fake of thirty lines in
tests/test_fleet.py. A ticket is one attempt at one group, and is used once, so an answer whose ticket is no longer
wanted is dropped, and a group has exactly one answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from dppo_megatron.rollout.servers.wire import Expected, GenerateRequest


class Submit(msgspec.Struct, frozen=True, tag=True):
    ticket: int
    index: int
    """Of the group in its rollout."""
    server: str
    """Its address."""
    group: GenerateRequest
    expected: Expected
    timeout_s: float
    """For the whole attempt, to its last byte."""
    prompt: bytes = b""
    """What the grading hook is given with the texts (a pickled `Prompt`); empty: not graded there."""


class Completed(msgspec.Struct, frozen=True, tag=True):
    """A group was answered, and the answer is what was asked for."""

    ticket: int
    lengths: list[int]
    """[count] tokens of each completion."""
    reasons: list[str]
    """[count] stop, length or abort."""
    spans: list[tuple[int, int]]
    """(weights version, tokens sampled under it), of all completions together."""


class Graded(msgspec.Struct, frozen=True, tag=True):
    """A group that has landed is decoded, and graded if that was wanted."""

    ticket: int


class AttemptFailed(msgspec.Struct, frozen=True, tag=True):
    """An attempt came to nothing."""

    ticket: int
    kind: Literal["unreachable", "refused", "bad", "ours"]
    """No answer; a status other than 2xx; an answer that cannot be right; this machine lacks files, memory or ports."""
    text: str
    status: int = 0
    retry_after_s: float | None = None


Event = Completed | Graded | AttemptFailed


class Intake(Protocol):
    """Takes in completions and keeps them."""

    def room(self, server: str) -> int:
        """Groups that may be in flight on `server`: each holds a socket of its client."""

    def ask(self, ask: Submit) -> None:
        """Begin one attempt; what becomes of it is among the `events`."""

    def end(self, tickets: Sequence[int]) -> None:
        """Have the servers end these now: what they have so far lands, as `abort`."""

    def cancel(self, tickets: Sequence[int]) -> None:
        """Close the connections of these, and drop what they have brought."""

    def events(self, timeout_s: float) -> list[Event]:
        """What has happened, waiting for it up to `timeout_s`. Raises RunAborted if the intake itself is lost."""
