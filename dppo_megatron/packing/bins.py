"""Fills bins of equal capacity, assigns them to data-parallel ranks, and balances the ranks.

All rules for filling take slots in a canonical order and return bins of positions, none over capacity. Best fit needs
the fewest bins, and leaves some nearly empty. Levelling by cost needs the number of bins beforehand, and fails if bins
would be nearly full. All must be fast: one rank makes a plan in every step, while all others wait.

A step is as slow as its slowest rank. Giving the costliest bin to the lightest rank works well with many bins per rank,
and poorly with three or four. So the slowest rank then exchanges samples with the lightest ones, a bounded number of
times. Whole bins are never exchanged: it gained 0.06 % at 512 samples on 32 ranks, and cost 0.5 % with pipeline stages.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dppo_megatron.types import BoolArray, FloatArray, IntArray

Bins = list[list[int]]
_PARTNERS = 4
"""Ranks, lightest first, that the slowest one tries to exchange with before the search ends."""

_TOLERANCE = 5e-4
"""Stop when the slowest rank is within this share of the mean: kernel times vary by more than that."""


def best_fit(order: Sequence[int], slots: Sequence[int], capacity: int) -> Bins:
    """Each slot into the fullest bin that has room; with a descending `order` this is best-fit decreasing."""
    bins: Bins = []
    _best_fit_into(bins, [], order, slots, capacity)
    return bins


def _best_fit_into(
    bins: Bins, open_bins: list[tuple[int, int]], order: Sequence[int], slots: Sequence[int], capacity: int
) -> None:
    """`open_bins`: sorted (room, bin) of the bins that may take more slots."""
    for i in order:
        slot = slots[i]
        place = bisect_left(open_bins, (slot, -1))
        if place < len(open_bins):
            room, b = open_bins.pop(place)
            bins[b].append(i)
        else:
            room, b = capacity, len(bins)
            bins.append([i])
        if room > slot:
            insort(open_bins, (room - slot, b))


def first_fit(order: Sequence[int], slots: Sequence[int], capacity: int) -> Bins:
    """Each slot into the oldest bin that has room."""
    room = np.full(len(order), capacity)
    bins: Bins = []
    for i in order:
        b = int((room >= slots[i]).argmax())  # 4 us for 4,096 bins
        if b == len(bins):
            bins.append([])
        bins[b].append(i)
        room[b] -= slots[i]
    return bins


def window_greedy(stream: Sequence[int], slots: Sequence[int], capacity: int, window: int) -> Bins:
    """Dense Prompt Packing as we read it in DPPO (arXiv 2603.04135): the oldest of `window` pending sequences opens a
    bin, which is filled with the longest pending ones that still fit. Whenever one leaves, the next of `stream`
    comes."""
    arriving = enumerate(stream)
    pending: list[tuple[int, int]] = []
    placed = [False] * len(stream)
    bins: Bins = []

    def refill() -> None:
        if (following := next(arriving, None)) is not None:
            insort(pending, (slots[following[1]], following[0]))

    for _ in range(window):
        refill()
    for oldest, i in enumerate(stream):
        if placed[oldest]:
            continue
        room, take, members = capacity, bisect_left(pending, (slots[i], oldest)), []
        while take >= 0:
            slot, position = pending.pop(take)
            placed[position] = True
            members.append(stream[position])
            room -= slot
            refill()
            take = bisect_right(pending, (room, len(stream))) - 1
        bins.append(members)
    return bins


def level(slots: Sequence[int], costs: Sequence[float], capacity: int, count: int, *, greedy: int) -> Bins | None:
    """`count` bins of about equal cost, or None if a slot does not fit: the first `greedy` slots each into the bin of
    lowest cost that has room, the others by best fit. Slots must descend."""
    room, cost = np.full(count, capacity), np.zeros(count)
    bins: Bins = [[] for _ in range(count)]
    for i in range(greedy):
        b = int(np.where(room >= slots[i], cost, np.inf).argmin())
        if room[b] < slots[i]:
            return None
        bins[b].append(i)
        room[b] -= slots[i]
        cost[b] += costs[i]
    open_bins = sorted((left, b) for b, left in enumerate(room.tolist()) if left)
    _best_fit_into(bins, open_bins, range(greedy, len(slots)), slots, capacity)
    return bins if len(bins) == count else None


def split_to(bins: Bins, costs: Sequence[float], count: int) -> Bins:
    """`count` bins: splits the costliest into halves of about equal cost, then adds empty ones once all are single."""
    heap = [(-sum(costs[i] for i in members), b) for b, members in enumerate(bins)]
    heapq.heapify(heap)
    bins = [list(members) for members in bins]
    while len(bins) < count and heap:
        b = heapq.heappop(heap)[1]
        if len(bins[b]) < 2:
            continue
        halves: tuple[list[int], list[int]] = ([], [])
        sums = [0.0, 0.0]
        for i in bins[b]:
            lighter = int(sums[1] < sums[0])
            halves[lighter].append(i)
            sums[lighter] += costs[i]
        for half, total, place in ((halves[0], sums[0], b), (halves[1], sums[1], len(bins))):
            heapq.heappush(heap, (-total, place))
            bins[place : place + 1] = [half]
    return bins + [[] for _ in range(count - len(bins))]


def deal(bins: Bins, costs: Sequence[float], num_ranks: int) -> list[Bins]:
    """The same number of bins for each rank: costliest first, each to the lightest rank that is not full. `bins`: a
    multiple of `num_ranks`; `costs`: [samples]."""
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
