"""What runs inside vLLM's workers: a receiver of weights by broadcast or shared memory, and a repair of packed ones.

A file of its own, importing nothing of this package, because the engine lives in another Python environment: the
launcher puts this directory on PYTHONPATH and passes

    --worker-extension-cls dppo_vllm_extension.WorkerExtension --weight-transfer-config '{"backend": "dppo"}'

Both are vLLM's public options, and `WeightTransferEngineFactory.register_engine` is its public way to add a transport.
vLLM's own nccl transport needs vLLM (PyNccl) in the trainer too; this one needs torch on both sides, and is the same
code over gloo, which is what lets a machine without a GPU test it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How this server's workers join the trainer's group."""

    backend: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket of tensors of one dtype."""

    names: list[str]
    shapes: list[list[int]]
    dtype: str
    memory: dict[str, Any] | None = None
    """Where they lie end to end in memory of the trainer (`shared_memory.py`); None: each is broadcast."""


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives Hugging Face tensors in buckets: from rank 0 of a group of its own, or from memory that it maps."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _group: Any = None
    _memory: torch.Tensor | None = None
    """Takes what is broadcast. Kept between syncs on a CPU, where touching fresh memory costs as much as filling it."""
    _mapped: tuple[str, torch.Tensor] | None = None
    """The trainer's buffer and what names it."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the group; the trainer is rank 0 and holds the store."""
        config, timeout = self.parallel_config, timedelta(seconds=init_info.timeout_s)
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        store = dist.TCPStore(
            init_info.master_address,
            init_info.master_port,
            init_info.world_size,
            False,
            timeout,
            wait_for_workers=False,
        )
        prefixed = PrefixStore("dppo", store)
        if init_info.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(prefixed, rank, init_info.world_size, options)
        else:
            self._group = dist.ProcessGroupGloo(prefixed, rank, init_info.world_size, timeout)

    def start_weight_update(self) -> None:
        """The layers take tensors in checkpoint form from here on. One that an update left half loaded, when a bucket
        of it failed, begins afresh; vLLM would go on counting and take it for complete too early."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel, info.loaded_weights = 0, []
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """One bucket: receive, cut, hand to the model's own loader."""
        dtype = getattr(torch, update_info.dtype)
        shapes = [torch.Size(shape) for shape in update_info.shapes]
        sizes = [shape.numel() * dtype.itemsize for shape in shapes]
        memory = self._own(sum(sizes)) if update_info.memory is None else self._map(update_info.memory)
        tensors = [
            part.view(dtype).view(shape) for part, shape in zip(memory[: sum(sizes)].split(sizes), shapes, strict=True)
        ]
        arriving = self._receive(tensors) if update_info.memory is None else tensors
        self.model.load_weights(zip(update_info.names, arriving, strict=True))
        keep_what_waits(self.model, memory)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the trainer fills the same memory again when it has our answer

    def _receive(self, tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """All broadcasts are begun at once; each tensor is loaded while the next ones come."""
        if self._group is None:
            raise RuntimeError("no weight transfer group: init_weight_transfer_engine comes first")
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        begun = [self._group.broadcast([tensor], options) for tensor in tensors]
        for tensor, work in zip(tensors, begun, strict=True):
            work.wait()
            yield tensor

    def _own(self, num_bytes: int) -> torch.Tensor:
        if self._memory is None or self._memory.nbytes < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._memory

    def _map(self, memory: dict[str, Any]) -> torch.Tensor:
        name = json.dumps(memory, sort_keys=True)
        if self._mapped is None or self._mapped[0] != name:
            self._mapped = name, _map_cuda(memory) if "uuid" in memory else _map_file(memory)
        return self._mapped[1]

    def finish_weight_update(self) -> None:
        """Layers go back to their kernels' form."""
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_packed(self.model)
        if self.device.type == "cuda":
            self._memory = self._mapped = None

    def shutdown(self) -> None:
        """Leave the group and unmap."""
        self._group = self._memory = self._mapped = None


class WorkerExtension:
    """Methods that `/collective_rpc` can call on every worker."""

    def dppo_model(self) -> dict[str, Any]:
        """What is served, for a trainer that cannot read the server's files."""
        config = self.get_model().config  # type: ignore[attr-defined]
        return {"architecture": config.architectures[0], "vocab_size": config.vocab_size}

    def dppo_refresh_packed(self) -> int:
        """After `reload_weights`: see `refresh_packed`."""
        return refresh_packed(self.get_model())  # type: ignore[attr-defined]


def keep_what_waits(model: torch.nn.Module, memory: torch.Tensor) -> None:
    """Copy out of `memory` what vLLM still wants of it: a layer that is cut by the end of a bucket, or whose padding is
    never loaded, keeps references to its tensors until it is complete, and the next bucket overwrites them."""
    place = memory.untyped_storage().data_ptr()
    for layer in model.modules():
        for _, call in get_layerwise_info(layer).loaded_weights:
            for name, value in call.arguments.items():
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == place:
                    call.arguments[name] = value.clone()


def refresh_packed(model: torch.nn.Module) -> int:
    """Rebuild the packed (oneDNN) copy that CPU layers keep beside a weight they did not load themselves.

    An output layer tied to the embedding shares its parameter, but packs its own copy when the model is first loaded;
    a reload goes through the embedding alone and leaves that copy with the old weights (seen in vLLM 0.32.0).

    Returns:
        How many layers were rebuilt; 0 on GPUs, where nothing is packed.
    """
    if not current_platform.is_cpu():
        return 0
    layers = [
        module
        for module in model.modules()
        if hasattr(module, "cpu_linear") and getattr(module, "weight", None) is not None and module.weight.numel()
    ]
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    return len(layers)


def _map_file(memory: dict[str, Any]) -> torch.Tensor:
    return torch.from_file(memory["path"], shared=True, size=memory["bytes"], dtype=torch.uint8)


def _map_cuda(memory: dict[str, Any]) -> torch.Tensor:
    """Devices are found by UUID: CUDA_VISIBLE_DEVICES may number them differently here than in the trainer."""
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if memory["uuid"] not in uuids:
        raise RuntimeError(f"the weights lie on GPU {memory['uuid']}; this worker sees only {', '.join(uuids)}")
    handle, counter, event = (base64.b64decode(memory[name]) for name in ("handle", "counter", "event"))
    storage = torch.UntypedStorage._new_shared_cuda(
        uuids.index(memory["uuid"]),
        handle,
        memory["size"],
        memory["offset"],
        counter,
        memory["counter_offset"],
        event,
        memory["event_sync"],
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[: memory["bytes"]]


WeightTransferEngineFactory.register_engine("dppo", Receiver)
