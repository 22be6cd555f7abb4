"""The value of a tree at given values of its variables, in a bounded number of operations.

Numbers stay fractions as long as possible; irrational ones are computed to many digits (mpmath, imported on first use).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from dppo_megatron.rewards.math.answers import Node, symbols

Point = Mapping[str, Fraction]  # values of variables
_MAX_BITS = 40_000
_MAX_FACTORIAL = 3000
_ALONE = 1000  # operations for one constant while a text is read, which contains a few hundred of them at most
WORK = 20_000  # operations of one grading: about 30 ms
_MOST_SUMS = 8  # nested in each other: deep calls cost more, and 30 nested sums took 0.12 s, where WORK is 0.03 s
_TRANSCENDENTAL = frozenset(["sin", "cos", "tan", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan"])
_GROWING = frozenset(["exp", "sinh", "cosh", "tanh"])
_HALF = Fraction(1, 2)
_OF_WHOLES = frozenset(["factorial", "factorial2", "binom", "gcd", "lcm", "mod"])


class TooBig(Exception):
    """More digits or operations than are worth computing."""


class Undefined(Exception):
    """Division by zero, an infinite value, or a function outside its domain."""


class Discrete(Exception):
    """Defined for whole numbers only, such as a sum up to n."""


class WorkLimit:
    """The operations that a grading may still use, and whether a comparison could not be decided."""

    def __init__(self, left: int = WORK) -> None:
        self.left, self.has_doubt = left, False

    def spend(self, operations: int = 1) -> None:
        """Raises TooBig if fewer operations are left, and in every later call."""
        self.left -= operations
        if self.left < 0:
            raise TooBig("too many operations")


@functools.cache  # creating it takes a millisecond
def _arithmetic(digits: int) -> tuple[Any, Any]:
    """The arithmetic of mpmath with so many digits, and 1 in the last but 20 of them."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = digits
    return context, context.mpf(10) ** (20 - digits)


@functools.lru_cache(maxsize=256)  # the letters' values in both trees, for example
def _rounded(above: int, below: int, digits: int) -> Any:
    number = _arithmetic(digits)[0].mpf(above)
    return number if below == 1 else number / below


def rational(node: Node, values: Point | None = None, work: WorkLimit | None = None) -> Fraction | None:
    """The exact value; None if the tree is not rational, has no value (0/0) or is not worth computing."""
    value = _value(node, values, work)
    return value if isinstance(value, Fraction) else None


def approximate(node: Node, values: Point | None = None, work: WorkLimit | None = None) -> Fraction | None:
    """The value, in double precision if it is irrational; None if there is no real one."""
    value = _value(node, values, work)
    if value is None or isinstance(value, Fraction):
        return value
    number = complex(value)
    return Fraction(number.real) if math.isfinite(abs(number)) and abs(number.imag) <= 1e-12 * abs(number) else None


def _value(node: Node, values: Point | None, work: WorkLimit | None) -> Any:
    try:
        at = Evaluation(values or {}, work or WorkLimit(_ALONE))
        value = at.of(node)
        return None if isinstance(value, Fraction) and at.bits > 60 else value  # a floor may need more than 60 digits
    except (TooBig, Undefined, Discrete, RecursionError, ArithmeticError, ValueError):
        return None


class Evaluation:
    """Evaluates trees at one point, irrational values to `digits` decimal digits: real if possible, else complex. The
    attributes tell how far its values can be trusted."""

    def __init__(self, values: Point, work: WorkLimit, digits: int = 60) -> None:
        self.values, self.work = dict(values), work
        self._digits, self._cost = digits, 3 + digits * digits // 2500
        # tiny, relative to the terms: values that differ by less may be equal, with 20 digits for rounding errors
        self._arithmetic, self.tiny = _arithmetic(digits)
        self.has_branch = False  # a root or logarithm of a number that is not positive was taken: it has several values
        self.largest: Any = 0  # term of all sums, by which a difference of nearly equal ones is judged
        self.bits = 0  # length of the longest fraction that was rounded
        self.is_outside = False  # a factorial or binomial was evaluated where it is not defined
        self._sums_around = 0

    def of(self, node: Node) -> Any:
        """A Fraction if the value is exact, else a number of mpmath."""
        self.work.spend()
        kind = node[0]
        if kind == "n":
            return node[1]
        if kind == "s" and node[1] in self.values:
            return self.values[node[1]]
        if kind == "-":
            return -self.of(node[1])
        if kind in ("+", "*", "/"):
            return self._operation(kind, self.of(node[1]), self.of(node[2]))
        if kind == "^":
            return self._power(node[1], node[2])
        if kind == "c" and node[1] != "inf":
            self.work.spend()
            return self._arithmetic.j if node[1] == "i" else +getattr(self._arithmetic, node[1])
        if kind == "f":
            if node[1] == "floor" and node[2][0] == "^" and node[2][2] == ("n", _HALF):
                return self._floor_of_root(self.of(node[2][1]))
            return self._function(node[1], [self.of(part) for part in node[2:]])
        if kind == "big":
            return self._big(node)
        raise Undefined(node[1])

    def lift(self, value: Any) -> Any:
        """`value` as a number of mpmath; a fraction is rounded."""
        if type(value) is not Fraction:
            return value
        above, below = value.as_integer_ratio()
        bits = max(above.bit_length(), below.bit_length())
        self.bits = max(self.bits, bits)
        self.work.spend(bits // 256)
        return _rounded(above, below, self._digits)

    def _operation(self, kind: str, left: Any, right: Any) -> Any:
        if type(left) is type(right) is Fraction:
            return self._fits(left + right if kind == "+" else left * right if kind == "*" else left / right)
        self.work.spend(self._cost)
        left, right = self.lift(left), self.lift(right)
        result = left + right if kind == "+" else left * right if kind == "*" else left / right
        if kind == "+":
            self.largest = max(self.largest, abs(left), abs(right))
        size = self.largest if kind == "+" else result
        bits = abs(self._arithmetic.mag(size))
        if bits > self.bits and not self._is_zero(size):  # beside 150 factors pi, small terms would be rounded away
            self.bits = bits
        return result

    def _fits(self, value: Fraction) -> Fraction:
        above, below = value.as_integer_ratio()
        bits = above.bit_length() + below.bit_length()
        if bits > 2 * _MAX_BITS:
            raise TooBig
        self.work.spend(bits // (4096 if below == 1 else 256))
        return value

    def _power(self, base: Node, exponent: Node) -> Any:
        power, value = self.of(exponent), self.of(base)
        if base == ("c", "e"):
            return Fraction(1) if power == 0 else self._called("exp", self.lift(power))
        if exponent[0] != "n" and self._is_zero(value) and symbols(exponent):  # 0^{(x-7)^2} is 0 at every point but one
            raise TooBig("0 to a power that may be 0")
        return self._raised(value, power)

    def _is_zero(self, value: Any) -> bool:
        """Whether it is 0, or may be 0 apart from rounding errors."""
        return not value or (type(value) is not Fraction and abs(value) <= self.tiny)

    def _raised(self, base: Any, power: Any) -> Any:
        """base^power; odd roots of real numbers are real."""
        self.work.spend()
        if not base:
            if power.real > 0:
                return Fraction(0)
            raise Undefined("0 to the power 0 or less")
        above, below = power.as_integer_ratio() if type(power) is Fraction else (0, 0)
        if 0 < below <= 100:
            if below % 2 and not base.imag and base.real < 0:
                root = self._raised(-base.real, power)
                return -root if above % 2 else root
            if type(base) is Fraction and (root := self._exact_root(base, below)) is not None:
                bits = max(root.numerator.bit_length(), root.denominator.bit_length())
                bits = (bits - 1) * abs(above)  # bits - 1, so that 1 may have any power
                if bits > _MAX_BITS:
                    raise TooBig
                self.work.spend(bits // 512)
                return self._fits(root**above)
            if below == 1:
                if abs(above) > _MAX_BITS:
                    raise TooBig
                self.work.spend(3 * self._cost)
                result = base**above
                self.bits = max(self.bits, 0 if self._is_zero(base) else abs(self._arithmetic.mag(result)))
                return result
        base = self.lift(base)
        if (above, below) == (1, 2) or (not below and power == _HALF):
            self.has_branch |= bool(base.imag or base.real <= 0)
            return self._called("sqrt", base)
        return self._called("exp", self.lift(power) * self._ln(base))

    def _exact_root(self, value: Fraction, degree: int) -> Fraction | None:
        """The root; None if it is not rational, or `value` is too long to tell."""
        if degree == 1:
            return value
        longest = max(value.numerator, value.denominator).bit_length()
        if value < 0 or (degree > 2 and longest > 150):
            return None
        self.work.spend(2 + longest // 256)
        parts = value.as_integer_ratio()
        roots = [math.isqrt(part) if degree == 2 else round(part ** (1 / degree)) for part in parts]
        return Fraction(*roots) if tuple(root**degree for root in roots) == parts else None

    def _ln(self, value: Any) -> Any:
        if not value:
            raise Undefined("logarithm of 0")
        self.has_branch |= bool(value.imag or value.real <= 0)
        return self._called("log", value)

    def _called(self, name: str, value: Any) -> Any:
        """A function of mpmath; real if the imaginary part is 0."""
        self.work.spend(self._cost + 4 * (name != "sqrt"))
        if name in _GROWING:  # a sum with e^{-4900} differs from one without it only in far digits
            if abs(value) > 1e5:
                raise TooBig
            self.bits = max(self.bits, 2 * int(abs(value.real)))
        result = getattr(self._arithmetic, name)(value)
        if not self._arithmetic.isfinite(result):  # as for arctan(i): infinity would compare as equal to anything
            raise Undefined(name)
        return result if result.imag else result.real

    def _function(self, name: str, values: list[Any]) -> Any:
        fractions = all(type(value) is Fraction for value in values)
        if name == "abs":
            return abs(values[0])
        if name == "max":
            values = values if fractions else [self.lift(value) for value in values]
            if any(value.imag for value in values):
                raise Undefined("order of complex numbers")
            return max(value.real for value in values)
        if name == "floor":
            return self._floor(values[0])
        if name == "ln":
            return self._ln(self.lift(values[0]))
        if name not in _OF_WHOLES:
            value = self.lift(values[0])
            if name not in _TRANSCENDENTAL:
                raise Undefined(name)
            self.has_branch |= name in ("arcsin", "arccos") and abs(value) > 1
            self.largest = max(self.largest, abs(value))  # sin(pi) has the rounding error of pi
            if abs(value) > 1e12:
                raise TooBig
            return self._called(name.replace("arc", "a"), value)
        if not fractions:
            raise Discrete(name)
        bits = sum(value.numerator.bit_length() + value.denominator.bit_length() for value in values)
        self.work.spend(bits**2 >> 21)
        if name == "mod":
            return values[0] % values[1]
        if any(value.denominator != 1 for value in values):
            raise Discrete(name)
        return self._of_wholes(name, *map(int, values))

    def _floor_of_root(self, value: Any) -> Fraction:
        if not isinstance(value, Fraction) or value < 0:
            return self._floor(self._raised(value, _HALF))
        self.work.spend(2 + value.numerator.bit_length() // 256)
        return Fraction(math.isqrt(math.floor(value)))

    def _floor(self, value: Any) -> Fraction:
        if isinstance(value, Fraction):
            return Fraction(math.floor(value))
        self.work.spend(3)
        if (value.imag and abs(value.imag) > self.tiny) or self._arithmetic.mag(value) > 50:
            raise Undefined("rounding of a complex or huge number")
        return Fraction(int(self._arithmetic.floor(value.real + self.tiny)))

    def _of_wholes(self, name: str, one: int, *others: int) -> Fraction:
        if name in ("gcd", "lcm"):
            return Fraction((math.gcd if name == "gcd" else math.lcm)(one, *others))
        if one < 0 or (name == "binom" and not 0 <= others[0] <= one):
            self.is_outside = True
            raise Undefined(f"{name} of {one}")
        if one > _MAX_FACTORIAL:
            raise TooBig
        if name == "binom":
            self.work.spend(min(others[0], one - others[0]) // 8)
            return Fraction(math.comb(one, others[0]))
        if name == "factorial2":
            self.work.spend(one // 8)
            return Fraction(math.prod(range(one, 0, -2)))
        return self._fits(Fraction(_factorials()[one]))

    def _big(self, node: Node) -> Any:
        """A sum or product of finitely many terms."""
        _, kind, name, low, high, body = node
        first, last = self.of(low), self.of(high)
        is_exact = isinstance(first, Fraction) and isinstance(last, Fraction)
        if not is_exact or first.denominator != 1 or last.denominator != 1 or last < first - 1:
            raise Discrete("bounds")
        if 2 * (last - first) > self.work.left or self._sums_around == _MOST_SUMS:
            raise TooBig
        self._sums_around += 1
        outside, result = self.values, Fraction(int(kind == "prod"))
        for index in range(int(first), int(last) + 1):
            self.values = {**outside, name: Fraction(index)}
            result = self._operation("+" if kind == "sum" else "*", result, self.of(body))
        self.values, self._sums_around = outside, self._sums_around - 1
        if first <= last and self._is_zero(result) and symbols(low) | symbols(high):  # \prod_{k=1}^{(n-7)^2} 0 at n = 7
            raise TooBig("0, but perhaps not if it has no terms")
        return result


@functools.cache  # else a sum of factorials would compute each of them from scratch
def _factorials() -> list[int]:
    return list(itertools.accumulate(range(1, _MAX_FACTORIAL + 1), operator.mul, initial=1))
