"""Moves training state to host memory while servers generate on the same GPUs.

Training a bfloat16 model takes 18 bytes per parameter: weights 2, gradients 4, main parameters and moments 12. In this
order, which is that of verl, slime and NeMo-RL, a GPU never holds both the trainer's state and the servers':

    trainer   update | free gradients, optimizer to host | weights to servers | weights to host |           | bring back
    servers   asleep | asleep                            | wake weights       | hold weights    | wake cache,
                                                                                                  generate, sleep

The weights leave when every rank has handed them over and before any server takes memory for its cache
(`rollout/sync/weight_sync.py`); `loop.py` calls it, for `actor.offload`.

Gradients and Transformer Engine's 8-bit copies of weights are freed, not copied: the next step zeroes or makes them
anyway. Optimizer tensors point to a host copy while they are
away, so a checkpoint can be written from it. Weights keep their tensors, since the model's parameters are views of one
buffer, and only release the storage. On CUDA the host copies are pinned, and kept for reuse. Copies are asynchronous,
with one wait at the end: the allocator reuses freed memory in stream order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

Part = Literal["gradients", "optimizer", "weights"]


class Offload:
    """Moves one actor's training state off its device and back. Repeating a call has no effect.

    Args:
        device: where the state lives during training.
    """

    def __init__(self, model: Sequence[DistributedDataParallel], device: torch.device) -> None:
        self._model, self._device = model, device
        self._away: set[Part] = set()
        self._host: dict[tuple[Part, int], Tensor] = {}
        """Host copies, by the id of the weights' storage or of the optimizer's tensor; kept when these are back."""
        self._released: dict[int, tuple[int, int]] = {}
        """By a storage's id: its size in bytes before, and where in it the tensor begins that owns it."""
        self._borrowing: list[tuple[Tensor, Tensor]] = []
        """Float32 main parameters that are views of weights which are away, and what they view on the device."""

    @property
    def away(self) -> frozenset[Part]:
        """The parts that are not on the device now."""
        return frozenset(self._away)

    def forget_optimizer(self) -> None:
        """Drop the host copies of the optimizer's state, because a new optimizer is about to be built."""
        self._host = {key: tensor for key, tensor in self._host.items() if key[0] == "weights"}
        self._away.discard("optimizer")

    def leave(self, optimizer: Any, *, weights: bool) -> None:
        """Free the gradients; move the optimizer's state and, if `weights`, the weights to the host."""
        if "gradients" not in self._away:
            for buffer in self._buffers():
                self._give_up(buffer.grad_data)
            self._away.add("gradients")
        self._drop_fp8_copies()  # outside: a pass for log-probabilities makes them without bringing gradients back
        if optimizer is not None and "optimizer" not in self._away:
            for tensor in self._optimizer_tensors(optimizer):
                if tensor.device == self._device:  # else the optimizer keeps it on the host itself
                    host = self._host_for("optimizer", id(tensor), tensor)
                    self._copy(tensor, host)
                    tensor.data = host
            self._away.add("optimizer")
        if weights and "weights" not in self._away:
            for whole in self._weights():
                self._copy(whole, self._host_for("weights", _storage_id(whole), whole))
                self._give_up(whole)
            self._away.add("weights")
            self._borrow(optimizer)
        self._wait()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def come_back(self, optimizer: Any, *, weights_only: bool = False) -> None:
        """Bring back the weights and, unless `weights_only`, the optimizer's state and zeroed gradient buffers."""
        if "weights" in self._away:
            for whole in self._weights():
                self._take_again(whole)
                self._copy(self._host["weights", _storage_id(whole)], whole)
            self._away.discard("weights")
            for main, on_device in self._borrowing:
                main.data = on_device
            self._borrowing.clear()
        if not weights_only and "optimizer" in self._away:
            for tensor in self._optimizer_tensors(optimizer):
                host = self._host.get(("optimizer", id(tensor)))
                if host is not None and tensor.data_ptr() == host.data_ptr():
                    tensor.data = torch.empty_like(host, device=self._device).copy_(host, non_blocking=True)
            self._away.discard("optimizer")
        if not weights_only and "gradients" in self._away:
            for buffer in self._buffers():
                self._take_again(buffer.grad_data)
                buffer.grad_data.zero_()
            self._away.discard("gradients")
        self._wait()

    def host_view(self, param: Tensor) -> Tensor:
        """The host's copy of a parameter whose weights are away, in its shape; to be read only."""
        assert "weights" in self._away
        storage = _storage_id(param)
        whole = self._host["weights", storage].view(-1)
        start = param.storage_offset() - self._released[storage][1]
        return whole[start : start + param.numel()].view(param.shape)

    # ---------------------------------------------------------------------------------------- inside

    def _borrow(self, optimizer: Any) -> None:
        """Let float32 main parameters that are views of the weights view the host's copy: a checkpoint reads them.

        Not the model's own parameters: Megatron's hooks hang on those, and are lost if their device changes.
        """
        own = {id(param) for model in self._model for param in model.parameters()}
        for main in self._mains(optimizer):
            if id(main) not in own and ("weights", _storage_id(main)) in self._host:
                self._borrowing.append((main, main.data))
                main.data = self.host_view(main)

    def _drop_fp8_copies(self) -> None:
        """Free Transformer Engine's 8-bit copies of the weights, 2 bytes a parameter that it keeps for the next
        micro-batch; a module without one makes it again in its next forward pass."""
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
        """Tensors that together own each storage of the parameters exactly once."""
        seen: set[int] = set()
        for buffer in self._buffers():
            if buffer.param_data is not None:
                seen |= {id(param) for param in buffer.params}
                yield buffer.param_data
        for model in self._model:
            yield from (param.data for param in model.parameters() if id(param) not in seen)

    def _optimizer_tensors(self, optimizer: Any) -> Iterator[Tensor]:
        """Main parameters and their states, as far as they belong to the optimizer alone.

        A float32 model has no main parameters: the optimizer updates views of the weights, which move with the weights.
        """
        weights = {_storage_id(param) for model in self._model for param in model.parameters()}
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            inner = part.optimizer
            if hasattr(inner, "sub_optimizers"):  # cpu_offload: its state is on the host already
                continue
            for param in (param for group in inner.param_groups for param in group["params"]):
                if _storage_id(param) not in weights:
                    yield param
                # not the step count, a single element
                state = inner.state.get(param, {}).values()
                yield from (value for value in state if isinstance(value, Tensor) and value.numel() > 1)

    def _host_for(self, part: Part, owner: int, tensor: Tensor) -> Tensor:
        kept = self._host.get((part, owner))
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            pinned = self._device.type == "cuda"
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            self._host[part, owner] = kept
        return kept

    def _copy(self, source: Tensor, target: Tensor) -> None:
        target.detach().copy_(source.detach(), non_blocking=True)

    def _give_up(self, whole: Tensor) -> None:
        storage = whole.untyped_storage()
        self._released[storage._cdata] = storage.nbytes(), int(whole.storage_offset())
        storage.resize_(0)

    def _take_again(self, whole: Tensor) -> None:
        storage = whole.untyped_storage()
        storage.resize_(self._released.pop(storage._cdata)[0])

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def pageable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its memory is pinned: Megatron's checkpoint writers are forked and may outlast the step,
    and a forked process shares pinned pages with its parent, which the next `leave` would overwrite."""
    return tensor.clone() if tensor.device.type == "cpu" and tensor.is_pinned() else tensor


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
