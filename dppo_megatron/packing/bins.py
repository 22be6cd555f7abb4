"""Greedy rules for filling bins of one capacity, from which the planner chooses.

All take slots in a canonical order and return bins of positions, none over the capacity. Best fit leaves the fewest
bins, some of them nearly empty. Levelling by cost needs the number of bins beforehand, and fails if they are nearly
full. The window needs to see only the next few sequences. Everything is O(n log n): a plan is made in every step, on
one rank, while all others wait.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

Bins = list[list[int]]


def best_fit(order: Sequence[int], slots: Sequence[int], capacity: int) -> Bins:
    """Each slot into the fullest bin that has room; with a descending `order` this is best-fit decreasing."""
    bins: Bins = []
    _best_fit_into(bins, [], order, slots, capacity)
    return bins


def _best_fit_into(
    bins: Bins, open_bins: list[tuple[int, int]], order: Sequence[int], slots: Sequence[int], capacity: int
) -> None:
    """`open_bins`: sorted (room, bin) of the bins that may take more."""
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
    """Each slot into the oldest bin that has room; a tree of maxima over the bins finds it in O(log n)."""
    leaves = 1 << max(len(order) - 1, 0).bit_length()
    most_room = [capacity] * (2 * leaves)
    bins: Bins = []
    for i in order:
        slot, node = slots[i], 1
        while node < leaves:
            node *= 2
            if most_room[node] < slot:
                node += 1
        b = node - leaves
        if b == len(bins):
            bins.append([])
        bins[b].append(i)
        most_room[node] -= slot
        while node > 1:
            node //= 2
            most_room[node] = max(most_room[2 * node], most_room[2 * node + 1])
    return bins


def window_greedy(stream: Sequence[int], slots: Sequence[int], capacity: int, window: int) -> Bins:
    """Dense Prompt Packing as we read it in DPPO (arXiv 2603.04135): a bin is opened by the oldest pending sequence and
    filled with the longest pending ones that still fit.

    Args:
        window: number of pending sequences; refilled from the stream whenever one leaves it.
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


class _Levelling:
    """Bins by cost, the lightest first; bins without room are set aside until slots are small enough."""

    def __init__(self, capacity: int, count: int) -> None:
        self.by_cost = [(0.0, b) for b in range(count)]
        self.waiting: list[tuple[int, int]] = []
        self.room, self.cost = [capacity] * count, [0.0] * count
        self.bins: Bins = [[] for _ in range(count)]

    def place(self, i: int, slot: int, cost: float) -> bool:
        """Into the lightest bin with room; False if there is none. Slots must come in descending order."""
        while self.waiting and -self.waiting[0][0] >= slot:
            b = heapq.heappop(self.waiting)[1]
            heapq.heappush(self.by_cost, (self.cost[b], b))
        while self.by_cost:
            b = self.by_cost[0][1]
            if self.room[b] >= slot:
                self.bins[b].append(i)
                self.room[b] -= slot
                self.cost[b] += cost
                heapq.heapreplace(self.by_cost, (self.cost[b], b))
                return True
            heapq.heappop(self.by_cost)
            heapq.heappush(self.waiting, (-self.room[b], b))
        return False


def level(slots: Sequence[int], costs: Sequence[float], capacity: int, count: int, *, greedy: int) -> Bins | None:
    """`count` bins of about equal cost, or None if something found no room: longest first into the lightest that has
    room, after `greedy` of them where they fit best. Slots descend."""
    levelling, order = _Levelling(capacity, count), range(len(slots))
    for i in order[:greedy]:
        if not levelling.place(i, slots[i], costs[i]):
            return None
    open_bins = sorted((room, b) for b, room in enumerate(levelling.room) if room)
    _best_fit_into(levelling.bins, open_bins, order[greedy:], slots, capacity)
    return levelling.bins if len(levelling.bins) == count else None


def split_to(bins: Bins, costs: Sequence[float], count: int) -> Bins:
    """`count` bins: the costliest are cut in halves of about equal cost; empty ones follow when all are single."""
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
