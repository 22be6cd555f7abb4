"""Moves training state to host memory while servers generate on the same GPUs.

docs/actor.md has the order of the calls. Gradients and Transformer Engine's 8-bit copies of weights are freed, not
copied: the next step zeroes or recreates them anyway. Offloaded optimizer tensors point to a host copy, from which a
checkpoint can be written. Weights keep their tensors, since the model's parameters are views of one buffer, and only
release the storage. On CUDA the host copies are pinned, and kept for reuse. Copies are asynchronous, with one wait at
the end: the allocator reuses freed memory in stream order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

Part = Literal["gradients", "optimizer", "weights"]


class Offload:
    """Moves one actor's training state off its `device` and back. Repeating a call has no effect."""

    def __init__(self, model: Sequence[DistributedDataParallel], device: torch.device) -> None:
        self._model, self._device = model, device
        self._offloaded: set[Part] = set()
        self._host: dict[tuple[Part, int], Tensor] = {}
        """Host copies, by the id of the weights' storage or of the optimizer's tensor; kept after an onload."""
        self._released: dict[int, tuple[int, int]] = {}
        """Released storages by id: the size in bytes to restore, and the storage offset of the tensor that owns it."""
        self._mains_on_host: list[tuple[Tensor, Tensor]] = []
        """Float32 main parameters that now view the host copy of weights, each with its former view on the device."""

    @property
    def offloaded(self) -> frozenset[Part]:
        """The parts that are not on the device now."""
        return frozenset(self._offloaded)

    def forget_optimizer(self) -> None:
        """Drop the host copies of the optimizer's state, because a new state is about to replace it."""
        self._host = {key: tensor for key, tensor in self._host.items() if key[0] == "weights"}
        self._offloaded.discard("optimizer")

    def offload(self, optimizer: Any, *, weights: bool) -> None:
        """Free the gradients; move the optimizer's state and, if `weights`, the weights to the host."""
        if "gradients" not in self._offloaded:
            for buffer in self._buffers():
                self._release(buffer.grad_data)
            for main in self._mains(optimizer):
                main.grad = None  # float32 copies, where `actor.ddp` has gradients reduced in bfloat16
            self._offloaded.add("gradients")
        self._drop_fp8_copies()  # each time: a log-probability pass recreates them while gradients stay freed
        if optimizer is not None and "optimizer" not in self._offloaded:
            for tensor in self._optimizer_tensors(optimizer):
                if tensor.device == self._device:  # not one that the optimizer itself keeps on the host
                    host = self._host_buffer("optimizer", id(tensor), tensor)
                    host.copy_(tensor.detach(), non_blocking=True)
                    tensor.data = host
            self._offloaded.add("optimizer")
        if weights and "weights" not in self._offloaded:
            for whole in self._weights():
                self._host_buffer("weights", _storage_id(whole), whole).copy_(whole.detach(), non_blocking=True)
                self._release(whole)
            self._offloaded.add("weights")
            self._point_mains_to_host(optimizer)
        self._wait()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, optimizer: Any, *, weights_only: bool = False) -> None:
        """Restore the weights and, unless `weights_only`, the optimizer's state and zeroed gradient buffers."""
        if "weights" in self._offloaded:
            for whole in self._weights():
                self._restore(whole)
                whole.detach().copy_(self._host["weights", _storage_id(whole)], non_blocking=True)
            self._offloaded.discard("weights")
            for main, on_device in self._mains_on_host:
                main.data = on_device
            self._mains_on_host.clear()
        if not weights_only and "optimizer" in self._offloaded:
            for tensor in self._optimizer_tensors(optimizer):
                host = self._host.get(("optimizer", id(tensor)))
                if host is not None and tensor.data_ptr() == host.data_ptr():
                    tensor.data = torch.empty_like(host, device=self._device).copy_(host, non_blocking=True)
            self._offloaded.discard("optimizer")
        if not weights_only and "gradients" in self._offloaded:
            for buffer in self._buffers():
                self._restore(buffer.grad_data)
                buffer.grad_data.zero_()
            self._offloaded.discard("gradients")
        self._wait()

    def host_view(self, param: Tensor) -> Tensor:
        """The host copy of an offloaded parameter, in its shape. Do not write to it."""
        assert "weights" in self._offloaded
        storage = _storage_id(param)
        whole = self._host["weights", storage].view(-1)
        start = param.storage_offset() - self._released[storage][1]
        return whole[start : start + param.numel()].view(param.shape)

    def _point_mains_to_host(self, optimizer: Any) -> None:
        """Make float32 main parameters that are views of the weights view the host copy: a checkpoint reads them. The
        model's own parameters are left alone: they would lose Megatron's hooks if their device changed."""
        own = {id(param) for model in self._model for param in model.parameters()}
        for main in self._mains(optimizer):
            if id(main) not in own and ("weights", _storage_id(main)) in self._host:
                self._mains_on_host.append((main, main.data))
                main.data = self.host_view(main)

    def _drop_fp8_copies(self) -> None:
        """Free Transformer Engine's 8-bit copies of the weights, 2 bytes per parameter that it keeps for the next
        micro-batch. A module without its copy recreates it in the next forward pass."""
        for model in self._model:
            for module in model.modules():
                getattr(module, "_fp8_workspaces", {}).clear()

    def _mains(self, optimizer: Any) -> Iterator[Tensor]:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]) if optimizer is not None else ():
            yield from (param for group in part.optimizer.param_groups for param in group["params"])

    def _buffers(self) -> Iterator[Any]:
        for model in self._model:
            yield from (*model.buffers, *model.expert_parallel_buffers)

    def _weights(self) -> Iterator[Tensor]:
        """Tensors that own the parameters' storages, exactly one per storage."""
        seen: set[int] = set()
        for buffer in self._buffers():
            if buffer.param_data is not None:
                seen |= {id(param) for param in buffer.params}
                yield buffer.param_data
        for model in self._model:
            yield from (param.data for param in model.parameters() if id(param) not in seen)

    def _optimizer_tensors(self, optimizer: Any) -> Iterator[Tensor]:
        """Main parameters and optimizer states that share no storage with the weights. A float32 model has no main
        parameters: the optimizer updates views of the weights, which move with the weights."""
        weights = {_storage_id(param) for model in self._model for param in model.parameters()}
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            inner = part.optimizer
            if hasattr(inner, "sub_optimizers"):  # cpu_offload: the state is on the host already
                continue
            for param in (param for group in inner.param_groups for param in group["params"]):
                if _storage_id(param) not in weights:
                    yield param
                # `> 1` leaves out the step count, a single element
                state = inner.state.get(param, {}).values()
                yield from (value for value in state if isinstance(value, Tensor) and value.numel() > 1)

    def _host_buffer(self, part: Part, owner: int, tensor: Tensor) -> Tensor:
        buffer = self._host.get((part, owner))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = self._device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            self._host[part, owner] = buffer
        return buffer

    def _release(self, whole: Tensor) -> None:
        storage = whole.untyped_storage()
        self._released[storage._cdata] = storage.nbytes(), int(whole.storage_offset())
        storage.resize_(0)

    def _restore(self, whole: Tensor) -> None:
        storage = whole.untyped_storage()
        storage.resize_(self._released.pop(storage._cdata)[0])

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def pageable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its memory is pinned: Megatron's checkpoint writers are forked and may outlast the step.
    A forked process shares pinned pages with its parent, so it would write what the next `offload` puts there."""
    return tensor.clone() if tensor.device.type == "cpu" and tensor.is_pinned() else tensor


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
