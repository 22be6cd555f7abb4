"""Proves that two trees are equal by their values modulo a secret prime, at a secret point (Schwartz-Zippel).

Two different rational functions agree there with a probability of about degree / 2^250. In trees with steps (floor,
absolute value, maximum), everything that is not a rational function is treated as a letter of its own, with rules that
hold everywhere: floor(u + 3) is floor(u) + 3; |u| is u or -u, and all combinations of signs are tried, unless u is a
sum of squares, for example. So |x - 5| is not 5 - x, which it equals at every point below 5, and no point has to be
found where a function changes its branch. What these rules do not imply is not proved, as |x^2 - x + 1| = x^2 - x + 1.
"""

from __future__ import annotations

import functools
import os
from fractions import Fraction
from typing import TYPE_CHECKING

from dppo_megatron.rewards.math.answers import Node, substituted, symbols, walk
from dppo_megatron.rewards.math.evaluate import TooBig, Undefined, WorkLimit, approximate, rational

if TYPE_CHECKING:
    from random import Random

_SECRET = os.urandom(16)
_SMALL = 1 << 90  # a quotient of numbers below it counts as a constant: a residue is one with a probability of 2^-70
_MAX_SIGNS = 10
_SQUARE_POINTS = 12  # at which it is tested whether a value is a square: one that is not has no root at some of them


def drawn(purpose: str) -> Random:
    """Random numbers that cannot be predicted without the secret, which is drawn once per process; the same numbers for
    the same purpose."""
    from random import Random

    return Random(_SECRET + purpose.encode())


def proved_equal(gold: Node, other: Node, has_letters: bool, work: WorkLimit) -> bool | None:
    """True for equal trees, False for rational functions that differ, None if neither is proved. With `has_letters`, as
    for trees with `steps`, what is not rational is a letter of its own.

    Raises:
        TooBig: it takes too many operations or combinations of signs.
    """
    is_gaussian = ("c", "i") in walk(("+", gold, other))
    try:
        if _FieldPoint(0, has_letters, is_gaussian, work).agree(gold, other):
            return True
        return None if has_letters else False
    except (Undefined, ValueError):  # 0 has no inverse
        return None


def steps(node: Node) -> set[str]:
    """Functions in the tree that change their branch somewhere; the root of a square counts as an absolute value."""
    if node[0] in "nsc":
        return set()
    if node[0] == "big":  # its letter varies if its bounds do; inserting nested bounds would make trees of length 2^n
        _, _, name, low, high, body = node
        body = body if symbols(low) | symbols(high) else substituted(body, {name: ("n", Fraction(997, 7))})
        return steps(low) | steps(high) | steps(body)
    found: set[str] = set().union(*(steps(part) for part in node[1:] if isinstance(part, tuple)))
    if node[0] == "f" and node[1] in ("abs", "floor", "max", "mod") and symbols(node):
        found.add(node[1])
    elif _is_root(node) and _is_square(node[1]):
        found.add("abs")
    return found


def _is_root(node: Node) -> bool:
    """Whether it is a square root, perhaps of a power."""
    power = _exponent(node[2]) if node[0] == "^" else None
    return power is not None and power.denominator == 2


@functools.lru_cache(maxsize=1024)
def _exponent(node: Node) -> Fraction | None:
    """The exponent's value, cached and not charged: 50 sums as exponents were computed anew for each choice of sign."""
    return node[1] if node[0] == "n" else rational(node, None, WorkLimit(100))


def _whole_power(node: Node) -> int | None:
    """The exponent of a power, if it is a whole number of at most 4,000 bits."""
    power = _exponent(node[2])
    return int(power) if power is not None and power.denominator == 1 and abs(power) < 1 << 4000 else None


def _never_negative(node: Node) -> bool:
    """Whether its form shows that it is never negative for real numbers: x^2 + 1, but not x^2 - 2 x + 1."""
    if node[0] == "n":
        return bool(node[1] >= 0)
    if node[0] in ("+", "*", "/"):
        return _never_negative(node[1]) and _never_negative(node[2])
    if _is_root(node) or node[1] == "abs":
        return True
    power = _whole_power(node) if node[0] == "^" else None
    return power is not None and (power % 2 == 0 or _never_negative(node[1]))


@functools.lru_cache(maxsize=1024)
def _is_square(inside: Node) -> bool:
    """Whether a tree is the square of another one, or a positive number times such a square. Then it has a root either
    at every point or at none."""
    point = {name: Fraction(97 + 13 * turn, 7) for turn, name in enumerate(sorted(symbols(inside)))}
    if not point:
        return False
    work = WorkLimit(1000 // (1 + sum(map(_is_root, walk(inside)))))  # less for each, since 38 nested roots call this
    is_gaussian = ("c", "i") in walk(inside)  # modulo any other prime, -1 has no root to stand for i
    points = (_FieldPoint(part, True, is_gaussian, work) for part in range(_SQUARE_POINTS))
    try:
        first = next(points).has_root(inside)
        is_square = all(one.has_root(inside) == first for one in points)
    except (Undefined, TooBig, ValueError):
        is_square = inside[0] == "^"
    # the root of -x^2 is not |x|
    return is_square and (approximate(inside, point, WorkLimit(100)) or 0) >= 0


@functools.cache
def _prime(is_gaussian: bool) -> int:
    """A secret prime. Modulo a gaussian one -1 has a root; modulo the other one root of each square is a square."""
    numbers = drawn("prime")
    while True:
        prime = numbers.getrandbits(248) * 4 + (1 if is_gaussian else 3)
        if all(pow(numbers.randrange(2, prime), prime - 1, prime) == 1 for _ in range(8)):  # Fermat's test
            return prime


@functools.lru_cache(maxsize=4096)
def _letter(name: str, place: str, prime: int) -> int:
    numbers = drawn(f"{place} {name}")
    while True:
        value = numbers.randrange(2, prime)
        if name != "constant i":
            return value
        root = pow(value, prime // 4, prime)
        if root * root % prime == prime - 1:
            return root


@functools.lru_cache(maxsize=4096)
def _sign_of_ratio(residue: int, prime: int) -> int:
    """The sign, if the residue is a quotient of small numbers, else 0: half of the extended Euclidean algorithm."""
    above, below, before, factor = prime, residue, 0, 1
    while below > _SMALL:
        above, below, before, factor = below, above % below, factor, before - above // below * factor
    return 0 if abs(factor) > _SMALL else 1 if factor > 0 else -1


class _FieldPoint:
    """A point: the residues of all letters, and what is known of signs and whole parts there."""

    def __init__(self, part: int, has_letters: bool, is_gaussian: bool, work: WorkLimit) -> None:
        self._place, self._has_letters, self._work = f"{part}", has_letters, work
        self._prime = _prime(is_gaussian)
        self._signs, self._taken, self._wholes = [(1, 1)], 0, [(0, 0)]
        self._path: list[int] = []  # the signs that are tried, of values of unknown sign in order of occurrence

    def agree(self, gold: Node, other: Node) -> bool:
        """Whether both trees have the same value, for every combination of signs that there may be."""
        while True:
            self._signs, self._taken, self._wholes = [(1, 1)], 0, [(0, 0)]
            if self._of(gold) != self._of(other):
                return False
            while self._path and self._path[-1] < 0:
                self._path.pop()
            if not self._path:
                return True
            self._path[-1] = -1

    def has_root(self, node: Node) -> bool:
        """Whether its value is a square."""
        return pow(self._of(node), self._prime // 2, self._prime) == 1

    def _of(self, node: Node) -> int:
        self._work.spend()
        kind, prime = node[0], self._prime
        if kind == "n":
            number: Fraction = node[1]
            above, below = number.as_integer_ratio()
            return above % prime if below == 1 else above * pow(below, -1, prime) % prime
        if kind == "s" or (kind == "c" and node[1] != "inf"):
            return _letter(f"{'constant ' * (kind == 'c')}{node[1]}", self._place, self._prime)
        if kind == "-":
            return -self._of(node[1]) % prime
        if kind in ("+", "*", "/"):
            left, right = self._of(node[1]), self._of(node[2])
            if kind == "+":
                return (left + right) % prime
            return left * (right if kind == "*" else pow(right, -1, prime)) % prime
        if kind == "^" and (power := _whole_power(node)) is not None:
            return self._power(self._of(node[1]), power)
        value = rational(node, None, self._work)
        if value is not None:
            return self._of(("n", value))
        if not self._has_letters or kind in ("big", "c"):
            raise ValueError("not rational")
        if _is_root(node):
            return self._size(node[1], rational(node[2]) or Fraction(1))
        return self._size(node[2], Fraction(1)) if node[1] == "abs" else self._function(node)

    def _function(self, node: Node) -> int:
        name = node[1]
        parts = [self._of(part) for part in node[1:] if isinstance(part, tuple)]
        value = parts[0]
        if name == "floor":
            return self._whole(value)
        if name == "max":
            for part in parts[1:]:
                apart = self._absolute((value - part) % self._prime)
                value = (value + part + apart) * pow(2, -1, self._prime) % self._prime
            return value
        names = [part for part in node if isinstance(part, str)]
        return _letter(f"{names} {parts}", self._place, self._prime)

    def _size(self, node: Node, power: Fraction) -> int:
        """|node| to `power`, which is whole or half a whole number, computed factor by factor."""
        self._work.spend(sum(1 for _ in walk(node)) // 4)
        if self._prime % 4 == 1:  # with i, |u| may be neither u nor -u; and the power for roots is for the other prime
            raise ValueError("not rational")
        is_half, value = power.denominator == 2, self._of(node)
        times = _whole_power(node) if node[0] == "^" else None
        if times is not None:
            size = self._size(node[1], power * times)
        elif node[0] in ("*", "/") and (not is_half or any(map(_never_negative, node[1:]))):
            two, one = self._size(node[2], power), self._size(node[1], power)
            size = one * (two if node[0] == "*" else pow(two, -1, self._prime)) % self._prime
        elif is_half and not _is_square(node):
            return self._power(_letter(f"root {value}", self._place, self._prime), power.numerator)
        else:
            base = pow(value, (self._prime + 1) // 4, self._prime) if is_half else value
            is_signed = is_half or (power % 2 and not _never_negative(node))
            return self._power(self._absolute(base) if is_signed else base, power.numerator)
        if power == 1 and value:
            self._signs.append((value, 1 if size == value else -1))
        return size

    def _power(self, base: int, power: int) -> int:
        if not base and power <= 0:
            raise Undefined("0 to the power 0 or less")
        return pow(base if power > 0 else pow(base, -1, self._prime), abs(power) % (self._prime - 1), self._prime)

    def _absolute(self, value: int) -> int:
        if not value:
            return 0
        sign = self._sign(value)
        if not sign:
            if self._taken == len(self._path):
                self._path.append(1)
                if len(self._path) > _MAX_SIGNS:
                    raise TooBig("too many signs")
            sign = self._path[self._taken]
            self._taken += 1
            self._signs.append((value, sign))
        return value * sign % self._prime

    def _sign(self, value: int) -> int:
        """The sign, from a value of known sign of which this is a multiple; 0 if there is none."""
        for known, sign in self._signs:
            self._work.spend(25)
            if ratio_sign := _sign_of_ratio(value * pow(known, -1, self._prime) % self._prime, self._prime):
                return sign * ratio_sign
        return 0

    def _whole(self, value: int) -> int:
        """The floor. If `value` differs from one with a known floor by a whole number, so do their floors."""
        self._work.spend(10 + len(self._wholes))
        for known, whole in self._wholes:
            difference = (value - known + self._prime // 2) % self._prime - self._prime // 2
            if abs(difference) < _SMALL:
                return (whole + difference) % self._prime
        whole = _letter(f"floor {value}", self._place, self._prime)
        self._wholes += [(value, whole), (whole, whole)]
        return whole
