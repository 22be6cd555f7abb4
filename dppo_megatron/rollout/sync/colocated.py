"""Sends weights through memory that servers on this machine map: CUDA IPC on GPUs, a shared anonymous file on CPUs.

Every rank that shares a device with a worker offers its own buffer, so that nothing crosses between GPUs, and all
workers of a tensor-parallel server read at the same time. Only rank 0 calls the servers:

    rank 0     fill A(k) | collect offers of k  |  have servers read A(k) (thread)    | collect offers of k + 1  | ...
                         |                      |  fill B(k + 1)                      |
    rank r     fill A(k) | offer k              |  fill B(k + 1)                      | offer k + 1              | ...

Each rank alternates between two buffers. The exchange of offers synchronizes the ranks: rank 0 enters that of k + 1
only when all servers have read k, so a rank that leaves it may overwrite the buffer of k.
"""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from dppo_megatron.distributed import on_loopback_if_one_machine, to_rank_zero
from dppo_megatron.rollout.servers.device_map import DeviceMap
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import Offer, TensorNote
from dppo_megatron.rollout.sync.channels import Bucket, BucketChannel, Offers, Tensors, buckets, drain, on_each

_CALLS = 5
"""Most sequential calls to a server between two exchanges: up to five begin an update, one is for a bucket, and up to
three end it."""
_GATHERING = timedelta(minutes=30)
"""Time for the actor's own work between two exchanges: torch's default timeout."""
_DEVICE_ARGUMENT = 6
"""Index of the device among the arguments of torch's `rebuild_cuda_tensor`; SGLang has the same constant."""


class SharedMemoryChannel(BucketChannel):
    """The channel `ipc`. Made on every rank; collective. `offer` makes handles that this engine's workers can map."""

    name = "ipc"

    def __init__(
        self, fleet: Fleet | None, device_map: DeviceMap, offer: MakeOffer, bucket_bytes: int, timeout_s: float
    ) -> None:
        super().__init__(fleet, bucket_bytes, timeout_s)
        self._device_map, self._make_offer = device_map, offer
        self.receivers = sorted({0, *(rank for ranks in device_map.values() for rank in ranks)})
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._group: Any = None
        if len(self.receivers) > 1:
            each = timedelta(seconds=timeout_s)
            with on_loopback_if_one_machine():
                self._group = dist.new_group(list(self.receivers), timeout=_GATHERING + _CALLS * each, backend="gloo")
        self._buffers: list[SharedBuffer | None] = [None, None]
        self._readers: list[tuple[str, int]] = []
        """(server, worker) of this pass that read from this rank."""

    def push(self, tensors: Tensors, members: Sequence[Member], version: str) -> list[Member]:
        self._offer_to([member.name for member in members])
        return super().push(tensors, members, version)

    def take_part(self, tensors: Tensors, names: Collection[str]) -> None:
        self._offer_to(names)
        if self._rank not in self.receivers:
            return drain(tensors)
        for number, bucket in enumerate(buckets(tensors, self._bucket_bytes)):
            self._exchange(self._offer(bucket, number))
        self._end()

    def close(self) -> None:
        for buffer in filter(None, self._buffers):
            buffer.close()
        self._buffers = [None, None]

    def _offer_to(self, names: Collection[str]) -> None:
        """Set the readers of this pass: workers of the servers `names` only, since CUDA keeps an offered buffer until
        its reader releases it, which a server that is out never does."""
        readers = [(url, w, rank) for url in names for w, rank in enumerate(self._device_map.get(url, ()))]
        self._readers = [(url, w) for url, w, rank in readers if rank == self._rank]

    def _offer(self, bucket: Bucket, number: int) -> Offers | str:
        """Fill a buffer; returns how each worker that reads from this rank maps it."""
        if not self._readers:
            return {}
        try:
            flat = bucket.flat()
            buffer = self._buffers[number % 2]
            if buffer is None or buffer.memory.nbytes < flat.nbytes:
                if buffer is not None:
                    buffer.close()
                buffer = SharedBuffer(max(flat.nbytes, self._bucket_bytes), flat.device)
                self._buffers[number % 2] = buffer
            buffer.fill(flat)
            return {reader: self._make_offer(buffer, bucket.notes) for reader in self._readers}
        except (RuntimeError, OSError) as error:  # not raised here: the other ranks wait in the exchange
            return f"rank {self._rank} could not offer its memory: {error}"

    def _exchange(self, mine: Offers | str) -> Sequence[Offers | str]:
        """Collect the offers of all ranks on rank 0; the other ranks wait until it has them."""
        if self._group is None:
            return [mine]
        offers = to_rank_zero(mine, self._group)
        dist.broadcast(torch.zeros(1), 0, self._group)
        return offers

    def _hand_over(self, members: Sequence[Member], bucket: Bucket, offers: Sequence[Offers | str]) -> list[Member]:
        of_worker = {reader: offer for part in offers if isinstance(part, dict) for reader, offer in part.items()}
        failures = "; ".join(part for part in offers if isinstance(part, str))

        def read(member: Member) -> None:
            own = [of_worker.get((member.name, worker)) for worker in range(len(self._device_map[member.name]))]
            if any(offer is None for offer in own):
                raise RuntimeError(failures)
            member.server.receive_shared(own, bucket.notes, timeout_s=self._timeout_s)  # type: ignore[arg-type]

        return on_each(self._fleet, members, read)

    def _end(self) -> None:
        """Return GPU buffers to the driver: the servers need the memory for their KV caches."""
        self._exchange({})  # a barrier: after it, servers have read all buffers and unmapped them
        if any(buffer is not None and buffer.is_on_gpu for buffer in self._buffers):
            self.close()
            # torch retains memory that another process had mapped until ipc_collect finds that it is unmapped
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()


class SharedBuffer:
    """A flat byte buffer of fixed size in memory that other processes can map.

    On CPUs it is an anonymous file, which others open through /proc while this process lives, so that a killed trainer
    leaves nothing behind. On GPUs it is a CUDA IPC handle with the device's UUID, because engine and trainer may number
    devices differently. `map_memory` in `in_engine/dppo_wire.py` is the other end.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._file = -1
        self.is_on_gpu = device.type == "cuda"
        if self.is_on_gpu:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        else:
            self._file = os.memfd_create("dppo-weights")
            os.truncate(self._file, num_bytes)
            self.memory = torch.from_file(self._path, shared=True, size=num_bytes, dtype=torch.uint8)

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def fill(self, flat: Tensor) -> None:
        """Copy a flat tensor of bytes to the buffer's front."""
        target = self.memory[: flat.nbytes]
        if target.is_cuda:
            target.copy_(flat)
            torch.cuda.synchronize(self.memory.device)  # a reader in another process cannot wait for our stream
        else:  # numpy, as it copies in one thread: torch's threads would compete with an engine's that spin while idle
            np.copyto(target.numpy(), flat.numpy())

    def handle(self) -> dict[str, Any]:
        """What another process needs to map it, as JSON: path and size, or CUDA's IPC handle in base64."""
        if not self.memory.is_cuda:
            return {"path": self._path, "bytes": self.memory.nbytes}
        _, handle, size, offset, counter, counter_offset, event, event_sync = (
            self.memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        )
        uuid = str(torch.cuda.get_device_properties(self.memory.device).uuid)
        binary = {"handle": handle, "counter": counter, "event": event}
        encoded = {name: base64.b64encode(value).decode() for name, value in binary.items()}
        numbers = {"offset": offset, "counter_offset": counter_offset, "event_sync": event_sync}
        return {"uuid": uuid, "size": size, "bytes": self.memory.nbytes, **encoded, **numbers}

    def close(self) -> None:
        """Release the memory; a process that has mapped it keeps its mapping."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _ByUuid(ForkingPickler):
    """Pickles GPU tensors with the device's UUID in place of its index, because a server with another
    CUDA_VISIBLE_DEVICES has another index. SGLang accepts both (0.5.23, srt/utils/patch_torch.py)."""

    def reducer_override(self, value: Any) -> Any:
        """How to pickle a GPU tensor; for anything else, pickle's default."""
        if not (isinstance(value, Tensor) and value.is_cuda):
            return NotImplemented
        build, arguments = reduce_tensor(value)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return build, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])


def pickled(payload: object) -> str:
    """In the form that SGLang accepts from a process on its machine: a pickle, with handles for tensors, in base64.

    We only write this pickle, for a server that we have started; none is ever loaded here.
    """
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    # not the default "file_descriptor": the server has no socket on which to receive descriptors
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        stream = io.BytesIO()
        _ByUuid(stream).dump(payload)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
    return base64.b64encode(stream.getvalue()).decode()


def vllm_offer(buffer: SharedBuffer, tensors: Sequence[TensorNote]) -> Offer:
    """How a vLLM worker maps `tensors` at the front of `buffer`; made on the rank that has filled it."""
    return buffer.handle()


def sglang_offer(buffer: SharedBuffer, tensors: Sequence[TensorNote]) -> Offer:
    """SGLang's `flattened_bucket` (0.5.23, weight_sync/tensor_bucket.py), with a type that its unpickler accepts. Not a
    handle for each tensor: on a GPU a buffer's handles nest in one another (torch's CudaIPCTypes.cpp), and freeing it
    takes them apart recursively, which for a large mixture's tens of thousands could overflow the stack."""
    metadata, end = [], 0
    for note in tensors:
        kind, start = getattr(torch, note.dtype), end
        end += math.prod(note.shape) * kind.itemsize
        place = {"start_idx": start, "end_idx": end, "numel": end - start}
        metadata.append(SimpleNamespace(name=note.name, shape=torch.Size(note.shape), dtype=kind, **place))
    return pickled({"flattened_tensor": buffer.memory[:end], "metadata": metadata})


MakeOffer: TypeAlias = Callable[[SharedBuffer, Sequence[TensorNote]], Offer]
OFFERS: dict[str, MakeOffer] = {"vllm": vllm_offer, "sglang": sglang_offer}
