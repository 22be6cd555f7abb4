"""Inequalities as intervals where one variable is bounded, and ratios."""

from __future__ import annotations

import re
from fractions import Fraction

from dppo_megatron.rewards.math.answers import INFINITY, TURNED, Answer, Chain, Piece, Ratio, Relation, Spans
from dppo_megatron.rewards.math.clean import split_top
from dppo_megatron.rewards.math.evaluate import TooBig, Undefined, exact
from dppo_megatron.rewards.math.parse import parse
from dppo_megatron.rewards.math.trees import Node, symbols


def read_inequality(sides: list[str], ops: list[str]) -> Answer:
    """An interval where one variable is bounded (also as 2x + 1 < 5), else the relation as it stands."""
    nodes = [parse(side) for side in sides]
    if len(nodes) == 2:
        left, right = nodes
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
                return Spans((Piece(low, ops[0] == "\\le", high, ops[1] == "\\le"),), middle[1])
            line, ends = _line(middle), [_constant(low), _constant(high)]
            if line is not None and ends[0] is not None and ends[1] is not None:
                name, slope, offset = line
                bounds = [(ends[0] - offset) / slope, (ends[1] - offset) / slope]
                closed = [op == "\\le" for op in ops]
                if slope < 0:
                    bounds.reverse()
                    closed.reverse()
                return Spans((Piece(("n", bounds[0]), closed[0], ("n", bounds[1]), closed[1]),), name)
    return Chain(tuple(nodes), tuple(ops))


def meeting(one: Spans, other: Spans) -> Spans | None:
    """Where a half-line upwards and one downwards with rational ends meet, as of x > 1 and x < 5; None if they do not.

    Example:
        >>> meeting(read_inequality(["x", "1"], [">"]), read_inequality(["x", "5"], ["<"])).pieces[0].low
        ('n', Fraction(1, 1))
    """
    if len(one.pieces) != 1 or len(other.pieces) != 1:
        return None
    up, down = one.pieces[0], other.pieces[0]
    if up.high != INFINITY:
        up, down = down, up
    if up.high != INFINITY or down.low != ("-", INFINITY) or INFINITY in (up.low, down.high):
        return None
    low, high = _constant(up.low), _constant(down.high)
    if low is None or high is None or low >= high:
        return None
    return Spans((Piece(up.low, up.low_closed, down.high, down.high_closed),), one.name)


def _half_line(name: str, op: str, bound: Node) -> Spans:
    below = Piece(("-", INFINITY), False, bound, op == "\\le")
    above = Piece(bound, op == "\\ge", INFINITY, False)
    if op == "\\ne":
        return Spans((below, above), name)
    return Spans((below if op in ("<", "\\le") else above,), name)


def _line(node: Node) -> tuple[str, Fraction, Fraction] | None:
    """(variable, slope, offset) of a rational linear function of one variable."""
    names = symbols(node)
    if len(names) != 1:
        return None
    (name,) = names
    values = []
    for point in (0, 1, 2, 3, 7):
        try:
            values.append(exact(node, {name: Fraction(point)}))
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
