"""Whether two trees are equal, proved and not sampled where that can be.

- Rational functions (also in pi, e and i): at a secret point modulo a secret prime of 120 bits (Schwartz-Zippel). Two
  different ones agree there with a chance of about degree / 2^120, however large their numbers are.
- Others: at secret points of both signs and of sizes from 1 to 10^6, and on both sides of every place where a floor,
  absolute value, maximum or root changes its branch: exactly where the value is rational, else in double precision,
  and, where that finds no difference, to 40 digits or more.
- Variables named as whole numbers are (n, k, m ...) may be equal for whole numbers only: cos(n pi) is (-1)^n.

None, "cannot be said", is not a yes. The secret is drawn once a process: an answer cannot be made for known points.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dppo_megatron.rewards.math.answers import Node, contains, symbols
from dppo_megatron.rewards.math.evaluate import (
    Discrete,
    Doubles,
    Evaluation,
    Irrational,
    Point,
    TooBig,
    Undefined,
    Unsure,
    WorkLimit,
    digits,
    exact,
    rational,
)
from dppo_megatron.rewards.math.steps import breaks, has_steps

if TYPE_CHECKING:
    from random import Random

_SECRET = os.urandom(16)
_WHOLE = frozenset("nmkljNMK")
_MAX_NAMES = 12
_MAX_PERIOD = 60
_SIZES = (1, 1, 4, 1, 1, 1, 30, 3, 300, 10**6, 10**5, 10**18, 10**18)
_NEGATIVE = {1: "one", 4: "all", 7: "one", 10: "one", 12: "all"}
"""Which of the sizes are for points of which one variable, or all, are below zero."""
_ENOUGH = 3
"""Points at which two functions have to be equal; of whole numbers, four times as many."""
_DIGITS = (60, 120, 250, 500, 1000, 2000)
"""Of which one is chosen: each has constants of its own, which take milliseconds the first time."""
_ERRORS = (ZeroDivisionError, ValueError)


class _NotRational(Exception):
    """No rational function."""


def same(gold: Node, other: Node, work: WorkLimit | None = None) -> bool | None:
    """Whether the trees are equal; None if that cannot be said.

    Example:
        >>> same(parse("2^{-2/3}"), parse("\\\\frac{1}{\\\\sqrt[3]{4}}"))
        True
    """
    if gold == other:
        return True
    work = work or WorkLimit()
    names = sorted(symbols(gold) | symbols(other))
    try:
        try:
            if not names and (left := exact(gold, None, work)) is not None:
                right = exact(other, None, work)
                if right is not None:
                    return left == right
        except TooBig:
            work.spend()  # also of digits, which residues do not have
        verdict = _same_residue(gold, other, work)
        if verdict is not None:
            return verdict
        if not names:
            return _near(gold, other, {}, work) == "equal"
        return _same_functions(gold, other, names, work) if len(names) <= _MAX_NAMES else None
    except (TooBig, Undefined, Irrational, OverflowError, RecursionError, *_ERRORS):
        return None


def _drawn(purpose: str = "") -> Random:
    """Numbers that nobody knows who does not know the secret, the same ones for the same purpose."""
    from random import Random

    return Random(_SECRET + purpose.encode())


@functools.cache
def _modulus() -> tuple[int, int]:
    """A secret prime with a root of -1, and that root."""
    drawn = _drawn()
    while True:
        prime = (drawn.getrandbits(120) | 1 << 119) & ~3 | 1
        if all(pow(drawn.randrange(2, prime), prime - 1, prime) == 1 for _ in range(8)):  # Fermat's test
            break
    while True:
        root = pow(drawn.randrange(2, prime), prime // 4, prime)
        if root * root % prime == prime - 1:
            return prime, root


@functools.lru_cache(maxsize=1024)
def _residue(name: str) -> int:
    return _drawn(name).randrange(1, _modulus()[0])


def _same_residue(gold: Node, other: Node, work: WorkLimit) -> bool | None:
    """None where one of the two is no rational function, or has no value."""
    try:
        return _modular(gold, work) == _modular(other, work)
    except (_NotRational, Undefined):
        return None


def _modular(node: Node, work: WorkLimit) -> int:
    work.spend()
    kind, (prime, root) = node[0], _modulus()
    if kind == "n":
        number: Fraction = node[1]
        return number.numerator * _inverse(number.denominator, prime) % prime
    if kind == "s":
        return _residue(node[1])
    if kind == "c" and node[1] != "inf":
        return root if node[1] == "i" else _residue("constant " + node[1])
    if kind == "-":
        return -_modular(node[1], work) % prime
    if kind in ("+", "*", "/"):
        left, right = _modular(node[1], work), _modular(node[2], work)
        return (left + right if kind == "+" else left * right if kind == "*" else left * _inverse(right, prime)) % prime
    if kind == "^" and not symbols(node[2]):
        power = exact(node[2], None, work)
        if power is None or power.denominator != 1 or power.numerator.bit_length() > 4000:
            raise _NotRational
        base = _modular(node[1], work)
        if not base and power <= 0:
            raise Undefined("0 to the power 0 or less")
        return pow(base if power > 0 else _inverse(base, prime), abs(int(power)) % (prime - 1), prime)
    if kind in ("f", "binom", "root", "of", "big") and not symbols(node):
        value = exact(node, None, work)
        if value is not None:
            return _modular(("n", value), work)
    raise _NotRational


def _inverse(value: int, prime: int) -> int:
    if not value % prime:
        raise Undefined("division by zero")
    return pow(value, -1, prime)


def _same_functions(gold: Node, other: Node, names: list[str], work: WorkLimit) -> bool | None:
    """By their values. With two variables or more below zero, roots and logarithms of products have other branches than
    products of roots; who writes them means positive numbers."""
    pair = ("+", gold, other)
    drawn = _drawn(repr(names))
    has_roots = contains(pair, {"root", "log", "^", "f"}, _is_branched)
    outcomes = []
    large = (_largest(pair, work) or Fraction(1)) if has_steps(pair) else Fraction(0)
    anywhere = ((point, False) for point in _points(names, large, drawn))
    for point, is_step in itertools.chain(anywhere, _around_breaks(pair, names, large, drawn, work)):
        if has_roots and sum(value < 0 for value in point.values()) > 1:
            continue
        found = _at(gold, other, point, work)
        if is_step and found == "one is real":
            continue  # x^2 / x for x
        outcomes.append(found)
        if found in ("different", "one is real"):
            break
    if {"different", "one is real"} & set(outcomes):
        return len(names) <= 3 and _WHOLE.issuperset(names) and _same_wholes(gold, other, names, drawn, work)
    if outcomes.count("equal") >= _ENOUGH:
        return True
    if "whole" in outcomes:
        return _same_wholes(gold, other, names, drawn, work)
    return False if "other branch" in outcomes else None


def _is_branched(node: Node) -> bool:
    if node[0] == "root":  # of a square it is an absolute value
        return bool(node[2][0] != "^" or node[2][2] != node[1])
    if node[0] == "^":
        return bool(node[2][0] != "n" or node[2][1].denominator != 1)
    return node[0] == "log" or node[1] in ("ln", "arcsin", "arccos")


def _points(names: Sequence[str], large: Fraction, drawn: Random) -> Iterator[dict[str, Fraction]]:
    """Some beyond the largest number; positive ones, then ones of which one, then all are negative, of growing size."""
    if large:  # there are steps: each variable beyond the largest number, then each of a size of its own
        for _ in range(8):
            yield {name: large * Fraction(drawn.randrange(-9970, 9970), 331) for name in names}
        for _ in range(16 if len(names) > 1 else 4):
            yield {
                name: Fraction(drawn.randrange(-997, 997), 331) * Fraction(10) ** drawn.randrange(-9, 18)
                for name in names
            }
    for turn, size in enumerate(_SIZES):
        below = {"one": [drawn.choice(names)], "all": names}.get(_NEGATIVE.get(turn, ""), ())
        point = {name: Fraction(drawn.randrange(1, 997), 997) * size for name in names}
        yield {name: -value if name in below else value for name, value in point.items()}


def _around_breaks(
    pair: Node, names: Sequence[str], large: Fraction, drawn: Random, work: WorkLimit
) -> Iterator[tuple[dict[str, Fraction], bool]]:
    """Along each variable, with the others fixed three times, every step (True) and points beside it."""
    far = Fraction(1)  # the farthest step so far: others depend on it where one step is in another
    for turn in range(3 if len(names) > 1 else 1):
        for name in names:
            size = (Fraction(1), large * 9, far)[turn]
            fixed = {other: Fraction(drawn.randrange(-997, 997), 331) * size for other in names if other != name}
            for place, is_step in breaks(pair, name, fixed, drawn, work):
                far = max(far, abs(place))
                yield {**fixed, name: place}, is_step


def _largest(node: Node, work: WorkLimit) -> Fraction | None:
    """Number beside a variable in the tree, carried out; None where there is no variable."""
    if node[0] in "sn":
        return Fraction(1) if node[0] == "s" else None
    parts = [(part, _largest(part, work)) for part in node[1:] if isinstance(part, tuple)]
    if all(largest is None for _, largest in parts):
        return None
    return max(abs(rational(part, None, work) or Fraction(1)) if large is None else large for part, large in parts)


def _number_functions(node: Node) -> set[Node]:
    """Where the tree takes a gcd, lcm or remainder of something with a variable."""
    own = {node} if node[0] == "of" and node[1] in ("gcd", "lcm", "mod") and symbols(node) else set()
    return own.union(*(_number_functions(part) for part in node[1:] if isinstance(part, tuple)))


def _same_wholes(gold: Node, other: Node, names: Sequence[str], drawn: Random, work: WorkLimit) -> bool | None:
    """Equal for whole numbers: runs of small ones, large ones, and both sides of every step."""
    points = [dict.fromkeys(names, Fraction(both)) for both in range(1, 13)]
    bounds = (*(12,) * 12 * (len(names) - 1), 30, 90, 300, 1000, 10**6, 10**13, 10**20)
    points += [{name: Fraction(drawn.randrange(1, bound)) for name in names} for bound in bounds]
    points += [{name: Fraction(-drawn.randrange(1, bound)) for name in names} for bound in (30, 10**4, 10**9)]
    if periodic := _number_functions(gold) ^ _number_functions(other):  # gcd(n, 1009) - 1 is 0 at nearly every point
        period = math.prod(_largest(node, work) or Fraction(1) for node in periodic)
        if len(names) > 1 or period > _MAX_PERIOD:
            return None
        points += [{names[0]: Fraction(whole)} for whole in range(13, 2 * int(period) + 13)]
    pair = ("+", gold, other)
    for point, _ in _around_breaks(pair, names, _largest(pair, work) or Fraction(1), drawn, work):
        points += [{name: Fraction(turn(value)) for name, value in point.items()} for turn in (math.floor, math.ceil)]
    outcomes = []
    for point in points:
        outcomes.append(_at(gold, other, point, work))
        if outcomes[-1] in ("different", "one is real"):
            return False
    return True if outcomes.count("equal") >= 4 * _ENOUGH else None


def _at(gold: Node, other: Node, values: Point, work: WorkLimit) -> str:
    """`equal`, `different`, `one is real` (or defined), `other branch`, `whole` (defined for whole numbers only), or
    `undefined` (or too large)."""
    kept, there = [], []
    for node in (gold, other):
        try:
            kept.append(Evaluation(values, None, work).of(node))
            there.append(True)
        except Discrete:
            return "whole"
        except (Undefined, *_ERRORS):
            there.append(False)
        except Irrational:
            there.append(True)
        except (TooBig, OverflowError):
            if work.left < 0:
                raise
            return "undefined"
    if not all(there):
        return "one is real" if any(there) else "undefined"
    if len(kept) == 2:
        return "equal" if kept[0] == kept[1] else "different"
    try:
        return _near(gold, other, values, work)
    except Discrete:
        return "whole"
    except (Undefined, TooBig, OverflowError, Irrational, *_ERRORS):
        if work.left < 0:
            raise TooBig from None
        return "undefined"


def _near(gold: Node, other: Node, values: Point, work: WorkLimit) -> str:
    """What `_at` says of irrational values: differences are found in double precision, equality with more digits."""
    bits = 0
    try:
        found, bits = _compared(gold, other, values, Doubles, work)
        if found:
            return found
    except (Unsure, OverflowError):
        pass
    # as many digits as the longest fraction beside the irrational part has, and 40 more
    needed = 60 if bits < 64 else 60 + bits // 3
    for count in _DIGITS:
        if count >= needed:
            found, bits = _compared(gold, other, values, digits(count), work)
            needed = bits // 3
            if count >= needed:
                return found
    raise TooBig


def _compared(gold: Node, other: Node, values: Point, arithmetic: Any, work: WorkLimit) -> tuple[str, int]:
    """And the bits of the longest fraction that was rounded."""
    ours, theirs = Evaluation(values, arithmetic, work), Evaluation(values, arithmetic, work)
    ours_value, theirs_value = ours.of(gold), theirs.of(other)
    if isinstance(ours_value, Fraction) and isinstance(theirs_value, Fraction):
        return ("equal" if ours_value == theirs_value else "different"), 0
    left, right = ours.lift(ours_value), theirs.lift(theirs_value)
    size, bits = max(abs(left), abs(right)), max(ours.bits, theirs.bits)
    apart, rough = abs(left - right), max(size, ours.largest, theirs.largest)
    if not arithmetic.precise and not (math.isfinite(rough) and rough > 1e-150):
        raise OverflowError
    if apart <= rough * arithmetic.tiny:
        return ("equal" if arithmetic.precise else ""), bits
    if not ours.has_branch and not theirs.has_branch:
        return "different", bits
    reals = [abs(value.imag) <= rough * arithmetic.tiny for value in (left, right)]
    strict = [real and not side.has_branch for real, side in zip(reals, (ours, theirs), strict=True)]
    if all(strict) or (all(reals) and not any(strict)):
        return "different", bits
    return ("different" if all(reals) else "one is real" if any(reals) else "other branch"), bits
