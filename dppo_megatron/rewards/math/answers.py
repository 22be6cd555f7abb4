"""The kinds of final answers (a number with a unit, a list, an interval, an equation, a time, a word), and the trees of
the expressions in them.

A tree is a nested tuple, so that equal trees compare equal:
`("n", Fraction)`, `("s", name)`, `("c", "pi" | "e" | "i" | "inf")`, `("+", a, b)`, `("*", a, b)`, `("/", a, b)`,
`("^", a, b)`, `("-", a)`, `("f", name, a ...)`, `("big", "sum" | "prod", name, from, to, body)`. Whatever these can
express has no kind of its own: a root is a power, a degree a multiple of pi.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dppo_megatron.rewards.math.units import Unit

Node = tuple[Any, ...]

INFINITY: Node = ("c", "inf")
PI: Node = ("c", "pi")
TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}  # the relation read from right to left


class Unreadable(Exception):
    """The text is not an expression of this grammar."""


@dataclass(frozen=True, slots=True)
class Value:
    """An expression, with a unit if one is stated."""

    node: Node
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class AnswerList:
    """Several answers. A `list` has no brackets, a `tuple` has an order, a `set` has no order and no repetition.
    `cases` are tuples of a value and its condition. A `ratio` of three or more parts holds their quotients with the
    first. A `grid` is a matrix, whose rows are tuples."""

    kind: Literal["list", "tuple", "set", "cases", "ratio", "grid"]
    items: tuple[Answer, ...]
    signs: bool = field(default=False, compare=False)  # it was written with plus-minus or `or`: it is no tuple


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
    name: str = ""  # the variable, if it is stated


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
class Words:
    """Text, folded to lower case without punctuation; a time of day, `16:30`; digits in another base, `17_8`."""

    text: str


Answer = Value | AnswerList | Intervals | Relation | Named | Words


def symbols(node: Node) -> frozenset[str]:
    """The names of its variables."""
    if node[0] in "nsc":
        return frozenset(node[1:]) if node[0] == "s" else frozenset()
    if node[0] == "big":  # each part is visited once, since sums may be nested in the bounds of sums
        return symbols(node[5]) - {node[2]} | symbols(node[3]) | symbols(node[4])
    return frozenset[str]().union(*(symbols(part) for part in node[1:] if isinstance(part, tuple)))


def walk(node: Node) -> Iterator[Node]:
    """The tree and all the trees in it, each before its parts."""
    stack = [node]
    while stack:
        yield (node := stack.pop())
        if node[0] not in "nsc":
            stack += [part for part in reversed(node[1:]) if isinstance(part, tuple)]


def substituted(node: Node, by: Mapping[str, Node]) -> Node:
    """The tree with `by`'s trees in place of its variables, all at once."""
    if node[0] == "s":
        return by.get(node[1], node)
    if node[0] == "big":
        by = {name: tree for name, tree in by.items() if name != node[2]}
    return (node[0], *(substituted(part, by) if isinstance(part, tuple) else part for part in node[1:]))
