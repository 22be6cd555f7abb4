"""The ways for weights into servers: through files or by broadcast; through shared memory is `colocated.py`.

All walk the actor's stream of full tensors in buckets, so that no rank holds the model, and send bucket k in a thread
while bucket k + 1 is gathered:

    this thread     gather 0 | gather 1      | gather 2      | ...    (the stream: collective over the actor's ranks)
    sender thread            | hand over 0   | hand over 1   | ...    (all servers at the same time)

A server that fails in the middle is marked out and never asked for a token again before a later pass has given it all
tensors, so no request meets mixed weights.
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
from dppo_megatron.rollout.servers.http import Refused, Unreachable
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import Offer, TensorNote
from dppo_megatron.rollout.servers.wire import version_number
from dppo_megatron.weights.hf_files import aside, assets

T = TypeVar("T")
Tensors = Iterable[tuple[str, Tensor]]
Offers: TypeAlias = dict[tuple[str, int], Offer]
"""How each reader maps a bucket, by server and worker."""
_WITH_LAST = ".q_a_proj.weight"
"""SGLang (0.5.23) joins it with what the stream has before it, kv_a_proj_with_mqa, and forgets either after a call."""
FAILURES = (Unreachable, Refused, RuntimeError)
"""What a server's failure looks like here; torch reports a broken group as RuntimeError."""


class Channel(ABC):
    """One way of weights into servers. Made on every rank, with the fleet on rank 0."""

    name = ""
    receivers: Sequence[int] = (0,)
    """Ranks of the actor that must be given the stream."""
    not_to_blame: Collection[str] = ()
    """Servers, by address, that did not get the last pass because of another server's failure."""

    def __init__(self, fleet: Fleet | None, bucket_bytes: int, timeout_s: float) -> None:
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._fleet = cast(Fleet, fleet)  # used on rank 0, which talks to the servers

    @abstractmethod
    def push(self, tensors: Tensors, members: Sequence[Member], version: str) -> list[Member]:
        """On rank 0: one pass. Consumes all `tensors`, whatever happens; a server that fails is marked out. Returns
        those that have all of them."""

    def take_part(self, tensors: Tensors, names: Collection[str]) -> None:
        """On every other rank, at the same time: the stream's exchanges. `names`: the members of the pass."""
        drain(tensors)

    @abstractmethod
    def close(self) -> None:
        """Give back what is held between syncs."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one dtype and what they are called."""

    tensors: list[tuple[str, Tensor]]

    @property
    def notes(self) -> list[TensorNote]:
        """What a receiver must know before the bytes come."""
        return [TensorNote(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in self.tensors]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors)

    def flat(self) -> Tensor:
        """Their bytes end to end [num_bytes]: where the stream has laid them so, without a copy."""
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
    """Consecutive tensors, together at most `max_bytes` unless one alone is larger: a bucket for each dtype among them,
    the smallest first, so that vLLM has the scales of a weight before it. None spans two pieces of memory that
    the stream has filled end to end, so that each can be sent without a copy."""
    waiting: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    size = 0

    def filled() -> list[Bucket]:
        return sorted(map(Bucket, waiting.values()), key=lambda bucket: bucket.nbytes)

    for name, tensor in tensors:
        alike = waiting.get(tensor.dtype)
        ends = size + tensor.nbytes > max_bytes or bool(alike and _breaks(alike[-1][1], tensor))
        if waiting and ends and not (_WITH_LAST in name or name.endswith(SCALE)):
            yield from filled()
            waiting, size = {}, 0
        waiting.setdefault(tensor.dtype, []).append((name, tensor))
        size += tensor.nbytes
    yield from filled()


def _breaks(last: Tensor, following: Tensor) -> bool:
    part_of_more = last.untyped_storage().nbytes() > last.nbytes
    return part_of_more and last.untyped_storage().data_ptr() != following.untyped_storage().data_ptr()


def write_snapshot(tensors: Tensors, target: Path, hf_path: str | Path, bucket_bytes: int) -> None:
    """Safetensors shards and config.json in `target`, which appears only when it is complete.

    Not fsynced: a snapshot is read at once and replaced by the next.
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
    """Safetensors on a path that trainer and servers share; works everywhere, at the speed of that file system."""

    name = "disk"

    def __init__(self, fleet: Fleet | None, directory: Path, hf_path: str, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(fleet, bucket_bytes, timeout_s)
        self._directory, self._hf_path = directory.absolute(), hf_path
        self._last: Path | None = None
        if fleet is not None:  # rank 0's: a run or evaluation of this directory that was killed has left a whole model
            for left in self._directory.glob("weights_*"):
                remove_tree(left)

    def push(self, tensors: Tensors, members: Sequence[Member], version: str) -> list[Member]:
        """Write once, then all servers read at the same time. The previous snapshot is deleted."""
        target = self._directory / f"weights_{version_number(version)}"
        stream = iter(tensors)
        try:
            write_snapshot(stream, target, self._hf_path, self._bucket_bytes)
        finally:
            drain(stream)  # a full disk must not leave the other ranks inside the collective stream
        if self._last is not None and self._last != target:
            shutil.rmtree(self._last, ignore_errors=True)
        self._last = target

        def load(member: Member) -> None:
            member.server.load_from_disk(str(target), version, timeout_s=self._timeout_s)

        return on_each(self._fleet, members, load)

    def close(self) -> None:
        """Delete the last snapshot."""
        if self._last is not None:
            shutil.rmtree(self._last, ignore_errors=True)


class BucketChannel(Channel):
    """What broadcast and shared memory have in common: each server opens an update, takes buckets, and commits."""

    def push(self, tensors: Tensors, members: Sequence[Member], version: str) -> list[Member]:
        """See the picture at the head of this file. What goes wrong is raised when the stream is at its end: the other
        ranks walk it too."""
        with ThreadPoolExecutor(1, thread_name_prefix="sender") as sender:
            handed = sender.submit(self._begin, members)
            wait([handed])
            for turn, bucket in enumerate(buckets(tensors, self._bucket_bytes)):
                mine = self._offer(bucket, turn)
                wait([handed])
                handed = sender.submit(self._go_on, handed, bucket, self._exchange(mine))
        try:
            took = handed.result()
            return on_each(self._fleet, took, lambda m: m.server.end_update(version, timeout_s=self._timeout_s))
        finally:
            self._end()

    def _begin(self, members: Sequence[Member]) -> list[Member]:
        return self._prepare(on_each(self._fleet, members, lambda m: m.server.begin_update(timeout_s=self._timeout_s)))

    def _go_on(self, before: Future[list[Member]], bucket: Bucket, offers: Sequence[Offers | str]) -> list[Member]:
        """In the sender thread. Raises what the bucket before has raised."""
        return self._hand_over(before.result(), bucket, offers)

    def _prepare(self, members: Sequence[Member]) -> list[Member]:
        """Before the first bucket; returns those that are ready."""
        return list(members)

    def _offer(self, bucket: Bucket, turn: int) -> Offers | str:
        """Put bucket `turn` where servers find it, while the one before is handed over. Text: what went wrong."""
        return {}

    def _exchange(self, mine: Offers | str) -> Sequence[Offers | str]:
        """All ranks' offers, on rank 0."""
        return [mine]

    @abstractmethod
    def _hand_over(self, members: Sequence[Member], bucket: Bucket, offers: Sequence[Offers | str]) -> list[Member]:
        """Give `bucket` to all `members`; returns those that took it. None left: only keep pace with the stream."""

    def _end(self) -> None:
        """After the last bucket, whatever has gone wrong."""


def drain(tensors: Iterable[object]) -> None:
    """Walk a collective stream to its end."""
    for _ in tensors:
        pass


def in_thread(action: Callable[[], T], name: str = "server") -> Future[T]:
    """Begin `action` in a new thread. A daemon: the process may end while a server hangs, unlike with an executor."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def at_once(members: Sequence[Member], action: Callable[[Member], T]) -> list[tuple[Member, Future[T]]]:
    """Begin `action` for all members at the same time."""
    return [(member, in_thread(partial(action, member))) for member in members]


def on_each(
    fleet: Fleet, members: Sequence[Member], action: Callable[[Member], None], doing: str = "weight sync"
) -> list[Member]:
    """Run `action` at the same time on all that are not out; a server that fails is marked out, with `doing` in the
    reason. Returns those for which it succeeded."""
    succeeded = []
    for member, future in at_once([member for member in members if member.state != "out"], action):
        try:
            future.result()
        except FAILURES as error:
            fleet.mark_out(member, f"{doing} failed: {error}")
        else:
            succeeded.append(member)
    return succeeded
