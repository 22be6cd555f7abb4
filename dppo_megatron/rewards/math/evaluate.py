"""The value of a tree where its variables have values, in a bounded number of operations.

Numbers stay fractions as long as they can; what is irrational is computed in double precision or to many digits
(mpmath, imported on first use). Nothing here looks at a clock: each operation is paid from the grading's `WorkLimit`,
and what costs more than is left, or has more digits than are worth computing, is `TooBig`.
"""

from __future__ import annotations

import cmath
import functools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from dppo_megatron.rewards.math.answers import Node

Point = Mapping[str, Fraction]
"""Values of variables."""
_MAX_BITS = 40_000
_MAX_FACTORIAL = 3000
_ALONE = 1000
"""Operations of a constant that is looked at by itself, while reading: a text has hundreds of them at most."""
WORK = 20_000
"""Operations of one grading: about 30 ms."""


class TooBig(Exception):
    """More digits or operations than are worth computing."""


class Undefined(Exception):
    """Division by zero, an infinite value, or a function outside its domain."""


class Discrete(Undefined):
    """Defined for whole numbers only, such as a sum up to n."""


class Unsure(Exception):
    """Double precision does not tell: which side of a step a value is on, what nearly equal terms differ by."""


class Irrational(Exception):
    """Not computable in fractions."""


class WorkLimit:
    """What is left of a grading's operations."""

    def __init__(self, left: int = WORK) -> None:
        self.left = left

    def spend(self, operations: int = 1) -> None:
        """Raises TooBig where there are not as many left, from then on always."""
        self.left -= operations
        if self.left < 0:
            self.left = -1
            raise TooBig("too many operations")


class Doubles:
    """Real where it can be, else complex."""

    precise = False
    tiny = 1e-6  # of which nothing is left where nearly equal terms are subtracted, as in 1 - cos x
    cost = gamma_cost = 1
    pi, e, i = math.pi, math.e, 1j
    exp, sin, cos, tan, atan = cmath.exp, cmath.sin, cmath.cos, cmath.tan, cmath.atan
    sinh, cosh, tanh, asin, acos = cmath.sinh, cmath.cosh, cmath.tanh, cmath.asin, cmath.acos
    sqrt, ln = cmath.sqrt, cmath.log
    number = staticmethod(float)

    @staticmethod
    def gamma(value: complex) -> float:
        if abs(value.imag) > 1e-12:
            raise Undefined("factorial of a complex number")
        return math.gamma(value.real)


@functools.cache  # making the context takes a millisecond
def digits(count: int) -> Any:
    """The same with so many decimal digits, of which 20 are for rounding errors."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = count

    class Digits:
        precise = True
        tiny = context.mpf(10) ** (20 - count)
        cost = 8 + count * count // 5000
        gamma_cost = count // 2 if count <= 250 else WORK  # 500 digits take half a second the first time
        pi, e, i = +context.pi, +context.e, context.mpc(0, 1)
        exp, sin, cos, tan, atan = context.exp, context.sin, context.cos, context.tan, context.atan
        sinh, cosh, tanh, asin, acos = context.sinh, context.cosh, context.tanh, context.asin, context.acos
        sqrt, ln, gamma = context.sqrt, context.ln, context.gamma

        @staticmethod
        def number(value: Fraction) -> Any:
            return context.mpf(value.numerator) / value.denominator

    return Digits


def exact(node: Node, values: Point | None = None, work: WorkLimit | None = None) -> Fraction | None:
    """The exact value; None if the tree is not rational.

    Raises:
        TooBig, Undefined.
    """
    try:
        value = Evaluation(values or {}, None, work or WorkLimit(_ALONE)).of(node)
    except Irrational:
        return None
    return value if isinstance(value, Fraction) else None


def rational(node: Node, values: Point | None = None, work: WorkLimit | None = None) -> Fraction | None:
    """As `exact`; None also for what has no value (0/0) or is not worth computing."""
    try:
        return exact(node, values, work)
    except (TooBig, Undefined, OverflowError, RecursionError):
        return None


def approximate(node: Node, values: Point | None = None, work: WorkLimit | None = None) -> Fraction | None:
    """The value, of what is irrational in double precision; None if there is no real one."""
    try:
        value = Evaluation(values or {}, Doubles, work or WorkLimit(_ALONE)).of(node)
    except (TooBig, Undefined, Unsure, Irrational, OverflowError, RecursionError, ZeroDivisionError, ValueError):
        return None
    if isinstance(value, Fraction):
        return value
    return Fraction(value.real) if math.isfinite(abs(value)) and abs(value.imag) <= 1e-12 * abs(value) else None


class Evaluation:
    """Of trees at one point. Attributes beside the values say how far they can be trusted.

    Args:
        values: of the variables.
        arithmetic: `Doubles` or `digits(n)` for what is irrational; None: that raises Irrational.
    """

    def __init__(self, values: Point, arithmetic: Any, work: WorkLimit) -> None:
        self.values, self.arithmetic, self.work = dict(values), arithmetic, work
        self.has_branch = False
        """Whether a root, power or logarithm of something not positive was taken: one of several values."""
        self.largest: Any = 0
        """Of the terms of all sums: what a difference of nearly equal ones is to be measured by."""
        self.factorial = (0, 1)
        """The last one: n and n!."""
        self.bits = 0
        """Of the longest fraction that was rounded."""

    def of(self, node: Node) -> Any:
        """A Fraction where that is exact, else a number of the arithmetic."""
        self.work.spend(self.arithmetic.cost if self.arithmetic else 1)
        kind = node[0]
        if kind == "n":
            return node[1]
        if kind == "s":
            if node[1] not in self.values:
                raise Irrational
            return self.values[node[1]]
        if kind == "-":
            return -self.of(node[1])
        if kind in ("+", "*", "/"):
            return self._operation(kind, self.of(node[1]), self.of(node[2]))
        method = _METHODS.get(kind)
        if method is None:
            raise Undefined(str(kind))
        return method(self, node)

    def lift(self, value: Any) -> Any:
        """A number of the arithmetic, which a fraction is rounded to."""
        if self.arithmetic is None:
            raise Irrational
        if isinstance(value, Fraction):
            self.bits = max(self.bits, value.numerator.bit_length(), value.denominator.bit_length())
            return self.arithmetic.number(value)
        return value

    def _operation(self, kind: str, left: Any, right: Any) -> Any:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            if kind == "/" and not right:
                raise Undefined("division by zero")
            return self._fits(left + right if kind == "+" else left * right if kind == "*" else left / right)
        left, right = self.lift(left), self.lift(right)
        if kind == "+":
            total, size = left + right, max(abs(left), abs(right))
            if not self.arithmetic.precise and abs(total) < 1e-8 * size:  # half of a double's digits are gone
                raise Unsure
            self.largest = max(self.largest, size)
            return total
        return left * right if kind == "*" else left / right

    def _fits(self, value: Fraction) -> Fraction:
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        if bits > 2 * _MAX_BITS:
            raise TooBig
        if bits > 512:
            self.work.spend(bits // (4096 if value.denominator == 1 else 256))
        return value

    def _constant(self, node: Node) -> Any:
        if node[1] == "inf":
            raise Undefined("infinite")
        return {"pi": self.arithmetic.pi, "e": self.arithmetic.e, "i": self.arithmetic.i}[node[1]]

    def _degrees(self, node: Node) -> Any:
        return self.lift(self.of(node[1])) * self.arithmetic.pi / 180

    def _power(self, node: Node) -> Any:
        if node[1] == ("c", "e"):
            power = self.of(node[2])
            return Fraction(1) if power == 0 else self._exp(self.lift(power))
        return self._raised(self.of(node[1]), self.of(node[2]))

    def _radical(self, node: Node) -> Any:
        return self._raised(self.of(node[2]), self._operation("/", Fraction(1), self.of(node[1])))

    def _raised(self, base: Any, power: Any) -> Any:
        """Real for odd roots of real numbers."""
        if isinstance(power, Fraction) and power.denominator <= 100:
            if isinstance(base, Fraction) and (root := self._exact_root(base, power.denominator)) is not None:
                return self._whole_power(root, int(power.numerator))
            base = self.lift(base)
            if power.denominator == 1 and base:
                if abs(power) > _MAX_BITS:
                    raise TooBig
                return base ** int(power)
            if power.denominator % 2 and not base.imag and base.real < 0:
                root = self._raised(-base.real, power)
                return -root if power.numerator % 2 else root
        base = self.lift(base)
        if not base:
            if power.real > 0:
                return Fraction(0)
            raise Undefined("0 to the power 0 or less")
        if power == Fraction(1, 2):
            self.has_branch |= not _is_positive(base)
            return _real(self.arithmetic.sqrt(base))
        return self._exp(self.lift(power) * self._ln(base))

    def _whole_power(self, base: Fraction, power: int) -> Fraction:
        if base in (0, 1, -1):
            if base == 0 and power <= 0:
                raise Undefined("0 to the power 0 or less")
            return base if power % 2 else abs(base)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(power) > _MAX_BITS:
            raise TooBig
        return self._fits(base**power)

    def _exact_root(self, value: Fraction, degree: int) -> Fraction | None:
        """Real for negative numbers and odd degrees; None if it is not rational."""
        if degree == 1:
            return value
        if value < 0:
            root = self._exact_root(-value, degree) if degree % 2 else None
            return None if root is None else -root
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        self.work.spend(bits * bits // 100_000)  # 30,000 bits take 4 ms, and an expression is evaluated several times
        above, below = _whole_root(value.numerator, degree), _whole_root(value.denominator, degree)
        is_root = above**degree == value.numerator and below**degree == value.denominator
        return Fraction(above, below) if is_root else None

    def _exp(self, value: Any) -> Any:
        if abs(value) > 1e5:
            raise TooBig
        return _real(self.arithmetic.exp(value))

    def _ln(self, value: Any) -> Any:
        if not value:
            raise Undefined("logarithm of 0")
        self.has_branch |= not _is_positive(value)
        return _real(self.arithmetic.ln(value))

    def _log(self, node: Node) -> Any:
        value = self._ln(self.lift(self.of(node[2])))
        return value if node[1] is None else value / self._ln(self.lift(self.of(node[1])))

    def _function(self, node: Node) -> Any:
        name, value = node[1], self.of(node[2])
        if name in ("factorial", "factorial2"):
            return self._factorial(value, 1 if name == "factorial" else 2)
        if name == "abs":
            return abs(value) if isinstance(value, Fraction) else abs(self.lift(value))
        if name in ("floor", "ceil"):
            return self._whole(name, value)
        m, value = self.arithmetic, self.lift(value)
        if name == "ln":
            return self._ln(value)
        if name in ("cot", "sec", "csc"):
            return 1 / _real({"cot": m.tan, "sec": m.cos, "csc": m.sin}[name](value))
        if name in ("arcsin", "arccos", "arctan"):
            self.has_branch |= name != "arctan" and abs(value) > 1
            return _real({"arcsin": m.asin, "arccos": m.acos, "arctan": m.atan}[name](value))
        if name not in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "exp"):
            raise Undefined(name)
        if abs(value) > (1e5 if name[-1] in "hp" else 1e12):
            raise TooBig  # no digit of a double would be left
        if not m.precise and abs(value) > 1e6:
            raise Unsure
        return _real(getattr(m, name)(value))

    def _whole(self, name: str, value: Any) -> Fraction:
        if isinstance(value, Fraction):
            return Fraction(getattr(math, name)(value))
        if abs(value.imag) > self.arithmetic.tiny or abs(value) > 1e15:
            raise Undefined("rounding of a complex or huge number")
        near = Fraction(round(float(value.real)))
        if abs(value.real - int(near)) < (1e-6 if not self.arithmetic.precise else self.arithmetic.tiny):
            if not self.arithmetic.precise:
                raise Unsure
            return near
        return Fraction(int(getattr(math, name)(value.real)))

    def _factorial(self, value: Any, step: int) -> Any:
        if not isinstance(value, Fraction) or value.denominator != 1:
            if step == 2:
                raise Discrete("double factorial")
            return self._gamma(self.lift(value) + 1)
        if value < 0:
            raise Undefined("factorial of a negative number")
        if value > _MAX_FACTORIAL:
            raise TooBig
        if step == 2:
            self.work.spend(int(value) // 8)
            return Fraction(math.prod(range(int(value), 0, -2)))
        known, product = self.factorial
        if not 0 <= value - known <= 8:  # in a sum each has the one before
            self.work.spend(int(value) // 8)
            known, product = int(value), math.factorial(int(value))
        product *= math.prod(range(known + 1, int(value) + 1))
        self.factorial = int(value), product
        return self._fits(Fraction(product))

    def _binomial(self, node: Node) -> Any:
        above, below = self.of(node[1]), self.of(node[2])
        if isinstance(above, Fraction) and isinstance(below, Fraction) and above.denominator == below.denominator == 1:
            if not 0 <= below <= above:
                raise Undefined("a binomial coefficient outside its triangle")
            if above > _MAX_FACTORIAL:
                raise TooBig
            self.work.spend(int(min(below, above - below)) // 8)
            return Fraction(math.comb(int(above), int(below)))
        above, below = self.lift(above), self.lift(below)
        return self._gamma(above + 1) / (self._gamma(below + 1) * self._gamma(above - below + 1))

    def _gamma(self, value: Any) -> Any:
        self.work.spend(self.arithmetic.gamma_cost)
        return self.arithmetic.gamma(value)

    def _several(self, node: Node) -> Any:
        """max, min, gcd, lcm and mod of two numbers or more."""
        name, values = node[1], [self.of(part) for part in node[2:]]
        if name in ("max", "min"):
            if any(value.imag for value in values):
                raise Undefined("order of complex numbers")
            fractions = all(isinstance(value, Fraction) for value in values)
            return (max if name == "max" else min)(values if fractions else [self.lift(value) for value in values])
        if not all(isinstance(value, Fraction) for value in values):
            raise Irrational if self.arithmetic is None else Discrete(name)
        bits = sum(value.numerator.bit_length() + value.denominator.bit_length() for value in values)
        self.work.spend(bits * bits // 2_000_000)
        if name == "mod":
            if not values[1]:
                raise Undefined("division by zero")
            return values[0] % values[1]
        if any(value.denominator != 1 for value in values):
            raise Discrete(name)
        return Fraction((math.gcd if name == "gcd" else math.lcm)(*map(int, values)))

    def _big(self, node: Node) -> Any:
        """A sum or product of finitely many terms."""
        _, kind, name, low, high, body = node
        first, last = self.of(low), self.of(high)
        if not isinstance(first, Fraction) or not isinstance(last, Fraction):
            raise Irrational if self.arithmetic is None else Discrete("bounds")
        if first.denominator != 1 or last.denominator != 1 or last < first - 1:
            raise Discrete("bounds")
        if 2 * (last - first) > self.work.left:
            raise TooBig
        before, result = self.values.get(name), Fraction(int(kind == "prod"))
        for index in range(int(first), int(last) + 1):
            self.values[name] = Fraction(index)
            result = self._operation("+" if kind == "sum" else "*", result, self.of(body))
        self.values.pop(name, None)
        if before is not None:
            self.values[name] = before
        return result


_METHODS = {
    "^": Evaluation._power,
    "c": lambda self, node: self._constant(node) if self.arithmetic else self.lift(node),
    "deg": lambda self, node: self._degrees(node) if self.arithmetic else self.lift(node),
    "root": Evaluation._radical,
    "log": Evaluation._log,
    "f": Evaluation._function,
    "binom": Evaluation._binomial,
    "of": Evaluation._several,
    "big": Evaluation._big,
}


def _real(value: Any) -> Any:
    """Without an imaginary part that is nothing."""
    return value if value.imag else value.real


def _is_positive(value: Any) -> bool:
    return not value.imag and bool(value.real > 0)


def _whole_root(value: int, degree: int) -> int:
    """Rounded down, by Newton's method from above."""
    if degree == 2 or value < 2:
        return math.isqrt(value)
    root = 1 << -(-value.bit_length() // degree)
    while True:
        better = ((degree - 1) * root + value // root ** (degree - 1)) // degree
        if better >= root:
            return root
        root = better
