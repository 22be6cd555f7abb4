"""From sequence lengths to packed micro-batches.

Invariants, asserted by the tests:
  - every sample is in exactly one micro-batch;
  - no micro-batch holds more than `max_tokens_per_microbatch` tokens; a longer sample is an error that names it;
  - every data-parallel rank has the same number of micro-batches (some may be empty: the schedule is collective);
  - the plan depends on the set of (length, id) pairs, not on the order they come in.

First-fit decreasing finds the fewest micro-batches, then samples are dealt again to exactly that number, longest
first to the lightest that has room: first-fit alone leaves the last one nearly empty, and a pipeline or
data-parallel step is as slow as its largest part.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.types import PackPlan, TrainSample, UserError


def plan_microbatches(
    samples: Sequence[TrainSample], *, layout: PackingLayout, max_tokens_per_microbatch: int, mode: str = "balanced"
) -> PackPlan:
    """Assign every sample to a micro-batch of a data-parallel rank.

    Args:
        mode: `none` puts every sample into a micro-batch of its own.

    Raises:
        UserError: a sample is longer than the cap.
    """
    lengths = [sample.num_tokens for sample in samples]
    data_parallel = layout.data_parallel
    for sample, length in zip(samples, lengths, strict=True):
        if length > max_tokens_per_microbatch:
            raise UserError(
                f"sample {sample.id} has {length} tokens, more than packing.max_tokens_per_microbatch ="
                f" {max_tokens_per_microbatch}"
            )
    order = sorted(range(len(samples)), key=lambda i: (-lengths[i], samples[i].id))
    if mode != "none":
        fewest = len(_first_fit(order, lengths, max_tokens_per_microbatch))
        count = max(1, -(-fewest // data_parallel)) * data_parallel
        bins = _level(order, lengths, count, max_tokens_per_microbatch)
    else:
        bins = [[i] for i in order]
    ranks = _deal(bins, lengths, data_parallel)
    microbatches = tuple(tuple(layout.place(members, lengths) for members in rank) for rank in ranks)
    plan = PackPlan(microbatches, max_tokens_per_microbatch, sum(lengths), {})
    plan.metrics.update(fill=plan.fill, microbatches=float(plan.num_microbatches))
    return plan


def _first_fit(order: Sequence[int], lengths: Sequence[int], cap: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        target = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if target is None:
            bins.append([])
            room.append(cap)
            target = len(bins) - 1
        bins[target].append(i)
        room[target] -= lengths[i]
    return bins


def _level(order: Sequence[int], lengths: Sequence[int], count: int, cap: int) -> list[list[int]]:
    """Longest first into the lightest of `count` bins; falls back to first-fit where that would not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, b) for b in range(count)]
    for i in order:
        load, lightest = heapq.heappop(loads)
        if load + lengths[i] > cap:
            fitted = _first_fit(order, lengths, cap)
            return fitted + [[] for _ in range(count - len(fitted))]
        bins[lightest].append(i)
        heapq.heappush(loads, (load + lengths[i], lightest))
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], data_parallel: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Heaviest bin first to the rank with the fewest tokens among those with the fewest bins."""
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(data_parallel)]
    tokens = [0] * data_parallel
    per_rank = max(1, -(-len(bins) // data_parallel))
    for members in sorted(bins, key=lambda b: -sum(lengths[i] for i in b)):
        rank = min((r for r in range(data_parallel) if len(ranks[r]) < per_rank), key=lambda r: tokens[r])
        ranks[rank].append(tuple(members))
        tokens[rank] += sum(lengths[i] for i in members)
    for rank_bins in ranks:
        rank_bins.extend(() for _ in range(per_rank - len(rank_bins)))
    return tuple(tuple(rank_bins) for rank_bins in ranks)
