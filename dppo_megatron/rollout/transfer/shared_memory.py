"""Memory of this process that an engine on the same machine maps: weights cross without a copy through a socket.

On CPUs it is an anonymous file, reached through /proc while this process lives, so that a killed trainer leaves
nothing behind; on GPUs it is a CUDA IPC handle, found by the device's UUID because engine and trainer may number their
devices differently. `in_engine/dppo_vllm_extension.py` is the other end.
"""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor


class SharedBuffer:
    """A flat byte buffer of fixed size in memory that other processes can map. It grows by being made again."""

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
            torch.cuda.synchronize(self.memory.device)  # a reader in another process knows nothing of our stream
        else:  # one thread: torch's would meet those of an engine that waits on the same cores by spinning
            np.copyto(target.numpy(), flat.numpy())

    def views(self, dtype: str, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Tensors of these shapes, end to end from the buffer's front."""
        kind = getattr(torch, dtype)
        sizes = [math.prod(shape) * kind.itemsize for shape in shapes]
        parts = torch.split(self.memory[: sum(sizes)], sizes)
        return [part.view(kind).view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]

    def handle(self) -> dict[str, Any]:
        """How to map it, as JSON: path, size and the inode that names it, or CUDA's description in base64."""
        if not self.memory.is_cuda:
            return {"path": self._path, "bytes": self.memory.nbytes, "inode": os.fstat(self._file).st_ino}
        _, handle, size, offset, counter, counter_offset, event, event_sync = (
            self.memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        )
        uuid = str(torch.cuda.get_device_properties(self.memory.device).uuid)
        encoded = {
            "handle": base64.b64encode(handle).decode(),
            "counter": base64.b64encode(counter).decode(),
            "event": base64.b64encode(event).decode(),
        }
        numbers = {"offset": offset, "counter_offset": counter_offset, "event_sync": event_sync}
        return {"uuid": uuid, "size": size, "bytes": self.memory.nbytes, **encoded, **numbers}

    def close(self) -> None:
        """Forget the memory; a process that has mapped it keeps its mapping."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def pickled(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """(name, tensor) pairs as SGLang takes them from a process on its own machine, in base64: handles, not values.

    Written by us and read by a server that we have started; a pickle is never read here.
    """
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    # the other end has no socket to receive descriptors on
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        stream = io.BytesIO()
        ForkingPickler(stream).dump(list(tensors))
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
    return base64.b64encode(stream.getvalue()).decode()
