"""How weights get from the actor into servers: through files, or by broadcast to the engines' workers.

Both walk the actor's stream of full tensors in buckets, so that no rank gathers the model. Every server is served on
its own: one that fails in the middle is marked out and never asked for a token again before a later sync has given
it all tensors, so no request meets mixed weights; the others are not disturbed. Each server has a broadcast group
of its own for the same reason: in a common one, the death of a server would break the sync of all.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from dppo_megatron.rollout.fleet import Fleet, Member
from dppo_megatron.rollout.http import Refused, Unreachable
from dppo_megatron.rollout.server import BroadcastServer, InFlight, Server, TensorNote
from dppo_megatron.types import UserError

ChannelName = Literal["disk", "gloo", "nccl"]


class Channel(Protocol):
    """One pass of weights into some servers. Used on the rank that talks to them."""

    name: str

    def push(self, tensors: Iterable[tuple[str, Tensor]], members: Sequence[Member], version: str) -> None:
        """Consume all `tensors`, whatever happens; a server that fails is marked out."""

    def close(self) -> None: ...


def buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors of one dtype, together at most `max_bytes` unless one alone is larger."""
    bucket: list[tuple[str, Tensor]] = []
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

        def load(server: Server) -> None:
            server.load_from_disk(str(target), version, timeout_s=self._timeout_s)

        _on_each(self._fleet, members, load)

    def close(self) -> None:
        """Delete the last snapshot."""
        if self._last is not None:
            shutil.rmtree(self._last, ignore_errors=True)


class BroadcastChannel:
    """Broadcast over gloo or NCCL from this rank to the workers of each server, a bucket at a time."""

    def __init__(
        self,
        fleet: Fleet,
        backend: Literal["gloo", "nccl"],
        world_sizes: dict[str, int],
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self.name: str = backend
        self._backend, self._fleet = backend, fleet
        self._world_sizes, self._bucket_bytes, self._timeout_s = world_sizes, bucket_bytes, timeout_s
        self._groups: dict[str, Any] = {}
        self._joined: dict[str, int] = {}
        """How often each server had been out when its group was made: after another outage it gets a new one."""
        self._threads = ThreadPoolExecutor(max_workers=2 * len(fleet.members), thread_name_prefix="sync")

    def push(self, tensors: Iterable[tuple[str, Tensor]], members: Sequence[Member], version: str) -> None:
        """Groups are made at the first sync of a server, and again after it has failed."""
        taking_part = list(members)

        def each(action: Callable[[Member], None]) -> None:
            futures = [(member, self._threads.submit(action, member)) for member in taking_part]
            for member, future in futures:
                if not _succeeded(self._fleet, member, future):
                    self._groups.pop(member.name, None)
                    taking_part.remove(member)

        each(self._join)
        each(lambda member: _receiver(member).begin_update(timeout_s=self._timeout_s))
        for bucket in buckets(tensors, self._bucket_bytes):
            if taking_part:  # else only keep pace with the other ranks
                flat = torch.cat([tensor.reshape(-1) for _, tensor in bucket])
                notes = [
                    TensorNote(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                    for name, tensor in bucket
                ]
                each(lambda member, flat=flat, notes=notes: self._send(member, flat, notes))  # type: ignore[misc]
        each(lambda member: _receiver(member).end_update(version, timeout_s=self._timeout_s))

    def close(self) -> None:
        """Leave the groups."""
        self._groups.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _join(self, member: Member) -> None:
        if self._joined.get(member.name) == member.outages and member.name in self._groups:
            return
        if member.name in self._joined:  # it may have been started again since, and then has none to leave
            _receiver(member).leave_group(timeout_s=self._timeout_s)
        timeout = timedelta(seconds=self._timeout_s)
        host = _own_address(member.name)
        world_size = self._world_sizes[member.name] + 1
        store = dist.TCPStore(host, 0, world_size, True, timeout, wait_for_workers=False)  # type: ignore[attr-defined]
        answer = _in_thread(
            lambda: _receiver(member).join_group(self._backend, host, store.port, world_size, timeout_s=self._timeout_s)
        )
        prefixed = PrefixStore("dppo", store)
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            group: Any = dist.ProcessGroupNCCL(prefixed, 0, world_size, options)
        else:
            group = dist.ProcessGroupGloo(prefixed, 0, world_size, timeout)
        answer.result()
        self._groups[member.name], self._joined[member.name] = group, member.outages

    def _send(self, member: Member, flat: Tensor, notes: Sequence[TensorNote]) -> None:
        answer = _in_thread(lambda: _receiver(member).receive(notes, timeout_s=self._timeout_s))
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._groups[member.name].broadcast([flat], options).wait()
        answer.result()


def choose_channel(wanted: str, offered: Sequence[Sequence[str]], on_gpu: bool) -> tuple[ChannelName, str]:
    """The sync channel and why.

    Args:
        wanted: `rollout.sync_channel`.
        offered: the channels that each server is started for.

    Raises:
        UserError: a forced channel that a server does not offer.
    """
    common: set[str] = set(offered[0]).intersection(*offered[1:]) if offered else set()
    if wanted != "auto":
        if wanted not in common:
            raise UserError(
                f"rollout.sync_channel = {wanted}, but the servers are started for {', '.join(sorted(common))};"
                " docs/engines.md has the arguments for the others"
            )
        return wanted, "asked for"  # type: ignore[return-value]
    if on_gpu and "nccl" in common:
        return "nccl", "the actor is on GPUs and every server offers it"
    if not on_gpu and "gloo" in common:
        return "gloo", "the actor is on CPUs and every server offers it"
    return "disk", "not every server is started for a broadcast"


def around_update(fleet: Fleet, members: Sequence[Member], in_flight: InFlight, timeout_s: float) -> None:
    """Before an update: running requests are treated as `in_flight` says, new ones wait at the server."""
    _on_each(fleet, members, lambda server: server.pause(in_flight, timeout_s=timeout_s))


def finish_update(fleet: Fleet, members: Sequence[Member], version: str, timeout_s: float) -> None:
    """After an update: forget cached prefixes, generate again, and read the version back. Those that agree are live."""

    def finish(server: Server) -> None:
        server.reset_cache(timeout_s=timeout_s)
        server.resume(timeout_s=timeout_s)
        found = server.weights_version(timeout_s=timeout_s)
        if found != version:
            raise Refused(409, f"its weights version is '{found}' after the sync of '{version}'")

    healthy = [member for member in members if member.state != "out"]
    for member in _on_each(fleet, healthy, finish):
        member.state, member.reason = "live", ""


def _on_each(fleet: Fleet, members: Sequence[Member], action: Callable[[Server], None]) -> list[Member]:
    """Run `action` on all at the same time; who fails is marked out. Returns the others."""
    futures = [(member, _in_thread(lambda m=member: action(m.server))) for member in members]  # type: ignore[misc]
    return [member for member, future in futures if _succeeded(fleet, member, future)]


def _succeeded(fleet: Fleet, member: Member, future: Future[None]) -> bool:
    try:
        future.result()
    except (Unreachable, Refused, RuntimeError) as error:  # torch reports a broken group as RuntimeError
        fleet.mark_out(member, f"weight sync failed: {error}")
        return False
    return True


def _in_thread(action: Callable[[], None]) -> Future[None]:
    pool = ThreadPoolExecutor(max_workers=1)
    future = pool.submit(action)
    pool.shutdown(wait=False)
    return future


def _receiver(member: Member) -> BroadcastServer:
    return cast(BroadcastServer, member.server)


def _own_address(url: str) -> str:
    """This machine's address as the server at `url` can reach it."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=10) as probe:
        return str(probe.getsockname()[0])
