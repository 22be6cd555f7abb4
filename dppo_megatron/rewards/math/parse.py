"""LaTeX and plain expressions to trees (`answers.py`), by recursive descent with a bounded depth.

What is not understood raises `Unreadable`: a wrong guess would be a wrong reward.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from fractions import Fraction

from dppo_megatron.rewards.math.answers import Node, Unreadable
from dppo_megatron.rewards.math.numbers import MAX_DIGITS, MAX_EXPONENT, REPEATING, repeating
from dppo_megatron.rewards.math.patterns import regex

MAX_CHARS = 1500
_MAX_DEPTH = 40

_FUNCTION_WORDS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln exp abs floor ceil Re Im arg cis log"
_RECIPROCALS = {"cot": "tan", "sec": "cos", "csc": "sin"}
FUNCTIONS = frozenset(_FUNCTION_WORDS.split())
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_WORD_CONSTANTS = {"pi": "pi", "infty": "inf", "infinity": "inf", "inf": "inf"}
_NAME_WORDS = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi chi psi omega Gamma"
    " Delta Theta Lambda Xi Sigma Phi Psi Omega hbar ell odot prime partial nabla"
)
_NAMES = frozenset(_NAME_WORDS.split())
_CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|"}
_NUMBER = regex(r"(\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d+)(?![A-Za-z]))?", re.ASCII)
_PLUS_MINUS = regex(r"\\pm(?![A-Za-z])|\+\s*/-")
_COMMAND = regex(r"\\([A-Za-z]+)")
_ARGUMENT = regex(r"\s*(?:\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|\\?[A-Za-z]+|\d)")
_LETTERS = regex(r"[A-Za-z]+")
_MIXED = regex(r"\s*\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))|\s+(\d+)\s*/\s*(\d+)", re.ASCII)
_PRIMES = regex(r"(?:\s*(?:'|\^\s*\{\s*(?:\\prime\s*)+\}|\^\s*\\prime(?![A-Za-z])))+")
_BRACKETED = regex(r"(?:[^A-Z(]\)|[!}])\s*\Z")  # a bracket has closed, and it is no choice letter's; 2!3!, 2^{3}3
_AT_A_NUMBER = regex(r"\((-?\d+)\)")
_SEVERAL = frozenset(["max", "min", "gcd", "lcm"])
ONE: Node = ("n", Fraction(1))
DEGREE: Node = ("/", ("c", "pi"), ("n", Fraction(180)))
_INDEX = regex(r"\s*\{\s*([A-Za-z])\s*=")
_DECORATED = frozenset(["overline", "dot", "ddot", "angle", "triangle"])


def parse(text: str) -> Node:
    """The tree of one expression.

    Raises:
        Unreadable: it is none.

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


def parse_signs(text: str) -> list[Node]:
    """The trees of all that an expression with plus-minus signs stands for, at most 8; `\\mp` goes against the `\\pm`.

    Example:
        >>> len(parse_signs("1 \\pm \\sqrt{19}"))
        2
    """
    count, opposed = len(_PLUS_MINUS.findall(text)), "\\mp" in text
    if count > 3 or (opposed and count > 1):
        raise Unreadable("too many plus-minus signs")
    choices = itertools.product("+-", repeat=max(count, int(opposed)))
    return [parse(_with_signs(text, choice)) for choice in choices]


def _with_signs(text: str, choice: Sequence[str]) -> str:
    signs = iter(choice)
    text = _PLUS_MINUS.sub(lambda _: next(signs), text)
    return text.replace("\\mp", "-" if choice[0] == "+" else "+") if choice else text


class _Reader:
    """Reads from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self._depth = 0
        self._in_bars = False
        self._bound: set[str] = set()
        """Letters that a sum or product counts with, i too."""

    def sum(self) -> Node:
        """Terms with + and - between."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unreadable("nested too deeply")
        node = self._signed()
        while sign := self._sign():
            term = self.product()
            node = ("+", node, term if sign == "+" else (sign, term))
        self._depth -= 1
        return node

    def product(self, *, until_function: bool = False) -> Node:
        """Factors with *, / or nothing between."""
        node = self._factor()
        while True:
            # the argument of a function without brackets ends before * and /: \cos t \cdot x
            if not until_function and self._take("*"):
                node = ("*", node, self._after_operator())
            elif not until_function and self._take("/"):
                node = _quotient(node, self._after_operator())
            elif not until_function and (self._take("\\bmod") or self._take("\\mod")):
                node = ("f", "mod", node, self._after_operator())
            elif self._starts_factor() and not (until_function and self._starts_function()):
                digits = self._peek().isdigit() or self._peek() == "."
                if digits and not _BRACKETED.search(self.text, 0, self.position):  # but (n-2) 2^n is a product
                    raise Unreadable("a number behind a factor")
                node = ("*", node, self._factor())
            else:
                return node

    def _signed(self) -> Node:
        sign = self._sign()
        if not sign:
            return self.product()
        inside = self._signed() if self._peek() in ("+", "-") else self.product()
        return inside if sign == "+" else ("-", inside)

    def _after_operator(self) -> Node:
        """A factor that may have its own sign, as in 2 * -3."""
        return ("-", self._factor()) if self._sign() == "-" else self._factor()

    def _sign(self) -> str:
        return "+" if self._take("+") else "-" if self._take("-") else ""

    def _factor(self) -> Node:
        node = self._primary()
        while True:
            if self._take("^"):
                power = self._exponent()
                if node[0] == "s" and "_" not in node[1] and self._peek() == "_":  # v^2_0 is v_0^2
                    node = ("s", self._name(node[1]))
                node = ("^", node, power)
            elif self._take("!"):
                double = self._take("!")
                if self._peek() == "!":
                    raise Unreadable("a triple factorial")
                node = ("f", "factorial2" if double else "factorial", node)
            elif self._take("%"):
                node = ("/", node, ("n", Fraction(100)))
            elif self._take("\\degree"):
                node = ("*", node, DEGREE)
            else:
                return node

    def _exponent(self) -> Node:
        if self._take("-"):
            return ("-", self._primary())
        return self._primary()

    def _primary(self) -> Node:
        sign = self._peek()
        if sign.isdigit() or sign == ".":
            return self._number()
        if sign in _CLOSING:
            return self._bracket()
        if sign == "\\":
            return self._macro()
        if sign.isascii() and sign.isalpha():
            return self._word()
        raise Unreadable(f"unexpected {sign!r}")

    def _number(self) -> Node:
        if match := REPEATING.match(self.text, self.position):
            if len(match.group()) > MAX_DIGITS:
                raise Unreadable("too many digits")
            self.position = match.end()
            if self._peek().isdigit():
                raise Unreadable("digits behind repeating ones")
            return ("n", repeating(match))
        match = _NUMBER.match(self.text, self.position)
        if match is None or len(match.group()) > MAX_DIGITS:
            raise Unreadable("not a number")
        self.position = match.end()
        value = Fraction(match[1].replace(",", ""))
        if match[2]:
            if abs(int(match[2])) > MAX_EXPONENT:
                raise Unreadable("exponent out of range")
            return ("n", value * Fraction(10) ** int(match[2]))
        return ("n", self._mixed(value) if "." not in match[1] else value)

    def _mixed(self, whole: Fraction) -> Fraction:
        """2\\frac{1}{3} and 2 1/3 are sums."""
        match = _MIXED.match(self.text, self.position)
        if match is None:
            return whole
        above, below = (int(number) for number in match.groups() if number)
        if above >= below:
            raise Unreadable("not a mixed number")
        self.position = match.end()
        return whole + Fraction(above, below)

    def _until(self, close: str) -> Node:
        """What stands before the bracket that closes."""
        bars, self._in_bars = self._in_bars, close == "|"
        node = self.sum()
        self._in_bars = bars
        if not self._take(close):
            raise Unreadable(f"no {close}")
        return node

    def _bracket(self) -> Node:
        sign = self._peek()
        self.position += 1
        inside = self._until(_CLOSING[sign])
        return ("f", "abs", inside) if sign == "|" else inside

    def _macro(self) -> Node:
        command = self._command()
        self.position += len(command) + 1
        if command == "frac":
            return _quotient(self._argument(), self._argument())
        if command == "binom":
            return ("f", "binom", self._argument(), self._argument())
        if command in ("sum", "prod"):
            return self._sum_or_product(command)
        if command in ("lfloor", "lceil"):
            return _applied(command[1:], self._until("\\r" + command[1:]), None)
        if command in FUNCTIONS or command in _SEVERAL or command in ("sqrt", "pi", "infty"):
            return self._called(command)
        if command in _DECORATED:
            return ("s", self._name(command + ":" + self._raw_argument()))
        if command in _NAMES:
            return ("s", self._name(command))
        raise Unreadable(f"unknown \\{command}")

    def _called(self, name: str) -> Node:
        """A constant, a root or a function, behind its name."""
        if name in _WORD_CONSTANTS:
            return ("c", _WORD_CONSTANTS[name])
        if name == "sqrt":
            return self._root()
        return self._of_several(name) if name in _SEVERAL else self._function(name)

    def _sum_or_product(self, kind: str) -> Node:
        """With both bounds, in any order."""
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
                bounds[sign] = self._exponent()
            else:
                raise Unreadable(f"a {kind} without bounds")
        body = self.product()
        self._bound.discard(name)
        return ("big", kind, name, bounds["_"], bounds["^"], body)

    def _of_several(self, name: str) -> Node:
        """max(a, b), also in braces or with spaces."""
        opening = "\\{" if self._peek() == "\\" else self._peek()
        close = {"(": ")", "[": "]", "\\{": "\\}"}.get(opening, "")
        if not close or not self._take(opening):
            raise Unreadable(f"{name} without a bracket")
        parts = [self.sum()]
        while self._take(","):
            parts.append(self.sum())
        if not self._take(close) or len(parts) > 20:
            raise Unreadable("bracket not closed")
        return ("-", ("f", "max", *(("-", part) for part in parts))) if name == "min" else ("f", name, *parts)

    def _root(self) -> Node:
        degree: Node = self._bracket() if self._peek() == "[" else ("n", Fraction(2))
        power = ("n", 1 / degree[1]) if degree[0] == "n" and degree[1] else ("/", ONE, degree)
        sign = self._peek()
        return ("^", self._primary() if sign.isdigit() or sign in _CLOSING else self._argument(), power)

    def _argument(self) -> Node:
        """A group, or the one token that LaTeX takes: \\frac12 is a half."""
        sign = self._peek()
        if sign == "{":
            return self._bracket()
        if sign.isdigit():
            self.position += 1
            return ("n", Fraction(int(sign)))
        if sign == "\\":
            return self._macro()
        if sign.isascii() and sign.isalpha():
            self.position += 1
            return self._letter(sign, sign)
        raise Unreadable("missing argument")

    def _raw_argument(self) -> str:
        match = _ARGUMENT.match(self.text, self.position)
        if match is None:
            raise Unreadable("missing argument")
        self.position = match.end()
        return re.sub(r"[\s{}]", "", match.group())

    def _word(self) -> Node:
        match = _LETTERS.match(self.text, self.position)
        assert match is not None
        word = match.group()
        for length in range(len(word), 1, -1):
            head, end = word[:length], self.position + length
            is_called = head in FUNCTIONS or head == "sqrt" or (head in _SEVERAL and self.text.startswith("(", end))
            if is_called or (word == head in _WORD_CONSTANTS):
                self.position = end
                return self._called(head)
        if len(word) > 3:
            raise Unreadable(f"the word {word!r}")
        self.position += 1
        if word not in "ei" and (at := _AT_A_NUMBER.match(self.text, self.position)):  # a function's value, no product
            self.position = at.end()
            return ("s", f"{word}({at[1]})")
        return self._letter(word[0], self._name(word[0]))

    def _letter(self, letter: str, name: str) -> Node:
        return ("c", letter) if letter == name and letter in "ei" and letter not in self._bound else ("s", name)

    def _name(self, name: str) -> str:
        """A symbol's name with its index and primes: x_{1}'."""
        if self._take("_"):
            name += "_" + self._raw_argument()
        if match := _PRIMES.match(self.text, self.position):
            self.position = match.end()
            name += "'" * len(re.findall(r"'|\\prime", match.group()))
        return name

    def _function(self, name: str) -> Node:
        base = power = None
        while True:
            if base is None and name == "log" and self._take("_"):
                base = self._argument()
            elif power is None and self._take("^"):
                power = self._exponent()
            else:
                break
        sign = self._peek()
        if sign in _CLOSING and sign != "|":
            inside = self._bracket()
        elif sign == "-":
            self.position += 1
            inside = ("-", self.product(until_function=True))
        elif self._starts_function():
            inside = self._factor()
        else:
            inside = self.product(until_function=True)
        if power == ("-", ONE) and name in _INVERSE:
            return ("f", _INVERSE[name], inside)
        node = _applied(name, inside, base)
        return node if power is None else ("^", node, power)

    def _starts_factor(self) -> bool:
        sign = self._peek()
        if not sign:
            return False
        if sign == "\\":
            return self._command() not in ("degree", "rfloor", "rceil", "bmod", "mod", "")
        if sign == "|":
            return not self._in_bars
        return (sign.isascii() and sign.isalnum()) or sign in "([{."

    def _starts_function(self) -> bool:
        command = self._command()
        if not command:
            match = _LETTERS.match(self.text, self.position)
            command = match.group() if match else ""
        return command in FUNCTIONS

    def _command(self) -> str:
        if self._peek() != "\\":
            return ""
        match = _COMMAND.match(self.text, self.position)
        return match[1] if match else ""

    def _peek(self) -> str:
        self._skip()
        return self.text[self.position : self.position + 1]

    def _take(self, sign: str) -> bool:
        self._skip()
        if self.text.startswith(sign, self.position):
            self.position += len(sign)
            return True
        return False

    def _skip(self) -> None:
        while self.text.startswith(" ", self.position):
            self.position += 1


def _quotient(above: Node, below: Node) -> Node:
    """Of two numbers, if they are short, a number."""
    if above[0] == below[0] == "n" and below[1] and max(above[1].denominator, below[1].denominator) == 1:
        return ("n", above[1] / below[1])
    return ("/", above, below)


def _applied(name: str, inside: Node, base: Node | None) -> Node:
    """A function's value, by few functions."""
    if name == "cis":
        return ("+", ("f", "cos", inside), ("*", ("c", "i"), ("f", "sin", inside)))
    if name == "exp":
        return ("^", ("c", "e"), inside)
    if name == "ceil":
        return ("-", ("f", "floor", ("-", inside)))
    if name in _RECIPROCALS:
        return ("/", ONE, ("f", _RECIPROCALS[name], inside))
    if name != "log":
        return ("f", name, inside)
    return ("f", "ln", inside) if base is None else ("/", ("f", "ln", inside), ("f", "ln", base))
