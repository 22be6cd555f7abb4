"""Seconds of a step from speeds that were measured, published or assumed.

generate     tokens to generate / (decode speed x GPUs that generate)
log-probs    a third of an update's FLOPs for each pass
update       useful FLOPs / (peak x MFU x GPUs), x 4/3 under full recomputation, x the pipeline's bubble
sync         bytes of the model / sync speed
checkpoint   bytes of the model and its optimizer / write speed, spread over the steps between two
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dppo_megatron.config.objective import needs_old_logprobs
from dppo_megatron.config.schema import Config
from dppo_megatron.cost import cost_model
from dppo_megatron.planning.engine import EnginePlan
from dppo_megatron.planning.memory import microbatches
from dppo_megatron.planning.shares import Degrees, whole_model
from dppo_megatron.planning.site import Site
from dppo_megatron.weights.architecture import Architecture

_NEMO = "derived from NeMo RL 0.4's published step times at our MFU"


@dataclass(frozen=True, slots=True)
class Speed:
    """A number that time estimates rest on."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Speeds:
    """All of them."""

    decode: Speed
    """Tokens per second that one GPU generates, over a whole rollout, its slow end included."""
    mfu: Speed
    """Useful FLOPs of an update over the chip's peak, without recomputation."""
    sync_gb_per_s: Speed
    save_gb_per_s: Speed
    other_s: Speed
    """A step's grading, selection and packing."""


@dataclass(frozen=True, slots=True)
class _Row:
    parameters: float
    is_mixture: bool
    decode: float
    what: str


_DECODE = (
    _Row(8.0e9, False, 1800.0, "Llama-3.1-8B on 16 H100, 97.7 s"),
    _Row(32.8e9, False, 950.0, "Qwen3-32B on 32 H100, 393 s"),
    _Row(30.5e9, True, 1050.0, "Qwen3-30B-A3B on 32 H100, 225 s"),
)
"""docs/plan.md has the arithmetic. A model takes the row whose size is nearest; a smaller one is faster than that."""


def speeds_for(architecture: Architecture, site: Site, **given: float | None) -> Speeds:
    """The table's speeds, and those of `given` in their place (None: the table's)."""
    mixture = architecture.experts is not None
    rows = [row for row in _DECODE if row.is_mixture == mixture]
    size = whole_model(architecture)
    row = min(rows, key=lambda row: abs(math.log(row.parameters / size)))
    found = {
        "decode": Speed(row.decode, f"{_NEMO}: {row.what}"),
        "mfu": Speed(0.25 if mixture else 0.40, "assumed; `benchmarks/gpu/train_step.py mfu` measures yours"),
        "sync_gb_per_s": Speed(8.0, "published for verl with NCCL, 30B to 30 receivers (8.25 GB/s)"),
        "save_gb_per_s": Speed(2.0, "assumed, for all ranks together"),
        "other_s": Speed(5.0, "assumed"),
    }
    return Speeds(**found | {name: Speed(value, "given") for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of a prompt and of a completion."""

    prompt: float
    completion: float

    @property
    def sequence(self) -> float:
        """Both."""
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one step in which nothing is pruned."""

    seconds: dict[str, float]
    """By phase; those of `checkpoint` are its share of a step."""
    tokens_generated: float
    tokens_trained: float
    overlaps: bool
    """Generation runs during the update (async_steps=1)."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        rest = sum(self.seconds.values()) - self.seconds["generate"]
        if self.overlaps:
            return max(self.seconds["generate"], rest)
        return self.seconds["generate"] + rest


def plan_timing(
    config: Config, architecture: Architecture, site: Site, engine: EnginePlan, lengths: Lengths, speeds: Speeds
) -> Timing | None:
    """Seconds of every phase; None where the number of generating GPUs is not known."""
    if not engine.gpus:
        return None
    rollout, degrees = config.rollout, Degrees.of(config.actor.layout, site.gpus)
    sequences = rollout.prompts_per_step * rollout.completions_per_prompt
    flops = float(cost_model(architecture).of(np.array([lengths.sequence]))[0]) * sequences
    pace = site.peak_flops * speeds.mfu.value * site.gpus
    count = microbatches(config, degrees, lengths.sequence)
    bubble = 1 + (degrees.pipeline - 1) / (count * degrees.virtual)
    again = 4 / 3 if config.actor.recompute == "full" else 1.0
    passes = int(needs_old_logprobs(config.objective)) + int(config.objective.kl.coef > 0)
    parameters = whole_model(architecture)
    each = 2 if config.model.dtype == "bfloat16" else 4
    every = config.checkpoint.every_steps
    seconds = {
        "generate": sequences * lengths.completion / (speeds.decode.value * engine.gpus),
        "log-probs": passes * flops / 3 / pace * bubble,
        "update": flops * again / pace * bubble,
        "sync": parameters * each / (speeds.sync_gb_per_s.value * 1e9),
        "checkpoint": parameters * 14 / (speeds.save_gb_per_s.value * 1e9) / every if every else 0.0,
        "other": speeds.other_s.value,
    }
    overlaps = config.rollout.async_steps > 0
    return Timing(seconds, sequences * lengths.completion, sequences * lengths.completion, overlaps)
