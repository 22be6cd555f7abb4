"""Settings that would make a job smaller, or faster: each is tried by planning again with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeAlias

from dppo_megatron.config.checks import check_values
from dppo_megatron.config.resolved_sets import longest_sequence
from dppo_megatron.config.schema import Config
from dppo_megatron.job import check_actor
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.platform.capabilities import Machine
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.workbench.planning.generation import Lengths
from dppo_megatron.workbench.planning.memory import plan_memory
from dppo_megatron.workbench.planning.site import GIB, Site
from dppo_megatron.workbench.planning.timing import Speeds, Timing, plan_timing

_MIN_BYTES, _MIN_SHARE = 0.5 * GIB, 0.01
"""Bytes of the largest phase, and share of a step: a change that saves less is not worth it."""
_GPUS = "--gpus"
_SHARE, _TENSOR, _DATA = "--gpu-memory-utilization", "--tensor-parallel-size", "--data-parallel-size"
_CAP, _RECOMPUTE = "packing.max_tokens_per_microbatch", "actor.recompute"
_FP8 = "rollout.quantization"
_FEWEST_TOKENS = 4096
"""Smaller micro-batches are never advised as faster: products of fewer rows are slower, which the predicted seconds
leave out."""
_Settings: TypeAlias = dict[str, Any]
"""Values by key; `--gpus`, and options that are in rollout.servers.args, begin with `--`."""
_DEGREES = {
    "tensor": "communication in every layer",
    "pipeline": "idle stages at both ends of a step",
    "context": "keys and values exchanged in every layer",
    "expert": "tokens exchanged between more ranks",
}
"""Kinds of parallelism, and what more of one costs."""


@dataclass(frozen=True, slots=True)
class SettingAdvice:
    change: str
    """As it would be written on the command line."""
    total: float
    """Bytes of the largest phase with it."""
    price: str = ""
    """What it costs, if it makes the job smaller."""
    step_s: float = 0.0
    """Seconds of a step with it, if it makes the job faster."""


def advise(
    config: Config,
    architecture: Architecture,
    site: Site,
    machine: Machine,
    lengths: Lengths,
    speeds: Speeds,
    now: Timing | None,
) -> tuple[list[SettingAdvice], list[SettingAdvice], list[SettingAdvice]]:
    """Three lists, the best change first: those that lower the largest phase by at least half a GiB; those with which
    the job fits and a step is at least 1 % shorter; those that help a job that does not fit. `now`: the timing of the
    job as it is, None if unknown."""
    as_is = plan_memory(config, architecture, site, lengths.sequence)
    total, problems = as_is.largest.total, len(as_is.problems(site))
    smaller: list[SettingAdvice] = []
    helps: list[SettingAdvice] = []
    faster: dict[str, SettingAdvice] = {}
    for settings, price in _changes(config, site):
        kind, change = next(iter(settings)), _command_line(settings)
        changed, changed_site = _changed(config, settings), replace(site, gpus=settings.get(_GPUS, site.gpus))
        try:
            check_values(changed, "plan")
            check_actor(changed, architecture, changed_site.gpus, machine)
            memory = plan_memory(changed, architecture, changed_site, lengths.sequence)
        except UserError:  # it contradicts another setting, or is impossible with these GPUs and this model
            continue
        if price and total - memory.largest.total >= _MIN_BYTES:
            smaller.append(SettingAdvice(change, memory.largest.total, price))
        remaining = len(memory.problems(changed_site))
        if remaining < problems:
            helps.append(SettingAdvice(change, memory.largest.total))
        fits = not problems and not remaining
        # of a kind, the first that fits: it changes the other settings least
        if now and fits and kind not in (*faster, _GPUS) and settings.get(_CAP, _FEWEST_TOKENS) >= _FEWEST_TOKENS:
            cost = None if kind.startswith("--") or kind == _FP8 else now.rollout
            timing = plan_timing(changed, architecture, site, memory.engine, lengths, speeds, cost)
            if timing and timing.step_s <= now.step_s * (1 - _MIN_SHARE):
                faster[kind] = SettingAdvice(change, memory.largest.total, step_s=timing.step_s)
    smaller.sort(key=lambda one: one.total)
    # on a GPU that is too small, any saving helps; a node's memory and a server's cache are not among the phases
    helps = smaller if total > site.gpu_memory else helps
    return smaller, sorted(faster.values(), key=lambda one: one.step_s), helps


def _changed(config: Config, settings: _Settings) -> Config:
    one = copy.deepcopy(config)
    arguments = one.rollout.servers.args
    for key, value in settings.items():
        if key in arguments:
            arguments[arguments.index(key) + 1] = str(value)
        elif key != _GPUS:
            *sections, name = key.split(".")
            setattr(reduce(getattr, sections, one), name, value)
    return one


def _command_line(settings: _Settings) -> str:
    key = next(iter(settings))
    if key.startswith("--"):
        flags = " ".join(f"{flag} {value}" for flag, value in settings.items())
        return flags if key == _GPUS else f"{flags} in rollout.servers.args"
    return " ".join(f"{key}={'true' if value is True else value}" for key, value in settings.items())


def _changes(config: Config, site: Site) -> Iterator[tuple[_Settings, str]]:
    """(settings, what they cost); of those with the same first key, the fastest first. Those without a price are tried
    only for speed."""
    actor, cap, args = config.actor, config.packing.max_tokens_per_microbatch, config.rollout.servers.args
    given = {flag: float(args[args.index(flag) + 1]) for flag in (_SHARE, _TENSOR, _DATA) if flag in args}
    multiple = packing_layout(actor, site.gpus).microbatch_multiple
    longest = -(-longest_sequence(config)[0] // multiple) * multiple
    caps = [tokens for tokens in (cap // 2, cap // 4) if tokens >= longest]
    for mode in ("none", "selective")[: {"none": 0, "selective": 1, "full": 2}[actor.recompute]]:
        yield {_RECOMPUTE: mode}, ""
        yield from (({_RECOMPUTE: mode, _CAP: tokens}, "") for tokens in caps)
    if actor.recompute != "full":
        yield {_RECOMPUTE: "full"}, "a third more FLOPs"
    if longest < cap:
        yield {_CAP: max(longest, cap // 2)}, "more, smaller micro-batches"
    if (chunk := actor.logprob_chunk_tokens // 2) >= 256:
        yield {"actor.logprob_chunk_tokens": chunk}, "smaller products in the output layer"
    if not actor.optimizer.distributed:
        yield {"actor.optimizer.distributed": True}, "nothing"
    elif not actor.optimizer.cpu_offload:
        yield {"actor.optimizer.cpu_offload": 1}, "an optimizer step on the host"
    for name, price in _DEGREES.items():
        key, size = f"actor.layout.{name}_parallel", getattr(actor.layout, f"{name}_parallel")
        if name != "tensor" or 2 * size <= site.ranks_per_node:  # across nodes it is never faster
            yield {key: 2 * size}, price
        if size > 1:
            yield {key: size // 2}, ""
    if share := given.get(_SHARE):
        yield from (({_SHARE: f"{share + more:.2g}"}, "") for more in (0.2, 0.1) if share + more < 0.95)
        if config.rollout.servers.colocate:
            yield {_SHARE: f"{max(0.1, share - 0.1):.2g}"}, "fewer sequences at a time"
    if config.rollout.quantization == "off" and config.rollout.engine != "hf" and config.model.dtype == "bfloat16":
        corrects = config.objective.correction.level != "none" or config.objective.loss == "divergence_tv"
        yield {_FP8: "fp8"} | ({} if corrects else {"objective.correction.level": "token"}), ""
    if _DATA in given and given.get(_TENSOR, 1) > 1:
        yield {_TENSOR: int(given[_TENSOR]) // 2, _DATA: 2 * int(given[_DATA])}, ""
    yield {_GPUS: 2 * site.gpus}, "twice the GPUs"
