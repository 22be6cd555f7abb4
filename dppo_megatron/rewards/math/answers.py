"""What a final answer can be: a number with a unit, a list, an interval, an equation, a time, a word; and the trees of
expressions in it.

A tree is a nested tuple, so that equal trees compare equal:
`("n", Fraction)`, `("s", name)`, `("c", "pi" | "e" | "i" | "inf")`, `("+", a, b)`, `("*", a, b)`, `("/", a, b)`,
`("^", a, b)`, `("-", a)`, `("deg", a)`, `("f", name, a)`,
`("root", n, a)`, `("log", base or None, a)`, `("binom", n, k)`,
`("of", "max" | "min" | "gcd" | "lcm" | "mod", a, b ...)`, `("big", "sum" | "prod", name, from, to, body)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from dppo_megatron.rewards.math.units import Unit

Node = tuple[Any, ...]


class Unreadable(Exception):
    """The text is not an expression of this grammar."""


INFINITY: Node = ("c", "inf")
TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
"""The relation read from right to left."""


@dataclass(frozen=True, slots=True)
class Value:
    """An expression, with a unit if one is stated."""

    node: Node
    unit: Unit | None = None


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
    """Text, folded to lower case without punctuation, or digits in a base other than ten: `17_8`."""

    text: str


Answer = Value | Clock | Ratio | AnswerList | Intervals | Relation | Named | Grid | Congruence | Cases | Words


def symbols(node: Node) -> frozenset[str]:
    """The names of its variables."""
    if node[0] == "s":
        return frozenset([node[1]])
    if node[0] in "nc":
        return frozenset()
    found: frozenset[str] = frozenset()
    for part in node[1:]:
        if isinstance(part, tuple):
            found |= symbols(part)
    return found - {node[2]} | symbols(node[3]) | symbols(node[4]) if node[0] == "big" else found


def contains(node: Node, kinds: Collection[str], test: Callable[[Node], bool] = bool) -> bool:
    """Whether a node of one of the kinds, that the test holds for, is anywhere in the tree."""
    if node[0] in kinds and test(node):
        return True
    return any(contains(part, kinds, test) for part in node[1:] if isinstance(part, tuple))


def substituted(node: Node, name: str, by: Node) -> Node:
    """The tree with another tree for one of its variables."""
    if node == ("s", name):
        return by
    if node[0] == "big" and node[2] == name:
        return node
    return (node[0], *(substituted(part, name, by) if isinstance(part, tuple) else part for part in node[1:]))
