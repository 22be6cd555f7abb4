"""Parses LaTeX and plain expressions into trees (`answers.py`), by recursive descent with a bounded depth. Whatever is
not understood raises `Unreadable`: a wrong guess would be a wrong reward."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from fractions import Fraction

from dppo_megatron.rewards.math import regex
from dppo_megatron.rewards.math.answers import PI, Node, Unreadable, substituted, symbols, walk
from dppo_megatron.rewards.math.clean import GREEK
from dppo_megatron.rewards.math.units import MAX_DIGITS, MAX_EXPONENT, decimal

MAX_CHARS = 1500
_MAX_DEPTH = 40

_NAMED = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln exp abs floor ceil Re Im arg cis log lg"
_FUNCTIONS = frozenset(_NAMED.split())
_RECIPROCALS = {"cot": "tan", "sec": "cos", "csc": "sin"}
_WORD_CONSTANTS = {"pi": "pi", "infty": "inf", "infinity": "inf", "inf": "inf"}
_NAMES = frozenset(f"{GREEK} Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega hbar ell odot partial nabla".split())
_CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|", "\\{": "\\}"}
_NUMBER = regex(r"(\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d+)(?![A-Za-z]))?", re.ASCII)
_TOKEN = regex(r"\\?[A-Za-z]+|.", re.DOTALL)
# one token, as p in m_pc; but plain x_max
_ARGUMENT = regex(r"\s*(?:\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|\\[A-Za-z]+|[A-Za-z]{3,}|[A-Za-z\d])")
_OF_FUNCTIONS = regex(r"\s*\([^()]*(?:sin|cos|tan|ln|log)")  # no argument in \sin x(1+\cos x)
_MIXED = regex(r"\s*\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))|\s+(\d+)\s*/\s*(\d+)", re.ASCII)
_BRACKETED = regex(r"(?:[^A-Z(]\)|[!}])\s*\Z")  # a closed bracket, but not a choice letter's; 2!3!, 2^{3}3
_TIMES_A_POWER = regex(r"(?<![A-Za-z\\_])[A-Za-z] ?\d+\s*\^\s*(?:[a-z]|\{[^{}]*[a-z])")  # n2^n; x2^3 may be x_2
# n(-1)^n is n times a power, v(0)^2 is the square of a value
_AT_A_NUMBER = regex(r"(?:(?<=[fghFGHPQ])|(?!\(-?\d+\)\s*\^\s*(?:[a-z]|\{[^{}]*[a-z])))\((-?\d+)\)")
CURRENCIES = ("dollars", "euros", "gbp", "yen", "rupees")
_SEVERAL = frozenset(["max", "min", "gcd", "lcm"])
ONE: Node = ("n", Fraction(1))
DEGREE: Node = ("/", PI, ("n", Fraction(180)))
_INDEX = regex(r"\s*\{\s*([A-Za-z])\s*=")
_DECORATED = frozenset(["overline", "hat", "vec", "tilde", "dot", "ddot", "angle", "triangle"])


def parse(text: str) -> Node:
    """The tree of one expression.

    Raises:
        Unreadable: the text is not an expression.

    Example:
        >>> parse("2\\\\frac{1}{2}x")
        ('*', ('n', Fraction(5, 2)), ('s', 'x'))
    """
    if len(text) > MAX_CHARS:
        raise Unreadable("too long")
    reader = _Reader(text)
    node = reader.sum()
    if rest := text[reader.position :].strip(" "):
        raise Unreadable(f"at {reader.position}: {rest[:12]!r}")
    return node


class _Reader:
    """A position in the text, and methods that parse a part of it from there on."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self._depth = 0
        self._in_bars = False
        self._bound: set[str] = set()  # letters that count in a sum or product: there `i` and `e` are letters too

    def sum(self) -> Node:
        """Terms separated by + and -."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unreadable("nested too deeply")
        node = self._signed(self.product)
        while sign := self._take("+", "-"):
            term = self.product()
            node = ("+", node, term if sign == "+" else (sign, term))
        self._depth -= 1
        return node

    def product(self, *, until_function: bool = False) -> Node:
        """Factors separated by *, / or nothing."""
        node = self._factor()
        while True:
            # the argument of a function without brackets ends before * and /: \cos t \cdot x
            sign = "" if until_function else self._take("*", "/", "\\bmod", "\\mod")
            if sign == "*":
                node = self._times(node, self._signed(self._factor))
            elif sign == "/":
                node = _quotient(node, self._signed(self._factor))
            elif sign:
                node = ("f", "mod", node, self._signed(self._factor))
            elif self._starts_factor(until_function):
                digits = self._peek()[0] in "0123456789."
                is_product = digits and (
                    _BRACKETED.search(self.text, 0, self.position)  # (n-2) 2^n is a product, x 2 is not
                    or _TIMES_A_POWER.match(self.text, self.position - 1 - self.text.endswith(" ", 0, self.position))
                )
                if digits and not is_product:
                    raise Unreadable("a number behind a factor")
                node = self._times(node, self._factor())
            else:
                return node

    def _times(self, left: Node, right: Node) -> Node:
        """The product. Raises Unreadable for two vectors, whose product is not one of numbers."""
        if "\\vec" in self.text and all("vec:" in " ".join(symbols(side)) for side in (right, left)):
            raise Unreadable("a product of vectors")
        return ("*", left, right)

    def _signed(self, read: Callable[[], Node]) -> Node:
        """`read()` with the signs before it."""
        sign = self._take("+", "-")
        node = self._signed(read) if sign else read()
        return ("-", node) if sign == "-" else node

    def _factor(self) -> Node:
        node = self._primary()
        while sign := self._take("^", "!!", "!", "%", "\\degree"):
            if sign == "^":
                power = self._signed(self._primary)
                if node[0] == "s" and "_" not in node[1] and self._peek() == "_":  # v^2_0 means v_0^2
                    node = ("s", self._name(node[1]))
                node = ("^", node, power)
            elif sign[0] == "!":
                if self._peek() == "!":
                    raise Unreadable("a triple factorial")
                node = ("f", "factorial" if sign == "!" else "factorial2", node)
            else:
                node = ("/", node, ("n", Fraction(100))) if sign == "%" else ("*", node, DEGREE)
        return node

    def _primary(self) -> Node:
        token = self._peek()
        if token[:1].isdigit() or token == ".":
            return self._number()
        if token in _CLOSING:
            return self._bracket()
        if token[:1] == "\\":
            return self._command(token[1:])
        if token.isascii() and token.isalpha():
            return self._word(token)
        raise Unreadable(f"unexpected {token!r}")

    def _number(self) -> Node:
        """A number; 2\\frac{1}{3} and 2 1/3 are mixed numbers."""
        match = _NUMBER.match(self.text, self.position)
        if match is None or len(match.group()) > MAX_DIGITS or abs(int(match[2] or 0)) > MAX_EXPONENT:
            raise Unreadable("not a number, or too long")
        is_scientific = match[2] is not None and self.text.strip(" +-") == match.group()  # not 2e-5 in \\frac{2e-5}{e}
        self.position = match.end(0 if is_scientific else 1)
        value = decimal(match[1].replace(",", ""))
        if is_scientific:
            value *= Fraction(10) ** int(match[2])
        fraction = None if is_scientific or "." in match[1] else _MIXED.match(self.text, self.position)
        if fraction is None:
            return ("n", value)
        above, below = (int(number) for number in fraction.groups() if number)
        if above >= below:
            raise Unreadable("not a mixed number")
        self.position = fraction.end()
        return ("n", value + Fraction(above, below))

    def _until(self, close: str) -> Node:
        """The sum up to the closing bracket `close`."""
        bars, self._in_bars = self._in_bars, close == "|"
        node = self.sum()
        self._in_bars = bars
        if not self._take(close):
            raise Unreadable(f"no {close}")
        return node

    def _bracket(self) -> Node:
        sign = self._take(*_CLOSING)
        inside = self._until(_CLOSING[sign])
        return ("f", "abs", inside) if sign == "|" else inside

    def _command(self, name: str) -> Node:
        """A constant, function or letter by its name, with the arguments that follow."""
        self.position = self.text.index(name, self.position) + len(name)
        if name in ("frac", "binom"):
            above, below = self._argument(), self._argument()
            return _quotient(above, below) if name == "frac" else ("f", name, above, below)
        if name in ("sum", "prod"):
            return self._sum_or_product(name)
        if name in ("lfloor", "lceil"):
            return _applied(name[1:], self._until("\\r" + name[1:]))
        if name in CURRENCIES:  # before a term, as in $5 + $3
            return self._primary()
        if name in _WORD_CONSTANTS:
            return ("c", _WORD_CONSTANTS[name])
        if name == "sqrt":
            degree: Node = self._bracket() if self._peek() == "[" else ("n", Fraction(2))
            is_plain = self._peek()[:1].isdigit() or self._peek() in _CLOSING
            return ("^", self._primary() if is_plain else self._argument(), _quotient(ONE, degree))
        if name in _SEVERAL:
            return self._of_several(name)
        if name in _FUNCTIONS:
            return self._function(name)
        if name in _DECORATED:
            return ("s", self._name(name + ":" + self._raw_argument()))
        if name in _NAMES:
            return ("s", self._name(name))
        raise Unreadable(f"unknown \\{name}")

    def _sum_or_product(self, kind: str) -> Node:
        """A sum or product with both bounds, in any order."""
        bounds: dict[str, Node] = {}
        name = ""
        while len(bounds) < 2:
            sign = self._peek()
            self.position += 1
            if sign == "_" and (index := _INDEX.match(self.text, self.position)):
                self.position, name = index.end(), index[1]
                self._bound.add(name)
                bounds[sign] = self._until("}")
            elif sign == "^" and sign not in bounds:
                bounds[sign] = self._signed(self._primary)
            else:
                raise Unreadable(f"a {kind} without bounds")
        body = self.product()
        self._bound.discard(name)
        # the letter does not matter: two sums that differ in it are one tree
        letter = f"index {sum(part[0] == 'big' for part in walk(body))}"
        return ("big", kind, letter, bounds["_"], bounds["^"], substituted(body, {name: ("s", letter)}))

    def _of_several(self, name: str) -> Node:
        """max, min, gcd or lcm of several expressions in brackets of any kind."""
        opening = self._take("(", "[", "\\{")
        parts = [self.sum()] if opening else []
        while self._take(","):
            parts.append(self.sum())
        if not opening or not self._take(_CLOSING[opening]) or len(parts) > 20:
            raise Unreadable(f"{name} of what?")
        if name == "min":
            return ("-", ("f", "max", *(("-", part) for part in parts)))
        return ("f", name, *sorted(parts, key=repr))

    def _argument(self) -> Node:
        """A group, or a single token as in LaTeX: \\frac12 is a half."""
        token = self._peek()
        if token == "{" or token[:1] == "\\":
            return self._primary()
        self.position += 1
        if token.isdigit():
            return ("n", Fraction(int(token)))
        if token.isascii() and token.isalpha():
            return self._letter(token[0], token[0])
        raise Unreadable("missing argument")

    def _raw_argument(self) -> str:
        match = _ARGUMENT.match(self.text, self.position)
        if match is None:
            raise Unreadable("missing argument")
        self.position = match.end()
        return re.sub(r"[\s{}]", "", match.group())

    def _word(self, word: str) -> Node:
        for length in range(len(word), 1, -1):
            head, end = word[:length], self.position + length
            is_function = head in _FUNCTIONS and head != "lg"  # without a backslash, lg is l times g
            is_called = is_function or head == "sqrt" or (head in _SEVERAL and self.text.startswith("(", end))
            if is_called or (word == head in _WORD_CONSTANTS):
                return self._command(head)
        if len(word) > 3:
            raise Unreadable(f"the word {word!r}")
        self.position += 1
        if word not in "ei" and (at := _AT_A_NUMBER.match(self.text, self.position)):  # f(2) is a value, not a product
            self.position = at.end()
            return ("s", f"{word}({at[1]})")
        return self._letter(word[0], self._name(word[0]))

    def _letter(self, letter: str, name: str) -> Node:
        return ("c", letter) if letter == name and letter in "ei" and letter not in self._bound else ("s", name)

    def _name(self, name: str) -> str:
        """A symbol's name with its index and primes: x_{1}'."""
        if self._take("_"):
            name += "_" + self._raw_argument()
        while self._take("'"):
            name += "'"
        return name

    def _function(self, name: str) -> Node:
        base = self._argument() if name == "log" and self._take("_") else None
        power = self._signed(self._primary) if self._take("^") else None
        if self._peek() in ("(", "[", "{"):
            inside = self._bracket()
        else:
            inside = self._signed(functools.partial(self.product, until_function=True))
        if power == ("-", ONE) and name in ("sin", "cos", "tan"):
            return ("f", f"arc{name}", inside)
        node = _applied(name, inside, base)
        return node if power is None else ("^", node, power)

    def _starts_factor(self, until_function: bool = False) -> bool:
        token = self._peek()
        if until_function and (token.removeprefix("\\") in _FUNCTIONS or _OF_FUNCTIONS.match(self.text, self.position)):
            return False
        if token[:1] == "\\":
            return token[1:] not in ("degree", "rfloor", "rceil", "bmod", "mod", "")
        if token == "|":
            return not self._in_bars
        return token != "" and ((token.isascii() and token.isalnum()) or token in "([{.")

    def _peek(self) -> str:
        """The next sign, command or run of letters; empty at the end."""
        self._take()
        match = _TOKEN.match(self.text, self.position)
        return match.group() if match else ""

    def _take(self, *signs: str) -> str:
        """Skip spaces. If one of `signs` comes next, move behind it and return it; else return ""."""
        while self.text.startswith(" ", self.position):
            self.position += 1
        if not self.text.startswith(signs, self.position):
            return ""
        found = next(sign for sign in signs if self.text.startswith(sign, self.position))
        self.position += len(found)
        return found


def _quotient(above: Node, below: Node) -> Node:
    """The quotient of two trees; a number if both are whole numbers."""
    if above[0] == below[0] == "n" and below[1] and max(above[1].denominator, below[1].denominator) == 1:
        return ("n", above[1] / below[1])
    return ("/", above, below)


def _applied(name: str, inside: Node, base: Node | None = None) -> Node:
    """A function's value, expressed by as few functions as possible: sec is 1 / cos, ceil is by floor."""
    if name == "cis":
        return ("+", ("f", "cos", inside), ("*", ("c", "i"), ("f", "sin", inside)))
    if name == "exp":
        return ("^", ("c", "e"), inside)
    if name == "ceil":
        return ("-", ("f", "floor", ("-", inside)))
    if name in _RECIPROCALS:
        return ("/", ONE, ("f", _RECIPROCALS[name], inside))
    base = ("n", Fraction(10)) if name == "lg" else base
    if name in ("ln", "log", "lg") and inside[:2] == ("f", "abs") and ("c", "i") not in walk(inside):
        half = _applied(name, ("^", inside[2], ("n", Fraction(2))), base)  # of real numbers; it has no steps
        return ("/", half, ("n", Fraction(2)))
    value = ("f", "ln" if name in ("log", "lg") else name, inside)
    return value if base is None else ("/", value, ("f", "ln", base))
