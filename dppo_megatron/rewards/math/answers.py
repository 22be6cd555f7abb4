"""What a final answer can be: a number with a unit, a list, an interval, an equation, a time, a word."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dppo_megatron.rewards.math.trees import Node
from dppo_megatron.rewards.math.units import Unit

INFINITY: Node = ("c", "inf")
TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
"""The relation read from right to left."""


@dataclass(frozen=True, slots=True)
class Value:
    """An expression, with a unit if one is stated."""

    node: Node
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class Based:
    """Digits in a base other than ten, without zeros at the ends."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Clock:
    """A time of day; the hour up to 24 where the half is stated."""

    hour: int
    minute: int
    half: str
    """`a`, `p` or nothing."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """a : b : ..."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class AnswerList:
    """Several answers: a `list` has no brackets, a `tuple` has an order, a `set` has no order and no repetition."""

    kind: Literal["list", "tuple", "set"]
    items: tuple[Answer, ...]
    signs: bool = field(default=False, compare=False)
    """A list that was written with a plus-minus sign: never a tuple."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One interval."""

    low: Node
    low_closed: bool
    high: Node
    high_closed: bool


@dataclass(frozen=True, slots=True)
class Intervals:
    """A union of intervals; points are closed intervals of no length."""

    pieces: tuple[Piece, ...]
    name: str = ""
    """The variable, where it is stated."""


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation or inequality between expressions, or several in a row: a < b < c."""

    sides: tuple[Node, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """name = value, where the left side only names the right one (y = 2x + 3, f(x) = ...)."""

    name: str
    value: Answer
    left: Node | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix; one column or row is a vector."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Congruence:
    """Every whole number with this remainder."""

    remainder: int
    modulus: int


@dataclass(frozen=True, slots=True)
class Cases:
    """A function by pieces: the value of each and where it holds."""

    rows: tuple[tuple[Answer, Answer], ...]


@dataclass(frozen=True, slots=True)
class Words:
    """Text, folded to lower case without punctuation."""

    text: str


Answer = Value | Based | Clock | Ratio | AnswerList | Intervals | Relation | Named | Grid | Congruence | Cases | Words
