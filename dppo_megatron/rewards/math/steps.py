"""Where a function of one variable changes its branch: the places that a comparison by values must look at on both
sides. |x - 5| and 5 - x agree at every point below 5."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

from dppo_megatron.rewards.math.answers import Node, symbols
from dppo_megatron.rewards.math.evaluate import Point, WorkLimit, approximate

if TYPE_CHECKING:
    from random import Random

_MAX_DEGREE = 8
_MAX_PLACES = 40
_GRID = [
    Fraction(size) for size in ("0.01", "0.2", "0.6", 1, 2, 4, 8, 16, 40, 100, 300, 1000, 5000, 10**5, 10**7, 10**13)
]
_STAIRS = {("f", "floor"), ("f", "ceil")}  # whose own steps are all that they have
Polynomial = list[Fraction]
"""Coefficients from the constant up."""
_Quotient = tuple[Polynomial, Polynomial]


def breaks(node: Node, name: str, fixed: Point, drawn: Random, work: WorkLimit) -> Iterator[tuple[Fraction, bool]]:
    """Each step of the tree along `name` (True), and points (False) between two neighbours and beyond the outermost,
    where the other variables are `fixed`."""
    places: set[Fraction] = set()
    has_stairs = False
    for inside, is_stair in dict.fromkeys(_steps(node)):
        if name in symbols(inside) and inside[:2] not in _STAIRS:
            has_stairs |= is_stair
            places.update(_zeros(inside, name, fixed, is_stair, drawn, work))
    if not places:
        return
    most = _MAX_PLACES // 3 if fixed else _MAX_PLACES
    ordered = sorted(places if len(places) <= most else drawn.sample(sorted(places), most))
    yield from ((place, True) for place in ordered)
    for low, high in itertools.pairwise(ordered):
        yield low + (high - low) * Fraction(drawn.randrange(1, 997), 997), False
        if len(ordered) < most // 2 and not fixed:  # where two steps cross is not always found exactly
            yield low + (high - low) * Fraction(drawn.randrange(1, 997), 99_700), False
            yield high - (high - low) * Fraction(drawn.randrange(1, 997), 99_700), False
    for size in (*(1,) * (5 if fixed else 15 if has_stairs else 2), 10, 10**3, 10**6):
        yield ordered[0] - (size + abs(ordered[0])) * Fraction(drawn.randrange(1, 997), 997), False
        yield ordered[-1] + (size + abs(ordered[-1])) * Fraction(drawn.randrange(1, 997), 997), False


def has_steps(node: Node) -> bool:
    """Whether it changes its branch anywhere."""
    return next(_steps(node), None) is not None


def _steps(node: Node) -> Iterator[tuple[Node, bool]]:
    """What has a step where it is zero, or (True) at every whole number."""
    if node[0] == "f" and node[1] in ("abs", "floor", "ceil"):
        yield node[2], node[1] != "abs"
    elif node[0] == "root" or (node[0] == "^" and (node[2][0] != "n" or node[2][1].denominator != 1)):
        yield (node[2] if node[0] == "root" else node[1]), False
    elif node[0] == "of" and node[1] in ("max", "min"):
        for one, two in itertools.combinations(node[2:], 2):
            yield ("+", one, ("-", two)), False
    elif node[0] == "of" and node[1] == "mod":
        yield ("/", node[2], node[3]), True
    elif node[0] == "big":
        return  # defined for whole numbers only
    for part in node[1:]:
        if isinstance(part, tuple):
            yield from _steps(part)


def _zeros(inside: Node, name: str, fixed: Point, is_stair: bool, drawn: Random, work: WorkLimit) -> list[Fraction]:
    targets = [Fraction(0)]
    if is_stair:
        there = approximate(inside, {**fixed, name: Fraction(drawn.randrange(1, 10**6), 7)}, work)
        far = math.floor(there) if there is not None else drawn.randrange(100)
        targets = [Fraction(whole) for whole in (*range(-4, 8), far, far + 1)]
    try:
        pieces = _quotients(inside, name, fixed, work)
    except _NoPolynomial:
        return [sign * size for sign in (-1, 1) for size in _GRID]  # something else than polynomials: points between
    found = []
    for above, below in pieces:
        found += _roots(below, work)
        for target in targets:
            found += _roots(_sum(above, [-target * part for part in below]), work)
    return found


class _NoPolynomial(Exception):
    """No quotient of polynomials of a small degree."""


def _quotients(node: Node, name: str, fixed: Point, work: WorkLimit) -> list[_Quotient]:
    """The quotients of polynomials of the variable that the tree is made of, one in each of its pieces."""
    work.spend(3)
    kind, one = node[0], [Fraction(1)]
    if kind not in ("+", "-", "*", "/", "s") and name not in symbols(node):
        value = node[1] if kind == "n" else approximate(node, fixed, work)
        if value is None:
            raise _NoPolynomial
        return [([value], one)]
    if kind == "s":
        return [([Fraction(0), Fraction(1)] if node[1] == name else [fixed[node[1]]], one)]
    if node[:2] in _STAIRS:
        return _quotients(node[2], name, fixed, work)  # less than 1 off
    if node[:2] in (("of", "max"), ("of", "min")):
        return _few([piece for part in node[2:] for piece in _quotients(part, name, fixed, work)])
    if kind == "root" and node[2][0] == "^" and node[1] == node[2][2]:
        return _signed(_quotients(node[2][1], name, fixed, work), both=True)
    if kind == "-" or node[:2] == ("f", "abs"):
        return _signed(_quotients(node[-1], name, fixed, work), both=kind == "f")
    if kind in ("+", "*", "/"):
        left, right = _quotients(node[1], name, fixed, work), _quotients(node[2], name, fixed, work)
        return _few([_combined(kind, *both) for both in itertools.product(left, right)])
    if kind == "^" and node[2][0] == "n" and node[2][1].denominator == 1 and 0 <= node[2][1] <= _MAX_DEGREE:
        powers = []
        for base in _quotients(node[1], name, fixed, work):
            result = (one, one)
            for _ in range(int(node[2][1])):
                result = _combined("*", result, base)
            powers.append(result)
        return powers
    raise _NoPolynomial


def _combined(kind: str, left: _Quotient, right: _Quotient) -> _Quotient:
    (a, b), (c, d) = left, right
    if kind == "+":
        return (_sum(a, c), b) if b == d else (_sum(_times(a, d), _times(c, b)), _times(b, d))
    return (_times(a, c), _times(b, d)) if kind == "*" else (_times(a, d), _times(b, c))


def _signed(pieces: list[_Quotient], *, both: bool) -> list[_Quotient]:
    return _few([*(pieces if both else []), *(([-part for part in above], below) for above, below in pieces)])


def _few(pieces: list[_Quotient]) -> list[_Quotient]:
    kept: list[_Quotient] = []
    for piece in pieces:
        if piece not in kept:
            kept.append(piece)
    if len(kept) > 12:
        raise _NoPolynomial
    return kept


def _sum(one: Polynomial, two: Polynomial) -> Polynomial:
    return [a + b for a, b in itertools.zip_longest(one, two, fillvalue=Fraction(0))]


def _times(one: Polynomial, two: Polynomial) -> Polynomial:
    if len(one) + len(two) - 2 > _MAX_DEGREE:
        raise _NoPolynomial
    product = [Fraction(0)] * (len(one) + len(two) - 1)
    for (i, a), (j, b) in itertools.product(enumerate(one), enumerate(two)):
        product[i + j] += a * b
    return product


def _roots(polynomial: Polynomial, work: WorkLimit) -> list[Fraction]:
    """The real roots, between those of the derivative; to 15 digits from degree two on."""
    while polynomial and not polynomial[-1]:
        polynomial = polynomial[:-1]
    if len(polynomial) < 2:
        return []
    if len(polynomial) == 2:
        return [-polynomial[0] / polynomial[1]]
    size = 1 + max(abs(part / polynomial[-1]) for part in polynomial)
    turns = _roots([part * power for power, part in enumerate(polynomial)][1:], work)
    edges = sorted({-size, *turns, size})
    found = [edge for edge in edges if not _value(polynomial, edge)]
    for low, high in itertools.pairwise(edges):
        below, above = _value(polynomial, low), _value(polynomial, high)
        if below * above < 0:
            found.append(_bisected(polynomial, low, high, below < 0, work))
    return found


def _bisected(polynomial: Polynomial, low: Fraction, high: Fraction, rises: bool, work: WorkLimit) -> Fraction:
    floats = [float(part) for part in polynomial]
    a, b = float(low), float(high)
    for _ in range(70):
        work.spend(1)
        middle = (a + b) / 2
        value = sum(part * middle**power for power, part in enumerate(floats))
        a, b = (middle, b) if (value < 0) == rises else (a, middle)
    return Fraction(a)


def _value(polynomial: Polynomial, at: Fraction) -> Fraction:
    value = Fraction(0)
    for part in reversed(polynomial):
        value = value * at + part
    return value
