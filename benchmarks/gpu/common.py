"""What the GPU benchmarks share: batches and plans, a timed step, its useful FLOPs, rates and utilization.

FLOPs are model FLOPs, not hardware FLOPs: neither padding nor recomputation raises a utilization.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from workload import Spread, trained_tokens

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.layout import Layout
from dppo_megatron.algorithms.objectives import clipped_surrogate
from dppo_megatron.config.schema import ActorConfig
from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.types import PackedMicrobatch, PackPlan, TrainSample
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.workbench.accept.workload import RandomWeights, Shape, architecture_of, peak_flops
from dppo_megatron.workbench.random_samples import SampleLengths, random_samples


@dataclass(frozen=True, slots=True)
class PlanTiming:
    """Times and figures of one plan on one actor."""

    seconds: list[float]
    """Wall time of each timed step, the device synchronized before and after."""
    peak_memory_gib: float
    """torch's peak of allocated memory over the timed steps; 0 without CUDA."""
    actor: str
    """The actor's own description: layout, layers and their reason, FP8 recipe."""
    metrics: dict[str, float]
    """The last step's metrics: a wrong loss makes a time worthless."""


@contextmanager
def built_actor(shape: Shape, config: ActorConfig, layout: Layout, dtype: torch.dtype) -> Iterator[Actor]:
    """An actor with random weights and a fresh optimizer; its memory is freed after the block."""
    architecture = architecture_of(shape)
    actor = Actor(config, layout, architecture, RandomWeights(architecture, layout.device), dtype=dtype)
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
) -> PlanTiming:
    """Time `Actor.update` from the samples on, including the host's share of a step."""
    objective = clipped_surrogate(0.2, 0.2, 0.0)
    for _ in range(warmup_steps):
        actor.update(samples, plan, objective)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, metrics = [], {"loss": float("nan"), "grad_norm": float("nan")}
    for _ in range(timed_steps):
        _synchronize()
        started = time.perf_counter()
        metrics = actor.update(samples, plan, objective).figures()
        _synchronize()
        seconds.append(time.perf_counter() - started)
    peak_memory_gib = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return PlanTiming(seconds, peak_memory_gib, actor.description, metrics)


def equal_samples(architecture: Architecture, tokens: int, microbatches: int, cap: int) -> list[TrainSample]:
    """Samples of one length that fill their micro-batches, so that only the kernels and this project are measured."""
    prompt = tokens // 8
    completion = tokens + 1 - prompt  # the last token is only a target: length + 1 tokens are length inputs
    lengths = SampleLengths(microbatches * (cap // tokens), completion, 0.0, completion, (prompt, prompt))
    return random_samples(lengths, architecture.vocab_size)


def padded_plan(
    samples: Sequence[TrainSample], layout: PackingLayout, max_tokens_per_microbatch: int, *, by_length: bool
) -> PackPlan:
    """A plan with slots as long as the longest sample of the step, or, sorted by length, of the micro-batch.

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
        padded = tuple(slot * i for i in range(len(members) + 1))
        microbatches.append(PackedMicrobatch(tuple(members), padded))
    return PackPlan((tuple(microbatches),), max_tokens_per_microbatch, sum(lengths), {})


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
    """Exit with code 2 and one sentence if a GPU is needed and there is none."""
    if not args.smoke and not torch.cuda.is_available():
        print("This benchmark needs a CUDA device; `--smoke` runs it tiny on the CPU.", file=sys.stderr)
        raise SystemExit(2)


def peak_gib(run: Callable[[], object]) -> float:
    """Peak memory of the device during `run`: what torch reserves, plus the context and other processes. 0 without
    CUDA."""
    if not torch.cuda.is_available():
        run()
        return 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()
    run()
    _synchronize()
    return float(torch.cuda.max_memory_reserved() + beside) / 2**30


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
