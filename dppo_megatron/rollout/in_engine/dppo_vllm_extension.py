"""What runs inside vLLM's workers: a broadcast receiver on torch's own process groups, and a repair of packed weights.

A file of its own, importing nothing of this package, because the engine lives in another Python environment: the
launcher puts this directory on PYTHONPATH and passes

    --worker-extension-cls dppo_vllm_extension.WorkerExtension --weight-transfer-config '{"backend": "dppo"}'

Both are vLLM's public options, and `WeightTransferEngineFactory.register_engine` is its public way to add a transport.
vLLM's own nccl transport needs vLLM (PyNccl) in the trainer too; this one needs torch on both sides, and is the same
code over gloo, which is what lets a machine without a GPU test it.
"""

from __future__ import annotations

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
    """One bucket: tensors that arrive joined end to end in one flat buffer of `dtype`."""

    names: list[str]
    shapes: list[list[int]]
    dtype: str


class BroadcastReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives Hugging Face tensors in buckets from rank 0 of a group of its own."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _group: Any = None

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
        """The layers take tensors in checkpoint form from here on."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """One bucket: receive, cut, hand to the model's own loader."""
        if self._group is None:
            raise RuntimeError("no weight transfer group: init_weight_transfer_engine comes first")
        sizes = [int(torch.Size(shape).numel()) for shape in update_info.shapes]
        flat = torch.empty(sum(sizes), dtype=getattr(torch, update_info.dtype), device=self.device)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([flat], options).wait()
        parts = flat.split(sizes)
        self.model.load_weights(
            (name, part.view(shape))
            for name, part, shape in zip(update_info.names, parts, update_info.shapes, strict=True)
        )

    def finish_weight_update(self) -> None:
        """Layers go back to their kernels' form."""
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_packed(self.model)

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


class WorkerExtension:
    """Methods that `/collective_rpc` can call on every worker."""

    def dppo_refresh_packed(self) -> int:
        """After `reload_weights`: see `refresh_packed`."""
        return refresh_packed(self.get_model())  # type: ignore[attr-defined]


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


WeightTransferEngineFactory.register_engine("dppo", BroadcastReceiver)
