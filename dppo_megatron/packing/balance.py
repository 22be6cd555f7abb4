"""Assigns bins to data-parallel ranks and balances the ranks: a step is as slow as its slowest rank.

Giving the costliest bin to the lightest rank works well with many bins per rank, and poorly with three or four, as in
wide jobs. So the slowest rank then exchanges samples with the lightest ones while that helps, a bounded number of
times. One exchange is a few numpy calls on a matrix of the two ranks' samples. Whole bins are never exchanged: doing so
too gained 0.06 % at 512 samples on 32 ranks, and cost 0.5 % with pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dppo_megatron.packing.bins import Bins
from dppo_megatron.types import BoolArray, FloatArray, IntArray

_PARTNERS = 4
"""Ranks, lightest first, that the slowest one tries to exchange with before the search ends."""

_TOLERANCE = 5e-4
"""Stop when the slowest rank is within this share of the mean: kernel times vary by more than that."""


def deal(bins: Bins, costs: Sequence[float], num_ranks: int) -> list[Bins]:
    """The same number of bins for each rank: costliest first, each to the lightest rank that is not full.

    Args:
        bins: a multiple of `num_ranks`.
        costs: [samples].
    """
    per_rank = len(bins) // num_ranks
    ranks: list[Bins] = [[] for _ in range(num_ranks)]
    total, sums = np.zeros(num_ranks), [sum(costs[i] for i in members) for members in bins]
    for b in sorted(range(len(bins)), key=lambda b: -sums[b]):
        r = int(total.argmin())
        ranks[r].append(bins[b])
        total[r] = total[r] + sums[b] if len(ranks[r]) < per_rank else np.inf
    return ranks


def exchange(
    ranks: list[Bins],
    slots: npt.NDArray[np.int64],
    costs: FloatArray,
    *,
    capacity: int,
    pipeline_parallel: int,
    most: int,
) -> list[Bins]:
    """Swap samples, or move one, between the slowest rank and light ones; at most `most` times.

    With p pipeline stages, a rank's time is about the sum of its micro-batches' costs + (p - 1) x the largest. With
    p > 1 an exchange never makes a rank's largest micro-batch larger, so only the sum can grow.

    Args:
        slots, costs: [samples] tokens and cost.
        capacity: tokens of a bin.
    """
    search = _Search(ranks, slots, costs, capacity, pipeline_parallel)
    for _ in range(most):
        if not search.improve_slowest():
            break
    return search.ranks()


class _Search:
    """Assignment of units (samples, then one phantom of 0 tokens per bin) to bins; bin b belongs to rank b // per_rank.
    Moving a sample is a swap with the phantom of its new bin, which itself stays there.
    """

    def __init__(self, ranks: list[Bins], slots: IntArray, costs: FloatArray, capacity: int, stages: int) -> None:
        bins = [members for rank in ranks for members in rank]
        self.num_samples, self.per_rank, self.stages = len(slots), len(bins) // len(ranks), stages
        self.slot = np.concatenate([slots, np.zeros(len(bins), np.int64)])
        self.cost = np.concatenate([costs, np.zeros(len(bins))])
        self.bin_of = np.empty(len(self.slot), np.int64)
        self.bin_of[[i for members in bins for i in members]] = np.repeat(np.arange(len(bins)), [len(b) for b in bins])
        self.bin_of[self.num_samples :] = np.arange(len(bins))
        self.room = capacity - np.bincount(self.bin_of, weights=self.slot).astype(np.int64)
        self.bin_cost = np.bincount(self.bin_of, weights=self.cost)
        self.time = np.array([self._time(r) for r in range(len(ranks))])

    def ranks(self) -> list[Bins]:
        """Bins of each rank, as `deal` returns them."""
        bins: Bins = [[] for _ in self.room]
        for i, b in enumerate(self.bin_of[: self.num_samples].tolist()):
            bins[b].append(i)
        return [bins[first : first + self.per_rank] for first in range(0, len(bins), self.per_rank)]

    def improve_slowest(self) -> bool:
        """Make one exchange after which both ranks are faster than the slowest was; False if none is found."""
        slow = int(self.time.argmax())
        if self.time[slow] <= (1 + _TOLERANCE) * self.time.mean():
            return False
        lightest = self.time.argsort(kind="stable")[:_PARTNERS]
        return any(self._improve(slow, int(light)) for light in lightest if light != slow)

    def _improve(self, slow: int, light: int) -> bool:
        """Make the swap that comes closest to equalising the two ranks, if it helps."""
        wanted = 0.5 * float(self.time[slow] - self.time[light])
        ours, theirs = (np.flatnonzero(self.bin_of // self.per_rank == r) for r in (slow, light))
        off = np.abs(np.subtract.outer(self.cost[ours], self.cost[theirs]) - wanted)
        off[self._forbidden(ours, theirs)] = np.inf
        i, j = divmod(int(off.argmin()), len(theirs))
        if off[i, j] >= (1 - 1e-3) * wanted:
            return False
        self._swap(int(ours[i]), int(theirs[j]))
        self.time[slow], self.time[light] = self._time(slow), self._time(light)
        return True

    def _forbidden(self, ours: IntArray, theirs: IntArray) -> BoolArray:
        """[ours, theirs]: whether a bin could not hold its new unit, or a rank's largest micro-batch would grow."""
        growth = np.subtract.outer(self.slot[ours], self.slot[theirs])
        our_bin, their_bin = self.bin_of[ours], self.bin_of[theirs]
        forbidden = (growth > self.room[their_bin]) | (-growth > self.room[our_bin][:, None])
        if self.stages > 1:
            gain = np.subtract.outer(self.cost[ours], self.cost[theirs])
            forbidden |= gain > self.bin_cost[their_bin].max() - self.bin_cost[their_bin]
            forbidden |= -gain > (self.bin_cost[our_bin].max() - self.bin_cost[our_bin])[:, None]
        return np.asarray(forbidden)

    def _swap(self, ours: int, theirs: int) -> None:
        a, b = int(self.bin_of[ours]), int(self.bin_of[theirs])
        for unit, source, target in ((ours, a, b), (theirs, b, a)):
            self.room[source] += self.slot[unit]
            self.room[target] -= self.slot[unit]
            self.bin_cost[source] -= self.cost[unit]
            self.bin_cost[target] += self.cost[unit]
            if unit < self.num_samples:
                self.bin_of[unit] = target

    def _time(self, r: int) -> float:
        costs = self.bin_cost[r * self.per_rank : (r + 1) * self.per_rank]
        return float(costs.sum() + (self.stages - 1) * costs.max())
