"""The gate before a packed or an FP8 job: does packing change the model, does FP8 change it by more than rounding?

Alignment padding is where FP8 training has gone wrong in the field: growing the last real sequence to the recipe's
multiple gave gradients 40 to 500 times too large (Transformer Engine issue 2892) while the loss looked fine. So the
gate compares numbers: the same samples one by one and packed, and, with an FP8 recipe, FP8 beside bfloat16. It runs the
user's own model at the user's own layout, and needs a few forward and backward passes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.layout import Layout
from dppo_megatron.algorithms.objectives import supervised
from dppo_megatron.config.schema import ActorConfig, Config
from dppo_megatron.distributed import from_rank_zero
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.types import PackPlan, TrainSample
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.workbench.random_samples import SampleLengths, random_samples

_SAMPLES = 24
WARMUPS = {"delayed": 2}
"""Passes before the measured ones, which only fill a recipe's history of maxima. Its scales are 1 at first, and
gradients of 1e-5 to 1e-4 are near or below E5M2's smallest number, 1.5e-5: a first backward pass does not predict the
second."""
PACKING_BOUNDS = {"float32": (1e-4, 1e-4), "bfloat16": (0.02, 0.05)}
"""Packed against one by one: mean absolute difference of log-probabilities; norm of the difference of all gradients
over their norm. float32: sums in another order. bfloat16 keeps 8 bits, so a logit of 16 moves by 0.06 and averages out.
With FP8 both sides have the format's rounding, under scales of different tensors: they may differ by the root of 2
times the measured difference between FP8 and bfloat16. By emulation it is 1.04 times at most, as both sides share the
weights' rounding, and 2.4 times if padding counts in the loss."""
FORMAT_BOUNDS = (0.35, 0.7)
"""FP8 against bfloat16; log-probabilities over their standard deviation, as rounding grows with the logits. Gradients
of 4 layers are 0.26 to 0.28 off on an H200 (2026-11-29) and within 0.001 of that by emulation on a CPU, which puts
log-probabilities at 0.14 and both at 28 layers at 0.23 and 0.51. A lost or a doubled gradient is off by 1; an error in
one matrix hides in the rounding of all, so SCALE_BOUND judges each matrix."""
SCALE_BOUND = 0.3
"""FP8 against bfloat16: |log2| of the ratio of a gradient's norms, of the worst matrix; 0.3 is a ratio of 1.23.
Rounding turns gradients more than it stretches them. By emulation sound FP8 is at most 0.056 off at 4 to 28 layers,
0.068 at 94, and 0.15 with experts at 28. A weight scale twice too large in one product, or halved gradients of one
layer, give 0.57 to 2.3: the bound is half-way in log from 0.15 to 0.57. It does not catch delayed scaling without
warm-up (0.17), nor one expert of many. Projections onto bfloat16's gradients separate less: 0.46 for sound FP8 at 94
layers, 0.63 for a wrong scale."""
_Measured: TypeAlias = tuple[list[np.ndarray], dict[str, Tensor]] | None
"""Log-probabilities, and gradients by name, of the whole model. None on all ranks but the first: the host of eight
ranks has no room for eight copies."""


@dataclass(frozen=True, slots=True)
class GateResult:
    what: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        """Within its bound; a NaN is not."""
        return self.value <= self.bound


def run_gate(
    config: Config, layout: Layout, architecture: Architecture, get_weight: Callable[[str], Tensor]
) -> list[GateResult]:
    """All findings, the same on every rank. Collective; `layout` is the config's, built by the caller, since Megatron
    builds its groups once in a process."""
    samples, model = _samples(config, architecture), (layout, architecture, get_weight)
    fp8 = replace(config.actor, optimizer=replace(config.actor.optimizer, distributed=False))
    plain = replace(fp8, fp8="off", fp8_bf16_layers=0)
    name, dtype = config.model.dtype, getattr(torch, config.model.dtype)
    what = "packed against one by one"
    packed, alone = _measure_both(config, plain, Actor(plain, *model, dtype=dtype), samples)
    findings = _differences(f"{name}: {what}", packed, alone, PACKING_BOUNDS[name])
    del alone  # gradients of the whole model
    if config.actor.fp8 != "off":
        rounded, others = _measure_both(config, fp8, Actor(fp8, *model, dtype=dtype), samples)
        rounding = _differences(f"{config.actor.fp8} against bfloat16", rounded, packed, FORMAT_BOUNDS, spread=True)
        least = PACKING_BOUNDS[name]
        bounds = [max(bound, math.sqrt(2) * one.value) for bound, one in zip(least, rounding, strict=False)]
        findings += _differences(f"fp8: {what}", rounded, others, bounds, spread=True) + rounding
        findings += _worst_scale(f"{config.actor.fp8} against bfloat16", rounded, packed)
    return from_rank_zero(lambda: findings)


def _measure_both(
    config: Config, settings: ActorConfig, actor: Actor, samples: Sequence[TrainSample]
) -> list[_Measured]:
    """Packed, and one by one."""
    layout = packing_layout(settings, actor.layout.world_size)
    cap = config.packing.max_tokens_per_microbatch
    plans = [
        plan_microbatches(samples, layout=layout, max_tokens_per_microbatch=cap, mode=mode)
        for mode in (config.packing.mode, "none")
    ]
    warmups = WARMUPS.get(settings.fp8, 0)
    return [_measure(actor, samples, plan, config.rollout.sampling.temperature, warmups) for plan in plans]


def _measure(
    actor: Actor, samples: Sequence[TrainSample], plan: PackPlan, temperature: float, warmups: int
) -> _Measured:
    for _ in range(warmups):
        actor.accumulate(samples, plan, supervised(), temperature=temperature)
    logprobs = actor.logprobs(samples, plan, temperature=temperature)  # on rank 0
    actor.accumulate(samples, plan, supervised(), temperature=temperature)
    gradients = {name: gradient.cpu() for name, gradient in actor.gradients() if logprobs is not None}
    return None if logprobs is None else (logprobs, gradients)


def _differences(
    what: str, mine: _Measured, theirs: _Measured, bounds: Sequence[float], *, spread: bool = False
) -> list[GateResult]:
    """Empty on ranks without the measurements. `spread`: log-probabilities are divided by their standard deviation."""
    if mine is None or theirs is None:
        return []
    (my_logprobs, my_gradients), (logprobs, gradients) = mine, theirs
    off = sum(float((my_gradients[name].double() - g.double()).square().sum()) for name, g in gradients.items())
    gradient = math.sqrt(off / sum(float(g.double().square().sum()) for g in gradients.values()))
    values = np.concatenate(logprobs)
    logprob = float(np.abs(np.concatenate(my_logprobs) - values).mean() / (values.std() if spread else 1.0))
    return [
        GateResult(f"{what}: log-probs, mean |difference|{' / deviation' * spread}", logprob, bounds[0]),
        GateResult(f"{what}: gradients, relative difference", gradient, bounds[1]),
    ]


def _worst_scale(what: str, mine: _Measured, theirs: _Measured) -> list[GateResult]:
    """A layer's experts count as one matrix, and routers are left out: rounding sends tokens to other experts, which
    moved norms of single experts by a factor of 2.9 and of routers, which are no FP8 product, by 1.4."""
    if mine is None or theirs is None:
        return []
    squares: dict[str, tuple[float, float]] = {}
    for name, gradient in theirs[1].items():
        if gradient.dim() > 1 and not name.endswith("gate.weight"):
            my_gradient, matrix = mine[1][name], re.sub(r"\.experts\.\d+\.", ".experts.", name)
            a, b = squares.get(matrix, (0.0, 0.0))
            a, b = a + float(my_gradient.double().square().sum()), b + float(gradient.double().square().sum())
            squares[matrix] = a, b
    off = {
        name: abs(math.log2(a / b)) / 2 if a and b else math.inf  # / 2: these are squares of norms
        for name, (a, b) in squares.items()
        if a or b  # an adapter's A has no gradient at first, as B is 0
    }
    worst = max(off, key=lambda name: (math.isnan(off[name]), off[name]))
    return [GateResult(f"{what}: gradients, |log2| of a norm's factor, most in {worst}", off[worst], SCALE_BOUND)]


def _samples(config: Config, architecture: Architecture) -> list[TrainSample]:
    """Samples of unaligned lengths, at most a quarter of the cap, with the denominator of a token mean."""
    longest = max(min(config.packing.max_tokens_per_microbatch // 4, architecture.max_positions, 4096) - 9, 1)
    lengths = SampleLengths(_SAMPLES, max(longest / 4, 2), 0.9, longest, (8, 8))
    samples = random_samples(lengths, architecture.vocab_size, config.seed)
    tokens = sum(one.num_completion_tokens for one in samples)
    return [replace(one, denominator=float(tokens)) for one in samples]
