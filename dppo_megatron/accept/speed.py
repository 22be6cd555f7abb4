"""Seconds and bytes of the training step on one device, at Qwen3's shapes with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dppo_megatron.accept.child import Sheet
from dppo_megatron.accept.timed import Timing, built_actor, synchronize, time_steps
from dppo_megatron.accept.workload import (
    SHAPES,
    TEN_MILLION,
    Lengths,
    RandomWeights,
    Shape,
    architecture_of,
    equal_samples,
    padded_plan,
    peak_flops,
    random_samples,
    shape_named,
)
from dppo_megatron.actor.layout import Layout, build_layout, start_process_group
from dppo_megatron.algorithms.objectives import clipped_surrogate
from dppo_megatron.config.schema import ActorConfig, Config, LayoutConfig, OptimizerConfig
from dppo_megatron.cost import cost_model
from dppo_megatron.doctor.fp8_gate import run_gate
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.planning.memory import plan_memory
from dppo_megatron.planning.site import GIB, Site
from dppo_megatron.planning.timing import speeds_for
from dppo_megatron.types import TrainSample

_CAP = 8192
"""Tokens of a pack of 4B: with 16,384 activations of 80 GB and 72 of model and optimizer exceed an H200."""
_WARMUP, _TIMED = 2, 3


def utilization_te(sheet: Sheet) -> None:
    """4B, or the user's model, with Transformer Engine's layers."""
    _utilization(sheet, "te")


def utilization_local(sheet: Sheet) -> None:
    """The same with the local layers."""
    _utilization(sheet, "local")


def _utilization(sheet: Sheet, spec: str) -> None:
    shape, layout = _shape(sheet), _one_rank()
    timing, samples = _timed(shape, _actor_config(layer_spec=spec), layout, 8192, 8, _CAP)
    architecture = architecture_of(shape)
    expected = speeds_for(architecture).mfu.value
    _note_utilization(sheet, "mfu", shape, samples, timing, expected)
    sheet.note("peak_gib", timing.peak_memory_gib)
    sheet.note("step_s", float(np.median(timing.seconds)), _flops(shape, samples) / _site(layout).peak_flops / expected)


def lengths(sheet: Sheet) -> None:
    """0.6B at two lengths of equal total."""
    layout = _one_rank()
    for tokens in (4096, 16384):
        timing, samples = _timed(SHAPES["0.6b"], _actor_config(), layout, tokens, 4, 16384)
        expected = speeds_for(architecture_of(SHAPES["0.6b"])).mfu.value
        _note_utilization(sheet, f"mfu_{tokens}", SHAPES["0.6b"], samples, timing, expected)


def packed(sheet: Sheet) -> None:
    """One actor, three plans of the same samples; without CUDA a tiny one in float32."""
    shape = SHAPES["0.6b" if sheet.cuda else "smoke"]
    if sheet.cuda:
        of, cap, dtype = Lengths(48, 1024, 0.9, 8192, (64, 256)), 16384, torch.bfloat16
    else:
        of, cap, dtype = Lengths(24, 32, 0.9, 256, (4, 16)), 512, torch.float32
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
            name: float(np.median(time_steps(actor, samples, plan, warmup_steps=_WARMUP, timed_steps=_TIMED).seconds))
            for name, plan in plans.items()
        }
    for other in ("padded", "sorted"):
        ratio, note = slots[other] / slots["packed"], "" if sheet.cuda else "tiny, in float32 on a CPU"
        sheet.note(f"over_{other}", seconds[other] / seconds["packed"], ratio, note)


def memory(sheet: Sheet) -> None:
    """The peak of each phase beside `plan`'s, both of the whole device: what torch has reserved, and its context."""
    shape, layout = _shape(sheet), _one_rank()
    config, architecture = Config(), architecture_of(shape)
    config.actor, config.model.dtype = _actor_config(), "bfloat16"
    config.rollout.engine, config.rollout.servers.endpoints = "vllm", ["http://elsewhere"]
    config.packing.max_tokens_per_microbatch = _CAP
    predicted = {one.name: one.total / GIB for one in plan_memory(config, architecture, _site(layout), 1024.0).phases}
    samples = equal_samples(architecture, 1024, 2, _CAP)
    plan = plan_microbatches(samples, layout=packing_layout(config.actor, 1), max_tokens_per_microbatch=_CAP)
    objective = clipped_surrogate(0.2, 0.2, 0.0)
    with built_actor(shape, config.actor, layout, torch.bfloat16) as actor:
        actor.update(samples, plan, objective)  # the optimizer's state exists after its first step
        phases = (
            ("log-probs", lambda: actor.own_logprobs(samples, plan)),
            ("backward", lambda: actor.accumulate(samples, plan, objective)),
            ("step", lambda: actor.update(samples, plan, objective)),
        )
        for name, run in phases:
            expected = max(predicted[name], predicted["backward"]) if name == "step" else predicted[name]
            sheet.note(name, _peak_gib(run), expected)
        held = torch.cuda.memory_allocated()
        actor.offload(weights=True)
        sheet.note("left", torch.cuda.memory_allocated() / held, 0.0)


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
        sheet.note(f"{recipe}_gate", worst.value / worst.bound if worst.bound else worst.value, 0.0, worst.what)
    shape = _shape(sheet)
    samples = random_samples(Lengths(48, 1024, 0.9, 7900, (64, 256)), shape["vocab_size"])
    reference: Timing | None = None
    for recipe in ("off", *recipes):
        actor_config = _actor_config(layer_spec="te", fp8=recipe)
        plan = plan_microbatches(samples, layout=packing_layout(actor_config, 1), max_tokens_per_microbatch=_CAP)
        with built_actor(shape, actor_config, layout, torch.bfloat16) as actor:
            timing = time_steps(actor, samples, plan, warmup_steps=_WARMUP, timed_steps=_TIMED)
        if reference is None:
            reference = timing
            continue
        sheet.note(f"{recipe}_speed", float(np.median(reference.seconds) / np.median(timing.seconds)))
        for name in ("loss", "grad_norm"):
            sheet.note(f"{recipe}_{name}", abs(timing.metrics[name] / reference.metrics[name] - 1), 0.0)


def _peak_gib(run: Callable[[], object]) -> float:
    """Of the device while `run` runs: all that torch reserves, and beside it the context and what others hold."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()
    run()
    synchronize()
    return float(torch.cuda.max_memory_reserved() + beside) / GIB


def _one_rank() -> Layout:
    start_process_group()
    return build_layout(LayoutConfig(), seed=0)


def _shape(sheet: Sheet) -> Shape:
    return shape_named(sheet.model or "4b")


def _actor_config(**settings: Any) -> ActorConfig:
    """A learning rate that leaves the random weights as they are."""
    return ActorConfig(optimizer=OptimizerConfig(learning_rate=1e-8), **settings)


def _site(layout: Layout) -> Site:
    properties = torch.cuda.get_device_properties(layout.device)
    peak = peak_flops(properties.name, fp8=False)
    return Site(1, 8, float(properties.total_memory), peak or float("nan"), 1e15)


def _timed(
    shape: Shape, config: ActorConfig, layout: Layout, tokens: int, microbatches: int, cap: int
) -> tuple[Timing, list[TrainSample]]:
    samples = equal_samples(architecture_of(shape), tokens, microbatches, cap)
    plan = plan_microbatches(samples, layout=packing_layout(config, 1), max_tokens_per_microbatch=cap)
    with built_actor(shape, config, layout, torch.bfloat16) as actor:
        return time_steps(actor, samples, plan, warmup_steps=_WARMUP, timed_steps=_TIMED), samples


def _flops(shape: Shape, samples: list[TrainSample]) -> float:
    return float(cost_model(architecture_of(shape)).of(np.array([one.num_tokens for one in samples])).sum())


def _note_utilization(
    sheet: Sheet, name: str, shape: Shape, samples: list[TrainSample], timing: Timing, expected: float
) -> None:
    rate, device = _flops(shape, samples) / float(np.median(timing.seconds)), torch.cuda.get_device_name()
    peak = peak_flops(device, fp8=False)
    if peak is None:
        sheet.skip(name, f"no data sheet of {device}; {rate / 1e12:.0f} TFLOP/s")
    else:
        sheet.note(name, rate / peak, expected, timing.actor)
