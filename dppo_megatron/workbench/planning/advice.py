"""What would make a job smaller, or faster: each setting that could, tried by planning again with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeAlias

from dppo_megatron.config.checks import check_values, check_world_size
from dppo_megatron.config.resolved_sets import longest_sequence
from dppo_megatron.config.schema import Config
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.workbench.planning.generation import Lengths
from dppo_megatron.workbench.planning.memory import MemoryPlan, plan_memory
from dppo_megatron.workbench.planning.site import GIB, Site
from dppo_megatron.workbench.planning.timing import Speeds, Timing, plan_timing

_LEAST = 0.5 * GIB
_SHARE, _TENSOR, _DATA = "--gpu-memory-utilization", "--tensor-parallel-size", "--data-parallel-size"
_CAP, _ARGS = "packing.max_tokens_per_microbatch", "rollout.servers.args"
_FASTER = 0.01
"""Of a step: less is not worth a change."""
_FEWEST_TOKENS = 4096
"""Micro-batches below this are not advised: products of fewer rows are slower, which the seconds here do not know."""
_Settings: TypeAlias = dict[str, Any]
"""Values by key, such as `actor.recompute`."""


@dataclass(frozen=True, slots=True)
class SettingAdvice:
    change: str
    """As it would be written on the command line."""
    total: float
    """Bytes of the largest phase with it."""
    price: str = ""
    """What it costs, of one that makes the job smaller."""
    step_s: float = 0.0
    """Seconds of a step with it, of one that makes the job faster."""


def advise(config: Config, architecture: Architecture, site: Site, mean_tokens: float) -> list[SettingAdvice]:
    """Changes that lower the largest phase by half a GiB or more, the best first."""
    now = plan_memory(config, architecture, site, mean_tokens).largest.total
    tried = [(_written(settings), price, _changed(config, settings), site) for settings, price in _smaller(config)]
    tried.append((f"--gpus {2 * site.gpus}", "twice the GPUs", config, replace(site, gpus=2 * site.gpus)))
    found = []
    for change, price, changed, there in tried:
        memory = _planned(changed, architecture, there, mean_tokens)
        if memory and now - memory.largest.total >= _LEAST:
            found.append(SettingAdvice(change, memory.largest.total, price))
    return sorted(found, key=lambda advice: advice.total)


def advise_speed(
    config: Config, architecture: Architecture, site: Site, lengths: Lengths, speeds: Speeds, now: Timing
) -> list[SettingAdvice]:
    """Changes with which the job fits and a step is a hundredth shorter or more, the best first."""
    found: dict[str, SettingAdvice] = {}
    for kind, settings in _faster(config):
        if kind in found:  # the first of a kind that fits does least to the rest
            continue
        changed = _changed(config, settings)
        memory = _planned(changed, architecture, site, lengths.sequence)
        if memory is None or memory.largest.total > site.gpu_memory:
            continue
        cost = None if _ARGS in settings else now.rollout
        timing = plan_timing(changed, architecture, site, memory.engine, lengths, speeds, cost)
        if timing and timing.step_s <= now.step_s * (1 - _FASTER):
            found[kind] = SettingAdvice(_written(settings), memory.largest.total, step_s=timing.step_s)
    return sorted(found.values(), key=lambda one: one.step_s)


def _planned(config: Config, architecture: Architecture, site: Site, mean_tokens: float) -> MemoryPlan | None:
    """None if it contradicts another setting, or there is no such layout of this model on these GPUs."""
    try:
        check_values(config, "plan")
        architecture.check_layout(config.actor)
        check_world_size(config, site.gpus)
        return plan_memory(config, architecture, site, mean_tokens)
    except UserError:
        return None


def _changed(config: Config, settings: _Settings) -> Config:
    one = copy.deepcopy(config)
    for key, value in settings.items():
        *sections, name = key.split(".")
        if key == _ARGS:
            value = list(one.rollout.servers.args)
            for flag, number in settings[key].items():
                value[value.index(flag) + 1] = number
        setattr(reduce(getattr, sections, one), name, value)
    return one


def _written(settings: _Settings) -> str:
    if _ARGS in settings:
        return " ".join(f"{flag} {number}" for flag, number in settings[_ARGS].items()) + f" in {_ARGS}"
    return " ".join(f"{key}={'true' if value is True else value}" for key, value in settings.items())


def _faster(config: Config) -> Iterator[tuple[str, _Settings]]:
    """(kind of change, settings), of a kind the fastest first."""
    cap, args = config.packing.max_tokens_per_microbatch, config.rollout.servers.args
    fewest = max(longest_sequence(config)[0], _FEWEST_TOKENS)
    for mode in ("none", "selective")[: {"none": 0, "selective": 1, "full": 2}[config.actor.recompute]]:
        yield "recompute", {"actor.recompute": mode}
        for tokens in (cap // 2, cap // 4):
            if tokens >= fewest:
                yield "recompute", {"actor.recompute": mode, _CAP: tokens}
    if cap // 2 >= fewest:
        yield "cap", {_CAP: cap // 2}
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        if size := getattr(config.actor.layout, name) // 2:
            yield name, {f"actor.layout.{name}": size}
    if _SHARE in args:
        for more in (0.2, 0.1):
            if (share := round(float(args[args.index(_SHARE) + 1]) + more, 2)) < 0.95:
                yield "engine share", {_ARGS: {_SHARE: f"{share:g}"}}
    if _TENSOR in args and _DATA in args and (tensor := int(args[args.index(_TENSOR) + 1])) > 1:
        replicas = int(args[args.index(_DATA) + 1])
        yield "engine layout", {_ARGS: {_TENSOR: str(tensor // 2), _DATA: str(2 * replicas)}}


def _smaller(config: Config) -> Iterator[tuple[_Settings, str]]:
    """(settings, what they cost)."""
    actor, cap, args = config.actor, config.packing.max_tokens_per_microbatch, config.rollout.servers.args
    if actor.recompute != "full":
        yield {"actor.recompute": "full"}, "a third more FLOPs"
    if (smaller := max(longest_sequence(config)[0], cap // 2)) < cap:
        yield {_CAP: smaller}, "more, smaller micro-batches"
    if (chunk := actor.logprob_chunk_tokens // 2) >= 256:
        yield {"actor.logprob_chunk_tokens": chunk}, "smaller products in the output layer"
    if not actor.optimizer.distributed:
        yield {"actor.optimizer.distributed": True}, "nothing"
    elif actor.optimizer.cpu_offload < 1:
        yield {"actor.optimizer.cpu_offload": 1}, "an optimizer step on the host"
    for name, price in (
        ("tensor_parallel", "communication in every layer"),
        ("pipeline_parallel", "idle stages at both ends of a step"),
        ("context_parallel", "keys and values exchanged in every layer"),
        ("expert_parallel", "tokens exchanged between more ranks"),
    ):
        yield {f"actor.layout.{name}": 2 * getattr(actor.layout, name)}, price
    if config.rollout.servers.colocate and _SHARE in args:
        lower = max(0.1, round(float(args[args.index(_SHARE) + 1]) - 0.1, 2))
        yield {_ARGS: {_SHARE: f"{lower:g}"}}, "fewer sequences at a time"
