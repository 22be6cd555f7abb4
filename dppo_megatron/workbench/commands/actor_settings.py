"""Checks `actor.megatron` and `actor.ddp` against the installed Megatron, before servers are started or ranks meet.

It imports Megatron, which takes seconds, so only a job that sets one of them waits for it.
"""

from __future__ import annotations

from dppo_megatron.config.checks import check_world_size
from dppo_megatron.config.schema import Config
from dppo_megatron.platform.capabilities import Machine
from dppo_megatron.types import Watch


def check_actor_settings(
    config: Config, world_size: int, watch: Watch, machine: Machine, *, runs_here: bool, writes: bool
) -> list[str]:
    """Check the fields that are given; returns a line that names those which are not tried, if there are any.

    Args:
        machine: what the job will run on; `runs_here` if it is this one, where Megatron's own checks count too.
        writes: whether Megatron's rewritten code may be kept on disk, for a faster start of the next process.

    Raises:
        UserError: a field that the installed Megatron does not have, or that is not the user's to set.
    """
    actor = config.actor
    if not (actor.megatron or actor.ddp):
        return []
    with watch("loading Megatron", 0, ""):
        import torch

        from dppo_megatron import platform

        platform.prepare(keep=writes)
        from dppo_megatron.actor.model import check_settings
        from dppo_megatron.weights.architecture import read_architecture
    architecture = read_architecture(config.model.hf_path, ignored=config.model.ignore_config_keys)
    check_world_size(config, world_size)
    architecture.check_layout(actor)
    spec, _ = machine.choose_layer_spec(actor.layer_spec, actor.fp8)
    dtype = getattr(torch, config.model.dtype)
    return check_settings(actor, architecture, dtype, world_size, spec, runs_here=runs_here)
