"""The trainer's end of a broadcast group with an engine's workers: rank 0 of a group outside torch's default one.

Both ends must agree on the keys under which they find each other, and each engine has its own: vLLM's workers run our
receiver, which takes a bare backend; SGLang builds torch's full process group, so the trainer has to as well.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Backend, BackendConfig, PrefixStore

BroadcastBackend = Literal["gloo", "nccl"]
_PREFIX = "dppo"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the members of one group find each other, and what they agree on."""

    name: str
    """Unique in this process and at the server: torch keeps a register of names."""
    backend: BroadcastBackend
    host: str
    store: TCPStore
    world_size: int
    timeout: timedelta


def listening_store(host: str, world_size: int, timeout: timedelta) -> TCPStore:
    """The store of a meeting, on a free port of `host` and on no other address of this machine: torch's own would
    listen on all of them, and takes keys and values from anybody."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port, handed_over = listener.getsockname()[1], listener.detach()
    return TCPStore(host, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=handed_over)


BroadcastGroup: TypeAlias = dict[str, Any]
"""A torch backend (ProcessGroupGloo or ProcessGroupNCCL) for each kind of device. In no register of torch's, so that
one whose other end hangs cannot hold up the end of the job's own group."""


def bare_group(meeting: Meeting) -> BroadcastGroup:
    """One backend under one prefix, as `in_engine/dppo_vllm_extension.py` joins it. Returns when all are there."""
    device = "cuda" if meeting.backend == "nccl" else "cpu"
    return {device: _backend(meeting, PrefixStore(_PREFIX, meeting.store))}


def torch_group(meeting: Meeting) -> BroadcastGroup:
    """What `torch.distributed` makes of a backend's name, as SGLang does: one backend for all kinds of device that it
    serves, under a prefix named after the first of them."""
    devices = list(BackendConfig(Backend(meeting.backend)).get_device_backend_map())
    prefixed = PrefixStore(f"{meeting.name}/", PrefixStore(meeting.name, meeting.store))
    return dict.fromkeys(devices, _backend(meeting, PrefixStore(f"{devices[0]}/", prefixed)))


class Sending:
    """Broadcasts from rank 0, begun in a thread of their own: NCCL connects in the first one, and blocks until the
    other ends do too. They are sent from where they lie, without a copy."""

    def __init__(self, group: BroadcastGroup, tensors: Sequence[Tensor]) -> None:
        self._begun: list[Any] = []
        self._error: BaseException | None = None
        self._forgotten = False
        self._thread = threading.Thread(target=self._begin, args=(group, tensors), name="broadcast", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Return when all have been received. Raises RuntimeError if that fails or cannot begin in time."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RuntimeError(f"the broadcast could not begin in {timeout_s:g} s")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        while self._begun:
            self._begun.pop().wait()

    def forget(self) -> None:
        """Drop the references to pending broadcasts."""
        self._forgotten = True
        self._begun.clear()

    def _begin(self, group: BroadcastGroup, tensors: Sequence[Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            for tensor in tensors:
                self._begun.append(group[tensor.device.type].broadcast([tensor.contiguous()], options))
                if self._forgotten:
                    self._begun.clear()
                    return
        except Exception as error:
            self._error = error


def abandon(group: BroadcastGroup) -> None:
    """Drop a group whose other end may have failed, in a thread of its own: ending it can wait for what was begun.

    NCCL's is aborted first. Its destructor waits for pending broadcasts, and where a killed receiver never answers
    torch's watchdog would end this whole process after the group's timeout.
    """
    threading.Thread(target=_end, args=(group,), name="abandoned group", daemon=True).start()


def _end(group: BroadcastGroup) -> None:
    for backend in {id(backend): backend for backend in group.values()}.values():
        if backend.name() == "nccl":  # gloo's ends with its sockets
            with contextlib.suppress(RuntimeError):
                backend.abort()
    group.clear()


def _backend(meeting: Meeting, store: PrefixStore) -> Any:
    if meeting.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        # longer than the request's: torch ends this whole process when a broadcast is what times out first
        options._timeout = 2 * meeting.timeout
        return dist.ProcessGroupNCCL(store, 0, meeting.world_size, options)
    return dist.ProcessGroupGloo(store, 0, meeting.world_size, meeting.timeout)
