"""What would make a job smaller: each setting that could, tried by planning again with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dppo_megatron.config.checks import check_values, check_world_size
from dppo_megatron.config.evaluation import longest_sequence
from dppo_megatron.config.schema import Config
from dppo_megatron.planning.memory import plan_memory
from dppo_megatron.planning.site import GIB, Site
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture

_LEAST = 0.5 * GIB


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
    share = "--gpu-memory-utilization"
    if config.rollout.servers.colocate and share in config.rollout.servers.args:
        one = changed()
        place = one.rollout.servers.args.index(share) + 1
        lower = max(0.1, round(float(one.rollout.servers.args[place]) - 0.1, 2))
        one.rollout.servers.args[place] = str(lower)
        yield f"{share} {lower:g} in rollout.servers.args", "fewer sequences at a time", one, site
    yield f"--gpus {2 * site.gpus}", "twice the GPUs", changed(), replace(site, gpus=2 * site.gpus)
