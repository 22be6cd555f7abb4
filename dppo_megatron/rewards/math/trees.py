"""What an expression is once it has been read: a nested tuple, so that equal trees compare equal.

`("n", Fraction)`, `("s", name)`, `("c", "pi" | "e" | "i" | "inf")`, `("+", a, b)`, `("*", a, b)`, `("/", a, b)`,
`("^", a, b)`, `("-", a)`, `("pm", a)` (plus or minus a), `("mp", a)`, `("deg", a)`, `("f", name, a)`,
`("root", n, a)`, `("log", base or None, a)`, `("binom", n, k)`,
`("of", "max" | "min" | "gcd" | "lcm" | "mod", a, b ...)`, `("big", "sum" | "prod", name, from, to, body)`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

Node = tuple[Any, ...]


class Unreadable(Exception):
    """The text is not an expression of this grammar."""


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


def signs(node: Node) -> list[Node]:
    """Every value that a tree with plus-minus signs stands for, at most 8; `\\mp` goes against the first `\\pm`.

    Example:
        >>> len(signs(parse("1 \\\\pm \\\\sqrt{19}")))
        2
    """
    found = _count(node, "pm")
    opposed = _count(node, "mp")
    if not found and not opposed:
        return [node]
    if found > 3 or (opposed and found > 1):
        raise Unreadable("too many plus-minus signs")
    choices = itertools.product((False, True), repeat=max(found, 1))
    return [_choose(node, iter(choice), choice[0]) for choice in choices]


def _count(node: Any, kind: str) -> int:
    if not isinstance(node, tuple):
        return 0
    return int(node[0] == kind) + sum(_count(part, kind) for part in node[1:])


def _choose(node: Any, minus: Iterator[bool], is_first_minus: bool) -> Any:
    if not isinstance(node, tuple):
        return node
    if node[0] in ("pm", "mp"):
        is_minus = next(minus) if node[0] == "pm" else not is_first_minus
        inside = _choose(node[1], minus, is_first_minus)
        return ("-", inside) if is_minus else inside
    return (node[0], *(_choose(part, minus, is_first_minus) for part in node[1:]))


def substituted(node: Node, name: str, by: Node) -> Node:
    """The tree with another tree for one of its variables."""
    if node == ("s", name):
        return by
    if node[0] == "big" and node[2] == name:
        return node
    return (node[0], *(substituted(part, name, by) if isinstance(part, tuple) else part for part in node[1:]))
