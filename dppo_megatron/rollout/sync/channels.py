"""The ways for weights into servers: through files, by broadcast to the engines' workers, or through shared memory.

All walk the actor's stream of full tensors in buckets, so that no rank gathers the model. Every server is served on
its own: one that fails in the middle is marked out and never asked for a token again before a later sync has given
it all tensors, so no request meets mixed weights; the others are not disturbed. Each server has a broadcast group
of its own for the same reason: in a common one, the death of a server would break the sync of all.
"""

from __future__ import annotations

import shutil
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import urlsplit

from safetensors.torch import save_file
from torch import Tensor

from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.http import Refused, Unreachable
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import BucketServer, TensorNote
from dppo_megatron.rollout.transfer.groups import (
    BroadcastBackend,
    BroadcastGroup,
    Meeting,
    Sending,
    abandon,
    listening_store,
)
from dppo_megatron.rollout.transfer.shared_memory import SharedBuffer

Bucket = list[tuple[str, Tensor]]


class Channel(Protocol):
    """One pass of weights into some servers. Used on the rank that talks to them."""

    name: str

    def push(self, tensors: Iterable[tuple[str, Tensor]], members: Sequence[Member], version: str) -> None:
        """Consume all `tensors`, whatever happens; a server that fails is marked out."""

    def close(self) -> None: ...


def buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Consecutive tensors of one dtype, together at most `max_bytes` unless one alone is larger."""
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        if bucket and (size + tensor.nbytes > max_bytes or tensor.dtype != bucket[0][1].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def write_snapshot(tensors: Iterable[tuple[str, Tensor]], target: Path, hf_path: str | Path, bucket_bytes: int) -> None:
    """Safetensors shards and config.json in `target`, which appears only when it is complete.

    Not fsynced: a snapshot is read at once and replaced by the next; checkpoints are made elsewhere.
    """
    aside = target.with_name(target.name + ".incomplete")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    shutil.copy(Path(hf_path) / "config.json", aside / "config.json")
    for number, bucket in enumerate(buckets(tensors, bucket_bytes)):
        save_file(
            {name: tensor.contiguous().cpu() for name, tensor in bucket},
            aside / f"model-{number:05d}.safetensors",
            metadata={"format": "pt"},
        )
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)


class DiskChannel:
    """Safetensors on a path that trainer and servers share; works everywhere, at the speed of that file system."""

    name = "disk"

    def __init__(self, fleet: Fleet, directory: Path, hf_path: str, bucket_bytes: int, timeout_s: float) -> None:
        self._fleet, self._directory, self._hf_path = fleet, directory.absolute(), hf_path
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._last: Path | None = None

    def push(self, tensors: Iterable[tuple[str, Tensor]], members: Sequence[Member], version: str) -> None:
        """Write once, then all servers read at the same time. The previous snapshot is deleted."""
        target = self._directory / f"weights_{version}"
        stream = iter(tensors)
        try:
            write_snapshot(stream, target, self._hf_path, self._bucket_bytes)
        finally:
            for _ in stream:  # a full disk must not leave the other ranks inside the collective stream
                pass
        if self._last is not None and self._last != target:
            shutil.rmtree(self._last, ignore_errors=True)
        self._last = target

        def load(member: Member) -> None:
            member.server.load_from_disk(str(target), version, timeout_s=self._timeout_s)

        on_each(self._fleet, members, load)

    def close(self) -> None:
        """Delete the last snapshot."""
        if self._last is not None:
            shutil.rmtree(self._last, ignore_errors=True)


class BucketChannel(ABC):
    """What broadcast and shared memory have in common: each server opens an update, takes buckets, and commits."""

    name = ""

    def __init__(self, fleet: Fleet, bucket_bytes: int, timeout_s: float) -> None:
        self._fleet, self._bucket_bytes, self._timeout_s = fleet, bucket_bytes, timeout_s

    def push(self, tensors: Iterable[tuple[str, Tensor]], members: Sequence[Member], version: str) -> None:
        """All servers take a bucket at the same time; the next is gathered when all have it."""
        timeout_s = self._timeout_s
        taking_part = self._each(members, self._prepare)
        taking_part = self._each(taking_part, lambda member: _receiver(member).begin_update(timeout_s=timeout_s))
        for bucket in buckets(tensors, self._bucket_bytes):
            if taking_part:  # else only keep pace with the other ranks
                taking_part = self._hand_over(taking_part, bucket)
        self._each(taking_part, lambda member: _receiver(member).end_update(version, timeout_s=timeout_s))

    @abstractmethod
    def close(self) -> None:
        """Give back what is held between syncs."""

    @abstractmethod
    def _prepare(self, member: Member) -> None:
        """Before the first bucket."""

    @abstractmethod
    def _hand_over(self, members: Sequence[Member], bucket: Bucket) -> list[Member]:
        """Give `bucket` to all `members`; returns those that took it."""

    def _each(self, members: Sequence[Member], action: Callable[[Member], None]) -> list[Member]:
        return on_each(self._fleet, members, action)


class BroadcastChannel(BucketChannel):
    """Broadcast over gloo or NCCL from this rank to the workers of each server."""

    def __init__(
        self,
        fleet: Fleet,
        backend: BroadcastBackend,
        world_sizes: dict[str, int],
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        super().__init__(fleet, bucket_bytes, timeout_s)
        self.name: str = backend
        self._backend, self._world_sizes = backend, world_sizes
        self._groups: dict[str, BroadcastGroup] = {}
        self._joined: dict[str, int] = {}
        """How often each server had been out when its group was made: after another outage it gets a new one."""

    def close(self) -> None:
        """Leave the groups."""
        for name in list(self._groups):
            abandon(self._groups.pop(name))

    def _prepare(self, member: Member) -> None:
        """Groups are made at the first sync of a server, and again after it has failed."""
        if self._joined.get(member.name) == member.outages and member.name in self._groups:
            return
        if member.name in self._groups:
            abandon(self._groups.pop(member.name))
        receiver, timeout = _receiver(member), timedelta(seconds=self._timeout_s)
        host, world_size = _own_address(member.name), self._world_sizes[member.name] + 1
        store = listening_store(host, world_size, timeout)
        meeting = Meeting(f"dppo-{uuid.uuid4().hex}", self._backend, host, store, world_size, timeout)
        answer = in_thread(lambda: receiver.join_group(meeting, timeout_s=self._timeout_s))
        group = receiver.own_group(meeting)
        answer.result()
        self._groups[member.name], self._joined[member.name] = group, member.outages

    def _hand_over(self, members: Sequence[Member], bucket: Bucket) -> list[Member]:
        tensors, notes = [tensor for _, tensor in bucket], notes_of(bucket)

        def hand_over(member: Member) -> None:
            """The broadcast and the request to take part in it, to one server. At the same time: the first broadcast
            over NCCL begins when the workers are there, and a refusal is to be known before a broadcast's timeout."""
            sending = Sending(self._groups[member.name], tensors)
            try:
                _receiver(member).receive(notes, timeout_s=self._timeout_s)
                sending.wait(self._timeout_s)
            finally:
                sending.forget()  # an error keeps this frame, and this the connection whose end the server waits for

        took = self._each(members, hand_over)
        for member in members:
            if member not in took:
                abandon(self._groups.pop(member.name))
        return took


class SharedMemoryChannel(BucketChannel):
    """Through memory that servers on this machine map: CUDA IPC on GPUs, a shared anonymous file on CPUs."""

    name = "ipc"

    def __init__(self, fleet: Fleet, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(fleet, bucket_bytes, timeout_s)
        self._buffer: SharedBuffer | None = None

    def push(self, tensors: Iterable[tuple[str, Tensor]], members: Sequence[Member], version: str) -> None:
        """As for every bucket channel. On a GPU the buffer goes back to the allocator: the actor needs its memory."""
        super().push(tensors, members, version)
        if self._buffer is not None and self._buffer.memory.is_cuda:
            self.close()

    def close(self) -> None:
        """Give the buffer back."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _prepare(self, member: Member) -> None:
        """Nothing: how to map the buffer comes with each bucket."""

    def _hand_over(self, members: Sequence[Member], bucket: Bucket) -> list[Member]:
        needed, device = sum(tensor.nbytes for _, tensor in bucket), bucket[0][1].device
        if self._buffer is None or self._buffer.memory.nbytes < needed:
            self.close()
            self._buffer = SharedBuffer(max(needed, self._bucket_bytes), device)
        views, notes, buffer = self._buffer.fill([tensor for _, tensor in bucket]), notes_of(bucket), self._buffer
        return self._each(
            members,
            lambda member: _receiver(member).receive_shared(buffer, views, notes, timeout_s=self._timeout_s),
        )


def notes_of(bucket: Bucket) -> list[TensorNote]:
    """What a receiver must know before the bytes come."""
    return [TensorNote(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in bucket]


def on_each(
    fleet: Fleet, members: Sequence[Member], action: Callable[[Member], None], doing: str = "weight sync"
) -> list[Member]:
    """Run `action` at the same time on all that are not out; who fails at what we were `doing` is marked out.

    Returns:
        Those for which it succeeded.
    """
    taking_part = [member for member in members if member.state != "out"]
    futures = [(member, in_thread(lambda m=member: action(m))) for member in taking_part]  # type: ignore[misc]
    succeeded = []
    for member, future in futures:
        try:
            future.result()
        except (Unreachable, Refused, RuntimeError) as error:  # torch reports a broken group as RuntimeError
            fleet.mark_out(member, f"{doing} failed: {error}")
        else:
            succeeded.append(member)
    return succeeded


def in_thread(action: Callable[[], None]) -> Future[None]:
    """Begin `action` in a thread of its own."""
    pool = ThreadPoolExecutor(max_workers=1)
    future = pool.submit(action)
    pool.shutdown(wait=False)
    return future


def _receiver(member: Member) -> BucketServer:
    return cast(BucketServer, member.server)


def _own_address(url: str) -> str:
    """This machine's address as the server at `url` can reach it."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=10) as probe:
        return str(probe.getsockname()[0])
