"""What the GPU benchmarks share: Qwen3's shapes, useful FLOPs of a step, chips' peaks, one timed actor.

Weights are random, so no checkpoint is needed and every shape is a name. FLOPs count what the mathematics asks for,
once (model FLOPs, not hardware FLOPs): neither padding nor recomputation raises a utilization.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from workload import RandomWeights, Shape, Spread, architecture_of, trained_tokens

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.layout import Layout
from dppo_megatron.algorithms.objectives import clipped_surrogate
from dppo_megatron.config.schema import ActorConfig
from dppo_megatron.types import PackPlan, TrainSample
from dppo_megatron.weights.architecture import Architecture

_QWEN3: Shape = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}

SHAPES: dict[str, Shape] = {
    "0.6b": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": _QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "smoke": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
}
"""Sizes in the config.json of Qwen3-0.6B, 1.7B and 4B (arXiv 2505.09388), and a tiny one for `--smoke`."""

PEAK_FLOPS: tuple[tuple[str, float, float], ...] = (
    ("H100 PCIe", 756e12, 1513e12),
    ("H100 NVL", 835e12, 1671e12),
    ("H100", 989e12, 1979e12),
    ("H200", 989e12, 1979e12),
)
"""Part of torch's device name, dense bfloat16 and dense FP8 peak in FLOP/s, from NVIDIA's data sheets (which print
the double for structured sparsity). The first match counts."""


def peak_flops(device_name: str, fp8: bool) -> float | None:
    """Peak of the chip in FLOP/s; None where the table does not have it."""
    for part, bf16_peak, fp8_peak in PEAK_FLOPS:
        if part in device_name:
            return fp8_peak if fp8 else bf16_peak
    return None


def matmul_parameters(architecture: Architecture) -> int:
    """Parameters that multiply every token: the layers' matrices and the output projection, not the embedding."""
    heads = architecture.num_heads + 2 * architecture.num_kv_heads
    attention = architecture.hidden_size * architecture.head_dim * (heads + architecture.num_heads)
    layer = attention + 3 * architecture.hidden_size * architecture.ffn_size
    return architecture.num_layers * layer + architecture.vocab_size * architecture.hidden_size


def useful_flops(architecture: Architecture, samples: Sequence[TrainSample]) -> float:
    """FLOPs of one forward and backward pass over the samples' own tokens.

    6 N T (arXiv 2001.08361, section 2.1), N as `matmul_parameters`, T all input tokens; and for causal attention
    6 L H d n^2 a sequence of n tokens: two products of n x n x d a head, half of each below the diagonal, 2 FLOPs a
    multiply-add, three times for forward and backward (arXiv 2205.14135 counts alike). N T includes the output
    projection at prompt positions, which the actor skips: below 1 % here, and it makes the figure comparable.
    """
    lengths = [sample.num_tokens for sample in samples]
    width = architecture.num_layers * architecture.num_heads * architecture.head_dim
    return 6.0 * matmul_parameters(architecture) * sum(lengths) + 6.0 * width * sum(n * n for n in lengths)


@dataclass(frozen=True, slots=True)
class Timing:
    """What a row of a table says of one plan on one actor."""

    seconds: list[float]
    """Wall time of each timed step, the device synchronized before and after."""
    peak_memory_gib: float
    """torch's peak of allocated memory over the timed steps; 0 without CUDA."""
    actor: str
    """The actor's own description: layout, layers and why, FP8 recipe."""
    metrics: dict[str, float]
    """What the last step returned; a wrong loss makes a time worthless."""

    def figures(self, architecture: Architecture, samples: Sequence[TrainSample], *, fp8: bool) -> dict[str, Any]:
        """Rates and utilization, for the table and the JSON."""
        spread = Spread.of(self.seconds)
        flops = useful_flops(architecture, samples) / spread.median
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        bf16_peak, fp8_peak = peak_flops(name, False), peak_flops(name, True)
        return {
            "step_s": spread.as_dict(),
            "all_step_s": self.seconds,
            "tokens_per_s": sum(sample.num_tokens for sample in samples) / spread.median,
            "trained_tokens_per_s": trained_tokens(samples) / spread.median,
            "useful_tflops_per_s": flops / 1e12,
            "mfu_of_bf16_peak": flops / bf16_peak if bf16_peak else None,
            "mfu_of_fp8_peak": flops / fp8_peak if fp8 and fp8_peak else None,
            "peak_memory_gib": self.peak_memory_gib,
            "actor": self.actor,
            "loss": self.metrics["loss"],
            "grad_norm": self.metrics["grad_norm"],
        }


@contextmanager
def built_actor(shape: Shape, config: ActorConfig, layout: Layout, dtype: torch.dtype) -> Iterator[Actor]:
    """An actor with random weights and a fresh optimizer; its memory is free again after the block."""
    actor = Actor(config, layout, architecture_of(shape), RandomWeights(shape, layout.device), dtype=dtype)
    actor.start_phase(config.optimizer, total_steps=10**6)
    try:
        yield actor
    finally:
        del actor
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def time_steps(
    actor: Actor, samples: Sequence[TrainSample], plan: PackPlan, *, warmup_steps: int, timed_steps: int
) -> Timing:
    """`Actor.update` from the samples on; the host's share of a step is part of it."""
    objective = clipped_surrogate(0.2, 0.2, 0.0)
    metrics = {"loss": float("nan"), "grad_norm": float("nan")}
    for _ in range(warmup_steps):
        metrics = actor.update(samples, plan, objective)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(timed_steps):
        _synchronize()
        started = time.perf_counter()
        metrics = actor.update(samples, plan, objective)
        _synchronize()
        seconds.append(time.perf_counter() - started)
    peak_memory_gib = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return Timing(seconds, peak_memory_gib, actor.description, metrics)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def require_cuda(args: argparse.Namespace) -> None:
    """Exit code 2 and one sentence where a GPU is needed and there is none."""
    if not args.smoke and not torch.cuda.is_available():
        print("This benchmark needs a CUDA device; `--smoke` runs it tiny on the CPU.", file=sys.stderr)
        raise SystemExit(2)
