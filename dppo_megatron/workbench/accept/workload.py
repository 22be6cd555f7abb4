"""What measurements of the training step share, those of `benchmarks/` too: shapes, and random weights by name.

A shape is a Hugging Face config.json, read by the same code that reads a user's checkpoint, so that measurements do not
depend on the fields of `Architecture`. Weights are random: no checkpoint and no network is needed.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig

from dppo_megatron.config.paths import shipped
from dppo_megatron.weights.architecture import Architecture, read_architecture
from dppo_megatron.weights.config_keys import MODEL_TYPES, QWEN3, QWEN3_MOE
from dppo_megatron.weights.mapping import hf_shapes
from dppo_megatron.workbench.planning.site import CHIPS

Shape = dict[str, Any]
"""The values of a config.json; without `architectures`, of a Qwen3, or of a Qwen3 mixture if it has `num_experts`."""


def shape_named(name: str) -> Shape:
    """The entry of `SHAPES`, else the config.json in the directory `name`."""
    if name in SHAPES:
        return SHAPES[name]
    return dict(json.loads((Path(name) / "config.json").read_text(encoding="utf-8")))


def _tiny(hidden: int, ffn: int, layers: int, vocabulary: int, **other: Any) -> Shape:
    """A shape with 4 heads and 2 key-value heads."""
    sizes: Shape = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4}
    return sizes | heads | {"intermediate_size": ffn, "rope_theta": 1e4} | other


SHAPES: dict[str, Shape] = {}
SHAPES |= {size: shape_named(str(shipped("configs", "models", f"qwen3-{size}"))) for size in ("0.6b", "1.7b", "4b")}
SHAPES["smoke"] = _tiny(64, 128, 2, 512, max_position_embeddings=1024, tie_word_embeddings=True)
"""Published sizes, and a tiny one for machines without CUDA."""

TEN_MILLION = _tiny(256, 768, 10, 4096, max_position_embeddings=2048, tie_word_embeddings=False)
"""10.0 million parameters, 2.1 of them embeddings; divides by two in heads, key-value heads and layers."""

_PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12}
_PEAK_FLOPS |= {name.upper(): chip.peak_flops for name, chip in CHIPS.items()}
"""Part of torch's device name and dense bfloat16 peak in FLOP/s, from NVIDIA's data sheets (which print the double for
structured sparsity; FP8's is twice as much). The first match counts."""


def peak_flops(device_name: str) -> float | None:
    """bfloat16 peak of the chip in FLOP/s; None where the table does not have it."""
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in device_name), None)


def hf_config(shape: Shape) -> PretrainedConfig:
    """The transformers configuration of a shape."""
    [family] = shape.get("architectures", [QWEN3_MOE if "num_experts" in shape else QWEN3])
    return CONFIG_MAPPING[MODEL_TYPES[family]](**shape | {"architectures": [family]})


def architecture_of(shape: Shape) -> Architecture:
    """What the project reads from the config.json of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        hf_config(shape).save_pretrained(folder)
        return read_architecture(folder)


class RandomWeights:
    """Hugging Face tensors by name: norms 1, matrices normal with standard deviation 0.02.

    A tensor is a function of its name and the seed, so that every rank and every actor sees the same model. It is drawn
    on `device` (four billion normals take a CPU a minute) and returned on the CPU, as a checkpoint's would be.
    """

    def __init__(self, architecture: Architecture, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self._shapes, self._device, self._seed = hf_shapes(architecture), torch.device(device), seed
        self._is_gemma = bool(architecture.gemma)

    def __call__(self, name: str) -> Tensor:
        """The full tensor, float32."""
        shape = self._shapes[name]
        return torch.ones(shape) if len(shape) == 1 else self._normal(name, 0.02)

    def _normal(self, name: str, deviation: float) -> Tensor:
        generator, empty = torch.Generator(self._device), torch.empty(self._shapes[name], device=self._device)
        generator.manual_seed(zlib.crc32(name.encode()) + self._seed)
        return empty.normal_(0.0, deviation, generator=generator).cpu()


class LivelyWeights(RandomWeights):
    """Mistakes show: embeddings and layers' outputs are of one size, attention chooses, no norm or bias is neutral."""

    def __call__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return (0.0 if self._is_gemma or "norm" not in name else 1.0) + self._normal(name, 0.1)
        # Gemma multiplies its embeddings by the root of their width
        return self._normal(name, 1.0 if "embed" in name and not self._is_gemma else shape[-1] ** -0.5)
