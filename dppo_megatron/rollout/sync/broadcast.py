"""Weights by broadcast: one group of this rank and the workers of all servers, so that one copy leaves the trainer.

The price of a common group: one server's death breaks it for all. The rules:

- A group is kept from sync to sync while those to be synced are the same and none has been out. Else it is made anew,
  of exactly those: a broadcast needs all of its members.
- A pass in which a member fails is broken: the rest of it is not sent, its members stay stale, and `WeightSync` begins
  another without the one that failed. No server keeps a part of the weights: a pass starts with tensor one.
- A server whose connection breaks or times out has failed. Those that answer "the weights stopped coming" are its
  neighbours in the group, and are not to blame. If every server answers, those that refuse are.

Each engine has its own ideas of a group: vLLM's workers run our receiver (`in_engine/dppo_wire.py`), which over gloo is
a chain; SGLang builds torch's full process group and takes torch's broadcast, so the trainer has to as well. A bucket
crosses as one flat piece of bytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Backend, BackendConfig, PrefixStore

from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.http import Unreachable
from dppo_megatron.rollout.servers.in_engine import dppo_wire
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import CHUNK_BYTES, BroadcastBackend, GroupRendezvous, Server
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
        own = in_thread(lambda: own_group(meeting, members[0].server))
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
        patience_s = _SHORTER * self._timeout_s
        problem = _until_one_fails(sending, [answer for _, answer in answers], patience_s)
        late = [member for member, answer in answers if not answer.done()]
        if late or any(answer.exception() for _, answer in answers):
            group.abandon()  # releases those that wait for a member that will not come
        is_broken = self._blame(answers, f"our end of the broadcast failed ({problem}): " if problem else "")
        if late and not (is_broken or problem):  # what they have answered since may be of an aborted broadcast
            for member in late:
                self._fleet.mark_out(member, f"weight sync failed: it had not taken a bucket after {patience_s:g} s")
            is_broken = True
        if is_broken:
            self.close()
            return []
        try:
            problem = sending.result(self._timeout_s)  # all have it, so it has left
        except TimeoutError:
            problem = f"the broadcast was not taken in {self._timeout_s:g} s"
        if problem:
            raise RuntimeError(problem)
        return list(members)


def _until_one_fails(sending: Future[str], answers: Sequence[Future[Any]], timeout_s: float) -> str:
    """Returns when all servers have answered, one of them or our end has failed, or time is up; with what has gone
    wrong at our end."""
    deadline, waiting = time.monotonic() + timeout_s, {sending, *answers}
    while not waiting.isdisjoint(answers):
        done, waiting = wait(waiting, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
        if not done or any(one.exception() or (one is sending and one.result()) for one in done):
            break
    return sending.result() if sending.done() else ""


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


def listening_store(host: str, world_size: int, timeout: timedelta) -> TCPStore:
    """The store of a meeting, on a free port of `host` and on no other address of this machine: torch's own would
    listen on all of them, and takes keys and values from anybody."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port, handed_over = listener.getsockname()[1], listener.detach()
    return TCPStore(host, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=handed_over)


class ChainGroup:
    """Over gloo to our own receivers: to the first worker, which passes it on. Returns when all have joined and proven
    it."""

    def __init__(self, meeting: GroupRendezvous) -> None:
        self._sealed = dppo_wire.Sealed(meeting.store, meeting.secret)  # C++ calls it, and keeps no Python object alive
        self._backend: Any = _backend(meeting, PrefixStore(dppo_wire.PREFIX, self._sealed))
        self._timeout = meeting.timeout
        dppo_wire.prove(self._backend, meeting.secret, 0, 1, meeting.joining)

    def send(self, memory: Tensor) -> None:
        """Send a flat piece of bytes to the one receiver, in parts, through the host's memory. Returns when it may be
        written to again. Raises RuntimeError."""
        parts = torch.split(memory.cpu(), CHUNK_BYTES)  # gloo sends from the host
        begun = [self._backend.send([part], 1, tag) for tag, part in enumerate(parts)]
        deadline = time.monotonic() + self._timeout.total_seconds()
        for work in begun:  # without a timeout gloo waits for the join timeout, and timedelta(0) counts as none
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def abandon(self) -> None:
        """Leave a group of which a member may have failed, without waiting. Once more does nothing."""
        self._backend = None  # closes its sockets when the last sender is done with it


class TorchBroadcastGroup:
    """Through torch's broadcast: NCCL to our own receivers, either backend to SGLang's. Returns when all have joined.

    Args:
        as_torch_does: find each other as `torch.distributed` does for a backend's name: SGLang calls it. Else the
            group proves itself before the first bytes.
    """

    def __init__(self, meeting: GroupRendezvous, *, as_torch_does: bool) -> None:
        self._store = meeting.store
        self._unproven = None if as_torch_does else meeting
        prefixed = PrefixStore(dppo_wire.PREFIX, meeting.store)
        if as_torch_does:
            devices = list(BackendConfig(Backend(meeting.backend)).get_device_backend_map())
            prefixed = PrefixStore(f"{meeting.name}/", PrefixStore(meeting.name, meeting.store))
            prefixed = PrefixStore(f"{devices[0]}/", prefixed)
        self._backend: Any = _backend(meeting, prefixed)

    def send(self, memory: Tensor) -> None:
        """As `ChainGroup.send`, to all members."""
        if (meeting := self._unproven) is not None:
            dppo_wire.prove_to_all(self._backend, meeting.secret, 0, meeting.world_size, memory.device)
            self._unproven = None
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._backend.broadcast([memory], options).wait()
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)  # `wait` only orders streams

    def abandon(self) -> None:
        """As `ChainGroup.abandon`. NCCL's is aborted: its destructor waits for pending broadcasts, and where a killed
        receiver never answers torch's watchdog would end this whole process after the group's timeout. A key in the
        store has the members abort theirs."""
        backend, self._backend = self._backend, None
        if backend is not None and backend.name() == "nccl":  # gloo's ends with its sockets
            with contextlib.suppress(RuntimeError):
                self._store.set(dppo_wire.GIVEN_UP, "")
            threading.Thread(target=_abort, args=(backend,), name="abandoned group", daemon=True).start()


def _abort(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):
        backend.abort()


def _backend(meeting: GroupRendezvous, store: PrefixStore) -> Any:
    if meeting.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        # longer than the request's: torch ends this whole process when a broadcast is what times out first
        options._timeout = 2 * meeting.timeout
        return dist.ProcessGroupNCCL(store, 0, meeting.world_size, options)
    if "GLOO_SOCKET_IFNAME" in os.environ:  # the user knows the network
        group = dist.ProcessGroupGloo(store, 0, meeting.world_size, meeting.joining)
    else:  # gloo's default is the address of the host's name, which other networks may reach
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.host)]
        options._timeout = meeting.joining
        group = dist.ProcessGroupGloo(store, 0, meeting.world_size, options)
    group.set_timeout(meeting.timeout)
    return group


BroadcastGroup: TypeAlias = ChainGroup | TorchBroadcastGroup
"""What the trainer holds of a group. In no register of torch's, so that one whose other end hangs cannot hold up the
end of the job's own group."""


def own_group(meeting: GroupRendezvous, server: Server) -> BroadcastGroup:
    """The trainer's end of a group with servers like this one. Returns when all have joined."""
    if server.runs_our_receiver and meeting.backend == "gloo":
        return ChainGroup(meeting)
    return TorchBroadcastGroup(meeting, as_torch_does=not server.runs_our_receiver)
