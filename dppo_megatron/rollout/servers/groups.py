"""The trainer's end of a broadcast group with the workers of all servers: rank 0 of a group outside torch's own.

    trainer (rank 0) ── one copy ──▶ workers of server A (1 ... a), of server B (a + 1 ... a + b), ...

Both ends must agree on how they find each other and on what goes over the wire, and each engine has its own ideas:
vLLM's workers run our receiver (`in_engine/dppo_wire.py`), which over gloo is a chain; SGLang builds torch's full
process group and takes torch's broadcast, so the trainer has to as well. A bucket crosses as one flat piece of bytes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Backend, BackendConfig, PrefixStore

from dppo_megatron.rollout.servers.in_engine import dppo_wire

BroadcastBackend = Literal["gloo", "nccl"]
CHUNK_BYTES = 4 << 20
"""Of the chain. Smaller ones fill it sooner, larger ones wake fewer threads; a chain of n workers lags by n chunks."""


@dataclass(frozen=True, slots=True)
class GroupRendezvous:
    """Where the members of one group find each other, and what they agree on."""

    name: str
    """Unique in this process and at the server: torch keeps a register of names."""
    backend: BroadcastBackend
    host: str
    store: TCPStore
    world_size: int
    joining: timedelta
    """For all members to join."""
    timeout: timedelta
    """For one transfer."""
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """Goes to servers with the request to join; members show each other that they know it, where both ends are ours."""


def listening_store(host: str, world_size: int, timeout: timedelta) -> TCPStore:
    """The store of a meeting, on a free port of `host` and on no other address of this machine: torch's own would
    listen on all of them, and takes keys and values from anybody."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port, handed_over = listener.getsockname()[1], listener.detach()
    return TCPStore(host, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=handed_over)


class BroadcastGroup(ABC):
    """What the trainer holds of a group. In no register of torch's, so that one whose other end hangs cannot hold up
    the end of the job's own group."""

    @abstractmethod
    def send(self, memory: Tensor) -> None:
        """Send a flat piece of bytes to all members. Returns when it may be written to again. Raises RuntimeError."""

    @abstractmethod
    def abandon(self) -> None:
        """Leave a group of which a member may have failed, without waiting for anything. Once more does nothing."""


class ChainGroup(BroadcastGroup):
    """Over gloo to our own receivers: to the first worker, which passes it on. Returns when all have joined and proven
    it."""

    def __init__(self, meeting: GroupRendezvous) -> None:
        self._sealed = dppo_wire.Sealed(meeting.store, meeting.secret)  # C++ calls it, and keeps no Python object alive
        self._backend: Any = _backend(meeting, PrefixStore(dppo_wire.PREFIX, self._sealed))
        self._timeout = meeting.timeout
        dppo_wire.prove(self._backend, meeting.secret, 0, 1, meeting.joining)

    def send(self, memory: Tensor) -> None:
        """Send to the one receiver, in parts, through the host's memory."""
        parts = torch.split(memory.cpu(), CHUNK_BYTES)  # gloo sends from the host
        begun = [self._backend.send([part], 1, tag) for tag, part in enumerate(parts)]
        deadline = time.monotonic() + self._timeout.total_seconds()
        for work in begun:  # without a timeout gloo waits for the join timeout, and timedelta(0) counts as none
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def abandon(self) -> None:
        self._backend = None  # closes its sockets when the last sender is done with it


class TorchBroadcastGroup(BroadcastGroup):
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
        if (meeting := self._unproven) is not None:
            dppo_wire.prove_to_all(self._backend, meeting.secret, 0, meeting.world_size, memory.device)
            self._unproven = None
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._backend.broadcast([memory], options).wait()
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)  # `wait` only orders streams

    def abandon(self) -> None:
        """NCCL's is aborted. Its destructor waits for pending broadcasts, and where a killed receiver never answers
        torch's watchdog would end this whole process after the group's timeout. A key in the store has the members
        abort theirs."""
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
