"""Micro-batches for a whole step, for few and for many data-parallel ranks."""

from __future__ import annotations

import time

import numpy as np

from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.packing.planner import CostModel, SampleSize, plan_microbatches
from plane.common import Bar

CAP = 16384
COST = CostModel(linear=2.413e10, quadratic=8.847e05)
"""Qwen3-4B."""


def lengths_of(count: int, longest: int, seed: int = 0) -> np.ndarray:
    """Completion lengths like those of reasoning: log-normal, mean about 0.45 of the limit, 8 % truncated at it."""
    drawn = np.random.default_rng(seed).lognormal(np.log(0.38 * longest), 0.7, count)
    return np.clip(drawn, 16, longest).astype(np.int64)


def run(smoke: bool) -> list[Bar]:
    """16,384 completions of up to 8k tokens."""
    count = 1024 if smoke else 16384
    samples = [SampleSize(f"{i // 16}:{i % 16}", int(n) + 200) for i, n in enumerate(lengths_of(count, 8192))]
    bars = []
    for ranks in (8, 64) if smoke else (8, 64, 256, 1024):
        started = time.process_time()
        layout = PackingLayout(data_parallel=ranks)
        plan = plan_microbatches(samples, layout=layout, max_tokens_per_microbatch=CAP, cost=COST)
        seconds = time.process_time() - started
        bars.append(Bar("plan", f"{count} x 8k, DP {ranks}", seconds, 0.5, "CPU s", is_time=True))
        bars.append(Bar("plan", f"{count} x 8k, DP {ranks}: slowest / mean", plan.metrics["imbalance"], 1.25))
    return bars
