"""Sets of real numbers: unions of intervals in one form, met and complemented."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

from dppo_megatron.rewards.math.answers import INFINITY, Answer, AnswerList, Intervals, Piece, Value
from dppo_megatron.rewards.math.evaluate import WorkLimit, approximate, rational
from dppo_megatron.rewards.math.trees import Node, Unreadable, symbols

_MAX_MEMBERS = 200
_MINUS_INFINITY: Node = ("-", INFINITY)
_Placed = tuple[Fraction | float, bool, Fraction | float, bool, Piece]
"""Low end, whether closed, high end, whether closed, and the piece."""


def normal(spans: Intervals) -> Intervals:
    """In order, without empty pieces, and with those in one that touch; as it is where an end is not a number.

    Example: [0, 1) and [1, 2] are [0, 2].
    """
    placed = _placed(spans)
    if placed is None:
        return spans
    merged: list[_Placed] = []
    for piece in sorted(placed, key=lambda piece: (piece[0], not piece[1])):
        if piece[0] > piece[2] or (piece[0] == piece[2] and not (piece[1] and piece[3])):
            continue
        last = merged[-1] if merged else None
        if last is None or piece[0] > last[2] or (piece[0] == last[2] and not (piece[1] or last[3])):
            merged.append(piece)
        elif (piece[2], piece[3]) > (last[2], last[3]):
            joined = Piece(last[4].low, last[1], piece[4].high, piece[3])
            merged[-1] = (last[0], last[1], piece[2], piece[3], joined)
    return Intervals(tuple(piece[4] for piece in merged), spans.name)


def intersection(one: Intervals, two: Intervals) -> Intervals | None:
    """What is in both; None where an end is not a number."""
    left, right = _placed(one), _placed(two)
    if left is None or right is None:
        return None
    pieces = []
    for a, b in itertools.product(left, right):
        low = max(a, b, key=lambda piece: (piece[0], not piece[1]))
        high = min(a, b, key=lambda piece: (piece[2], piece[3]))
        if low[0] <= high[2]:
            pieces.append(Piece(low[4].low, low[1], high[4].high, high[3]))
    return normal(Intervals(tuple(pieces), one.name or two.name))


def complement(spans: Intervals) -> Intervals | None:
    """Every other real number; None where an end is not a number."""
    if _placed(spans) is None:
        return None
    low, closed, pieces = _MINUS_INFINITY, False, []
    for piece in normal(spans).pieces:
        if piece.low != _MINUS_INFINITY:
            pieces.append(Piece(low, closed, piece.low, not piece.low_closed))
        low, closed = piece.high, not piece.high_closed
    if low != INFINITY:
        pieces.append(Piece(low, closed, INFINITY, False))
    return Intervals(tuple(pieces))


def whole_members(spans: Intervals, least: float = -math.inf) -> Answer:
    """The whole numbers in a bounded set."""
    placed = _placed(normal(spans))
    if placed is None:
        raise Unreadable("whole numbers between ends that are no numbers")
    members = []
    for low, low_closed, high, high_closed, _ in placed:
        low = max(low, least)
        if high - low > _MAX_MEMBERS or math.isinf(low):
            raise Unreadable("too many whole numbers")
        inside = range(math.ceil(low), math.floor(high) + 1)
        members += [x for x in inside if (x > low or low_closed) and (x < high or high_closed)]
    return AnswerList("set", tuple(Value(("n", Fraction(member))) for member in members))


def _placed(spans: Intervals) -> list[_Placed] | None:
    placed = []
    for piece in spans.pieces:
        low, high = _place(piece.low), _place(piece.high)
        if low is None or high is None:
            return None
        placed.append((low, piece.low_closed, high, piece.high_closed, piece))
    return placed


def _place(node: Node) -> Fraction | float | None:
    if node in (INFINITY, _MINUS_INFINITY):
        return math.inf if node == INFINITY else -math.inf
    if symbols(node):
        return None
    value = rational(node, None, WorkLimit(300))
    if value is not None:
        return value
    near = approximate(node, WorkLimit(300))
    return None if near is None else round(Fraction(near), 12)  # two spellings of one number are one place
