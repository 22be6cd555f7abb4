"""Seconds and bytes of the training step on one device, at Qwen3's shapes with random weights."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.layout import Layout, build_layout, start_process_group
from dppo_megatron.algorithms.objectives import clipped_surrogate
from dppo_megatron.config.schema import ActorConfig, Config, LayoutConfig, OptimizerConfig
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.types import PackPlan, TrainSample
from dppo_megatron.workbench.accept.runner import Sheet
from dppo_megatron.workbench.accept.workload import (
    CAP,
    SHAPES,
    TEN_MILLION,
    RandomWeights,
    SampleLengths,
    Shape,
    architecture_of,
    equal_samples,
    padded_plan,
    peak_flops,
    random_samples,
    shape_named,
    useful_flops,
)
from dppo_megatron.workbench.doctor.fp8_gate import run_gate
from dppo_megatron.workbench.planning.site import GIB

_STEPS = {"warmup_steps": 2, "timed_steps": 3}


@dataclass(frozen=True, slots=True)
class PlanTiming:
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
) -> PlanTiming:
    """`Actor.update` from the samples on; the host's share of a step is part of it."""
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


def utilization(sheet: Sheet, spec: str) -> None:
    """4B, or the user's model."""
    timing = _timed(sheet, "mfu", _one_rank(), sheet.model or "4b", _actor_config(layer_spec=spec), (8192, 8, CAP))
    sheet.note("peak_gib", timing.peak_memory_gib)
    sheet.note("step_s", float(np.median(timing.seconds)))


def lengths(sheet: Sheet) -> None:
    """0.6B at two lengths of equal total."""
    layout = _one_rank()
    for tokens in (4096, 16384):
        _timed(sheet, f"mfu_{tokens}", layout, "0.6b", _actor_config(), (tokens, 4, 16384))


def _timed(
    sheet: Sheet, figure: str, layout: Layout, model: str, config: ActorConfig, of: tuple[int, int, int]
) -> PlanTiming:
    """Notes the utilization of a step of equal samples: `of` is their length, the micro-batches, the cap of one."""
    shape = shape_named(model)
    samples = equal_samples(architecture_of(shape), *of)
    plan = plan_microbatches(samples, layout=packing_layout(config, 1), max_tokens_per_microbatch=of[-1])
    with built_actor(shape, config, layout, torch.bfloat16) as actor:
        timing = time_steps(actor, samples, plan, **_STEPS)
    rate, device = useful_flops(shape, samples) / float(np.median(timing.seconds)), torch.cuda.get_device_name()
    if peak := peak_flops(device):
        sheet.note(figure, rate / peak, note=timing.actor)
    else:
        sheet.note(figure, None, note=f"no data sheet of {device}; {rate / 1e12:.0f} TFLOP/s")
    return timing


def packed(sheet: Sheet) -> None:
    """One actor, three plans of the same samples; without CUDA a tiny one in float32."""
    shape = SHAPES["0.6b" if sheet.cuda else "smoke"]
    if sheet.cuda:
        of, cap, dtype = SampleLengths(48, 1024, 0.9, 8192, (64, 256)), 16384, torch.bfloat16
    else:
        of, cap, dtype = SampleLengths(24, 32, 0.9, 256, (4, 16)), 512, torch.float32
    samples, config, layout = random_samples(of, shape["vocab_size"]), _actor_config(), _one_rank()
    placing = packing_layout(config, 1)
    plans = {
        "padded": padded_plan(samples, placing, cap, by_length=False),
        "sorted": padded_plan(samples, placing, cap, by_length=True),
        "packed": plan_microbatches(samples, layout=placing, max_tokens_per_microbatch=cap),
    }
    slots = {name: sum(pack.num_tokens for pack in plan.microbatches[0]) for name, plan in plans.items()}
    with built_actor(shape, config, layout, dtype) as actor:
        seconds = {
            name: float(np.median(time_steps(actor, samples, plan, **_STEPS).seconds)) for name, plan in plans.items()
        }
    for other in ("padded", "sorted"):
        ratio, note = slots[other] / slots["packed"], "" if sheet.cuda else "tiny, in float32 on a CPU"
        sheet.note(f"over_{other}", seconds[other] / seconds["packed"], ratio, note)


def memory(sheet: Sheet) -> None:
    """The peak of each phase, of the whole device: what torch has reserved, and its context."""
    shape, layout, config = shape_named(sheet.model or "4b"), _one_rank(), _actor_config()
    samples = equal_samples(architecture_of(shape), 1024, 2, CAP)
    plan = plan_microbatches(samples, layout=packing_layout(config, 1), max_tokens_per_microbatch=CAP)
    objective = clipped_surrogate(0.2, 0.2, 0.0)
    with built_actor(shape, config, layout, torch.bfloat16) as actor:
        actor.update(samples, plan, objective)  # the optimizer's state exists after its first step
        sheet.note("log-probs", _peak_gib(lambda: actor.own_logprobs(samples, plan)))
        sheet.note("backward", _peak_gib(lambda: actor.accumulate(samples, plan, objective)))
        sheet.note("step", _peak_gib(lambda: actor.update(samples, plan, objective)))
        held = torch.cuda.memory_allocated()
        actor.offload(weights=True)
        sheet.note("left", torch.cuda.memory_allocated() / held)


def fp8(sheet: Sheet) -> None:
    """The gate on ten million parameters, then seconds at 4B; bfloat16 first, on the same layers."""
    layout, recipes = _one_rank(), ("tensorwise", "blockwise")
    config = Config()
    config.model.dtype, config.packing.max_tokens_per_microbatch = "bfloat16", 2048
    tiny = architecture_of(TEN_MILLION)
    for recipe in recipes:
        config.actor = _actor_config(fp8=recipe)
        findings = run_gate(config, layout, tiny, RandomWeights(tiny, layout.device))
        worst = max(findings, key=lambda one: one.value / one.bound if one.bound else one.value)
        sheet.note(f"{recipe}_gate", worst.value / worst.bound if worst.bound else worst.value, note=worst.what)
    shape = shape_named(sheet.model or "4b")
    samples = random_samples(SampleLengths(48, 1024, 0.9, 7900, (64, 256)), shape["vocab_size"])
    timings: dict[str, PlanTiming] = {}
    for recipe in ("off", *recipes):
        actor_config = _actor_config(layer_spec="te", fp8=recipe)
        plan = plan_microbatches(samples, layout=packing_layout(actor_config, 1), max_tokens_per_microbatch=CAP)
        with built_actor(shape, actor_config, layout, torch.bfloat16) as actor:
            timings[recipe] = time_steps(actor, samples, plan, **_STEPS)
    reference = timings.pop("off")
    for recipe, timing in timings.items():
        sheet.note(f"{recipe}_speed", float(np.median(reference.seconds) / np.median(timing.seconds)))
        for name in ("loss", "grad_norm"):
            sheet.note(f"{recipe}_{name}", abs(timing.metrics[name] / reference.metrics[name] - 1))


def _peak_gib(run: Callable[[], object]) -> float:
    """Of the device while `run` runs: all that torch reserves, and beside it the context and what others hold."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()
    run()
    _synchronize()
    return float(torch.cuda.max_memory_reserved() + beside) / GIB


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _one_rank() -> Layout:
    start_process_group()
    return build_layout(LayoutConfig(), seed=0)


def _actor_config(**settings: Any) -> ActorConfig:
    """A learning rate that leaves the random weights as they are."""
    return ActorConfig(optimizer=OptimizerConfig(learning_rate=1e-8), **settings)
