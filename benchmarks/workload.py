"""What the benchmarks of the training step share: shapes, random weights by name, a batch, the machine.

A shape is a Hugging Face config.json, read by the same code that reads a user's checkpoint, so that a benchmark does
not know the fields of `Architecture`. Completion lengths are log-normal, clipped: that is what rollouts of reasoning
models look like, and padding to the longest is cheap only for lengths that real batches do not have.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from dppo_megatron.types import TrainSample
from dppo_megatron.weights.architecture import Architecture, read_architecture

Shape = dict[str, Any]
"""The sizes of a Qwen3 config.json."""

TEN_MILLION: Shape = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""10.0 million parameters, 2.1 of them embeddings; divides by two in heads, key-value heads and layers."""


def hf_config(shape: Shape) -> Qwen3Config:
    """The transformers configuration of a shape."""
    return Qwen3Config(architectures=["Qwen3ForCausalLM"], **shape)


def architecture_of(shape: Shape) -> Architecture:
    """What the project reads from the config.json of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        hf_config(shape).save_pretrained(folder)
        return read_architecture(folder)


class RandomWeights:
    """Hugging Face tensors by name: norms 1, matrices normal with standard deviation 0.02.

    A tensor is a function of its name, so that every rank and every actor sees the same model. It is drawn on
    `device` (four billion normals take a CPU a minute) and returned on the CPU, as a checkpoint's would be.
    """

    def __init__(self, shape: Shape, device: torch.device | str = "cpu") -> None:
        with torch.device("meta"):
            model = Qwen3ForCausalLM(hf_config(shape))
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._device = torch.device(device)

    def __call__(self, name: str) -> Tensor:
        """The full tensor, float32."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape, device=self._device).normal_(0.0, 0.02, generator=generator).cpu()


@dataclass(frozen=True, slots=True)
class Lengths:
    """A step's samples: prompts of uniform length, completions of log-normal length, clipped."""

    samples: int
    median_tokens: int
    sigma: float
    max_tokens: int
    prompt_tokens: tuple[int, int] = (16, 64)
    """Shortest and longest prompt."""


def random_samples(lengths: Lengths, vocab_size: int, seed: int = 0) -> list[TrainSample]:
    """Random tokens with GRPO's denominators (samples * completion length) and weight 1.

    The behaviour's log-probabilities lie around those of a uniform policy, which a model with `RandomWeights` nearly
    is, widely enough that a part of the tokens is clipped.
    """
    rng = np.random.default_rng(seed)
    drawn = lengths.median_tokens * np.exp(lengths.sigma * rng.normal(size=lengths.samples))
    completions = np.clip(drawn.astype(np.int64), 1, lengths.max_tokens)
    prompts = rng.integers(lengths.prompt_tokens[0], lengths.prompt_tokens[1] + 1, lengths.samples)
    return [
        TrainSample(
            id=f"{i}:0",
            token_ids=rng.integers(0, vocab_size, prompt + completion),
            num_prompt_tokens=int(prompt),
            behaviour_logprobs=(-np.log(vocab_size) + 0.3 * rng.normal(size=completion)).astype(np.float32),
            advantage=float(rng.normal()),
            weight=1.0,
            denominator=float(lengths.samples * completion),
        )
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


def trained_tokens(samples: Sequence[TrainSample]) -> int:
    """Tokens that carry loss."""
    return sum(sample.num_completion_tokens for sample in samples)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(float(np.median(values)), float(min(values)), float(max(values)))

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"median": self.median, "low": self.low, "high": self.high}

    def text(self, digits: int) -> str:
        """`median (low .. high)`."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} .. {self.high:.{digits}f})"


def environment() -> dict[str, Any]:
    """Versions and machine, for the JSON of every benchmark."""
    versions = {"python": platform.python_version()}
    for name in ("dppo_megatron", "torch", "megatron-core", "transformers", "numpy", "transformer-engine"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    machine: dict[str, Any] = {"platform": platform.platform(), "processor": _processor(), "cpus": os.cpu_count()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
        machine["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return {"versions": versions, "machine": machine}


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """One JSON object with every figure, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(result | environment(), indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())
