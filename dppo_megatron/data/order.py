"""The order in which prompts are visited: over one set, or several in fixed shares; shuffled, or sorted by a key.

It is a pure function of the position, and a resumed run continues with the same prompts. Of sets with weights or a key,
a checkpoint also stores how far each has come, and its epoch, which other weights, another number of prompts a step, or
a key that changes with the run, as the model's pass rate does, may not give again.
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
"""What an epoch that begins now is sorted by, rising: [prompts of all sets]; equals, and NaN at the end, at random."""

_MOST_SLOTS = 1_000_000
"""Length of the longest pattern of sets. Weights whose ratio needs more are rounded to parts in a million."""


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """An endless stream of shuffled epochs over `num_prompts`, addressed by position."""

    num_prompts: int
    seed: int

    def take(self, position: int, count: int) -> tuple[IntArray, int]:
        """The next `count` <= num_prompts indices [count] int64, and the position after them.

        Always from one epoch, so that no prompt comes twice: if fewer than `count` are left in an epoch, they are
        skipped.
        """
        epoch, offset = divmod(position, self.num_prompts)
        if offset + count > self.num_prompts:
            epoch, offset = epoch + 1, 0
        taken = _shuffle(self.num_prompts, self.seed, epoch)[offset : offset + count]
        return taken, epoch * self.num_prompts + offset + count


class WeightedOrder:
    """Several sets side by side, each in its share of every step and with its own epochs.

    Sets take turns in a fixed pattern: slot by slot the set whose next item is due first, item j of a set with share w
    being due at (j + 1/2) / w. After one pattern the shares are exact, and at any time each set is within a few items
    of its share. A set's items are its epochs one after the other, each epoch every problem once, so the position in
    every set, and its epoch, follow from the one position that a checkpoint keeps, and after a resume with other
    weights from what had been taken of each set.

    No problem comes twice within `per_take` slots, also where an epoch ends inside a step: the next epoch's shuffle
    leaves so much room behind each problem's last place.

    Example:
        shares 2:1 of sets of 3 and 2 problems make the pattern A B A. Slots 0-5 hold items A0 B0 A1 A2 B1 A3, where
        A3 is the first item of A's second epoch. taken(6) -> [4, 2]: four items of A are used and two of B.

    Args:
        sizes: problems of each set; set s has the prompt indices from sum(sizes[:s]) on.
        weights: relative shares.
        per_take: the most that is taken at once, for which no problem comes twice.
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
        """[sets] items beyond those that these weights would have taken: `go_on`."""
        self._latest: dict[int, tuple[int, IntArray]] = {}
        """Set to the epoch last asked for and its order, which the next epoch's needs."""
        self._first = np.concatenate([[0], np.cumsum(self._sizes)]).astype(np.int64)

    @property
    def num_prompts(self) -> int:
        """Of all sets."""
        return int(self._first[-1])

    def taken(self, position: int) -> IntArray:
        """[sets] items of each set before `position`; divided by its size, its epoch."""
        rounds, slot = divmod(position, len(self._pattern))
        items: IntArray = self._ahead + rounds * self._before[:, -1] + self._before[:, slot]
        return items

    def go_on(self, position: int, taken: IntArray) -> None:
        """From `position`, before which `taken` [sets] items of each set were, by other weights perhaps."""
        if len(taken) == len(self._sizes):
            self._ahead += taken - self.taken(position)

    def take(self, position: int, count: int) -> tuple[IntArray, int]:
        """The prompts of the next `count` slots, and the position after them.

        With more than `per_take` slots a problem may repeat; it is then left out, so fewer are returned.
        """
        slots = (position + np.arange(count)) % len(self._pattern)
        sets, item = self._pattern[slots], self.taken(position)
        indices = np.empty(count, dtype=np.int64)
        for s in np.unique(sets):
            mine = np.flatnonzero(sets == s)
            indices[mine] = self._first[s] + self._items(int(s), int(item[s]), len(mine))
        _, firsts = np.unique(indices, return_index=True)
        return indices[np.sort(firsts)], position + count

    def state_dict(self) -> dict[int, Any]:
        """Each set's epoch and its order. The arrays are not copied."""
        return dict(self._latest)

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Without the orders of what had another size."""
        sizes = dict(enumerate(self._sizes))
        self._latest = {s: (epoch, order) for s, (epoch, order) in state.items() if len(order) == sizes.get(s)}

    def _items(self, s: int, start: int, count: int) -> IntArray:
        """Problems start, start + 1, ... of set `s`, over its epochs."""
        parts, size = [], self._sizes[s]
        while count:
            epoch, offset = divmod(start, size)
            part = self._epoch(s, epoch)[offset : offset + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(parts)

    def _epoch(self, s: int, epoch: int) -> IntArray:
        """[size] the problems of one epoch of set `s`; each is spaced from the one before, so from the first on."""
        last, order = self._latest.get(s, (-1, None))
        if epoch < last:
            last, order = -1, None
        for number in range(last + 1, epoch + 1):
            shuffled = generator(self._seed, "order of a weighted set", s, number).permutation(self._sizes[s])
            if self._key is not None:
                own = self._key()[self._first[s] : self._first[s + 1]]
                shuffled = shuffled[np.argsort(own[shuffled], kind="stable")]
            order = _spaced(shuffled.astype(np.int64), order, self._window[s])
        assert order is not None
        self._latest[s] = (epoch, order)
        return order

    def _most(self, s: int, count: int) -> int:
        """The most items of set `s` in any `count` slots in a row."""
        rounds, rest = divmod(count, len(self._pattern))
        before = self._before[s]
        twice = np.concatenate([before, before[-1] + before[1:]])
        return int(rounds * before[-1] + np.max(twice[rest : rest + len(before)] - before))


Order: TypeAlias = PromptOrder | WeightedOrder


def make_order(
    sizes: Mapping[str, int], weights: Mapping[str, float] | None, seed: int, per_take: int, key: Key | None = None
) -> Order:
    """The order over all training sets: together, or with `weights` each in its share; by `key`, or shuffled.

    One set has one order, whatever its weight. A step of a sorted order goes on into the next epoch: it must not be the
    same problems that are skipped at the end of every epoch.

    Raises:
        UserError: a step of `per_take` prompts needs more problems of a set than it has, or hardly any.
    """
    if weights is None or len(sizes) == 1:
        whole = {"": sum(sizes.values())}
        return PromptOrder(whole[""], seed) if key is None else WeightedOrder(whole, {"": 1.0}, seed, per_take, key)
    return WeightedOrder(sizes, weights, seed, per_take, key)


def whole_epochs(size: int, seed: int, per_take: int) -> Order:
    """Of which nothing is skipped: a step goes on into the next epoch. Where none has to, it is the `PromptOrder`."""
    return WeightedOrder({"": size}, {"": 1.0}, seed, per_take) if size % per_take else PromptOrder(size, seed)


def order_key(order: OrderName, by: OrderBy, num_prompts: int, level: FloatArray | None, pass_rate: Key) -> Key | None:
    """What `data.order` sorts by, given `data.order_by`; None: shuffled.

    Args:
        level: [num_prompts], NaN where a problem has none; None: none has.
        pass_rate: of each problem as it is known when it is called.

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
            raise UserError(f"data.train_sets.{name}.weight: less than a millionth of all; leave the set out")
    common = math.gcd(*rounded)
    return [share // common for share in rounded]


def _pattern(shares: list[int]) -> npt.NDArray[np.int16]:
    """[sum(shares)] the set of each slot: the one whose next item is due first; ties go by place in the list."""
    # quotients of integers this small are equal exactly where the fractions are, so ties are the true ones
    due = np.concatenate([(2 * np.arange(share) + 1) / share for share in shares])
    owner = np.repeat(np.arange(len(shares)), shares)
    return owner[np.lexsort((owner, due))].astype(np.int16)


def _spaced(shuffled: IntArray, before: IntArray | None, window: int) -> IntArray:
    """`shuffled`, reordered as little as needed so that no `window` consecutive items contain a duplicate.

    Args:
        before: the epoch before, whose end this one follows; None: there is none.

    Example:
        _spaced([2, 0, 1, 3], before=[0, 1, 3, 2], window=3)  # [0, 1, 2, 3]: 2 and 3 were last, and wait
    """
    if before is None or window < 2:
        return shuffled
    size, rank = len(shuffled), np.argsort(shuffled)
    early = shuffled[~np.isin(shuffled, before[size - window + 1 :])]
    released: list[int] = []  # the first rank at which each of the last items of `before` may come again
    chosen, next_early = [], 0
    for place in range(window - 1):
        if place:
            heapq.heappush(released, int(rank[before[size - window + place]]))
        if released and (next_early == len(early) or released[0] < rank[early[next_early]]):
            chosen.append(int(shuffled[heapq.heappop(released)]))
        else:
            chosen.append(int(early[next_early]))
            next_early += 1
    rest = shuffled[~np.isin(shuffled, chosen)]
    spaced: IntArray = np.concatenate([np.array(chosen, dtype=np.int64), rest])
    return spaced


@lru_cache(maxsize=2)
def _shuffle(num_prompts: int, seed: int, epoch: int) -> IntArray:
    permutation: IntArray = generator(seed, "order", epoch).permutation(num_prompts).astype(np.int64)
    return permutation
