"""Writes an adapter as PEFT's files, adapter_config.json and adapter_model.safetensors. PEFT, transformers and the
engines load them onto the model from which training started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dppo_megatron.files import make_directory
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Lora

CONFIG = "adapter_config.json"


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], lora: Lora, base: str) -> None:
    """Write an adapter: its `tensors`, by PEFT's names, and a config that names the model `base` it belongs to.

    Raises:
        UserError: the disk is full.
    """
    make_directory(directory)
    saved = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    path = directory / "adapter_model.safetensors"
    try:
        save_file(saved, path, {"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"'{path}' cannot be written: {error}") from None
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "bias": "none",
        "inference_mode": True,
        "target_modules": list(lora.targets),
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
