"""How a step used its devices, as `perf/*`: completion tokens per second and device, and peak memory."""

from __future__ import annotations

import torch

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.distributed import to_rank_zero, world_size
from dppo_megatron.observe.metrics import StepTiming
from dppo_megatron.types import StepCounts, mean_of_sums


def performance(
    counts: StepCounts | None, timing: StepTiming, rollout: RolloutConfig, device: torch.device
) -> dict[str, float]:
    """Metrics of a finished step. Only rank 0 has its `counts` and returns throughputs. The divisor is the trainer's
    ranks, also if servers on other GPUs generate. Memory is the maximum over ranks since the last call. Collective."""
    found: dict[str, float] = {}
    if counts is not None:
        # servers on GPUs of their own generate during the whole step; `generating_s` is then only the wait for the rest
        overlaps = rollout.async_steps > 0 and not rollout.servers.colocate
        generating = timing.step_s if overlaps else timing.generating_s
        for name, tokens, seconds in (
            ("generated", counts.tokens_generated, generating),
            ("trained", counts.tokens_trained, timing.update_s),
        ):
            found[f"perf/{name}_tokens_per_s_per_gpu"] = mean_of_sums(tokens, seconds * world_size())
    if device.type == "cuda":
        peaks = to_rank_zero((torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)))
        torch.cuda.reset_peak_memory_stats(device)
        for name, of_ranks in zip(("allocated", "reserved"), zip(*peaks, strict=True), strict=False):
            found[f"perf/max_memory_{name}_gib"] = max(of_ranks) / 2**30
    return found
