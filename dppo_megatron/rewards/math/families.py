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
    if len(ours) < 2 * len(items[0]) or len(theirs) < 2 * len(items[1]):
        return False
    sizes = [approximate(step, None, rules.work) or Fraction(0) for _, step in ours + theirs]
    ratios = [(size / sizes[0]).limit_denominator(_MAX) if sizes[0] else Fraction(0) for size in sizes]
    if 0 in ratios:
        return False
    times = math.lcm(*(ratio.numerator for ratio in ratios))
    period = _times(ours[0][1], Fraction(times, math.gcd(*(ratio.denominator for ratio in ratios))))
    members: list[list[Node]] = [[], []]
    for index, (start, step) in enumerate(ours + theirs):
        num = _whole_ratio(period, step, rules)
        if not num or abs(num) > _MAX:
            return False
        members[index >= len(ours)] += [("+", start, _times(step, turn)) for turn in range(abs(num))]
    if max(map(len, members)) > 2 * _MAX:
        return False
    places = [[approximate(("/", node, period), None, rules.work) or Fraction(0) for node in side] for side in members]
    for side in (0, 1):  # each number is a whole number of periods from one of the other side
        for node, place in zip(members[side], places[side], strict=True):
            near = (abs(place - other - round(place - other)) for other in places[1 - side])
            _, closest = min(zip(near, range(len(members[1 - side])), strict=True))
            if _whole_ratio(("+", node, ("-", members[1 - side][closest])), period, rules) is None:
                return False
    return True


def _times(node: Node, factor: int | Fraction) -> Node:
    return ("*", node, ("n", Fraction(factor)))


def _whole_ratio(node: Node, unit: Node, rules: Rules) -> int | None:
    """How many units the number is; None if that is not whole."""
    ratio = approximate(("/", node, unit), None, rules.work)
    if ratio is None or abs(ratio - round(ratio)) > Fraction(1, 10**9):
        return None
    return round(ratio) if same(node, _times(unit, round(ratio)), rules.work) else None


def _progressions(item: Answer, rules: Rules) -> list[tuple[Node, Node]]:
    """Start and step for even and for odd numbers, since (-1)^n may be in it; empty for anything else."""
    value = item.value if isinstance(item, Named) else item
    if not isinstance(value, Value) or value.unit or len(names := symbols(value.node)) != 1 or not names <= _WHOLE:
        return []
    found = []
    for rest in range(2):
        numbers = [{name: ("n", Fraction(2 * turn + rest)) for name in names} for turn in (0, 1, 977)]
        start, next_, far = (substituted(value.node, by) for by in numbers)
        step: Node = ("+", next_, ("-", start))
        if not same(far, ("+", start, _times(step, 977)), rules.work):
            return []
        found.append((start, step))
    return found


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
        return _same_on_spans(ours, theirs, rules)
    residues = [item for item in map(_residue, conditions) if item]
    others = (where for where in conditions if not _residue(where))
    names, modulus = {name for name, _, _ in residues}, math.lcm(*(by for _, by, _ in residues))
    are_known = all(isinstance(where, Intervals) and where.pieces == EVERY_REAL for where in others)  # or `otherwise`
    if not are_known or len(names) != 1 or modulus > _MAX:
        return False
    for rest in range(modulus):
        by = {name: ("+", _times(("s", "n"), modulus), ("n", Fraction(rest))) for name in names}
        values = [value for pieces in (ours, theirs) for value in _at_residue(pieces, rest)]
        are_functions = len(values) == 2 and all(symbols(value) <= names for value in values)
        if not are_functions or not same(*(substituted(value, by) for value in values), rules.work):
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
    """The expression for numbers with this remainder, else that for all others."""
    there = [value for value, where in pieces if (mod := _residue(where)) and rest % mod[1] == mod[2]]
    return (there or [value for value, where in pieces if not _residue(where)])[:1]


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
            by = {both.name: piece.low} if both and same(piece.low, piece.high, rules.work) else {}
            if not same(substituted(left[0], by), substituted(right[0], by), rules.work):
                return False
    return True
