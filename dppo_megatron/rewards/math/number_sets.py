"""Sets of real numbers: inequalities solved for their variable; intersection, complement and normal form of unions of
intervals."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from dppo_megatron.rewards.math import answers
from dppo_megatron.rewards.math.answers import Answer, AnswerList, Node, Unreadable, Value, symbols
from dppo_megatron.rewards.math.equality import same
from dppo_megatron.rewards.math.evaluate import WorkLimit, approximate, rational
from dppo_megatron.rewards.math.parse import parse

_MAX_MEMBERS = 50
_OPERATIONS = 150  # for one end of an interval or one linear inequality: a list may have hundreds of them
MINUS_INFINITY: Node = ("-", answers.INFINITY)
_End = tuple[Fraction | float, bool]  # a number, and whether the end is just above it, as open low and closed high ones


def read_inequality(sides: list[str], ops: list[str]) -> Answer:
    """The set that bounds one variable (also in 2x + 1 < 5 or |x| > 1); other relations as they are."""
    nodes = [parse(side) for side in sides]
    if set(ops) <= {">", "\\ge"}:
        nodes, ops = nodes[::-1], [answers.TURNED[op] for op in reversed(ops)]
    relation = answers.Relation(tuple(nodes), tuple(ops))
    if len(nodes) == 2:
        return _solved(nodes[0], ops[0], nodes[1]) or relation
    if len(nodes) == 3 and set(ops) <= {"<", "\\le"}:
        low, middle, high = nodes
        if middle[0] == "s" and middle[1] not in symbols(low) | symbols(high):
            return answers.Intervals((answers.Piece(low, ops[0] == "\\le", high, ops[1] == "\\le"),), middle[1])
        ends = _solved(low, ops[0], middle), _solved(middle, ops[1], high)
        if not symbols(low) | symbols(high):
            return intersection(*ends) or relation
    return relation


def _solved(left: Node, op: str, right: Node) -> answers.Intervals | None:
    for one, relation, two in ((left, op, right), (right, answers.TURNED.get(op, op), left)):
        if one[0] == "s" and not symbols(two):
            return half_line(one[1], relation, two)
        is_absolute = one[:2] == ("f", "abs") and op in answers.TURNED
        bound = approximate(two, None, WorkLimit(_OPERATIONS)) if is_absolute else None
        if bound is not None and bound >= 0:
            above = _solved(one[2], relation, two)
            below = _solved(one[2], answers.TURNED[relation], ("-", two))
            if relation in ("<", "\\le"):
                return intersection(above, below)
            return above and below and answers.Intervals(above.pieces + below.pieces, above.name)
    difference: Node = ("+", left, ("-", right))
    work, name = WorkLimit(_OPERATIONS), "".join(symbols(difference))
    offset, next_ = (rational(difference, {name: Fraction(point)}, work) for point in (0, 1))
    if offset is None or next_ is None or next_ == offset:  # also with several variables
        return None
    slope = next_ - offset
    if not same(difference, ("+", ("*", ("n", slope), ("s", name)), ("n", offset)), work):
        return None
    return half_line(name, op if slope > 0 else answers.TURNED.get(op, op), ("n", -offset / slope))


def half_line(name: str, op: str, bound: Node) -> answers.Intervals:
    """The numbers in the relation `op` to `bound`."""
    below = answers.Piece(MINUS_INFINITY, False, bound, op == "\\le")
    above = answers.Piece(bound, op == "\\ge", answers.INFINITY, False)
    pieces = (below,) if op in ("<", "\\le") else (above,) if op in (">", "\\ge") else (below, above)
    return answers.Intervals(pieces, name)


def half_lines(answer: Answer) -> list[Answer]:
    """The sets that an inequality may be: x < a of x, a < b of a or of b; none for x < y, which is a half-plane. Other
    answers as they are."""
    if not isinstance(answer, answers.Relation):
        return [answer]
    one, op, two = answer.sides[0], answer.ops[0], answer.sides[-1]
    turned = answers.TURNED.get(op, op)
    read = [] if op == "=" or len(answer.ops) > 1 else [(one, op, two), (two, turned, one)]
    return [half_line(a[1], op, b) for a, op, b in read if a[0] == "s" and symbols(b).isdisjoint((a[1], *"xyz"))]


def as_spans(answer: Answer | None) -> answers.Intervals | None:
    """The answer as a set of real numbers, if it can be one: a pair as an open interval, numbers as points."""
    if isinstance(answer, answers.Named):
        return as_spans(answer.value)
    if isinstance(answer, Value):
        return answers.Intervals((answers.Piece(answer.node, True, answer.node, True),))
    if not isinstance(answer, AnswerList):
        return answer if isinstance(answer, answers.Intervals) else None
    if answer.kind == "tuple":
        ends = [item.node for item in answer.items if isinstance(item, Value)]
        is_pair = len(ends) == len(answer.items) == 2
        return answers.Intervals((answers.Piece(ends[0], False, ends[1], False),)) if is_pair else None
    if answer.kind == "set" and any(isinstance(item, AnswerList) for item in answer.items):
        return None  # points of the plane, for example
    parts = [part for part in map(as_spans, answer.items) if part is not None]
    names = {part.name for part in parts if part.name}
    if len(parts) < len(answer.items) or len(names) > 1:
        return None
    return answers.Intervals(tuple(piece for part in parts for piece in part.pieces), *names)


def normal(spans: answers.Intervals) -> answers.Intervals:
    """The pieces sorted, without empty ones, and [0, 2] for [0, 1) and [1, 2]; unchanged if an end is not a number."""
    rest = complement(spans)
    both = rest and complement(rest)
    return replace(both, name=spans.name) if both else spans


def intersection(one: answers.Intervals | None, two: answers.Intervals | None) -> answers.Intervals | None:
    """The numbers in both; None if there is no other set, or an end is not a number."""
    if one is None or two is None or (left := complement(one)) is None or (right := complement(two)) is None:
        return None
    both = complement(answers.Intervals(left.pieces + right.pieces))
    return both and replace(both, name=one.name or two.name)


def complement(spans: answers.Intervals) -> answers.Intervals | None:
    """All other real numbers, in order; None if an end is not a number."""
    placed = _placed(spans)
    if placed is None:
        return None
    low, closed, pieces = MINUS_INFINITY, False, []
    reached: _End = (-math.inf, True)
    for start, end, piece in sorted(placed, key=lambda place: place[0]):
        if reached < start < end:
            pieces.append(answers.Piece(low, closed, piece.low, not piece.low_closed))
        if max(start, reached) < end:
            low, closed, reached = piece.high, not piece.high_closed, end
    if low != answers.INFINITY:
        pieces.append(answers.Piece(low, closed, answers.INFINITY, False))
    return answers.Intervals(tuple(pieces))


def whole_members(spans: answers.Intervals, least: float = -math.inf) -> Answer:
    """The whole numbers in a bounded set."""
    members: list[int] = []
    placed = _placed(normal(spans))
    if placed is None:
        raise Unreadable("whole numbers between ends that are not numbers")
    for low, high, _ in placed:
        first, end = max(low[0], least), high[0]
        if not end - first <= _MAX_MEMBERS:  # with `not`, for the NaN of infinite ends
            raise Unreadable("too many whole numbers")
        members += [x for x in range(math.ceil(first), math.floor(end) + 1) if low < (x, True) and (x, False) < high]
    return AnswerList("set", tuple(Value(("n", Fraction(member))) for member in members))


def _placed(spans: answers.Intervals) -> list[tuple[_End, _End, answers.Piece]] | None:
    placed = []
    for piece in spans.pieces:
        low, high = _place(piece.low), _place(piece.high)
        if low is None or high is None:
            return None
        placed.append(((low, not piece.low_closed), (high, piece.high_closed), piece))
    return placed


def _place(node: Node) -> Fraction | float | None:
    if node in (answers.INFINITY, MINUS_INFINITY):
        return math.inf if node == answers.INFINITY else -math.inf
    value = approximate(node, None, WorkLimit(_OPERATIONS))
    return None if value is None else round(value, 12)  # rounded, so that two spellings of one number are equal
