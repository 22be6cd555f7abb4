"""One actor with random weights, and the seconds and the memory of its steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dppo_megatron.accept.workload import RandomWeights, Shape, architecture_of
from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.layout import Layout
from dppo_megatron.algorithms.objectives import clipped_surrogate
from dppo_megatron.config.schema import ActorConfig
from dppo_megatron.types import PackPlan, TrainSample


@dataclass(frozen=True, slots=True)
class Timing:
    """What one plan took on one actor."""

    seconds: list[float]
    """Wall time of each timed step, the device synchronized before and after."""
    peak_memory_gib: float
    """torch's peak of allocated memory over the timed steps; 0 without CUDA."""
    actor: str
    """The actor's own description: layout, layers and why, FP8 recipe."""
    metrics: dict[str, float]
    """What the last step returned; a wrong loss makes a time worthless."""


@contextmanager
def built_actor(shape: Shape, config: ActorConfig, layout: Layout, dtype: torch.dtype) -> Iterator[Actor]:
    """An actor with random weights and a fresh optimizer; its memory is free again after the block."""
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
) -> Timing:
    """`Actor.update` from the samples on; the host's share of a step is part of it."""
    objective = clipped_surrogate(0.2, 0.2, 0.0)
    for _ in range(warmup_steps):
        actor.update(samples, plan, objective)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, metrics = [], {"loss": float("nan"), "grad_norm": float("nan")}
    for _ in range(timed_steps):
        synchronize()
        started = time.perf_counter()
        metrics = actor.update(samples, plan, objective)
        synchronize()
        seconds.append(time.perf_counter() - started)
    peak_memory_gib = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return Timing(seconds, peak_memory_gib, actor.description, metrics)


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
