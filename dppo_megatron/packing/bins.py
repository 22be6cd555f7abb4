"""Greedy rules for filling bins of equal capacity, from which the planner chooses.

All take slots in a canonical order and return bins of positions, none over capacity. Best fit needs the fewest bins,
and leaves some nearly empty. Levelling by cost needs the number of bins beforehand, and fails if bins would be nearly
full. The window rule only looks at the next few sequences. All must be fast: one rank makes a plan in every step, while
all others wait.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np

Bins = list[list[int]]


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
    """Dense Prompt Packing as we read it in DPPO (arXiv 2603.04135): the oldest pending sequence opens a bin, which is
    filled with the longest pending ones that still fit.

    Args:
        window: number of pending sequences; refilled from the stream whenever one leaves.
    """
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
