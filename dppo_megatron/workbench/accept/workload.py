"""What measurements of the training step share: shapes, random weights by name, a batch.

A shape is a Hugging Face config.json, read by the same code that reads a user's checkpoint, so that a measurement does
not know the fields of `Architecture`. Weights are random: no checkpoint and no network is needed. Completion lengths
are log-normal, clipped: that is what rollouts of reasoning models look like, and padding to the longest is cheap only
for lengths that real batches do not have.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.steps.rollout_cost import cost_model
from dppo_megatron.types import PackedMicrobatch, PackPlan, TrainSample
from dppo_megatron.weights.architecture import Architecture, read_architecture
from dppo_megatron.weights.mapping import hf_shapes
from dppo_megatron.workbench.planning.site import CHIPS

Shape = dict[str, Any]
"""The sizes of a Qwen3 config.json; of a mixture of experts, if it names experts."""

CAP = 8192
"""Tokens of a pack of 4B: with 16,384 activations of 80 GB and 72 of model and optimizer exceed an H200."""


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, **other: Any) -> Shape:
    sizes = {"vocab_size": 151936, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128}
    return sizes | {"max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": True} | other


_SMALL: Shape = {"num_key_value_heads": 2, "rope_theta": 1e4}
SHAPES: dict[str, Shape] = {
    "0.6b": _qwen3(1024, 3072, 28, 16),
    "1.7b": _qwen3(2048, 6144, 28, 16),
    "4b": _qwen3(2560, 9728, 36, 32),
    "smoke": _qwen3(64, 128, 2, 4, vocab_size=512, **_SMALL, head_dim=16, max_position_embeddings=1024),
}
"""Sizes in the config.json of Qwen3-0.6B, 1.7B and 4B (arXiv 2505.09388), and a tiny one for machines without CUDA."""

TEN_MILLION = _qwen3(
    *(256, 768, 10, 4), vocab_size=4096, **_SMALL, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=False
)
"""10.0 million parameters, 2.1 of them embeddings; divides by two in heads, key-value heads and layers."""

_PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12}
_PEAK_FLOPS |= {name.upper(): chip.peak_flops for name, chip in CHIPS.items()}
"""Part of torch's device name and dense bfloat16 peak in FLOP/s, from NVIDIA's data sheets (which print the double for
structured sparsity; FP8's is twice as much). The first match counts."""


def peak_flops(device_name: str) -> float | None:
    """bfloat16 peak of the chip in FLOP/s; None where the table does not have it."""
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in device_name), None)


def useful_flops(shape: Shape, samples: Sequence[TrainSample]) -> float:
    """Of a forward and backward pass, as selection counts them."""
    return float(cost_model(architecture_of(shape)).of(np.array([one.num_tokens for one in samples])).sum())


def hf_config(shape: Shape) -> PretrainedConfig:
    """The transformers configuration of a shape."""
    if "num_experts" in shape:
        return Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **shape)
    return Qwen3Config(architectures=["Qwen3ForCausalLM"], **shape)


def architecture_of(shape: Shape) -> Architecture:
    """What the project reads from the config.json of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        hf_config(shape).save_pretrained(folder)
        return read_architecture(folder)


def shape_named(name: str) -> Shape:
    """One of `SHAPES`, or the config.json in a directory of this name."""
    if name in SHAPES:
        return SHAPES[name]
    values = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in values.items() if key not in ("architectures", "model_type")}


class RandomWeights:
    """Hugging Face tensors by name: norms 1, matrices normal with standard deviation 0.02.

    A tensor is a function of its name and the seed, so that every rank and every actor sees the same model. It is drawn
    on `device` (four billion normals take a CPU a minute) and returned on the CPU, as a checkpoint's would be.
    """

    def __init__(self, architecture: Architecture, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self._shapes, self._device, self._seed = hf_shapes(architecture), torch.device(device), seed

    def __call__(self, name: str) -> Tensor:
        """The full tensor, float32."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()) + self._seed)
        return torch.empty(shape, device=self._device).normal_(0.0, 0.02, generator=generator).cpu()

    def all(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name, one after the other, on the device."""
        return ((name, self(name).to(self._device, dtype)) for name in self._shapes)


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """A step's samples: prompts of uniform length, completions of log-normal length, clipped."""

    samples: int
    median_tokens: int
    sigma: float
    max_tokens: int
    prompt_tokens: tuple[int, int] = (16, 64)
    """Shortest and longest prompt."""


def random_samples(lengths: SampleLengths, vocab_size: int, seed: int = 0) -> list[TrainSample]:
    """Random tokens with GRPO's denominators (samples * completion length) and weight 1.

    The behaviour's log-probabilities are around those of a uniform policy, which a model with `RandomWeights` nearly
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


def equal_samples(architecture: Architecture, tokens: int, microbatches: int, cap: int) -> list[TrainSample]:
    """Samples of one length that fill their micro-batches, so that only the kernels and our layer are measured."""
    prompt = tokens // 8
    completion = tokens + 1 - prompt  # the last token is only a target: length + 1 tokens are length inputs
    lengths = SampleLengths(microbatches * (cap // tokens), completion, 0.0, completion, (prompt, prompt))
    return random_samples(lengths, architecture.vocab_size)


def padded_plan(
    samples: Sequence[TrainSample], layout: PackingLayout, max_tokens_per_microbatch: int, *, by_length: bool
) -> PackPlan:
    """Slots as long as the longest sample of the step, or, sorted by length first, of the micro-batch.

    The same micro-batches as a padded tensor [B, L] of at most `max_tokens_per_microbatch` slots, laid out flat.
    """
    lengths = [sample.num_tokens for sample in samples]
    order = sorted(range(len(samples)), key=lambda i: -lengths[i]) if by_length else list(range(len(samples)))
    microbatches = []
    while order:
        longest = lengths[order[0]] if by_length else max(lengths)
        slot = -(-longest // layout.microbatch_multiple) * layout.microbatch_multiple
        rows = max(1, max_tokens_per_microbatch // slot)
        members, order = order[:rows], order[rows:]
        true = [0]
        for member in members:
            true.append(true[-1] + lengths[member])
        padded = tuple(slot * i for i in range(len(members) + 1))
        microbatches.append(PackedMicrobatch(tuple(members), tuple(true), padded))
    return PackPlan((tuple(microbatches),), max_tokens_per_microbatch, sum(lengths), {})
