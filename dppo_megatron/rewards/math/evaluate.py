"""Whether two trees have the same value, in bounded time.

Rational trees are computed exactly. Others are first computed in double precision, which settles nearly every
difference, and then to 60 digits (mpmath, imported on first use): (1 + 10^{-12}) pi is not pi. Trees with variables are
compared at a few fixed points: two different rational functions of the sizes that answers have do not agree there.
Powers and factorials whose digits would not fit are not computed (`TooBig`).
"""

from __future__ import annotations

import cmath
import functools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from dppo_megatron.rewards.math.trees import Node, symbols

_MAX_BITS = 40_000
_DIGITS = 60


class TooBig(Exception):
    """A number of the tree has more digits than are worth computing."""


class Undefined(Exception):
    """Division by zero, an infinite value, or a function outside its domain."""


class _Irrational(Exception):
    """Not computable in fractions."""


def exact(node: Node, values: Mapping[str, Fraction] | None = None) -> Fraction | None:
    """The exact value; None if the tree is not rational.

    Raises:
        TooBig, Undefined.
    """
    try:
        return _exact(node, values or {})
    except _Irrational:
        return None


def rational(node: Node, values: Mapping[str, Fraction] | None = None) -> Fraction | None:
    """As `exact`; None also for what has no value (0/0) or is not worth computing."""
    try:
        return exact(node, values)
    except (TooBig, Undefined, OverflowError, RecursionError):
        return None


def same(gold: Node, other: Node) -> bool | None:
    """Whether the trees are equal; None if that cannot be said.

    Example:
        >>> same(parse("2^{-2/3}"), parse("\\\\frac{1}{\\\\sqrt[3]{4}}"))
        True
    """
    if gold == other:
        return True
    names = sorted(symbols(gold) | symbols(other))
    try:
        if not names:
            return _same_constants(gold, other)
        return _same_functions(gold, other, names)
    except (TooBig, Undefined, OverflowError, RecursionError):
        return None


def approximate(node: Node) -> float | None:
    """A constant's value in double precision; None if it has no real one."""
    try:
        value: complex = _approximate(node, {}, _Doubles)
    except (TooBig, Undefined, OverflowError, RecursionError, ZeroDivisionError, ValueError):
        return None
    return value.real if math.isfinite(abs(value)) and abs(value.imag) <= 1e-12 * abs(value) else None


def is_too_big(node: Node) -> bool:
    """Whether the tree has a number that is not worth computing, such as 9^{9^{9^9}}."""
    try:
        if exact(node, dict.fromkeys(symbols(node), Fraction(2))) is None:
            _approximate(node, dict.fromkeys(symbols(node), Fraction(2)), _Doubles)
    except (TooBig, OverflowError):
        return True
    except (Undefined, RecursionError, ZeroDivisionError, ValueError):
        return False
    return False


def _same_constants(gold: Node, other: Node) -> bool | None:
    left, right = exact(gold), exact(other)
    if left is not None and right is not None:
        return left == right
    return (_near(gold, other, {}) or _near(gold, other, {}, precise=True)) == "equal"


# values of both signs and several between 0 and 1, without common factors; then whole numbers for (-1)^n and the like
_REALS = (
    [Fraction(p, 7) for p in (11, 17, 5, 23, 29, 3, 31, 13, 37, 19, 41, 43)],
    [Fraction(p, 47) for p in (29, 7, 31, 3, 17, 13, 5, 41, 19, 23, 37, 43)],
    [Fraction(p, 43) for p in (5, 19, 31, 11, 7, 23, 3, 17, 37, 29, 41, 2)],
    [Fraction(p, 13) for p in (-5, 19, -31, 11, -7, 23, -3, 17, -37, 29, -41, 2)],
    [Fraction(p, 5) for p in (7, -3, 11, 13, -17, 2, 19, -23, 29, 31, 37, -1)],
)
_WHOLES = (
    [Fraction(p) for p in (7, 3, 5, 2, 11, 4, 13, 6, 17, 8, 19, 9)],
    [Fraction(p) for p in (6, 4, 3, 5, 8, 2, 9, 7, 11, 10, 13, 12)],
)


def _same_functions(gold: Node, other: Node, names: list[str]) -> bool | None:
    if len(names) > len(_REALS[0]):
        return None
    outcomes = [_at(gold, other, dict(zip(names, point, strict=False))) for point in _REALS]
    if "different" not in outcomes and "one is real" not in outcomes and outcomes.count("equal") >= 2:
        return True
    if "other branch" in outcomes and not {"equal", "one is real", "different"} & set(outcomes):
        return False  # branches of a complex value count where nothing is real
    wholes = [_at(gold, other, dict(zip(names, whole, strict=False))) for whole in _WHOLES]
    if "different" in outcomes:
        # equal where n is a whole number is not the same as different
        return None if all(found == "equal" for found in wholes) else False
    return False if "different" in wholes else None


def _at(gold: Node, other: Node, values: dict[str, Fraction]) -> str:
    """`equal`, `different`, `one is real` (or defined), `other branch` (both complex), `undefined`."""
    found: list[Fraction | None] = []
    defined = []
    for node in (gold, other):
        try:
            found.append(exact(node, values))
            defined.append(True)
        except Undefined:
            found.append(None)
            defined.append(False)
        except TooBig:
            return "undefined"
    if not all(defined):
        return "one is real" if any(defined) else "undefined"
    if None not in found:
        return "equal" if found[0] == found[1] else "different"
    try:
        near = _near(gold, other, values)
        return near or _near(gold, other, values, precise=True) or "undefined"
    except (Undefined, TooBig, OverflowError):
        return "undefined"


def _near(gold: Node, other: Node, values: Mapping[str, Fraction], *, precise: bool = False) -> str:
    """What `_at` says, from numbers; in double precision only clear differences are said, else nothing."""
    arithmetic = _digits() if precise else _Doubles
    try:
        left = _approximate(gold, values, arithmetic)
        right = _approximate(other, values, arithmetic)
    except (ZeroDivisionError, ValueError) as error:
        raise Undefined(str(error)) from error
    size = max(abs(left), abs(right))
    apart = abs(left - right)
    if not math.isfinite(size):
        raise TooBig
    if apart <= size * (arithmetic.tiny if precise else 1e-4) or (precise and size <= arithmetic.tiny):
        return "equal" if precise else ""
    # a value that is nothing but rounding error counts as real
    reals = [abs(value.imag) <= abs(value) * arithmetic.tiny for value in (left, right)]
    return "different" if all(reals) else "one is real" if any(reals) else "other branch"


def _exact(node: Node, values: Mapping[str, Fraction]) -> Fraction:
    kind = node[0]
    if kind == "n":
        number: Fraction = node[1]
        return number
    if kind == "s":
        if node[1] not in values:
            raise _Irrational
        return values[node[1]]
    if kind == "-":
        return -_exact(node[1], values)
    if kind in ("+", "*", "/", "^"):
        return _exact_operation(kind, _exact(node[1], values), _exact(node[2], values))
    if kind == "root":
        degree = _exact(node[1], values)
        if degree.denominator != 1 or not 2 <= degree <= 100:
            raise _Irrational
        return _root(_exact(node[2], values), int(degree))
    if kind == "f":
        return _exact_function(node[1], _exact(node[2], values))
    if kind == "binom":
        above, below = _exact(node[1], values), _exact(node[2], values)
        if above.denominator != 1 or below.denominator != 1 or not 0 <= below <= above:
            raise _Irrational
        if above > 3000:
            raise TooBig
        return Fraction(math.comb(int(above), int(below)))
    raise _Irrational


def _exact_operation(kind: str, left: Fraction, right: Fraction) -> Fraction:
    if kind == "+":
        return left + right
    if kind == "*":
        return _fits(left * right)
    if kind == "^":
        return _power(left, right)
    if not right:
        raise Undefined("division by zero")
    return _fits(left / right)


def _exact_function(name: str, value: Fraction) -> Fraction:
    if name == "abs":
        return abs(value)
    if name == "floor":
        return Fraction(math.floor(value))
    if name == "ceil":
        return Fraction(math.ceil(value))
    if name == "factorial" and value.denominator == 1:
        if value < 0:
            raise Undefined("factorial of a negative number")
        if value > 3000:
            raise TooBig
        return Fraction(math.factorial(int(value)))
    raise _Irrational


def _fits(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > 2 * _MAX_BITS:
        raise TooBig
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if exponent.denominator > 100 or base < 0:
            raise _Irrational
        base, exponent = _root(base, exponent.denominator), Fraction(exponent.numerator)
    if base in (0, 1, -1):
        if base == 0 and exponent <= 0:
            raise Undefined("0 to the power 0 or less")
        return base if exponent % 2 else abs(base)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) > _MAX_BITS or bits * abs(exponent) > _MAX_BITS:
        raise TooBig
    return base ** int(exponent)


def _root(value: Fraction, degree: int) -> Fraction:
    """The exact root, real for negative numbers and odd degrees."""
    if value < 0:
        if degree % 2 == 0:
            raise _Irrational
        return -_root(-value, degree)
    above, below = _whole_root(value.numerator, degree), _whole_root(value.denominator, degree)
    if above**degree != value.numerator or below**degree != value.denominator:
        raise _Irrational
    return Fraction(above, below)


def _whole_root(value: int, degree: int) -> int:
    if degree == 2:
        return math.isqrt(value)
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if middle**degree <= value:
            low = middle
        else:
            high = middle - 1
    return low


class _Doubles:
    """Double precision, complex."""

    tiny = 1e-9
    pi = complex(math.pi)
    e = complex(math.e)
    i = 1j
    sin, cos, tan, exp, sqrt = cmath.sin, cmath.cos, cmath.tan, cmath.exp, cmath.sqrt
    asin, acos, atan = cmath.asin, cmath.acos, cmath.atan
    sinh, cosh, tanh = cmath.sinh, cmath.cosh, cmath.tanh
    ln = cmath.log

    @staticmethod
    def number(value: Fraction) -> complex:
        return complex(float(value))

    @staticmethod
    def gamma(value: complex) -> complex:
        if abs(value.imag) > 1e-12:
            raise Undefined("factorial of a complex number")
        return complex(math.gamma(value.real))


@functools.cache  # making the context takes a millisecond
def _digits() -> Any:
    """The same with 60 digits."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = _DIGITS

    class Digits:
        tiny = context.mpf(10) ** (20 - _DIGITS)
        pi = context.mpc(context.pi)
        e = context.mpc(context.e)
        i = context.mpc(0, 1)
        sin, cos, tan, exp, sqrt = context.sin, context.cos, context.tan, context.exp, context.sqrt
        asin, acos, atan = context.asin, context.acos, context.atan
        sinh, cosh, tanh = context.sinh, context.cosh, context.tanh
        ln = context.log
        gamma = context.gamma

        @staticmethod
        def number(value: Fraction) -> Any:
            return context.mpc(context.mpf(value.numerator) / value.denominator)

    return Digits


def _approximate(node: Node, values: Mapping[str, Fraction], m: Any) -> Any:
    kind = node[0]
    try:
        return m.number(_exact(node, values))  # as much as possible exactly: 1/2004! has no double
    except _Irrational:
        pass
    if kind == "c":
        if node[1] == "inf":
            raise Undefined("infinite")
        return {"pi": m.pi, "e": m.e, "i": m.i}[node[1]]
    if kind == "-":
        return -_approximate(node[1], values, m)
    if kind in ("+", "*", "/"):
        left, right = _approximate(node[1], values, m), _approximate(node[2], values, m)
        return left + right if kind == "+" else left * right if kind == "*" else left / right
    if kind == "^":
        return _approximate_power(node, values, m)
    if kind == "root":
        return _approximate_root(node, values, m)
    if kind == "deg":
        return _approximate(node[1], values, m) * m.pi / 180
    if kind == "log":
        return _logarithm(_approximate(node[2], values, m), node[1], values, m)
    if kind == "f":
        return _approximate_function(node[1], _approximate(node[2], values, m), m)
    if kind == "binom":
        above, below = _approximate(node[1], values, m), _approximate(node[2], values, m)
        return m.gamma(above + 1) / (m.gamma(below + 1) * m.gamma(above - below + 1))
    raise Undefined(str(kind))


def _approximate_power(node: Node, values: Mapping[str, Fraction], m: Any) -> Any:
    if node[1] == ("c", "e"):
        return m.exp(_approximate(node[2], values, m))
    base, power = _approximate(node[1], values, m), _approximate(node[2], values, m)
    if abs(power) > 1e15:
        raise TooBig
    if not base:
        raise Undefined("power of 0")
    return m.exp(power * m.ln(base)) if m is not _Doubles else base**power


def _approximate_root(node: Node, values: Mapping[str, Fraction], m: Any) -> Any:
    inside = _approximate(node[2], values, m)
    if node[1] == ("n", Fraction(2)):
        return m.sqrt(inside)
    degree = _approximate(node[1], values, m)
    odd = node[1][0] == "n" and node[1][1].denominator == 1 and node[1][1] % 2
    if not inside:
        return inside
    if odd and inside.real < 0 and abs(inside.imag) <= abs(inside) * m.tiny:
        return -m.exp(m.ln(-inside) / degree)  # the real root
    return m.exp(m.ln(inside) / degree)


def _logarithm(value: Any, base: Node | None, values: Mapping[str, Fraction], m: Any) -> Any:
    if not value:
        raise Undefined("logarithm of 0")
    return m.ln(value) if base is None else m.ln(value) / m.ln(_approximate(base, values, m))


def _approximate_function(name: str, value: Any, m: Any) -> Any:
    if name == "abs":
        return m.sqrt(value.real**2 + value.imag**2) + 0 * m.i
    if name == "factorial":
        return m.gamma(value + 1)
    if name in ("floor", "ceil"):
        if abs(value.imag) > 1e-12 or abs(value) > 1e15:
            raise Undefined("rounding of a complex or huge number")
        return m.number(Fraction(getattr(math, name)(value.real)))
    if name in ("cot", "sec", "csc"):
        return 1 / {"cot": m.tan, "sec": m.cos, "csc": m.sin}[name](value)
    if name in ("arcsin", "arccos", "arctan"):
        return {"arcsin": m.asin, "arccos": m.acos, "arctan": m.atan}[name](value)
    if name == "ln":
        return _logarithm(value, None, {}, m)
    if name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "exp"):
        if abs(value) > 1e12:
            raise TooBig  # no digit of a double would be left
        return getattr(m, name)(value)
    raise Undefined(name)
