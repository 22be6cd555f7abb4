"""Inequalities as intervals where one variable is bounded, and ratios."""

from __future__ import annotations

import re
from fractions import Fraction

from dppo_megatron.rewards.math.answers import INFINITY, TURNED, Answer, Inequalities, Intervals, Piece, Ratio, Relation
from dppo_megatron.rewards.math.clean import split_top
from dppo_megatron.rewards.math.evaluate import TooBig, Undefined, WorkLimit, exact
from dppo_megatron.rewards.math.parse import parse
from dppo_megatron.rewards.math.trees import Node, symbols


def read_inequality(sides: list[str], ops: list[str]) -> Answer:
    """An interval where one variable is bounded (also as 2x + 1 < 5), else the relation as it stands."""
    return _inequality([parse(side) for side in sides], ops)


def _inequality(nodes: list[Node], ops: list[str]) -> Answer:
    if len(nodes) == 2:
        left, right = nodes
        if right[:2] == ("f", "abs") and left[:2] != ("f", "abs"):
            left, right, ops = right, left, [TURNED.get(ops[0], ops[0])]
        if left[:2] == ("f", "abs") and (bound := _constant(right)) is not None and bound > 0 and ops[0] in TURNED:
            low, inside, high = ("n", -bound), left[2], ("n", bound)
            if ops[0] in ("<", "\\le"):
                return _inequality([low, inside, high], [ops[0], ops[0]])
            sides = [_inequality([inside, high], ops), _inequality([inside, low], [TURNED[ops[0]]])]
            if isinstance(sides[0], Intervals) and isinstance(sides[1], Intervals):
                return Intervals(sides[0].pieces + sides[1].pieces, sides[0].name)
        if left[0] == "s" and left[1] not in symbols(right):
            return _half_line(left[1], ops[0], right)
        if right[0] == "s" and right[1] not in symbols(left):
            return _half_line(right[1], TURNED.get(ops[0], ops[0]), left)
        if (line := _line(("+", left, ("-", right)))) is not None:
            name, slope, offset = line
            return _half_line(name, ops[0] if slope > 0 else TURNED.get(ops[0], ops[0]), ("n", -offset / slope))
        return Relation(ops[0], left, right)
    if len(nodes) == 3:
        low, middle, high = nodes
        if set(ops) <= {">", "\\ge"}:
            low, high, ops = high, low, [TURNED[op] for op in reversed(ops)]
            nodes.reverse()
        if set(ops) <= {"<", "\\le"}:
            if middle[0] == "s" and middle[1] not in symbols(low) | symbols(high):
                return Intervals((Piece(low, ops[0] == "\\le", high, ops[1] == "\\le"),), middle[1])
            line, ends = _line(middle), [_constant(low), _constant(high)]
            if line is not None and ends[0] is not None and ends[1] is not None:
                name, slope, offset = line
                bounds = [(ends[0] - offset) / slope, (ends[1] - offset) / slope]
                closed = [op == "\\le" for op in ops]
                if slope < 0:
                    bounds.reverse()
                    closed.reverse()
                return Intervals((Piece(("n", bounds[0]), closed[0], ("n", bounds[1]), closed[1]),), name)
    return Inequalities(tuple(nodes), tuple(ops))


def _half_line(name: str, op: str, bound: Node) -> Intervals:
    below = Piece(("-", INFINITY), False, bound, op == "\\le")
    above = Piece(bound, op == "\\ge", INFINITY, False)
    if op == "\\ne":
        return Intervals((below, above), name)
    return Intervals((below if op in ("<", "\\le") else above,), name)


def _line(node: Node) -> tuple[str, Fraction, Fraction] | None:
    """(variable, slope, offset) of a rational linear function of one variable."""
    names = symbols(node)
    if len(names) != 1:
        return None
    (name,) = names
    values, work = [], WorkLimit(300)  # together: a list may have hundreds of these
    for point in (0, 1, 2, 3, 7):
        try:
            values.append(exact(node, {name: Fraction(point)}, work))
        except (TooBig, Undefined):
            return None
    if any(value is None for value in values):
        return None
    offset, slope = values[0], values[1] - values[0]  # type: ignore[operator]
    if not slope or any(value != offset + slope * p for value, p in zip(values, (0, 1, 2, 3, 7), strict=True)):  # type: ignore[operator]
        return None
    return name, slope, offset  # type: ignore[return-value]


def _constant(node: Node) -> Fraction | None:
    try:
        return exact(node)
    except (TooBig, Undefined):
        return None


_TO = re.compile(r"\s+to\s+|\s*\\text\{\s*(?:is )?to\s*\}\s*")
_TERM = re.compile(r"\d+(?:\.\d+)?(?:/\d+)?|[a-z]", re.ASCII)


def read_ratio(text: str) -> Answer | None:
    """`3 : 2` of any expressions, `3 to 2` of numbers and letters only."""
    words = _TO.split(text)
    if len(words) > 1 and all(_TERM.fullmatch(part) for part in words):
        return Ratio(tuple(parse(part) for part in words))
    parts = split_top(text, re.compile(r"\s*:\s*"))
    if len(parts) == 1 or text.startswith("\\{"):
        return None
    return Ratio(tuple(parse(part) for part in parts))
