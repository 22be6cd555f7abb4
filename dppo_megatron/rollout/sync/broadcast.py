"""Sends weights by broadcast in one group of rank 0 and all servers' workers, so that one copy leaves the trainer.

The price of a common group: if one server dies, the broadcast fails for all. The rules:

- A group is kept from sync to sync as long as the members are the same and none has been out. Otherwise a new group is
  made of exactly the servers of this sync: a broadcast needs all of its members.
- When a member fails, the pass fails: all members stay stale, and `WeightSync` begins another pass, from the first
  tensor on, without the failed member. So no server keeps a part of the weights.
- A server has failed if its connection breaks or times out. Servers that then answer "the weights stopped coming" are
  not to blame. If every server answers, those that refuse have failed.

Engines form groups differently: vLLM's workers run our receiver (`in_engine/dppo_wire.py`), which over gloo is a chain;
SGLang builds torch's full process group and uses torch's broadcast, so the trainer must do the same. A bucket is sent
as one flat byte tensor.
"""

from __future__ import annotations

import contextlib
import os
import socket
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
"""A broadcast times out after this fraction of the request's timeout, so that servers can still answer the request."""
_JOINING_S = 60.0
"""Limit for joining a group. Short, because the other members are blocked while one does not join."""
_MARGIN_S = 5.0
"""The request to join waits this much longer than `_JOINING_S`: the server times out first, and gives a reason."""


class BroadcastChannel(BucketChannel):
    def __init__(self, fleet: Fleet | None, backend: BroadcastBackend, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(fleet, bucket_bytes, timeout_s)
        self.name, self._backend = backend, backend
        self._group: BroadcastGroup | None = None
        self._joined: list[tuple[str, int]] = []
        """(name, outages so far) of the group's members when it was made."""

    def close(self) -> None:
        if self._group is not None:
            self._group.abandon()
        self._group, self._joined = None, []

    def push(self, tensors: Tensors, members: Sequence[Member], version: str) -> list[Member]:
        """If one member fails, none has taken the weights."""
        took = super().push(tensors, members, version)
        self.not_to_blame = [member.name for member in members if member not in took and member.state != "out"]
        return took

    def _prepare(self, members: Sequence[Member]) -> list[Member]:
        present = [(member.name, member.outages) for member in members]
        if present != self._joined:
            self.close()
            self._group = self._join(members) if members else None
            self._joined = present if self._group is not None else []
        return list(members) if self._group is not None else []

    def _join(self, members: Sequence[Member]) -> BroadcastGroup | None:
        """Have all members join a new group; returns the trainer's end, or None if a member is out for not joining."""
        joining_s = min(_JOINING_S, self._timeout_s)
        world_size = 1 + sum(member.server.world_size for member in members)
        host = _own_address([member.name for member in members])
        rendezvous = GroupRendezvous(
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
        own = in_thread(lambda: own_group(rendezvous, members[0].server))
        ask_s = joining_s + _MARGIN_S
        answers = at_once(members, lambda m: m.server.join_group(rendezvous, first_ranks[m.name], timeout_s=ask_s))
        joins: list[Future[Any]] = [own, *(answer for _, answer in answers)]
        wait(joins, return_when=FIRST_EXCEPTION)
        if any(answer.done() and isinstance(answer.exception(), Unreachable) for _, answer in answers):
            answers = [(member, answer) for member, answer in answers if answer.done()]  # the rest would only time out
        doing = "it did not join the broadcast: "
        # if only our own end fails, the first member is to blame: in a chain, our end connects to it alone
        if self._blame(answers, doing) or self._blame([(members[0], own)], doing):
            return None
        return own.result()

    def _blame(self, answers: Sequence[tuple[Member, Future[Any]]], doing: str = "") -> bool:
        """Mark out the servers that broke the group: those that cannot be reached or, if all answered, those that
        refused. Returns whether any of `answers` is a failure."""
        failed = {member: error for member, answer in answers if (error := answer.exception()) is not None}
        for error in failed.values():
            if not isinstance(error, FAILURES):
                raise error
        gone = [member for member, error in failed.items() if isinstance(error, Unreachable)]
        for member in gone or failed:
            self._fleet.mark_out(member, f"weight sync failed: {doing}{failed[member]}")
        return bool(failed)

    def _hand_over(self, members: Sequence[Member], bucket: Bucket, offers: Sequence[Offers | str]) -> list[Member]:
        """If a server breaks the group, it is marked out and none has taken the bucket. Broadcast and requests run at
        the same time, because NCCL's first broadcast blocks until the workers join it."""
        group = self._group
        if not members or group is None:
            return []
        flat = bucket.flat()
        sending = in_thread(lambda: _send(group, flat), "broadcast")
        answers = at_once(members, lambda m: m.server.receive(bucket.notes, timeout_s=self._timeout_s))
        patience_s = _SHORTER * self._timeout_s
        problem = _until_one_fails(sending, [answer for _, answer in answers], patience_s)
        late = [member for member, answer in answers if not answer.done()]
        if late or any(answer.exception() for _, answer in answers):
            group.abandon()  # releases members that wait for one that will not join in
        is_broken = self._blame(answers, f"our end of the broadcast failed ({problem}): " if problem else "")
        # a late server may have answered by now, but only because the broadcast was abandoned: it is at fault
        if late and not (is_broken or problem):
            for member in late:
                self._fleet.mark_out(member, f"weight sync failed: it did not take a bucket within {patience_s:g} s")
            is_broken = True
        if is_broken:
            self.close()
            return []
        try:
            problem = sending.result(self._timeout_s)  # does not block long: all servers have the bucket
        except TimeoutError:
            problem = f"the broadcast did not end within {self._timeout_s:g} s"
        if problem:
            raise RuntimeError(problem)
        return list(members)


def _until_one_fails(sending: Future[str], answers: Sequence[Future[Any]], timeout_s: float) -> str:
    """Wait until all servers have answered, a server or our end has failed, or time is up. Returns our end's error."""
    deadline, waiting = time.monotonic() + timeout_s, {sending, *answers}
    while not waiting.isdisjoint(answers):
        done, waiting = wait(waiting, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
        if not done or any(one.exception() or (one is sending and one.result()) for one in done):
            break
    return sending.result() if sending.done() else ""


def _send(group: BroadcastGroup, memory: Tensor) -> str:
    """Send; blocks until the other ends have connected (NCCL's first send) or, if one hangs, until the group's timeout.
    Returns an error as text: a traceback would keep the group's sockets open, and members wait for these to close."""
    try:
        group.send(memory)
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _own_address(urls: Sequence[str]) -> str:
    """An address of this machine that all servers can reach: not loopback if any server is on another machine."""
    addresses = [address_toward(str(urlsplit(url).hostname)) for url in urls]
    return next((address for address in addresses if not ip_address(address).is_loopback), addresses[0])


def listening_store(host: str, world_size: int, timeout: timedelta) -> TCPStore:
    """A store on a free port of `host` only: by default torch's store listens on all addresses of the machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port, handed_over = listener.getsockname()[1], listener.detach()
    return TCPStore(host, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=handed_over)


class ChainGroup:
    """The trainer's end of a gloo chain of our own receivers: sends to the first worker, which passes the bytes on.
    Construction blocks until all have joined and proven the secret."""

    def __init__(self, rendezvous: GroupRendezvous) -> None:
        # kept as an attribute: the backend calls it from C++, which keeps no Python object alive
        self._sealed = dppo_wire.Sealed(rendezvous.store, rendezvous.secret)
        self._backend: Any = _backend(rendezvous, PrefixStore(dppo_wire.PREFIX, self._sealed))
        self._timeout = rendezvous.timeout
        dppo_wire.prove(self._backend, rendezvous.secret, 0, 1, rendezvous.joining)

    def send(self, memory: Tensor) -> None:
        """Send a flat byte tensor to the first worker. Returns when it may be overwritten. Raises RuntimeError."""
        parts = torch.split(memory.cpu(), CHUNK_BYTES)  # gloo sends from the host
        sends = [self._backend.send([part], 1, tag) for tag, part in enumerate(parts)]
        deadline = time.monotonic() + self._timeout.total_seconds()
        for work in sends:  # always with a timeout > 0: without one, or with 0, gloo uses the timeout for joining
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def abandon(self) -> None:
        """Leave the group without waiting, although a member may have failed. Idempotent."""
        self._backend = None  # its sockets close when the last sender releases it


class TorchBroadcastGroup:
    """The trainer's end of a torch process group: NCCL to our own receivers, either backend to SGLang's. Construction
    blocks until all have joined. `as_torch_does`: with the store keys that `torch.distributed` uses for a named group,
    as SGLang calls it, and no proof of the secret. Else members prove the secret before the first bytes."""

    def __init__(self, rendezvous: GroupRendezvous, *, as_torch_does: bool) -> None:
        self._store = rendezvous.store
        self._unproven = None if as_torch_does else rendezvous
        prefixed = PrefixStore(dppo_wire.PREFIX, rendezvous.store)
        if as_torch_does:
            devices = list(BackendConfig(Backend(rendezvous.backend)).get_device_backend_map())
            prefixed = PrefixStore(f"{rendezvous.name}/", PrefixStore(rendezvous.name, rendezvous.store))
            prefixed = PrefixStore(f"{devices[0]}/", prefixed)
        self._backend: Any = _backend(rendezvous, prefixed)

    def send(self, memory: Tensor) -> None:
        """Like `ChainGroup.send`, to all members."""
        if (rendezvous := self._unproven) is not None:
            dppo_wire.prove_to_all(self._backend, rendezvous.secret, 0, rendezvous.world_size, memory.device)
            self._unproven = None
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._backend.broadcast([memory], options).wait()
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)  # `wait` only orders CUDA streams

    def abandon(self) -> None:
        """Like `ChainGroup.abandon`. An NCCL group must be aborted: its destructor waits for pending broadcasts, and if
        a killed receiver never answers, torch's watchdog ends this whole process after the group's timeout."""
        backend, self._backend = self._backend, None
        if backend is not None and backend.name() == "nccl":  # a gloo group ends when its sockets close
            with contextlib.suppress(RuntimeError):
                self._store.set(dppo_wire.GIVEN_UP, "")  # on this key the members abort their ends
            in_thread(lambda: _abort(backend), "abandoned group")


def _abort(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):  # a future with the error would keep the backend, whose destructor may wait
        backend.abort()


def _backend(rendezvous: GroupRendezvous, store: PrefixStore) -> Any:
    if rendezvous.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        # longer than the request's timeout, because torch ends this whole process if the broadcast times out first
        options._timeout = 2 * rendezvous.timeout
        return dist.ProcessGroupNCCL(store, 0, rendezvous.world_size, options)
    if "GLOO_SOCKET_IFNAME" in os.environ:  # the user has chosen the network
        group = dist.ProcessGroupGloo(store, 0, rendezvous.world_size, rendezvous.joining)
    else:  # gloo's default is the address of the host's name, which may be reachable from other networks
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=rendezvous.host)]
        options._timeout = rendezvous.joining
        group = dist.ProcessGroupGloo(store, 0, rendezvous.world_size, options)
    group.set_timeout(rendezvous.timeout)
    return group


BroadcastGroup: TypeAlias = ChainGroup | TorchBroadcastGroup
"""The trainer's end of a group. Not registered with torch.distributed, so that a group whose other end hangs cannot
delay the destruction of the job's process groups."""


def own_group(rendezvous: GroupRendezvous, server: Server) -> BroadcastGroup:
    """The trainer's end of a group with servers like this one. Returns when all have joined."""
    if server.runs_our_receiver and rendezvous.backend == "gloo":
        return ChainGroup(rendezvous)
    return TorchBroadcastGroup(rendezvous, as_torch_does=not server.runs_our_receiver)
