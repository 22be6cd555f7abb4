"""Weights by broadcast: one group of this rank and the workers of all servers, so that one copy leaves the trainer.

The price of a common group: one server's death breaks it for all. The rules:

- A group is kept from sync to sync while those to be synced are the same and none has been out. Else it is made anew,
  of exactly those: a broadcast needs all of its members.
- A pass in which a member fails is broken: the rest of it is not sent, its members stay stale, and `WeightSync` begins
  another without the one that failed. No server keeps a part of the weights: a pass starts with tensor one.
- A server whose connection breaks or times out has failed. Those that answer "the weights stopped coming" are its
  neighbours in the group, and are not to blame. If every server answers, those that refuse are.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.groups import BroadcastBackend, BroadcastGroup, GroupRendezvous, listening_store
from dppo_megatron.rollout.servers.http import Unreachable
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.server_process import address_toward
from dppo_megatron.rollout.sync.channels import FAILURES, Bucket, BucketChannel, Offers, Tensors, at_once, in_thread

_SHORTER = 0.75
"""Of the timeout of a request: servers give up a broadcast before it, and so can still answer that they live."""
_JOINING_S = 60.0
"""Members that wait for one that does not join are blocked."""
_MARGIN_S = 5.0
"""Of the request to join over `_JOINING_S`: the server's own timeout comes first, and names the reason."""


class BroadcastChannel(BucketChannel):
    """Broadcast over gloo or NCCL from rank 0 to the workers of all servers."""

    def __init__(self, fleet: Fleet | None, backend: BroadcastBackend, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(fleet, bucket_bytes, timeout_s)
        self.name, self._backend = backend, backend
        self._group: BroadcastGroup | None = None
        self._joined: list[tuple[str, int]] = []
        """Who is in the group, and how often each had been out then."""

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.abandon()
        self._group, self._joined = None, []

    def push(self, tensors: Tensors, members: Sequence[Member], version: str) -> list[Member]:
        """A pass in which a member fails counts for none."""
        took = super().push(tensors, members, version)
        self.not_to_blame = [member.name for member in members if member not in took and member.state != "out"]
        return took

    def _prepare(self, members: Sequence[Member]) -> list[Member]:
        """A group of exactly these members."""
        present = [(member.name, member.outages) for member in members]
        if present != self._joined:
            self.close()
            self._group = self._join(members) if members else None
            self._joined = present if self._group is not None else []
        return list(members) if self._group is not None else []

    def _join(self, members: Sequence[Member]) -> BroadcastGroup | None:
        """The trainer's end, when all members have joined. None if one does not; that one is marked out."""
        joining_s = min(_JOINING_S, self._timeout_s)
        world_size = 1 + sum(member.server.world_size for member in members)
        host = _own_address([member.name for member in members])
        meeting = GroupRendezvous(
            name=f"dppo-{uuid.uuid4().hex}",
            backend=self._backend,
            host=host,
            store=listening_store(host, world_size, timedelta(seconds=joining_s)),
            world_size=world_size,
            joining=timedelta(seconds=joining_s),
            timeout=timedelta(seconds=_SHORTER * self._timeout_s),
        )
        first_ranks, following = {}, 1
        for member in members:
            first_ranks[member.name], following = following, following + member.server.world_size
        own = in_thread(lambda: members[0].server.own_group(meeting))
        answers = at_once(
            members,
            lambda m: m.server.join_group(meeting, first_ranks[m.name], timeout_s=joining_s + _MARGIN_S),
        )
        begun: list[Future[Any]] = [own, *(answer for _, answer in answers)]
        wait(begun, return_when=FIRST_EXCEPTION)
        if any(answer.done() and isinstance(answer.exception(), Unreachable) for _, answer in answers):
            answers = [(member, answer) for member, answer in answers if answer.done()]  # the others wait in vain
        doing = "it did not join the broadcast: "
        if self._blame(answers, doing) or self._blame([(members[0], own)], doing):  # our end's neighbour is its first
            return None
        return own.result()

    def _blame(self, answers: Sequence[tuple[Member, Future[Any]]], doing: str = "") -> bool:
        """Mark out the servers that broke the group, if any of `answers` is a failure: those that cannot be reached,
        or, if all answer, those that refuse."""
        failed = {member: error for member, answer in answers if (error := answer.exception()) is not None}
        for error in failed.values():
            if not isinstance(error, FAILURES):
                raise error
        gone = [member for member, error in failed.items() if isinstance(error, Unreachable)]
        for member in gone or failed:
            self._fleet.mark_out(member, f"weight sync failed: {doing}{failed[member]}")
        return bool(failed)

    def _hand_over(self, members: Sequence[Member], bucket: Bucket, offers: Sequence[Offers | str]) -> list[Member]:
        """The broadcast and the requests to take part in it go at the same time: over NCCL the first one begins when
        the workers are there. A server that breaks the group is out, and none has taken the bucket."""
        group = self._group
        if not members or group is None:
            return []
        flat = bucket.flat()
        sending = in_thread(lambda: _sent(group, flat), "broadcast")
        answers = at_once(members, lambda m: m.server.receive(bucket.notes, timeout_s=self._timeout_s))
        wait([answer for _, answer in answers], return_when=FIRST_EXCEPTION)
        if any(answer.done() and answer.exception() for _, answer in answers):
            group.abandon()  # releases those that wait for a member that will not come
        if self._blame(answers):
            self.close()
            return []
        try:
            problem = sending.result(self._timeout_s)  # all have it, so it has left
        except TimeoutError:
            problem = f"the broadcast was not taken in {self._timeout_s:g} s"
        if problem:
            raise RuntimeError(problem)
        return list(members)


def _sent(group: BroadcastGroup, memory: Tensor) -> str:
    """Send; blocks until the other ends have connected (NCCL's first send) or, if one hangs, until the group's timeout.
    Returns what went wrong as text: a traceback would keep the group alive, and others wait until our sockets close."""
    try:
        group.send(memory)
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _own_address(urls: Sequence[str]) -> str:
    """This machine's address as the servers can reach it: one that other machines see, if one of them is elsewhere."""
    found = []
    for url in urls:
        parts = urlsplit(url)
        assert parts.hostname is not None
        found.append(address_toward(parts.hostname))
    return next((address for address in found if not ip_address(address).is_loopback), found[0])
