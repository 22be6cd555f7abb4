"""What the GPU benchmarks share: useful FLOPs of a step, rates and utilization of a timed one.

FLOPs count what the mathematics asks for, once (model FLOPs, not hardware FLOPs): neither padding nor recomputation
raises a utilization.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from workload import Spread, trained_tokens

from dppo_megatron.types import TrainSample
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.workbench.accept.speed import PlanTiming
from dppo_megatron.workbench.accept.workload import peak_flops


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


def figures(
    timing: PlanTiming, architecture: Architecture, samples: Sequence[TrainSample], *, fp8: bool
) -> dict[str, Any]:
    """Rates and utilization, for the table and the JSON."""
    spread = Spread.of(timing.seconds)
    flops = useful_flops(architecture, samples) / spread.median
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = peak_flops(name)
    return {
        "step_s": spread.as_dict(),
        "all_step_s": timing.seconds,
        "tokens_per_s": sum(sample.num_tokens for sample in samples) / spread.median,
        "trained_tokens_per_s": trained_tokens(samples) / spread.median,
        "useful_tflops_per_s": flops / 1e12,
        "mfu_of_bf16_peak": flops / peak if peak else None,
        "mfu_of_fp8_peak": flops / (2 * peak) if fp8 and peak else None,
        "peak_memory_gib": timing.peak_memory_gib,
        "actor": timing.actor,
        "loss": timing.metrics["loss"],
        "grad_norm": timing.metrics["grad_norm"],
    }


def require_cuda(args: argparse.Namespace) -> None:
    """Exit code 2 and one sentence where a GPU is needed and there is none."""
    if not args.smoke and not torch.cuda.is_available():
        print("This benchmark needs a CUDA device; `--smoke` runs it tiny on the CPU.", file=sys.stderr)
        raise SystemExit(2)
