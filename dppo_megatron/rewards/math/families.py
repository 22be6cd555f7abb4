"""Answers that are equal as a whole and not part by part: numbers in other arithmetic progressions (n pi is 2n pi and
(2n + 1) pi), a function in other pieces."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

from dppo_megatron.rewards.math import answers
from dppo_megatron.rewards.math.answers import Answer, AnswerList, Named, Node, Value, substituted, symbols
from dppo_megatron.rewards.math.compare import differ, letters, letters_of
from dppo_megatron.rewards.math.equality import Rules, same
from dppo_megatron.rewards.math.evaluate import WorkLimit, approximate
from dppo_megatron.rewards.math.number_sets import as_spans, complement, intersection
from dppo_megatron.rewards.math.special import EVERY_REAL

_WHOLE = frozenset("ijklmn")
_MAX = 12  # of one answer: progressions, numbers in a period, pieces
_Piece = tuple[Node, Answer | None]


def same_family(gold: Answer, other: Answer, rules: Rules) -> bool:
    """Whether both are the same numbers b + s n, where n is any whole number: a letter that the reference declares and
    the problem does not have. Whatever the floats suggest is proved."""
    if not rules.wholes or not rules.problem or letters_of(rules.problem) & rules.wholes:
        return False
    names = [[item.name for item in _items(answer) if isinstance(item, Named)] for answer in (gold, other)]
    if any(itertools.starmap(differ, itertools.product(*names))):
        return False
    ours, theirs = (_progressions(answer, rules.work) for answer in (gold, other))
    sizes = [approximate(step, None, rules.work) for _, step in ours + theirs]
    if not (ours and theirs) or not all(sizes):
        return False
    ratios = [Fraction(size / sizes[0]).limit_denominator(_MAX) for size in sizes]
    times = math.lcm(*(abs(ratio.numerator) for ratio in ratios))
    period = ("*", ours[0][1], ("n", Fraction(times, math.gcd(*(ratio.denominator for ratio in ratios)))))
    members: list[list[Node]] = [[], []]
    for index, (start, step) in enumerate(ours + theirs):
        count = approximate(("/", period, step), None, rules.work)
        num = abs(round(count)) if count else _MAX + 1
        if num > _MAX or not same(period, ("*", step, ("n", Fraction(round(count or 0)))), rules.work):
            return False
        members[index >= len(ours)] += [("+", start, ("*", step, ("n", Fraction(turn)))) for turn in range(num)]
    if max(map(len, members)) > _MAX:
        return False

    def is_in(node: Node, others: list[Node]) -> bool:
        for one in others:
            apart = ("+", node, ("-", one))
            turns = approximate(("/", apart, period), None, rules.work)
            if turns is not None and abs(turns - round(turns)) < Fraction(1, 10**9):
                return bool(same(apart, ("*", period, ("n", Fraction(round(turns)))), rules.work))
        return False

    pairs = (members, members[::-1])
    return all(is_in(node, others) for side, others in pairs for node in side)


def _progressions(answer: Answer, work: WorkLimit) -> list[tuple[Node, Node]]:
    """Start and step of each; empty if the answer is anything else. b (-1)^n + s n is two."""
    found = []
    for item in _items(answer):
        value = item.value if isinstance(item, Named) else item
        if not isinstance(value, Value) or value.unit or len(names := symbols(value.node)) != 1 or not names <= _WHOLE:
            return []
        (name,) = names
        has_signs = any(_is_sign(part) for part in answers.walk(value.node))
        for rest in range(1 + has_signs):
            letter: Node = ("+", ("*", ("n", Fraction(1 + has_signs)), ("s", name)), ("n", Fraction(rest)))
            node = substituted(_without_signs(value.node, {name: ("n", Fraction(rest))}, work), {name: letter})
            start, end = (substituted(node, {name: ("n", Fraction(at))}) for at in (0, 1))
            step = ("+", end, ("-", start))
            if not same(node, ("+", start, ("*", step, ("s", name))), work):
                return []
            found.append((start, step))
    return found if len(found) <= _MAX else []


def _items(answer: Answer) -> tuple[Answer, ...]:
    return answer.items if isinstance(answer, AnswerList) and answer.kind in ("list", "set") else (answer,)


def _is_sign(node: Node) -> bool:
    return node[0] == "^" and node[1] == ("-", ("n", Fraction(1))) and bool(symbols(node[2]))


def _without_signs(node: Node, at: dict[str, Node], work: WorkLimit) -> Node:
    """The tree with (-1)^n replaced by its value at `at`."""
    if _is_sign(node):
        power = approximate(substituted(node[2], at), None, work)
        return node if power is None or power.denominator > 1 else ("n", Fraction(1 - 2 * (int(power) % 2)))
    return (node[0], *(_without_signs(part, at, work) if isinstance(part, tuple) else part for part in node[1:]))


def same_pieces(gold: Answer, other: Answer, rules: Rules) -> bool:
    """Whether both, of which one is in pieces, are the same function of one letter: on each part of the real numbers
    where both have one expression, or for each remainder of a whole number."""
    ours, theirs = _pieces(gold), _pieces(other)
    conditions = [where for _, where in ours + theirs if where is not None]
    if isinstance(gold, Named) and isinstance(other, Named) and differ(gold.name, other.name):
        return False
    if not (ours and theirs and conditions) or len(ours) * len(theirs) > _MAX * _MAX:
        return False
    if all(isinstance(where, answers.Intervals) for where in conditions):
        return _same_on_spans(ours, theirs, rules)
    residues = [item for item in map(_residue, conditions) if item]
    others = (where for where in conditions if not _residue(where))
    if not all(isinstance(where, answers.Intervals) and where.pieces == EVERY_REAL for where in others):
        return False
    names, modulus = {name for name, _, _ in residues}, math.lcm(*(by for _, by, _ in residues))
    if len(names) != 1 or modulus > _MAX:
        return False
    (name,) = names
    for rest in range(modulus):
        whole: Node = ("+", ("*", ("n", Fraction(modulus)), ("s", "n")), ("n", Fraction(rest)))
        values = [_at_residue(pieces, rest) for pieces in (ours, theirs)]
        if values[0] is None or values[1] is None or not symbols(values[0]) | symbols(values[1]) <= {name}:
            return False
        left, right = (substituted(value, {name: whole}) for value in values if value is not None)
        if not same(left, right, rules.work):
            return False
    return True


def _pieces(answer: Answer) -> list[_Piece]:
    answer = answer.value if isinstance(answer, Named) else answer
    if isinstance(answer, Value):
        return [] if answer.unit else [(answer.node, None)]
    rows = [row.items for row in answer.items] if isinstance(answer, AnswerList) and answer.kind == "cases" else []  # type: ignore[union-attr]
    read = [(value.node, _as_condition(where)) for value, where in rows if isinstance(value, Value)]
    return read if len(read) == len(rows) else []


def _as_condition(where: Answer) -> Answer:
    """x = 0 as a point; others as they are."""
    spans = as_spans(where.value) if isinstance(where, Named) and not letters(where) else None
    return replace(spans, name=where.name) if spans and isinstance(where, Named) else where


def _residue(where: Answer | None) -> tuple[str, int, int] | None:
    """The letter, modulus and remainder of a congruence."""
    value = where.value.node if isinstance(where, Named) and isinstance(where.value, Value) else ("",)
    is_class = value[0] == "+" and value[1][0] == "*" and value[1][2] == ("s", "_")
    return (where.name, int(value[1][1][1]), int(value[2][1])) if is_class and isinstance(where, Named) else None


def _at_residue(pieces: list[_Piece], rest: int) -> Node | None:
    """The expression for numbers with this remainder; `otherwise` is read as all other numbers."""
    for value, where in pieces:
        residue = _residue(where)
        if where is None or (residue and rest % residue[1] == residue[2]):
            return value
    return next((value for value, where in pieces if isinstance(where, answers.Intervals)), None)


def _same_on_spans(ours: list[_Piece], theirs: list[_Piece], rules: Rules) -> bool:
    every = answers.Intervals(EVERY_REAL)
    domains = []
    for pieces in (ours, theirs):
        spans = [where if isinstance(where, answers.Intervals) else every for _, where in pieces]
        domains.append(answers.Intervals(tuple(piece for span in spans for piece in span.pieces)))
    for one, two in (domains, domains[::-1]):
        outside = complement(two)
        beyond = outside and intersection(one, outside)
        if beyond is None or beyond.pieces:
            return False
    for (left, one), (right, two) in itertools.product(ours, theirs):
        both = intersection(one or every, two or every)  # type: ignore[arg-type]
        if both is None:
            return False
        name = next((where.name for where in (one, two) if isinstance(where, answers.Intervals) and where.name), "")
        for piece in both.pieces:
            by = {name: piece.low} if piece.low == piece.high else {}
            if not same(substituted(left, by), substituted(right, by), rules.work):
                return False
    return True
