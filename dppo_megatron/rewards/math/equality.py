"""Whether two trees are equal, proved and not sampled where that can be.

- Rational functions (also in pi, e and i) and all that has steps (floor, absolute value, maximum): modulo a secret
  prime (`field.py`).
- Others: at secret points of both signs and of sizes from 1 to 10^7: exactly where the value is rational, else in
  double precision, and, where that finds no difference, to 40 digits or more.
- Variables named as whole numbers are (n, k, m ...) may be equal for whole numbers only: cos(n pi) is (-1)^n.

None, "cannot be said", is not a yes. An answer cannot be made for known points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from dppo_megatron.rewards.math.answers import Node, contains, symbols
from dppo_megatron.rewards.math.evaluate import (
    Discrete,
    Doubles,
    Evaluation,
    Irrational,
    Point,
    TooBig,
    Undefined,
    Unsure,
    WorkLimit,
    digits,
    exact,
)
from dppo_megatron.rewards.math.field import drawn, proved_equal, steps

_WHOLE = frozenset("nmkljNMK")
_MAX_NAMES = 12
_MAX_PERIOD = 60
_SIZES = (1, 1, 4, 1, 1, 1, 30, 3, 300, 10**6, 10**5, 10**7, 10**7)
_NEGATIVE = {1: "one", 4: "all", 7: "one", 10: "one", 12: "all"}
"""Which of the sizes are for points of which one variable, or all, are below zero."""
_ENOUGH = 3
"""Points at which two functions have to be equal; of whole numbers, four times as many."""
_DIGITS = (60, 120, 250, 500, 1000, 2000)
"""Of which one is chosen: each has constants of its own, which take milliseconds the first time."""
_ERRORS = (ZeroDivisionError, ValueError)


def same(gold: Node, other: Node, work: WorkLimit | None = None) -> bool | None:
    """Whether the trees are equal; None if that cannot be said.

    Example:
        >>> same(parse("2^{-2/3}"), parse("\\\\frac{1}{\\\\sqrt[3]{4}}"))
        True
    """
    if gold == other:
        return True
    work = work or WorkLimit()
    names = sorted(symbols(gold) | symbols(other))
    try:
        try:
            if not names and (left := exact(gold, None, work)) is not None:
                right = exact(other, None, work)
                if right is not None:
                    return left == right
        except TooBig:
            work.spend()  # also of digits, which residues do not have
        verdict = proved_equal(gold, other, work)
        if verdict is not None:
            return verdict
        if not names:
            return _near(gold, other, {}, work) == "equal"
        if found := steps(("+", gold, other)):
            is_discrete = found <= {"floor", "ceil", "mod"} and _WHOLE.issuperset(names)
            return _same_wholes(gold, other, names, work) if is_discrete else None
        return _same_functions(gold, other, names, work) if len(names) <= _MAX_NAMES else None
    except (TooBig, Undefined, Irrational, OverflowError, RecursionError, *_ERRORS):
        return None


def _same_functions(gold: Node, other: Node, names: list[str], work: WorkLimit) -> bool | None:
    """By their values. With two variables or more below zero, roots and logarithms of products have other branches than
    products of roots; who writes them means positive numbers."""
    has_roots = contains(("+", gold, other), {"root", "log", "^", "f"}, _is_branched)
    outcomes = []
    for point in _points(names):
        if has_roots and sum(value < 0 for value in point.values()) > 1:
            continue
        outcomes.append(_at(gold, other, point, work))
        if outcomes[-1] in ("different", "one is real"):
            return _WHOLE.issuperset(names) and _same_wholes(gold, other, names, work)
    if outcomes.count("equal") >= _ENOUGH:
        return True
    if "whole" in outcomes:
        return _same_wholes(gold, other, names, work)
    return False if "other branch" in outcomes else None


def _is_branched(node: Node) -> bool:
    if node[0] == "root":  # of a square it is an absolute value
        return bool(node[2][0] != "^" or node[2][2] != node[1])
    if node[0] == "^":
        return bool(node[2][0] != "n" or node[2][1].denominator != 1)
    return node[0] == "log" or node[1] in ("ln", "arcsin", "arccos")


def _points(names: Sequence[str]) -> Iterator[dict[str, Fraction]]:
    """Positive ones, then ones of which one, then all are negative, of growing size."""
    numbers = drawn(repr(names))
    for turn, size in enumerate(_SIZES):
        below = {"one": [numbers.choice(names)], "all": names}.get(_NEGATIVE.get(turn, ""), ())
        point = {name: Fraction(numbers.randrange(1, 997), 997) * size for name in names}
        yield {name: -value if name in below else value for name, value in point.items()}


def _same_wholes(gold: Node, other: Node, names: Sequence[str], work: WorkLimit) -> bool | None:
    """Equal for whole numbers: runs of small ones, large ones, and a whole period of what repeats."""
    if len(names) > 3:
        return None
    numbers = drawn(f"whole {names}")
    points = [dict.fromkeys(names, Fraction(both)) for both in range(1, 13)]
    bounds = (*(12,) * 12 * (len(names) - 1), 30, 90, 300, 1000, 10**6, 10**13, 10**20)
    points += [{name: Fraction(numbers.randrange(1, bound)) for name in names} for bound in bounds]
    points += [{name: Fraction(-numbers.randrange(1, bound)) for name in names} for bound in (30, 10**4, 10**9)]
    if periodic := _periodic(gold) | _periodic(other):  # gcd(n, 1009) - 1 is 0 at nearly every point
        period = math.prod(abs(number.numerator) * number.denominator for node in periodic for number in _numbers(node))
        if len(names) > 1 or period > _MAX_PERIOD:
            return None
        far = numbers.randrange(10**12)
        points += [{names[0]: Fraction(start + whole)} for start in (12, far) for whole in range(1, period + 1)]
    outcomes = []
    for point in points:
        outcomes.append(_at(gold, other, point, work))
        if outcomes[-1] in ("different", "one is real"):
            return False
    return True if outcomes.count("equal") >= 4 * _ENOUGH else None


def _periodic(node: Node) -> set[Node]:
    """Where the tree takes a whole part, gcd, lcm or remainder of something with a variable."""
    if node[1] in ("gcd", "lcm", "mod", "floor", "ceil") and symbols(node):
        return {node}
    return set().union(*(_periodic(part) for part in node[1:] if isinstance(part, tuple)))


def _numbers(node: Node) -> Iterator[Fraction]:
    """In the tree, without 0."""
    if node[0] == "n" and node[1]:
        yield node[1]
    for part in node[1:]:
        if isinstance(part, tuple):
            yield from _numbers(part)


def _at(gold: Node, other: Node, values: Point, work: WorkLimit) -> str:
    """`equal`, `different`, `one is real` (or defined), `other branch`, `whole` (defined for whole numbers only), or
    `undefined` (or too large)."""
    kept, there = [], []
    for node in (gold, other):
        try:
            kept.append(Evaluation(values, None, work).of(node))
            there.append(True)
        except Discrete:
            return "whole"
        except (Undefined, *_ERRORS):
            there.append(False)
        except Irrational:
            there.append(True)
        except (TooBig, OverflowError):
            if work.left < 0:
                raise
            return "undefined"
    if not all(there):
        return "one is real" if any(there) else "undefined"
    if len(kept) == 2:
        return "equal" if kept[0] == kept[1] else "different"
    try:
        return _near(gold, other, values, work)
    except Discrete:
        return "whole"
    except (Undefined, TooBig, OverflowError, Irrational, *_ERRORS):
        if work.left < 0:
            raise TooBig from None
        return "undefined"


def _near(gold: Node, other: Node, values: Point, work: WorkLimit) -> str:
    """What `_at` says of irrational values: differences are found in double precision, equality with more digits."""
    bits = 0
    try:
        found, bits = _compared(gold, other, values, Doubles, work)
        if found:
            return found
    except (Unsure, OverflowError):
        pass
    # as many digits as the longest fraction beside the irrational part has, and 40 more
    needed = 60 if bits < 64 else 60 + bits // 3
    for count in _DIGITS:
        if count >= needed:
            found, bits = _compared(gold, other, values, digits(count), work)
            needed = bits // 3
            if count >= needed:
                return found
    raise TooBig


def _compared(gold: Node, other: Node, values: Point, arithmetic: Any, work: WorkLimit) -> tuple[str, int]:
    """And the bits of the longest fraction that was rounded."""
    ours, theirs = Evaluation(values, arithmetic, work), Evaluation(values, arithmetic, work)
    ours_value, theirs_value = ours.of(gold), theirs.of(other)
    if isinstance(ours_value, Fraction) and isinstance(theirs_value, Fraction):
        return ("equal" if ours_value == theirs_value else "different"), 0
    left, right = ours.lift(ours_value), theirs.lift(theirs_value)
    size, bits = max(abs(left), abs(right)), max(ours.bits, theirs.bits)
    apart, rough = abs(left - right), max(size, ours.largest, theirs.largest)
    if not arithmetic.precise and not (math.isfinite(rough) and rough > 1e-150):
        raise OverflowError
    if apart <= rough * arithmetic.tiny:
        return ("equal" if arithmetic.precise else ""), bits
    if not ours.has_branch and not theirs.has_branch:
        return "different", bits
    reals = [abs(value.imag) <= rough * arithmetic.tiny for value in (left, right)]
    strict = [real and not side.has_branch for real, side in zip(reals, (ours, theirs), strict=True)]
    if all(strict) or (all(reals) and not any(strict)):
        return "different", bits
    return ("different" if all(reals) else "one is real" if any(reals) else "other branch"), bits
