"""The gate before a packed or an FP8 job: does packing change the model, does FP8 change it by more than rounding?

Alignment padding is where FP8 training has gone wrong in the field: growing the last real sequence to the recipe's
multiple gave gradients 40 to 500 times too large (Transformer Engine issue 2892) while the loss looked fine. So the
gate first looks at the plan itself, then compares numbers: the same samples one by one and packed, and, with an FP8
recipe, FP8 beside bfloat16. It runs the user's own model at the user's own layout, and needs a few forward and
backward passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.layout import Layout
from dppo_megatron.algorithms.objectives import supervised
from dppo_megatron.config.schema import ActorConfig, Config
from dppo_megatron.distributed import from_rank_zero
from dppo_megatron.packing.alignment import PackingLayout, packing_layout
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.randomness import generator
from dppo_megatron.types import PackPlan, TrainSample
from dppo_megatron.weights.architecture import Architecture

_SAMPLES = 24
_DELAYED_WARMUPS = 2
"""Passes that only fill the `delayed` recipe's history of maxima. Its scales are 1 at first, and gradients of 1e-5 to
1e-4 lie at or below E5M2's smallest number, 1.5e-5: a first backward pass does not predict the second."""


@dataclass(frozen=True, slots=True)
class Tolerances:
    """How far two computations of the same thing may be apart in one number format."""

    logprob: float
    """Mean absolute difference of log-probabilities."""
    gradient: float
    """Norm of the difference of all gradients over the norm."""


PACKING_BOUNDS = {"float32": Tolerances(1e-4, 1e-4), "bfloat16": Tolerances(0.02, 0.05), "fp8": Tolerances(0.05, 0.25)}
"""Packed against one by one. float32: sums in another order. bfloat16 keeps 8 bits, so a logit of 16 moves by 0.06 and
averages out. FP8 scales are taken over other tensors when packed, on 3 or 2 bits of mantissa."""
FORMAT_BOUNDS = Tolerances(0.1, 0.5)
"""FP8 against bfloat16: rounding of a few per cent a layer. A broken recipe is off by more than the values' size."""


@dataclass(frozen=True, slots=True)
class GateResult:
    what: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        """Within its bound; a NaN is not."""
        return self.value <= self.bound


@dataclass(frozen=True, slots=True)
class _Measured:
    logprobs: list[np.ndarray] | None
    gradients: dict[str, Tensor]


def run_gate(
    config: Config, layout: Layout, architecture: Architecture, get_weight: Callable[[str], Tensor]
) -> list[GateResult]:
    """All findings, the same on every rank. Collective; `layout` is the config's, built by the caller, since Megatron
    builds its groups once in a process."""
    samples, model = _samples(config, architecture), (layout, architecture, get_weight)
    fp8 = replace(config.actor, optimizer=replace(config.actor.optimizer, distributed=False))
    plain = replace(fp8, fp8="off", fp8_bf16_layers=0)
    name, dtype = config.model.dtype, getattr(torch, config.model.dtype)
    findings, reference = _compare_packing(config, plain, Actor(plain, *model, dtype=dtype), samples, name)
    if config.actor.fp8 != "off":
        more, measured = _compare_packing(config, fp8, Actor(fp8, *model, dtype=dtype), samples, "fp8")
        findings += more + _differences(f"{config.actor.fp8} against bfloat16", measured, reference, FORMAT_BOUNDS)
    return from_rank_zero(lambda: findings)


def unsafe_patterns(plan: PackPlan, samples: Sequence[TrainSample], layout: PackingLayout) -> list[str]:
    """What in a plan is known to corrupt packed training; empty if nothing.

    A sample's slot may exceed its true length by its alignment only, a micro-batch's remainder is a segment of its
    own, and the token count on each rank is a multiple of the recipe's.
    """
    found = []
    for rank, microbatches in enumerate(plan.microbatches):
        for index, packed in enumerate(microbatches):
            where = f"rank {rank}, micro-batch {index}"
            for position, member in enumerate(packed.members):
                true = packed.cu_seqlens[position + 1] - packed.cu_seqlens[position]
                slot = packed.cu_seqlens_padded[position + 1] - packed.cu_seqlens_padded[position]
                if true != samples[member].num_tokens:
                    found.append(f"{where}: sample {samples[member].id} is described as {true} tokens long")
                if slot - true >= layout.sequence_multiple:
                    found.append(f"{where}: the slot of sample {samples[member].id} is grown by {slot - true} tokens")
            if packed.num_tokens % layout.microbatch_multiple:
                found.append(f"{where}: {packed.num_tokens} tokens are no multiple of {layout.microbatch_multiple}")
    return found


def _compare_packing(
    config: Config, settings: ActorConfig, actor: Actor, samples: Sequence[TrainSample], number_format: str
) -> tuple[list[GateResult], _Measured]:
    planner = packing_layout(settings, actor.layout.world_size)
    cap = config.packing.max_tokens_per_microbatch
    plans = [
        plan_microbatches(samples, layout=planner, max_tokens_per_microbatch=cap, mode=mode)
        for mode in (config.packing.mode, "none")
    ]
    unsafe = [line for plan in plans for line in unsafe_patterns(plan, samples, planner)]
    what = f"{number_format}: packed against one by one"
    findings = [GateResult("; ".join([f"{number_format}: unsafe patterns in the plan", *unsafe[:3]]), len(unsafe), 0)]
    if unsafe:
        return findings, _Measured(None, {})
    warmups = warmups_of(settings.fp8)
    packed, alone = (_measure(actor, samples, plan, config.rollout.sampling.temperature, warmups) for plan in plans)
    return findings + _differences(what, packed, alone, PACKING_BOUNDS[number_format]), packed


def warmups_of(recipe: str) -> int:
    """Forward and backward passes before the measured ones."""
    return _DELAYED_WARMUPS if recipe == "delayed" else 0


def _measure(
    actor: Actor, samples: Sequence[TrainSample], plan: PackPlan, temperature: float, warmups: int
) -> _Measured:
    for _ in range(warmups):
        actor.accumulate(samples, plan, supervised(), temperature=temperature)
    logprobs = actor.logprobs(samples, plan, temperature=temperature)
    actor.accumulate(samples, plan, supervised(), temperature=temperature)
    return _Measured(logprobs, {name: gradient.cpu() for name, gradient in actor.gradients()})


def _differences(what: str, mine: _Measured, theirs: _Measured, bounds: Tolerances) -> list[GateResult]:
    gradient = math.sqrt(
        sum(float((mine.gradients[name].double() - g.double()).square().sum()) for name, g in theirs.gradients.items())
        / sum(float(g.double().square().sum()) for g in theirs.gradients.values())
    )
    logprob = 0.0
    if mine.logprobs is not None and theirs.logprobs is not None:  # rank 0 holds them
        logprob = float(np.abs(np.concatenate(mine.logprobs) - np.concatenate(theirs.logprobs)).mean())
    return [
        GateResult(f"{what}: log-probs, mean |difference|", logprob, bounds.logprob),
        GateResult(f"{what}: gradients, relative difference", gradient, bounds.gradient),
    ]


def _samples(config: Config, architecture: Architecture) -> list[TrainSample]:
    """Random tokens of log-normal lengths up to a quarter of the cap: no length is aligned to anything."""
    rng = generator(config.seed, "fp8 gate")
    longest = min(config.packing.max_tokens_per_microbatch // 4, architecture.max_positions, 4096) - 9
    lengths = np.clip(rng.lognormal(math.log(max(longest / 4, 2)), 0.9, _SAMPLES), 1, max(longest, 1)).astype(int)
    return [
        TrainSample(
            id=f"{index}:0",
            token_ids=rng.integers(0, architecture.vocab_size, int(length) + 8),
            num_prompt_tokens=8,
            behaviour_logprobs=np.zeros(int(length), np.float32),
            advantage=1.0,
            weight=1.0,
            denominator=float(lengths.sum()),
        )
        for index, length in enumerate(lengths)
    ]
