"""Runs in vLLM's environment: a worker whose loading of weights is interrupted.

python -m interrupted_worker

Worker and layerwise reload are vLLM's own; the model is one layer, and there is no device. Prints what comes of

    open, failed    sleep in an update that is open, and in one in which the worker has failed: at once, and after the
                    update was begun again and finished
    reloaded        a snapshot of files, after one of which the second file could not be read
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from dppo_vllm_extension import Receiver, WorkerExtension
from safetensors.torch import save_file
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.v1.worker import gpu_worker

BUCKET = {"names": ["first"], "shapes": [[2]], "dtype": "float32", "memory": {"path": "/no/such/file", "bytes": 8}}


class Layer(torch.nn.Module):
    """Of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "second"):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(2), requires_grad=False))
            getattr(self, name).weight_loader = lambda param, loaded: param.data.copy_(loaded)


class Model(torch.nn.Module):
    """One layer, and positions, which no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.positions = Layer(), torch.nn.Module()
        self.positions.register_buffer("table", torch.arange(2.0), persistent=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """By the parameters' loaders, as vLLM's models, which also list them once."""
        parameters: dict[str, Any] = dict(self.layer.named_parameters())
        for name, tensor in tensors:
            parameters[name].weight_loader(parameters[name], tensor)


class Worker(WorkerExtension, gpu_worker.Worker):  # type: ignore[misc]
    """Without a device, a group or a cache."""

    def __init__(self) -> None:
        model, engine = Model(), Receiver.__new__(Receiver)
        record_metadata_for_reloading(model)
        engine.model, engine.model_config, engine.device = model, None, torch.device("cpu")
        engine.reset_weight_update_target = lambda: None
        self.weight_transfer_engine, self._weight_update_active, self._weight_update_is_draft = engine, False, False
        self.model_runner = SimpleNamespace(
            model=model,
            get_model=lambda: model,
            get_draft_model=lambda: None,
            reset_lora_state=lambda: None,
            reload_weights=self._reload,
        )
        self.model_config = SimpleNamespace(sleep_preserve_parameter_names=[], enable_nccl_comm_suspend=False)
        self.vllm_config = SimpleNamespace(model_config=self.model_config)
        self._sleep_mode_backend = SimpleNamespace(suspend=lambda level: None)

    def _reload(self, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As vLLM's `reload/inplace.py`, which needs a whole configuration."""
        initialize_layerwise_reload(self.get_model())
        self.get_model().load_weights(weights_iterator)
        finalize_layerwise_reload(self.get_model(), None)

    def asleep(self) -> Any:
        """What it has saved, or why it does not sleep."""
        try:
            self.sleep(2)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return {name: buffer.tolist() for name, buffer in self._sleep_saved_buffers.items()}


def found(fails: bool) -> list[Any]:
    """Of sleep in an update, and after it was closed."""
    worker = Worker()
    assert worker.dppo_do("start_weight_update", {}) == {"problem": ""}
    if fails:
        assert worker.dppo_do("update_weights", {"update_info": BUCKET})["problem"]
    told = [worker.asleep()]
    for method in ("start_weight_update", "finish_weight_update"):
        worker.dppo_do(method, {})
    return [*told, worker.asleep()]


def reloaded(directory: Path) -> list[Any]:
    """Of a snapshot that breaks off, and of a whole one after it."""
    worker = Worker()
    save_file({"first": torch.full((2,), 9.0)}, directory / "a.safetensors")
    (directory / "b.safetensors").write_text("no tensors")
    told = worker.dppo_do("dppo_reload", {"weights_path": str(directory)})["problem"].partition(":")[0]
    save_file({"second": torch.full((2,), 2.0)}, directory / "b.safetensors")
    save_file({"first": torch.full((2,), 1.0)}, directory / "a.safetensors")
    assert worker.dppo_do("dppo_reload", {"weights_path": str(directory)}) == {"problem": ""}
    layer = worker.get_model().layer
    return [told, layer.first.tolist(), layer.second.tolist()]


torch.accelerator.synchronize = lambda *_: None
torch.accelerator.get_memory_info = lambda *_: (1, 2)
gpu_worker.set_current_vllm_config = lambda *_: nullcontext()
with tempfile.TemporaryDirectory() as name:
    print(json.dumps({"open": found(False), "failed": found(True), "reloaded": reloaded(Path(name))}))
