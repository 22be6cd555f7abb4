"""What a step made of its devices, as `perf/*`: completion tokens a second of each, and how full their memory was.

No share of the peak FLOPs: what a model's tokens take and a chip can do is known to `dppo-megatron plan`, not to a run.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.distributed import to_rank_zero, world_size
from dppo_megatron.types import StepCounts, mean_of_sums


def performance(
    counts: StepCounts | None, metrics: Mapping[str, float], rollout: RolloutConfig, device: torch.device
) -> dict[str, float]:
    """Of a finished step, on rank 0, which has its `counts`; a GPU is a rank of the trainer, whoever generates.
    Memory is the most that one rank has had since the last call. Collective."""
    found: dict[str, float] = {}
    if counts is not None:
        beside = rollout.async_steps > 0 and not rollout.servers.colocate  # its seconds are the wait for what is left
        generating = metrics["time/step_s"] if beside else metrics.get("time/rollout_s", 0.0)
        for name, tokens, seconds in (
            ("generated", counts.tokens_generated, generating),
            ("trained", counts.tokens_trained, metrics.get("time/update_s", 0.0)),
        ):
            found[f"perf/{name}_tokens_per_s_per_gpu"] = mean_of_sums(tokens, seconds * world_size())
    if device.type == "cuda":
        peaks = to_rank_zero((torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)))
        torch.cuda.reset_peak_memory_stats(device)
        for name, of_ranks in zip(("allocated", "reserved"), zip(*peaks, strict=True), strict=False):
            found[f"perf/max_memory_{name}_gib"] = max(of_ranks) / 2**30
    return found
