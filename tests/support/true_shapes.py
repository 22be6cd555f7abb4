"""Model directories with the shapes of the real Qwen3 models and none of their weights.

The safetensors files have true headers and no data: they are sparse, so 61 GB of them take a few kilobytes of disk and
are never read. Shapes are those of the models' own config.json on the hub.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from dppo_megatron.config.paths import shipped
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.mapping import hf_shapes
from support.chat_model import train_tokenizer

LARGEST, GLM, LONG = "qwen3_235b_a22b", "glm_4.5_air", "qwen3_8b_64k"
_SHAPES: dict[str, dict[str, Any]] = {
    name: json.loads(shipped("configs", "models", name.replace("_", "-"), "config.json").read_text(encoding="utf-8"))
    for name in ("qwen3_4b", "qwen3_8b", "qwen3_32b", "qwen3_30b_a3b", LARGEST, GLM, LONG)
}
MODELS = {name: shape for name, shape in _SHAPES.items() if name not in (LARGEST, GLM, LONG)}
"""Of which there is a recipe for every size of a job."""
_FILE_BYTES = 4 * 10**9


def write_config(directory: Path, name: str, **changes: Any) -> Path:
    """Only config.json: what a plan reads."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_SHAPES[name] | changes), encoding="utf-8")
    return directory


def write_empty_model(directory: Path, name: str) -> Path:
    """config.json, a small tokenizer with a chat template, and weights without data."""
    tokenizer = train_tokenizer(["What is 1 + 1? Please reason step by step."], 320)
    tokenizer.save_pretrained(directory)
    write_config(directory, name, eos_token_id=tokenizer.eos_token_id)
    shapes = list(hf_shapes(read_architecture(directory)).items())
    files: list[dict[str, Any]] = [{}]
    end, weight_map = 0, {}
    for tensor, shape in shapes:
        size = 2 * math.prod(shape)
        if end and end + size > _FILE_BYTES:
            files.append({})
            end = 0
        files[-1][tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    for number, header in enumerate(files):
        path = directory / f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + max(entry["data_offsets"][1] for entry in header.values()))
        weight_map |= dict.fromkeys(header, path.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return directory
