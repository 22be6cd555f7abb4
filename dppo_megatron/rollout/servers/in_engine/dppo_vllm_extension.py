"""Code inside vLLM's workers: receives weights by broadcast or shared memory, and rebuilds packed copies of weights.

Imports nothing of the package, because it runs in the engine's environment: the launcher puts this directory on
PYTHONPATH and passes

    --worker-extension-cls dppo_vllm_extension.WorkerExtension --weight-transfer-config '{"backend": "dppo"}'

Both are vLLM's public options, and `WeightTransferEngineFactory.register_engine` is its public way to add a transport.
vLLM's own nccl transport needs vLLM (PyNccl) in the trainer too; this one needs only torch, and also runs over gloo.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dppo_wire import BroadcastReceiver, ChainReceiver, map_memory, nccl_settings
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform


@dataclass
class InitInfo(WeightTransferInitInfo):
    backend: str
    master_address: str
    master_port: int
    rank_offset: int
    """Rank of this server's first worker: the trainer is rank 0, and other servers' workers may come before."""
    world_size: int
    joining_s: float
    timeout_s: float
    chunk_bytes: int
    secret: str = field(repr=False)
    """Known to the group's members only."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket of tensors of one dtype."""

    names: list[str]
    shapes: list[list[int]]
    dtype: str
    memory: dict[str, Any] | None = None
    """Handle of the trainer's memory that holds them concatenated (`SharedBuffer`); None: they are broadcast."""


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives Hugging Face tensors in buckets, by broadcast or by mapping memory of the trainer."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _group: ChainReceiver | BroadcastReceiver | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._group = None  # leave an earlier group first: its members may be waiting for this one
        config = self.parallel_config
        joining, timeout = timedelta(seconds=init_info.joining_s), timedelta(seconds=init_info.timeout_s)
        rank = init_info.rank_offset + place_of(config, config.rank)
        address = (init_info.master_address, init_info.master_port, init_info.world_size)
        store = dist.TCPStore(*address, False, joining, wait_for_workers=False)
        if init_info.backend == "nccl":
            self._group = BroadcastReceiver(store, rank, init_info.world_size, timeout, init_info.secret, self.device)
        else:
            more = init_info.chunk_bytes, init_info.secret
            self._group = ChainReceiver(store, rank, init_info.world_size, joining, timeout, *more)

    def start_weight_update(self) -> None:
        """Prepare the layers to load tensors in checkpoint form."""
        reset_half_loaded(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a bucket: tensors of one dtype, end to end."""
        dtype = getattr(torch, update_info.dtype)
        shapes = [torch.Size(shape) for shape in update_info.shapes]
        sizes = [shape.numel() * dtype.itemsize for shape in shapes]
        if update_info.memory is None:
            memory = self._received(sum(sizes))
        else:
            memory = map_memory(update_info.memory)[: sum(sizes)]
        tensors = [part.view(dtype).view(shape) for part, shape in zip(memory.split(sizes), shapes, strict=True)]
        self.model.load_weights(zip(update_info.names, tensors, strict=True))
        keep_what_waits(self.model, memory)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the trainer overwrites the memory as soon as it has our answer

    def _received(self, num_bytes: int) -> torch.Tensor:
        if self._group is None:
            raise RuntimeError("no weight transfer group: init_weight_transfer_engine comes first")
        try:
            return self._group.receive(num_bytes)
        except RuntimeError:
            self._group = None  # closes our sockets, which ends the waits of the other members
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_packed(self.model)
        if isinstance(self._group, BroadcastReceiver):
            self._group.free()

    def shutdown(self) -> None:
        self._group = None


CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update", "dppo_reload")


class WorkerExtension:
    """Methods that `/collective_rpc` can call on every worker."""

    def dppo_model(self) -> dict[str, Any]:
        """Model and worker, for a trainer that cannot read the server's files."""
        config = self.get_model().config  # type: ignore[attr-defined]
        place = place_of(self.parallel_config, self.rank)  # type: ignore[attr-defined]
        device = self.device  # type: ignore[attr-defined]
        return {
            "architecture": config.architectures[0],
            "vocab_size": config.vocab_size,
            "place": place,
            "device": str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu",
            "nccl": nccl_settings(),
        }

    def dppo_do(self, call: str, arguments: dict[str, Any]) -> dict[str, str]:
        """Call one of `CALLS`. Returns what went wrong as text, and raises nothing: of an engine with several workers
        vLLM raises the first exception and leaves the other workers' answers in their queues, so that each later call
        gets the answers to an earlier one (0.32.0, `MultiprocExecutor.collective_rpc`). A trainer would then be told
        that a bucket has been read while workers still read it. No argument is named `method`, as one of vLLM's is that
        `RayDistributedExecutor` passes along with these."""
        try:
            if call not in CALLS:
                raise ValueError(f"{call} is none of {', '.join(CALLS)}")
            getattr(self, call)(**arguments)
            return {"problem": ""}
        except Exception as error:
            traceback.print_exc()  # to the server's log, as vLLM would have
            return {"problem": f"{type(error).__name__}: {error}"}

    def dppo_reload(self, weights_path: str) -> None:
        """Load safetensors. vLLM's own call accepts no path if the server was started without weights (0.32.0)."""
        tensors = _read(weights_path)
        reset_half_loaded(self.get_model())  # type: ignore[attr-defined]
        self.reload_weights(weights_iterator=tensors)  # type: ignore[attr-defined]
        refresh_packed(self.get_model())  # type: ignore[attr-defined]


def _read(directory: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Raises if this machine does not see the snapshot. vLLM (0.32.0) would not: given no tensors, it restores the old
    weights, logs a warning and reports success."""
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(errno.ENOENT, "no *.safetensors here, as this server sees it", directory)
    return _tensors(files)


def _tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 # not a mapping
                yield name, tensors.get_tensor(name)


def place_of(config: Any, rank: int) -> int:
    """A worker's index among those of all replicas; vLLM gives each worker the entry at this index of a list."""
    return int(config.data_parallel_index * config.world_size + rank)


def reset_half_loaded(model: torch.nn.Module) -> None:
    """Reset layers that a failed update left half loaded: vLLM would go on counting, and complete them too early."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel, info.loaded_weights = 0, []


def keep_what_waits(model: torch.nn.Module, memory: torch.Tensor) -> None:
    """Copy tensors that vLLM still needs out of `memory`, which the next bucket overwrites: until a layer is complete,
    vLLM keeps references to its tensors. It is not complete if the bucket ends inside it, or its padding is not loaded.

    All experts are one layer, 4.8 GB in Qwen3-235B-A22B. Experts of other workers are not copied.
    """
    address = memory.untyped_storage().data_ptr()
    for layer in model.modules():
        info = get_layerwise_info(layer)
        kept_calls, info.loaded_weights = info.loaded_weights, []
        for name, call in kept_calls:
            inside = {
                argument: value
                for argument, value in call.arguments.items()
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == address
            }
            if inside and _is_elsewhere(layer, call.arguments.get("expert_id")):
                continue
            call.arguments.update({argument: value.clone() for argument, value in inside.items()})
            info.loaded_weights.append((name, call))


def _is_elsewhere(layer: Any, expert: int | None) -> bool:
    """Whether another worker holds the expert. Then the loader's call can be dropped: it has loaded nothing here (vLLM
    0.32.0 counts no element for it), and would load nothing when vLLM repeats it."""
    return expert is not None and layer._map_global_expert_id_to_local_expert_id(expert) == -1


def refresh_packed(model: torch.nn.Module) -> int:
    """Rebuild the packed (oneDNN) copies of weights that CPU layers keep and that a reload leaves wrong.

    An output layer tied to the embedding shares its parameter, but packs its own copy when the model is first loaded. A
    reload updates the embedding only and leaves that copy with the old weights (seen in vLLM 0.32.0). Experts are
    packed in place at the first load, and their kernel then treats reloaded weights as packed. Returns the number of
    rebuilt layers.
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
    mixtures = [module for module in model.modules() if _kernel(module) is not None]
    for module in mixtures:
        _kernel(module).fused_experts.process_weights_after_loading(module)
    return len(layers) + len(mixtures)


def _kernel(module: torch.nn.Module) -> Any:
    """The kernel of a layer of experts; None for other layers."""
    return getattr(getattr(module, "quant_method", None), "moe_kernel", None)


WeightTransferEngineFactory.register_engine("dppo", Receiver)
