"""Answers that are equal as a whole and not part by part: numbers in other arithmetic progressions (n pi is 2n pi and
(2n + 1) pi), a function in other pieces."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

from dppo_megatron.rewards.math.answers import Answer, AnswerList, Intervals, Named, Node, Value, substituted, symbols
from dppo_megatron.rewards.math.compare import differ, letters, letters_of
from dppo_megatron.rewards.math.equality import Rules, same
from dppo_megatron.rewards.math.evaluate import approximate
from dppo_megatron.rewards.math.field import drawn
from dppo_megatron.rewards.math.number_sets import as_spans, complement, intersection
from dppo_megatron.rewards.math.special import EVERY_REAL

_WHOLE = frozenset("ijklmn")
_MAX = 24  # of one answer: progressions, numbers in a period, pieces
_Pieces = list[tuple[Node, Answer | None]]


def same_family(gold: Answer, other: Answer, rules: Rules) -> bool:
    """Whether both are the same numbers b + s n, where n is any whole number: a letter that the reference declares and
    the problem does not have. Whatever the floats suggest is proved."""
    if not rules.wholes or not rules.problem or letters_of(rules.problem) & rules.wholes:
        return False
    items = [side.items if isinstance(side, AnswerList) and side.kind != "tuple" else (side,) for side in (gold, other)]
    names = ([item.name for item in side if isinstance(item, Named)] for side in items)
    if max(map(len, items)) > _MAX // 2 or any(itertools.starmap(differ, itertools.product(*names))):
        return False
    ours, theirs = ([part for item in side for part in _progressions(item, rules)] for side in items)
    if len(ours) < len(items[0]) or len(theirs) < len(items[1]):
        return False
    unit, bases, sizes = ours[0][1], list[Node](), list[Fraction]()
    places: list[tuple[int, Fraction]] = []  # a base, and how many units from it a progression starts
    for start, step in ours + theirs:
        sizes.append(_ratio(step, unit, rules) or Fraction(0))
        apart = (_ratio(("+", start, ("-", base)), unit, rules) for base in bases)
        place = next(((at, ratio) for at, ratio in enumerate(apart) if ratio is not None), None)
        places.append(place or (len(bases), Fraction(0)))
        bases += [] if place else [start]
    if 0 in sizes:
        return False
    period = Fraction(math.lcm(*(size.numerator for size in sizes)), math.gcd(*(size.denominator for size in sizes)))
    if any(abs(period / size) > _MAX for size in sizes):
        return False
    members = [
        {(base, (start + size * turn) % period) for turn in range(abs(period // size))}
        for (base, start), size in zip(places, sizes, strict=True)
    ]
    return set().union(*members[: len(ours)]) == set().union(*members[len(ours) :])


def _times(node: Node, factor: int | Fraction) -> Node:
    return ("*", node, ("n", Fraction(factor)))


def _ratio(node: Node, unit: Node, rules: Rules) -> Fraction | None:
    """How many units the number is; None if that is not a simple fraction."""
    value = approximate(("/", node, unit), None, rules.work)
    ratio = value and value.limit_denominator(1000)
    is_near = value is not None and ratio is not None and abs(value - ratio) < Fraction(1, 10**9)
    return ratio if is_near and ratio is not None and same(node, _times(unit, ratio), rules.work) else None


def _progressions(item: Answer, rules: Rules) -> list[tuple[Node, Node]]:
    """Start and step for all whole numbers, or for even and odd ones, since (-1)^n may be in it; else nothing."""
    value = item.value if isinstance(item, Named) else item
    if not isinstance(value, Value) or value.unit or len(names := symbols(value.node)) != 1 or not names <= _WHOLE:
        return []
    last = drawn("progression").randrange(1000, 2000)  # unknown: n(n - 1)(n - 977) is 0 in three places
    for num in (1, 2):
        found = []
        for rest in range(num):
            numbers = [{name: ("n", Fraction(num * turn + rest)) for name in names} for turn in (0, 1, last)]
            start, next_, far = (substituted(value.node, by) for by in numbers)
            step: Node = ("+", next_, ("-", start))
            if same(far, ("+", start, _times(step, last)), rules.work):
                found.append((start, step))
        if len(found) == num:
            return found
    return []


def same_pieces(gold: Answer, other: Answer, rules: Rules) -> bool:
    """Whether both, of which one is in pieces, are the same function of one letter: on each part of the real numbers
    where both have one expression, or for each remainder of a whole number."""
    if isinstance(gold, Named) and isinstance(other, Named) and differ(gold.name, other.name):
        return False
    ours, theirs = _pieces(gold), _pieces(other)
    conditions = [where for _, where in ours + theirs if where is not None]
    if not (ours and theirs and conditions) or len(ours) * len(theirs) > _MAX:
        return False
    if all(isinstance(where, Intervals) for where in conditions):
        named = {where.name for where in conditions if isinstance(where, Intervals)} - {""}
        return len(named) < 2 and _same_on_spans(ours, theirs, rules)
    residues = [item for item in map(_residue, conditions) if item]
    others = (where for where in conditions if not _residue(where))
    names, modulus = {name for name, _, _ in residues}, math.lcm(*(by for _, by, _ in residues))
    are_known = all(isinstance(where, Intervals) and where.pieces == EVERY_REAL for where in others)  # or `otherwise`
    if not are_known or len(names) != 1 or modulus > _MAX:
        return False
    for rest in range(modulus):
        by = {name: ("+", _times(("s", "n"), modulus), ("n", Fraction(rest))) for name in names}
        sides = [_at_residue(pieces, rest) for pieces in (ours, theirs)]
        if not all(sides) or not symbols(("+", *sides[0], *sides[1])) <= names:
            return False
        first, *more = (substituted(value, by) for side in sides for value in side)
        if not all(same(first, value, rules.work) for value in more):
            return False
    return True


def _pieces(answer: Answer) -> _Pieces:
    answer = answer.value if isinstance(answer, Named) else answer
    if isinstance(answer, Value):
        return [] if answer.unit else [(answer.node, None)]
    found: _Pieces = []
    for row in answer.items if isinstance(answer, AnswerList) and answer.kind == "cases" else ():
        value, where = row.items if isinstance(row, AnswerList) else (row, row)
        spans = as_spans(where.value) if isinstance(where, Named) and not letters(where) else None
        if not isinstance(value, Value):
            return []
        found.append((value.node, replace(spans, name=where.name) if spans and isinstance(where, Named) else where))
    return found


def _residue(where: Answer | None) -> tuple[str, int, int] | None:
    """The letter, modulus and remainder of a congruence."""
    node = where.value.node if isinstance(where, Named) and isinstance(where.value, Value) else ("",)
    is_class = isinstance(where, Named) and node[0] == "+" and node[1][0] == "*" and node[1][2] == ("s", "_")
    return (where.name, int(node[1][1][1]), int(node[2][1])) if is_class and isinstance(where, Named) else None


def _at_residue(pieces: _Pieces, rest: int) -> list[Node]:
    """The expressions for numbers with this remainder, else that for all others."""
    there = [value for value, where in pieces if (mod := _residue(where)) and rest % mod[1] == mod[2]]
    return there or [value for value, where in pieces if not _residue(where)][:1]


def _same_on_spans(ours: _Pieces, theirs: _Pieces, rules: Rules) -> bool:
    every = Intervals(EVERY_REAL)
    spans = [[where if isinstance(where, Intervals) else every for _, where in side] for side in (ours, theirs)]
    domains = [Intervals(tuple(piece for span in side for piece in span.pieces)) for side in spans]
    for one, two in (domains, domains[::-1]):
        beyond = intersection(one, complement(two))
        if beyond is None or beyond.pieces:
            return False
    for (left, right), (here, there) in zip(itertools.product(ours, theirs), itertools.product(*spans), strict=True):
        both = intersection(here, there)
        for piece in both.pieces if both else ():
            is_point = same(piece.low, piece.high, rules.work)
            if is_point and not any(
                same(span.pieces[0].low, span.pieces[0].high, rules.work) for span in (here, there)
            ):
                return False  # an end that has moved to another piece is another condition, whatever the values there
            by = {both.name: piece.low} if both and is_point else {}
            if not same(substituted(left[0], by), substituted(right[0], by), rules.work):
                return False
    return True
