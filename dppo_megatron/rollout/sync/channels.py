"""The channels by which weights reach servers: what they share, and the one through files. See also `broadcast.py` and
`colocated.py`.

All iterate over the actor's stream of full tensors in buckets, so that no rank holds the whole model. Broadcast and
shared memory send bucket k in a thread while bucket k + 1 is gathered:

    this thread     gather 0 | gather 1      | gather 2      | ...    (the stream: collective over the actor's ranks)
    sender thread            | hand over 0   | hand over 1   | ...    (to all servers at the same time)

A server that fails halfway is marked out and gets no requests before a later pass has sent it all tensors, so no token
is ever sampled with mixed weights.
"""

from __future__ import annotations

import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from dppo_megatron.files import remove_tree
from dppo_megatron.rollout.fp8_weights import SCALE
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.http import BadAnswer, Refused, Unreachable
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import Offer, TensorNote
from dppo_megatron.rollout.servers.wire import version_number
from dppo_megatron.weights.hf_files import aside, assets

T = TypeVar("T")
Tensors = Iterable[tuple[str, Tensor]]
Offers: TypeAlias = dict[tuple[str, int], Offer]
"""(server, worker) -> how that worker maps a bucket."""
_SAME_BUCKET_AS_PREVIOUS = ".q_a_proj.weight"
"""SGLang (0.5.23) joins it with kv_a_proj_with_mqa, which precedes it in the stream, but only within one call."""
FAILURES = (Unreachable, Refused, RuntimeError)
"""Exceptions that mean a server has failed; torch reports a broken group as RuntimeError."""


class Channel(ABC):
    """A way to send weights to servers. Made on every rank, with the fleet on rank 0."""

    name = ""
    receivers: Sequence[int] = (0,)
    """Ranks of the actor that need the stream's tensors."""
    not_to_blame: Collection[str] = ()
    """Addresses of servers for which the last pass failed because of another server."""

    def __init__(self, fleet: Fleet | None, bucket_bytes: int, timeout_s: float) -> None:
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._fleet = cast(Fleet, fleet)  # None on other ranks, which never use it

    @abstractmethod
    def push(self, tensors: Tensors, members: Sequence[Member], version: str) -> list[Member]:
        """On rank 0: make one pass. Consumes all `tensors`, whatever happens; a server that fails is marked out.
        Returns the members that have all tensors."""

    def take_part(self, tensors: Tensors, names: Collection[str]) -> None:
        """On every other rank, during `push`: consume the collective stream. `names`: the members of the pass."""
        drain(tensors)

    @abstractmethod
    def close(self) -> None:
        """Release what is kept between syncs."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Named tensors of one dtype."""

    tensors: list[tuple[str, Tensor]]

    @property
    def notes(self) -> list[TensorNote]:
        return [TensorNote(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in self.tensors]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors)

    def flat(self) -> Tensor:
        """The tensors' bytes end to end [num_bytes]; no copy if they already lie like that in one storage."""
        first = self.tensors[0][1]
        parts = [tensor.detach().contiguous() for _, tensor in self.tensors]
        end = parts[0].data_ptr()
        for part in parts:
            if part.data_ptr() != end or part.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr():
                return torch.cat([one.reshape(-1).view(torch.uint8) for one in parts])
            end += part.nbytes
        total = sum(part.numel() for part in parts)
        return first.detach().as_strided((total,), (1,), first.storage_offset()).view(torch.uint8)


def buckets(tensors: Tensors, max_bytes: int) -> Iterator[Bucket]:
    """Group consecutive tensors, at most `max_bytes` together unless one alone is larger, and yield a bucket for each
    dtype among them. The smallest comes first, so that vLLM has the scales of a weight before the weight. If the stream
    packs tensors into larger storages, no bucket spans two storages, so that each can be sent without a copy."""
    by_dtype: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    size = 0

    def filled() -> list[Bucket]:
        return sorted(map(Bucket, by_dtype.values()), key=lambda bucket: bucket.nbytes)

    for name, tensor in tensors:
        previous = by_dtype.get(tensor.dtype)
        is_full = size + tensor.nbytes > max_bytes or bool(previous and _leaves_storage(previous[-1][1], tensor))
        if by_dtype and is_full and not (_SAME_BUCKET_AS_PREVIOUS in name or name.endswith(SCALE)):
            yield from filled()
            by_dtype, size = {}, 0
        by_dtype.setdefault(tensor.dtype, []).append((name, tensor))
        size += tensor.nbytes
    yield from filled()


def _leaves_storage(last: Tensor, following: Tensor) -> bool:
    """Whether `last` is in a storage with other tensors, and `following` is in another storage."""
    is_packed = last.untyped_storage().nbytes() > last.nbytes
    return is_packed and last.untyped_storage().data_ptr() != following.untyped_storage().data_ptr()


def write_snapshot(tensors: Tensors, target: Path, hf_path: str | Path, bucket_bytes: int) -> None:
    """Write safetensors shards and config.json to `target`, which appears only when it is complete.

    There is no fsync: servers read a snapshot at once, and the next one replaces it.
    """
    [config] = [path for path in assets(hf_path) if path.name == "config.json"]
    with aside(target, durable=False) as directory:
        shutil.copy(config, directory)
        for number, bucket in enumerate(buckets(tensors, bucket_bytes)):
            save_file(
                {name: tensor.contiguous().cpu() for name, tensor in bucket.tensors},
                directory / f"model-{number:05d}.safetensors",
                metadata={"format": "pt"},
            )


class DiskChannel(Channel):
    """Safetensors on a path that trainer and servers share. Works everywhere, at the speed of that file system."""

    name = "disk"

    def __init__(self, fleet: Fleet | None, directory: Path, hf_path: str, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(fleet, bucket_bytes, timeout_s)
        self._directory, self._hf_path = directory.absolute(), hf_path
        self._last: Path | None = None
        if fleet is not None:  # on rank 0: remove the snapshot of an earlier run with this directory that was killed
            for leftover in self._directory.glob("weights_*"):
                remove_tree(leftover)

    def push(self, tensors: Tensors, members: Sequence[Member], version: str) -> list[Member]:
        target = self._directory / f"weights_{version_number(version)}"
        stream = iter(tensors)
        try:
            write_snapshot(stream, target, self._hf_path, self._bucket_bytes)
        finally:
            drain(stream)  # a full disk must not leave the other ranks inside the collective stream
        if self._last is not None and self._last != target:
            shutil.rmtree(self._last, ignore_errors=True)
        self._last = target

        ask_s = self._timeout_s
        return on_each(self._fleet, members, lambda m: m.server.load_from_disk(str(target), version, timeout_s=ask_s))

    def close(self) -> None:
        if self._last is not None:
            shutil.rmtree(self._last, ignore_errors=True)


class BucketChannel(Channel):
    """What broadcast and shared memory have in common: each server begins an update, receives buckets, and commits."""

    def push(self, tensors: Tensors, members: Sequence[Member], version: str) -> list[Member]:
        """See the diagram at the head of this file. Errors are raised at the stream's end, as other ranks are in it."""
        with ThreadPoolExecutor(1, thread_name_prefix="sender") as sender:
            handed_over = sender.submit(self._begin, members)
            wait([handed_over])
            for number, bucket in enumerate(buckets(tensors, self._bucket_bytes)):
                mine = self._offer(bucket, number)
                wait([handed_over])
                handed_over = sender.submit(self._send_next, handed_over, bucket, self._exchange(mine))
        try:
            took = handed_over.result()
            return on_each(self._fleet, took, lambda m: m.server.end_update(version, timeout_s=self._timeout_s))
        finally:
            self._end()

    def _begin(self, members: Sequence[Member]) -> list[Member]:
        return self._prepare(on_each(self._fleet, members, lambda m: m.server.begin_update(timeout_s=self._timeout_s)))

    def _send_next(self, last: Future[list[Member]], bucket: Bucket, offers: Sequence[Offers | str]) -> list[Member]:
        """In the sender thread: hand over to the members that took the last bucket, or raise that one's error."""
        return self._hand_over(last.result(), bucket, offers)

    def _prepare(self, members: Sequence[Member]) -> list[Member]:
        """Called before the first bucket; returns the members that are ready."""
        return list(members)

    def _offer(self, bucket: Bucket, number: int) -> Offers | str:
        """Put bucket `number` where servers can read it; the previous one may still be read. Text: what went wrong."""
        return {}

    def _exchange(self, mine: Offers | str) -> Sequence[Offers | str]:
        """Collect the offers of all ranks on rank 0."""
        return [mine]

    @abstractmethod
    def _hand_over(self, members: Sequence[Member], bucket: Bucket, offers: Sequence[Offers | str]) -> list[Member]:
        """Give `bucket` to all `members` (possibly none: all have failed); returns those that took it."""

    def _end(self) -> None:
        """Called after the last bucket, even if something has failed."""


def drain(tensors: Iterable[object]) -> None:
    """Consume a collective stream to its end."""
    for _ in tensors:
        pass


def in_thread(action: Callable[[], T], name: str = "server") -> Future[T]:
    """Run `action` in a new daemon thread: unlike an executor's, it lets the process end while a server hangs."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def at_once(members: Sequence[Member], action: Callable[[Member], T]) -> list[tuple[Member, Future[T]]]:
    return [(member, in_thread(partial(action, member))) for member in members]


def on_each(
    fleet: Fleet, members: Sequence[Member], action: Callable[[Member], None], doing: str = "weight sync"
) -> list[Member]:
    """Run `action` for all members that are not out, at the same time. A server that fails is marked out, with `doing`
    in the reason. Returns the members for which it succeeded."""
    succeeded = []
    for member, future in at_once([member for member in members if member.state != "out"], action):
        try:
            future.result()
        except FAILURES as error:
            fleet.mark_out(member, f"{doing} failed: {error}")
            member.must_restart |= isinstance(error, BadAnswer)
        else:
            succeeded.append(member)
    return succeeded
