"""Whether two trees are equal, by proof where possible, else by their values at points.

- Rational functions (also in pi, e and i) and trees with steps (floor, absolute value, maximum): proved modulo a secret
  prime (`field.py`).
- Others: compared at secret points of both signs and of sizes from 1 to 10^7, exactly if the values are rational, else
  to 40 digits or more. The points are secret so that no answer can be made to fit them.
- With variables that usually are whole numbers (n, k, m ...), trees may be equal for those only: cos(n pi) is (-1)^n.

None means undecided, which is not treated as equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from dppo_megatron.rewards.math.answers import Node, symbols, walk
from dppo_megatron.rewards.math.evaluate import Discrete, Evaluation, Point, TooBig, Undefined, WorkLimit
from dppo_megatron.rewards.math.field import drawn, proved_equal, steps

_WHOLE = frozenset("nmkljNMK")
_MAX_NAMES = 12
_MAX_PERIOD = 60
_PERIODIC = frozenset(["gcd", "lcm", "mod", "floor"])
_SIZES = (1, 1, 4, 1, 1, 1, 30, 3, 300, 10**6, 10**5, 10**7, 10**7)
_NEGATIVE = {1: "one", 4: "all", 7: "one", 10: "one", 12: "all"}
"""Indices of sizes at whose points one variable, or all, are negative."""
_ENOUGH = 3
"""Points at which two functions have to be equal; four times as many for whole numbers."""
_DIGITS = (60, 120, 250, 500, 1000, 2000)
"""Precisions to choose from: each has constants of its own, which take milliseconds the first time."""


def same(gold: Node, other: Node, work: WorkLimit | None = None) -> bool | None:
    """Whether the trees are equal; None if that is undecided, which also sets `work.has_doubt`.

    Example:
        >>> same(parse("2^{-2/3}"), parse("\\\\frac{1}{\\\\sqrt[3]{4}}"))
        True
    """
    work = work or WorkLimit()
    verdict = True if gold == other else _same(gold, other, work)
    work.has_doubt |= verdict is None
    return verdict


def _same(gold: Node, other: Node, work: WorkLimit) -> bool | None:
    names = sorted(symbols(gold) | symbols(other))
    try:
        if gold[0] == other[0] == "n":
            return bool(gold[1] == other[1])
        verdict = proved_equal(gold, other, work)
        if verdict is not None:
            return verdict
        if not names:
            return {"equal": True, "different": False}.get(_at(gold, other, {}, work))
        if found := steps(("+", gold, other)):
            is_discrete = found <= {"floor", "mod"} and _WHOLE.issuperset(names)
            return _same_wholes(gold, other, names, work) if is_discrete else None
        return _same_functions(gold, other, names, work) if len(names) <= _MAX_NAMES else None
    except (TooBig, Undefined, ArithmeticError, RecursionError, ValueError):
        return None


def _same_functions(gold: Node, other: Node, names: list[str], work: WorkLimit) -> bool | None:
    """Compare by values. If two or more variables are negative, a root or logarithm of a product has another branch
    than the product of roots. Such points are skipped, since roots are usually written for positive numbers."""
    has_roots = any(map(_is_branched, walk(("+", gold, other))))
    points = (point for point in _points(names) if not has_roots or sum(value < 0 for value in point.values()) < 2)
    outcomes = _outcomes(gold, other, points, work)
    if outcomes[-1] == "different":
        return _WHOLE.issuperset(names) and _same_wholes(gold, other, names, work)
    if outcomes.count("equal") >= _ENOUGH:
        return True
    return _same_wholes(gold, other, names, work) if "whole" in outcomes else None


def _is_branched(node: Node) -> bool:
    if node[0] != "^":
        return node[0] == "f" and node[1] in ("ln", "arcsin", "arccos")
    (kind, power), base = node[2][:2], node[1]
    is_absolute = kind == "n" and base[0] == "^" and base[2] == ("n", 1 / power)
    return not is_absolute and (kind != "n" or power.denominator != 1)


def _points(names: Sequence[str]) -> Iterator[dict[str, Fraction]]:
    """Secret points of growing size: positive ones, and some with one or all coordinates negative."""
    numbers = drawn(repr(names))
    for turn, size in enumerate(_SIZES):
        below = {"one": [numbers.choice(names)], "all": names}.get(_NEGATIVE.get(turn, ""), ())
        point = {name: Fraction(numbers.randrange(1, 997), 997) * size for name in names}
        yield {name: -value if name in below else value for name, value in point.items()}


def _same_wholes(gold: Node, other: Node, names: Sequence[str], work: WorkLimit) -> bool | None:
    """Whether they are equal for whole numbers: small ones in a row, large ones, and a period of periodic functions."""
    sums = [part for node in walk(("+", gold, other)) if node[0] == "big" for part in walk(node)]
    if len(names) > 3 or ("c", "i") in sums or ("c", "pi") in sums:  # a sum of 17 cosines is 0 but at every 17th n
        return None
    numbers = drawn(f"whole {names}")
    points: list[Point] = [dict.fromkeys(names, Fraction(both)) for both in range(1, 13)]
    start = sorted(numbers.sample(range(100, 500), len(names)))
    orders = enumerate([*itertools.permutations(names)] * 4)
    points += [{name: Fraction(at + turn) for name, at in zip(order, start, strict=True)} for turn, order in orders]
    num_near = len(points)
    bounds = (*(12,) * 12 * (len(names) - 1), 30, 90, 300, 1000, 10**6, 10**13, 10**20)
    points += [{name: Fraction(numbers.randrange(1, bound)) for name in names} for bound in bounds]
    points += [{name: Fraction(-numbers.randrange(1, bound)) for name in names} for bound in (30, 10**4, 10**9)]
    periodic = {node for node in walk(("+", gold, other)) if node[0] == "f" and node[1] in _PERIODIC and symbols(node)}
    if periodic:  # gcd(n, 1009) - 1 is 0 at nearly every point
        parts = [part for node in periodic for part in walk(node)]
        period = math.prod(abs(part[1].numerator) * part[1].denominator for part in parts if part[0] == "n" and part[1])
        if len(names) > 1 or period > _MAX_PERIOD or not all(map(_has_period, parts)):
            return None
        far = numbers.randrange(10**12)
        points += [{names[0]: Fraction(start + whole)} for start in (12, far) for whole in range(1, period + 1)]
    outcomes = _outcomes(gold, other, points, work)
    if outcomes[-1] == "different":
        return False
    # the first 12 points are not secret: trees with values at those alone are not accepted
    if "equal" not in outcomes[12:num_near] or "too big" in outcomes[12:num_near]:
        return None
    return outcomes.count("equal") >= 4 * _ENOUGH or None


def _has_period(node: Node) -> bool:
    """Whether the period follows from the numbers in the node, if so in its parts: not for floor(1 / (1 + n^2)), which
    is 0 but at one point."""
    others = [part for part in node[2:] if part[0] != "n"]
    if node[0] == "^":  # not (n/2)^5, whose period is 32
        return not others and all(part[0] in "s+-*^" or (part[0] == "n" and part[1] % 1 == 0) for part in walk(node))
    return node[0] in "ns+-*" or node[:2] == ("f", "floor") or (node[0] == "/" and not others)


def _outcomes(gold: Node, other: Node, points: Iterable[Point], work: WorkLimit) -> list[str]:
    """The outcome at each of the points, up to the first `different`."""
    outcomes = []
    for point in points:
        outcomes.append(_at(gold, other, point, work))
        if outcomes[-1] == "different":
            break
    return outcomes


def _at(gold: Node, other: Node, values: Point, work: WorkLimit) -> str:
    """`equal`, `different`, `other branch` (of a root), `whole` (defined for whole numbers only), `outside` (one has a
    factorial that is not defined), `undefined` or `too big`. `equal` is checked again with 40 digits more than the
    longest fraction has that was rounded."""
    bits = 0
    for digits in _DIGITS:
        if digits < 40 + bits // 3:
            continue
        # at most half: e^{5t} at t = 290 takes 2000 digits, and the other points need operations too
        allowed = work.left // 2 if values else work.left
        part = WorkLimit(allowed)
        try:
            found, bits = _compared(gold, other, values, digits, part)
        except Discrete:
            return "whole"
        except (TooBig, OverflowError):
            return "too big"
        finally:
            work.left -= allowed - part.left
        if found != "equal" or digits >= 40 + bits // 3:
            return found
    return "too big"


def _compared(gold: Node, other: Node, values: Point, digits: int, work: WorkLimit) -> tuple[str, int]:
    """The outcome at `digits` digits, and the bits of the longest fraction that was rounded."""
    ours, theirs = (Evaluation(values, work, digits) for _ in range(2))
    left, right = _value(ours, gold), _value(theirs, other)
    if left is None or right is None:
        # n!/(n-2)! is n(n-1) but at n = 1. With letters other than n, k, ... only the reference may be undefined.
        is_outside = ours.is_outside or (theirs.is_outside and _WHOLE.issuperset(values))
        return "undefined" if left is right or not values else "outside" if is_outside else "different", 0
    if isinstance(left, Fraction) and isinstance(right, Fraction):  # with bits, since a floor may be of a rounded value
        return "equal" if left == right else "different", max(ours.bits, theirs.bits)
    left, right = ours.lift(left), theirs.lift(right)
    bits, tiny = max(ours.bits, theirs.bits), ours.tiny * max(abs(left), abs(right), ours.largest, theirs.largest)
    if abs(left - right) <= tiny:
        return "equal", bits
    is_branch = (ours.has_branch or theirs.has_branch) and min(abs(left.imag), abs(right.imag)) > tiny
    return "other branch" if is_branch else "different", bits


def _value(at: Evaluation, node: Node) -> Any:
    """The value; None if there is none."""
    try:
        return at.of(node)
    except (Undefined, ZeroDivisionError, ValueError):
        return None
