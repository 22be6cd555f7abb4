"""What would make a job smaller, or faster: each setting that could, tried by planning again with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dppo_megatron.config.checks import check_values, check_world_size
from dppo_megatron.config.schema import Config
from dppo_megatron.config.sets import longest_sequence
from dppo_megatron.planning.lengths import Lengths
from dppo_megatron.planning.memory import plan_memory
from dppo_megatron.planning.site import GIB, Site
from dppo_megatron.planning.timing import Speeds, Timing, plan_timing
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture

_LEAST = 0.5 * GIB
_SHARE = "--gpu-memory-utilization"


_FASTER = 0.01
"""Of a step: less is not worth a change."""
_FEWEST_TOKENS = 4096
"""Micro-batches below this are not advised: products of fewer rows are slower, which the seconds here do not know."""


@dataclass(frozen=True, slots=True)
class Faster:
    """A change that fits and takes fewer seconds."""

    change: str
    """As it would be written on the command line."""
    step_s: float
    """Seconds of a step with it."""
    total: float
    """Bytes of the largest phase with it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One change."""

    change: str
    """As it would be written on the command line."""
    total: float
    """Bytes of the largest phase with it."""
    price: str


def advise(config: Config, architecture: Architecture, site: Site, mean_tokens: float) -> list[Advice]:
    """Changes that lower the largest phase by half a GiB or more, the best first."""
    now = plan_memory(config, architecture, site, mean_tokens).largest.total
    found = []
    for change, price, changed, there in _changes(config, site):
        try:
            check_values(changed, "plan")
            architecture.check_layout(changed.actor)
            check_world_size(changed, there.gpus)
            total = plan_memory(changed, architecture, there, mean_tokens).largest.total
        except UserError:  # it contradicts another setting, or there is no such layout of this model on these GPUs
            continue
        if now - total >= _LEAST:
            found.append(Advice(change, total, price))
    return sorted(found, key=lambda advice: advice.total)


def advise_speed(
    config: Config, architecture: Architecture, site: Site, lengths: Lengths, speeds: Speeds, now: Timing
) -> list[Faster]:
    """Changes with which the job fits and a step is a hundredth shorter or more, the best first."""
    found: dict[str, Faster] = {}
    for kind, change, changed in _faster(config):
        if kind in found:  # the first of a kind that fits does least to the rest
            continue
        try:
            check_values(changed, "plan")
            architecture.check_layout(changed.actor)
            check_world_size(changed, site.gpus)
            memory = plan_memory(changed, architecture, site, lengths.sequence)
        except UserError:
            continue
        cost = None if kind.startswith("engine") else now.rollout
        timing = plan_timing(changed, architecture, site, memory.engine, lengths, speeds, cost)
        fits = memory.largest.total <= site.gpu_memory
        if timing and fits and timing.step_s <= now.step_s * (1 - _FASTER):
            found[kind] = Faster(change, timing.step_s, memory.largest.total)
    return sorted(found.values(), key=lambda one: one.step_s)


def _faster(config: Config) -> Iterator[tuple[str, str, Config]]:
    """(kind of change, setting, the config with it), of a kind the fastest first."""
    longest, cap = longest_sequence(config)[0], config.packing.max_tokens_per_microbatch
    modes: tuple[Literal["none", "selective"], ...] = ("none", "selective")
    for mode in modes[: {"none": 0, "selective": 1, "full": 2}[config.actor.recompute]]:
        for tokens in (cap, cap // 2, cap // 4):
            if tokens == cap or tokens >= max(longest, _FEWEST_TOKENS):
                one = copy.deepcopy(config)
                one.actor.recompute, one.packing.max_tokens_per_microbatch = mode, tokens
                smaller = "" if tokens == cap else f" packing.max_tokens_per_microbatch={tokens}"
                yield "recompute", f"actor.recompute={mode}{smaller}", one
    one = copy.deepcopy(config)
    one.packing.max_tokens_per_microbatch = cap // 2
    if cap // 2 >= max(longest, _FEWEST_TOKENS):
        yield "cap", f"packing.max_tokens_per_microbatch={cap // 2}", one
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        one = copy.deepcopy(config)
        size = getattr(one.actor.layout, name) // 2
        if size:
            setattr(one.actor.layout, name, size)
            yield name, f"actor.layout.{name}={size}", one
    args = config.rollout.servers.args
    if _SHARE in args:
        place = args.index(_SHARE) + 1
        for more in (0.2, 0.1):
            one, share = copy.deepcopy(config), round(float(args[place]) + more, 2)
            if share < 0.95:
                one.rollout.servers.args[place] = str(share)
                yield "engine share", f"{_SHARE} {share:g} in rollout.servers.args", one
    tensor, data = "--tensor-parallel-size", "--data-parallel-size"
    if tensor in args and data in args and int(args[args.index(tensor) + 1]) > 1:
        one = copy.deepcopy(config)
        wider, narrower = int(args[args.index(data) + 1]) * 2, int(args[args.index(tensor) + 1]) // 2
        one.rollout.servers.args[args.index(tensor) + 1] = str(narrower)
        one.rollout.servers.args[args.index(data) + 1] = str(wider)
        yield "engine layout", f"{tensor} {narrower} {data} {wider} in rollout.servers.args", one


def _changes(config: Config, site: Site) -> Iterator[tuple[str, str, Config, Site]]:
    """(setting, what it costs, the config with it, the site with it)."""

    def changed() -> Config:
        """A copy to change."""
        return copy.deepcopy(config)

    if config.actor.recompute != "full":
        one = changed()
        one.actor.recompute = "full"
        yield "actor.recompute=full", "a third more FLOPs", one, site
    longest, cap = longest_sequence(config)[0], config.packing.max_tokens_per_microbatch
    if (smaller := max(longest, cap // 2)) < cap:
        one = changed()
        one.packing.max_tokens_per_microbatch = smaller
        yield f"packing.max_tokens_per_microbatch={smaller}", "more, smaller micro-batches", one, site
    if (chunk := config.actor.logprob_chunk_tokens // 2) >= 256:
        one = changed()
        one.actor.logprob_chunk_tokens = chunk
        yield f"actor.logprob_chunk_tokens={chunk}", "smaller products in the output layer", one, site
    if not config.actor.optimizer.distributed:
        one = changed()
        one.actor.optimizer.distributed = True
        yield "actor.optimizer.distributed=true", "nothing", one, site
    if config.actor.optimizer.distributed and config.actor.optimizer.cpu_offload < 1:
        one = changed()
        one.actor.optimizer.cpu_offload = 1.0
        yield "actor.optimizer.cpu_offload=1", "an optimizer step on the host", one, site
    for name, price in (
        ("tensor_parallel", "communication in every layer"),
        ("pipeline_parallel", "idle stages at both ends of a step"),
        ("context_parallel", "keys and values exchanged in every layer"),
        ("expert_parallel", "tokens exchanged between more ranks"),
    ):
        one = changed()
        size = 2 * getattr(config.actor.layout, name)
        setattr(one.actor.layout, name, size)
        yield f"actor.layout.{name}={size}", price, one, site
    if config.rollout.servers.colocate and _SHARE in config.rollout.servers.args:
        one = changed()
        place = one.rollout.servers.args.index(_SHARE) + 1
        lower = max(0.1, round(float(one.rollout.servers.args[place]) - 0.1, 2))
        one.rollout.servers.args[place] = str(lower)
        yield f"{_SHARE} {lower:g} in rollout.servers.args", "fewer sequences at a time", one, site
    yield f"--gpus {2 * site.gpus}", "twice the GPUs", changed(), replace(site, gpus=2 * site.gpus)
