"""Plans packed micro-batches for every data-parallel rank from sequence lengths. docs/packing.md has what always holds.

Objective: first the fewest micro-batches, then the shortest time of the slowest rank by the cost model. Costs are
levelled over the smallest possible number of micro-batches, which also keeps the largest one small: a pipeline waits
for it. Then samples are exchanged between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np

from dppo_megatron.config.schema import PackingConfig
from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.packing.bins import Bins, best_fit, deal, exchange, first_fit, level, split_to, window_greedy
from dppo_megatron.types import FloatArray, IntArray, PackedMicrobatch, PackPlan, TrainSample, UserError

_GREEDY_SHARES = (1.0, 0.5)
"""Shares of the samples to level by cost before best fit places the rest, tried in order; 0.5 packs more tightly."""


_MARGIN_SD = 2.0
"""Room kept free for the scatter of the drawn token total, in standard deviations."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost of a sequence of L tokens: linear L + quadratic L^2. Only the ratio of the two matters to a plan.

    Tokens alone mislead: attention grows with the square of the length. The ratio of the two terms depends on the
    model: for Qwen3-4B they are equal at 27,000 tokens, for Qwen3-32B at 61,000.
    """

    linear: float
    """Per token: every matrix multiplication with parameters."""
    quadratic: float
    """Per pair of tokens: attention."""

    def of(self, lengths: FloatArray) -> FloatArray:
        """Cost of each sequence, [n] for lengths [n] in tokens."""
        return lengths * (self.linear + self.quadratic * lengths)


TOKENS = CostModel(linear=1.0, quadratic=0.0)
"""Every token costs the same: the planner's default when no model is known."""


class SampleSize(NamedTuple):
    """The size of a sample whose tokens may be on another rank."""

    id: str
    num_tokens: int
    """Tokens that the model reads."""


Packable: TypeAlias = TrainSample | SampleSize
"""The planner reads only the length and, for ties, the id."""


def plan_microbatches(
    samples: Sequence[Packable],
    *,
    layout: PackingLayout,
    max_tokens_per_microbatch: int,
    mode: str = "balanced",
    cost: CostModel = TOKENS,
    window: int = 64,
) -> PackPlan:
    """Assign every sample to a micro-batch of a data-parallel rank.

    Args:
        max_tokens_per_microbatch: hard cap; the remainder modulo the layout's `microbatch_multiple` stays unused.
        mode: `balanced`; `window`, the greedy packing of DPPO (arXiv 2603.04135) over the samples in order of their
            ids; `first_fit_decreasing`; `none`, a micro-batch for every sample.
        cost: what a sequence costs; the default counts tokens.
        window: sequences that `window` chooses from.

    Returns:
        A plan with the metrics
        `fill`: true tokens over (the cap times the number of micro-batches);
        `microbatches`: of each rank;
        `padding`: share of the processed tokens that belong to no sample;
        `imbalance`: time of the slowest rank over the mean; with p pipeline stages a rank's time is the sum of its
        micro-batches' costs plus (p - 1) times the largest;
        `largest_over_mean`: cost of the costliest micro-batch over the mean.

    Raises:
        UserError: the cap holds no token, a sample does not fit, or the mode is unknown.
    """
    lengths = [sample.num_tokens for sample in samples]
    capacity = usable_capacity(layout, max_tokens_per_microbatch)
    slots = layout.slots(np.array(lengths, dtype=np.int64))
    _check_fit(samples, slots, layout, max_tokens_per_microbatch)
    # From here on a sample is its position in this order: longest first, then by id.
    by_id = np.array(sorted(range(len(samples)), key=lambda i: samples[i].id), dtype=np.int64)
    stream = np.argsort(-slots[by_id], kind="stable")
    origin = by_id[stream]
    slots = slots[origin]
    costs = cost.of(slots.astype(np.float64))
    count_of = partial(quantised, quantum=layout.data_parallel * layout.microbatch_group)
    if mode == "balanced":
        ranks = _balanced(slots, costs, capacity, count_of, layout)
    else:
        bins = _greedy_bins(mode, slots.tolist(), capacity, np.argsort(stream).tolist(), window)
        bins = split_to(bins, costs.tolist(), count_of(len(bins)))
        ranks = deal(bins, costs.tolist(), layout.data_parallel)
    microbatches = _place(ranks, origin.tolist(), lengths, slots.tolist(), costs.tolist(), layout)
    plan = PackPlan(microbatches, max_tokens_per_microbatch, sum(lengths), {})
    plan.metrics.update(_metrics(plan, layout, cost))
    return plan


def usable_capacity(layout: PackingLayout, max_tokens_per_microbatch: int) -> int:
    """The largest multiple of the layout's `microbatch_multiple` within the cap; `UserError` if that is 0."""
    multiple = layout.microbatch_multiple
    if max_tokens_per_microbatch < multiple:
        raise UserError(
            f"packing.max_tokens_per_microbatch = {max_tokens_per_microbatch}: this layout and number format run"
            f" micro-batches in multiples of {multiple} tokens, so it must be at least that"
        )
    return max_tokens_per_microbatch // multiple * multiple


def check_longest_trained(tokens: int, layout: PackingLayout, max_tokens_per_microbatch: int) -> None:
    """Raise `UserError` if the longest possible prompt and completion, of `tokens` in all, would not fit into a
    micro-batch. Otherwise only the first kept completion of that length would show it, after its rollout."""
    capacity, multiple = usable_capacity(layout, max_tokens_per_microbatch), layout.microbatch_multiple
    if tokens - 1 > capacity:  # the last token is only a target
        raise UserError(
            f"packing.max_tokens_per_microbatch = {max_tokens_per_microbatch}: this layout and number format run"
            f" micro-batches in multiples of {multiple} tokens and use {capacity} of them, but the longest possible"
            f" sequence takes {tokens - 1}; set it to {-(-(tokens - 1) // multiple) * multiple}"
        )


def quantised(count: int, quantum: int) -> int:
    """`count` micro-batches rounded up so that every rank has the same whole number of groups, and at least one."""
    return max(1, -(-count // quantum)) * quantum


def _check_fit(samples: Sequence[Packable], slots: IntArray, layout: PackingLayout, max_tokens: int) -> None:
    capacity = usable_capacity(layout, max_tokens)
    too_long = [(samples[i].id, i) for i in np.flatnonzero(slots > capacity).tolist()]
    if too_long:
        name, i = min(too_long)
        length, multiple = samples[i].num_tokens, layout.sequence_multiple
        aligned = f", {slots[i]} aligned to {multiple}" if slots[i] != length else ""
        usable = f" ({capacity} usable, a multiple of {layout.microbatch_multiple})" if capacity != max_tokens else ""
        cap = f"packing.max_tokens_per_microbatch = {max_tokens}{usable}"
        raise UserError(f"sample {name} has {length} tokens{aligned}, more than {cap}")


def _greedy_bins(mode: str, slots: Sequence[int], capacity: int, by_id: Sequence[int], window: int) -> Bins:
    if mode == "window":
        return window_greedy(by_id, slots, capacity, window)
    if mode == "first_fit_decreasing":
        return first_fit(range(len(slots)), slots, capacity)
    if mode == "none":
        return [[i] for i in range(len(slots))]
    raise UserError(f"packing.mode = '{mode}': no such choice; known: balanced, window, first_fit_decreasing, none")


def _balanced(
    slots: IntArray, costs: FloatArray, capacity: int, count_of: Callable[[int], int], layout: PackingLayout
) -> list[Bins]:
    sizes = slots.tolist()
    # With a virtual pipeline all micro-batches are padded to the longest, so tokens have to be levelled, not costs.
    one_length = layout.virtual_pipeline > 1
    prices = [float(size) for size in sizes] if one_length else costs.tolist()
    # Two samples of more than half the capacity never share a micro-batch.
    count = count_of(max(-(-int(slots.sum()) // capacity), int((2 * slots > capacity).sum())))
    bins = _levelled(sizes, prices, capacity, count)
    if bins is None:
        tightest = min((fit(range(len(sizes)), sizes, capacity) for fit in (best_fit, first_fit)), key=len)
        needed = count_of(len(tightest))
        # Levelling failed at `count`. If best fit needs more micro-batches anyway, try levelling over that number.
        bins = _levelled(sizes, prices, capacity, needed) if needed > count else None
        bins = split_to(tightest, prices, needed) if bins is None else bins
    if one_length:
        capacity = max(sum(sizes[i] for i in members) for members in bins)
    return exchange(
        deal(bins, costs.tolist(), layout.data_parallel),
        slots,
        costs,
        capacity=capacity,
        pipeline_parallel=layout.pipeline_parallel,
        most=2 * layout.data_parallel + 16,
    )


def _levelled(slots: Sequence[int], costs: Sequence[float], capacity: int, count: int) -> Bins | None:
    tries = (level(slots, costs, capacity, count, greedy=int(share * len(slots))) for share in _GREEDY_SHARES)
    return next((bins for bins in tries if bins is not None), None)


def _place(
    ranks: list[Bins],
    origin: Sequence[int],
    lengths: Sequence[int],
    slots: Sequence[int],
    costs: Sequence[float],
    layout: PackingLayout,
) -> tuple[tuple[PackedMicrobatch, ...], ...]:
    """Order each rank's bins, and place the samples of each bin longest first.

    Costliest bins first, so that ranks run similar ones at the same time: collectives within a micro-batch make them
    wait for each other. In a pipeline the cheap ones go to both ends, where stages wait for the first and the last.

    Args:
        origin: position in the caller's list of each sample in the bins.
        lengths: [samples] in the caller's order; slots and costs in the order of the bins' positions.
    """
    longest = 0
    if layout.virtual_pipeline > 1:
        fullest = max(sum(slots[i] for i in members) for rank in ranks for members in rank)
        longest = quantised(fullest, layout.microbatch_multiple)
    placed = []
    for rank in ranks:
        members = sorted((sorted(bin_) for bin_ in rank), key=lambda bin_: -sum(costs[i] for i in bin_))
        if layout.pipeline_parallel > 1:
            members = members[::-2] + members[len(members) % 2 :: 2]
        placed.append(tuple(layout.place([origin[i] for i in bin_], lengths, longest) for bin_ in members))
    return tuple(placed)


def _metrics(plan: PackPlan, layout: PackingLayout, cost: CostModel) -> dict[str, float]:
    run = [microbatch for rank in plan.microbatches for microbatch in rank]
    tokens = sum(microbatch.num_tokens for microbatch in run)
    ends = np.array(list(chain.from_iterable(microbatch.cu_seqlens_padded for microbatch in run)), dtype=np.float64)
    starts = np.cumsum([0] + [len(microbatch.cu_seqlens_padded) for microbatch in run[:-1]])
    segments = np.diff(ends, prepend=0.0)
    segments[starts] = 0.0
    price = np.add.reduceat(cost.of(segments), starts).reshape(len(plan.microbatches), -1)
    time = price.sum(axis=1) + (layout.pipeline_parallel - 1) * price.max(axis=1)
    return {
        "fill": plan.fill,
        "microbatches": float(plan.num_microbatches),
        "padding": 1.0 - plan.num_tokens / tokens,
        "imbalance": float(time.max() / time.mean()),
        "largest_over_mean": float(price.max() / price.mean()),
    }


@dataclass(frozen=True, slots=True)
class TokenCapacity:
    """How many tokens a step can train on without another round of micro-batches: `pruning.interface.StepCapacity`.

    The number of micro-batches is a multiple of the data-parallel size times the interleaved schedule's group. So after
    pruning a plan often has spare room, and the completion policy can raise its probabilities to use it. To stay
    unbiased, that decision must not depend on the draw: the room is computed from all candidates and their
    probabilities. The drawn token total scatters around its expectation; a margin makes another round rare.
    """

    layout: PackingLayout
    max_tokens_per_microbatch: int
    achievable_fill: float = 0.98
    """Share of the cap that the planner can be relied on to fill; measured in docs/packing.md."""

    @staticmethod
    def of(config: PackingConfig, layout: PackingLayout) -> TokenCapacity | None:
        """None for mode=none, where each micro-batch holds one sequence and has no spare room."""
        return None if config.mode == "none" else TokenCapacity(layout, config.max_tokens_per_microbatch)

    def microbatches(self, tokens: IntArray, inclusion_prob: FloatArray) -> int:
        """Micro-batches needed for the expected tokens, over all ranks."""
        expected = float(np.sum(self.layout.slots(tokens) * inclusion_prob))
        quantum = self.layout.data_parallel * self.layout.microbatch_group
        return quantised(math.ceil(expected / self._usable - 1e-9), quantum)

    def holds(self, microbatches: int, tokens: IntArray, inclusion_prob: FloatArray, *, fixed_size: bool) -> bool:
        """Whether a draw will fit into `microbatches`, with a margin for its scatter.

        The variance of a total under a design of fixed size is taken as sum(pi (1 - pi) (l - l0)^2), with l0 the mean
        weighted by pi (1 - pi) (Hajek 1964); l0 = 0 for independent draws. Samples of more than half a micro-batch are
        counted too, since no two of them share one.
        """
        slots = self.layout.slots(tokens).astype(np.float64)
        large = (2 * slots > usable_capacity(self.layout, self.max_tokens_per_microbatch)).astype(np.float64)
        return bool(
            self._bound(slots, inclusion_prob, fixed_size) <= microbatches * self._usable
            and self._bound(large, inclusion_prob, fixed_size) <= microbatches
        )

    @property
    def _usable(self) -> float:
        return self.achievable_fill * usable_capacity(self.layout, self.max_tokens_per_microbatch)

    def _bound(self, amount: FloatArray, pi: FloatArray, fixed_size: bool) -> float:
        scatter = pi * (1.0 - pi)
        total = float(scatter.sum())
        centre = float(np.sum(scatter * amount)) / total if fixed_size and total > 0 else 0.0
        variance = float(np.sum(scatter * np.square(amount - centre)))
        return float(np.sum(pi * amount)) + _MARGIN_SD * math.sqrt(variance)
