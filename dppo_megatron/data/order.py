"""The order in which prompts are visited: over one set, or several in fixed shares; shuffled, or sorted by a key.

It is a pure function of the position, so a resumed run continues with the same prompts. For sets with weights or a key,
a checkpoint also stores each set's progress and the order of its current epoch. That order cannot be computed again
under other weights, another number of prompts per step, or a key that changes, such as the model's pass rate.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dppo_megatron.config.data import OrderBy, OrderName
from dppo_megatron.randomness import generator
from dppo_megatron.types import FloatArray, IntArray, UserError

Key: TypeAlias = Callable[[], FloatArray]
"""What an epoch that begins now is sorted by, ascending: [prompts of all sets]. NaN last; ties in random order."""

_MOST_SLOTS = 1_000_000
"""Longest pattern of sets. Weights whose ratio needs a longer one are rounded to millionths."""


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """An endless stream of shuffled epochs over `num_prompts`, addressed by position."""

    num_prompts: int
    seed: int

    def take(self, position: int, count: int) -> tuple[IntArray, int]:
        """The next `count` <= num_prompts indices [count] int64, and the position after them.

        All are from one epoch, so that none repeats: if fewer than `count` are left in an epoch, they are skipped.
        """
        epoch, offset = divmod(position, self.num_prompts)
        if offset + count > self.num_prompts:
            epoch, offset = epoch + 1, 0
        taken = _shuffle(self.num_prompts, self.seed, epoch)[offset : offset + count]
        return taken, epoch * self.num_prompts + offset + count


class WeightedOrder:
    """Several sets side by side, each in its share of every step and with its own epochs.

    Sets take turns in a fixed pattern. Each slot goes to the set whose next item is due first, where item j of a set
    with share w is due at (j + 1/2) / w. After one pattern the shares are exact, and at any time each set is within a
    few items of its share. A set's items are its epochs one after the other, and each epoch has every problem once. So
    the position and epoch in every set follow from the one position in the checkpoint, or, after a resume with other
    weights, from the number of items taken from each set.

    No problem repeats within `per_take` slots, even if an epoch ends inside a step: the next epoch is reordered to keep
    that distance from each problem's last occurrence.

    Example:
        shares 2:1 of sets of 3 and 2 problems make the pattern A B A. Slots 0-5 hold items A0 B0 A1 A2 B1 A3, where
        A3 is the first item of A's second epoch. taken(6) -> [4, 2]: four items of A are used and two of B.

    Args:
        sizes: problems of each set; set s has the prompt indices from sum(sizes[:s]) on.
        weights: relative shares.
        per_take: most prompts of one `take`, within which no problem repeats.
        key: what each epoch of each set is sorted by; None: shuffled.

    Raises:
        UserError: a set has fewer problems than its share of `per_take`.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        weights: Mapping[str, float],
        seed: int,
        per_take: int,
        key: Key | None = None,
    ) -> None:
        shares = _whole_shares([weights[name] for name in sizes], list(sizes))
        self._sizes, self._seed, self._key = list(sizes.values()), seed, key
        self._pattern = _pattern(shares)
        counts = np.stack([np.cumsum(self._pattern == s) for s in range(len(shares))])
        self._before = np.concatenate([np.zeros((len(shares), 1), np.int64), counts], axis=1)
        """[sets, slots + 1] items of each set before each slot of the pattern."""
        self._window = [self._most(s, per_take) for s in range(len(shares))]
        for name, size, most in zip(sizes, self._sizes, self._window, strict=True):
            if most > size:
                raise UserError(
                    f"data.train_sets.{name}.weight: a step of {per_take} prompts takes up to {most} of '{name}', which"
                    f" holds only {size} problems; lower its weight or rollout.prompts_per_step"
                )
        self._ahead = np.zeros(len(shares), dtype=np.int64)
        """[sets] items taken in addition to those that these weights would have taken; see `go_on`."""
        self._latest: dict[int, tuple[int, IntArray]] = {}
        """Set -> its latest epoch and that epoch's order, from which the next epoch's order is computed."""
        self._first = np.concatenate([[0], np.cumsum(self._sizes)]).astype(np.int64)

    @property
    def num_prompts(self) -> int:
        return int(self._first[-1])

    def taken(self, position: int) -> IntArray:
        """[sets] items of each set before `position`. Divided by the set's size, this is its epoch."""
        rounds, slot = divmod(position, len(self._pattern))
        items: IntArray = self._ahead + rounds * self._before[:, -1] + self._before[:, slot]
        return items

    def go_on(self, position: int, taken: IntArray) -> None:
        """Continue at `position`, before which `taken` [sets] items of each set were taken, maybe by other weights."""
        if len(taken) == len(self._sizes):
            self._ahead += taken - self.taken(position)

    def take(self, position: int, count: int) -> tuple[IntArray, int]:
        """The prompts of the next `count` slots, and the position after them.

        In more than `per_take` slots a problem may repeat. The repetition is left out, so that fewer are returned.
        """
        slots = (position + np.arange(count)) % len(self._pattern)
        sets, item = self._pattern[slots], self.taken(position)
        indices = np.empty(count, dtype=np.int64)
        for s in np.unique(sets):
            slots_of_set = np.flatnonzero(sets == s)
            indices[slots_of_set] = self._first[s] + self._items(int(s), int(item[s]), len(slots_of_set))
        _, firsts = np.unique(indices, return_index=True)
        return indices[np.sort(firsts)], position + count

    def state_dict(self) -> dict[int, Any]:
        """Each set's latest epoch and its order. The arrays are not copied."""
        return dict(self._latest)

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Restore `state_dict`, except for sets that had another size."""
        sizes = dict(enumerate(self._sizes))
        self._latest = {s: (epoch, order) for s, (epoch, order) in state.items() if len(order) == sizes.get(s)}

    def _items(self, s: int, start: int, count: int) -> IntArray:
        """Problems start, start + 1, ... of set `s`, over its epochs."""
        epoch, offset = divmod(start, self._sizes[s])
        last = (start + count - 1) // self._sizes[s]
        whole = np.concatenate([self._epoch(s, number) for number in range(epoch, last + 1)])
        return whole[offset : offset + count]

    def _epoch(self, s: int, epoch: int) -> IntArray:
        """[size] the problems of one epoch of set `s`. Its order depends on the one before it, so all are computed."""
        last, order = self._latest.get(s, (-1, None))
        if epoch < last:
            last, order = -1, None
        for number in range(last + 1, epoch + 1):
            shuffled = generator(self._seed, "order of a weighted set", s, number).permutation(self._sizes[s])
            if self._key is not None:
                values = self._key()[self._first[s] : self._first[s + 1]]
                shuffled = shuffled[np.argsort(values[shuffled], kind="stable")]
            order = _spaced(shuffled.astype(np.int64), order, self._window[s])
        assert order is not None
        self._latest[s] = (epoch, order)
        return order

    def _most(self, s: int, count: int) -> int:
        """The most items of set `s` in any `count` consecutive slots."""
        rounds, rest = divmod(count, len(self._pattern))
        before = self._before[s]
        twice = np.concatenate([before, before[-1] + before[1:]])
        return int(rounds * before[-1] + np.max(twice[rest : rest + len(before)] - before))


Order: TypeAlias = PromptOrder | WeightedOrder


def make_order(
    sizes: Mapping[str, int], weights: Mapping[str, float] | None, seed: int, per_take: int, key: Key | None = None
) -> Order:
    """The order over all training sets: together, or with `weights` each in its share; by `key`, or shuffled.

    The weight of a single set has no effect. In a sorted order a step at an epoch's end continues into the next epoch:
    otherwise the same problems would be skipped at the end of every epoch.

    Raises:
        UserError: a step of `per_take` prompts needs more problems of a set than it has, or a weight is too small.
    """
    if weights is None or len(sizes) == 1:
        whole = {"": sum(sizes.values())}
        return PromptOrder(whole[""], seed) if key is None else WeightedOrder(whole, {"": 1.0}, seed, per_take, key)
    return WeightedOrder(sizes, weights, seed, per_take, key)


def whole_epochs(size: int, seed: int, per_take: int) -> Order:
    """A shuffled order that skips nothing: a step may continue into the next epoch. If none needs to: `PromptOrder`."""
    return WeightedOrder({"": size}, {"": 1.0}, seed, per_take) if size % per_take else PromptOrder(size, seed)


def order_key(order: OrderName, by: OrderBy, num_prompts: int, level: FloatArray | None, pass_rate: Key) -> Key | None:
    """What `data.order` sorts by, given `data.order_by`; None: shuffled.

    Args:
        level: [num_prompts], NaN for a problem without one; None: no problem has one.
        pass_rate: returns each problem's pass rate, as known at the time of the call.

    Raises:
        UserError: no problem has a level to sort by.
    """
    if order in ("shuffled", "file"):
        return None if order == "shuffled" else lambda: np.arange(num_prompts, dtype=np.float64)
    sign = 1.0 if order == "easy_first" else -1.0
    if by == "pass_rate":
        return lambda: -sign * pass_rate()
    if level is None or np.isnan(level).all():
        raise UserError(
            f"data.order = {order}: no problem has a level; name its field in data.level_field (level_is:"
            " solve_rate if more is easier), or set data.order_by=pass_rate"
        )
    return lambda: sign * level


def _whole_shares(weights: list[float], names: list[str]) -> list[int]:
    """Whole numbers in the ratio of the weights, in their smallest terms."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    parts = [weight / total for weight in exact]
    slots = math.lcm(*(part.denominator for part in parts))
    if slots <= _MOST_SLOTS:
        return [int(part * slots) for part in parts]
    rounded = [round(part * _MOST_SLOTS) for part in parts]
    for name, share in zip(names, rounded, strict=True):
        if not share:
            raise UserError(f"data.train_sets.{name}.weight: less than a millionth of the total; leave the set out")
    common = math.gcd(*rounded)
    return [share // common for share in rounded]


def _pattern(shares: list[int]) -> npt.NDArray[np.int16]:
    """[sum(shares)] the set of each slot: the one whose next item is due first; of several, the first in the list."""
    # Floating-point quotients of integers this small are equal only if the exact fractions are.
    due = np.concatenate([(2 * np.arange(share) + 1) / share for share in shares])
    owner = np.repeat(np.arange(len(shares)), shares)
    return owner[np.lexsort((owner, due))].astype(np.int16)


def _spaced(shuffled: IntArray, before: IntArray | None, window: int) -> IntArray:
    """`shuffled`, reordered as little as needed so that no `window` consecutive items contain a duplicate.

    Args:
        before: the epoch before this one; None: there is none.

    Example:
        _spaced([2, 0, 1, 3], before=[0, 1, 3, 2], window=3)  # [0, 1, 2, 3]: 2 and 3 were last, so they are put off
    """
    if before is None or window < 2:
        return shuffled
    rank = np.argsort(shuffled)
    late = rank[before[len(shuffled) - window + 1 :]]  # of the last items of `before`, each allowed one place later
    allowed = np.setdiff1d(rank, late).tolist()  # sorted, and so a heap
    chosen = []
    for one in late.tolist():
        chosen.append(heapq.heappop(allowed))
        heapq.heappush(allowed, one)
    spaced: IntArray = shuffled[[*chosen, *sorted(allowed)]]
    return spaced


@lru_cache(maxsize=2)
def _shuffle(num_prompts: int, seed: int, epoch: int) -> IntArray:
    permutation: IntArray = generator(seed, "order", epoch).permutation(num_prompts).astype(np.int64)
    return permutation
