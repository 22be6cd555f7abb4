"""LaTeX and plain expressions to trees (`answers.py`), by recursive descent with a bounded depth.

What is not understood raises `Unreadable`: a wrong guess would be a wrong reward.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from fractions import Fraction

from dppo_megatron.rewards.math.answers import Node, Unreadable
from dppo_megatron.rewards.math.clean import closing
from dppo_megatron.rewards.math.numbers import MAX_DIGITS, MAX_EXPONENT, REPEATING, repeating
from dppo_megatron.rewards.math.patterns import regex

MAX_CHARS = 1500
_MAX_DEPTH = 40

_FUNCTION_WORDS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln exp abs floor ceil Re Im arg cis log"
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
_TOKEN = regex(r"\\?[A-Za-z]+|\d")
_LETTERS = regex(r"[A-Za-z]+")
_MIXED = regex(r"\s*\\frac\s*(?:\{\s*\d+\s*\}|\d)\s*(?:\{\s*\d+\s*\}|\d)", re.ASCII)
_MIXED_SLASHED = regex(r"\s+(\d+)\s*/\s*(\d+)", re.ASCII)
_PRIMES = regex(r"(?:\s*(?:'|\^\s*\{\s*(?:\\prime\s*)+\}|\^\s*\\prime(?![A-Za-z])))+")
_CHOICES = regex(r"C\s*\(([^(),]{1,60}),([^(),]{1,60})\)")
_BRACKETED = regex(r"(?:[^A-Z(]\)|[!}])\s*\Z")  # a bracket has closed, and it is no choice letter's; 2!3!, 2^{3}3
_AT_A_NUMBER = regex(r"\((-?\d+)\)")
_SEVERAL = frozenset(["max", "min", "gcd", "lcm"])
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
    return _parsed(text, ())


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
    return [_parsed(text, choice) for choice in choices]


def _parsed(text: str, signs: Sequence[str]) -> Node:
    if len(text) > MAX_CHARS:
        raise Unreadable("too long")
    reader = _Reader(text, signs)
    node = reader.sum()
    if not reader.at_end():
        raise Unreadable(f"at {reader.position}: {text[reader.position : reader.position + 12]!r}")
    return node


class _Reader:
    """Reads from left to right."""

    def __init__(self, text: str, signs: Sequence[str]) -> None:
        self.text = text
        self._signs, self._taken = signs, 0
        self.position = 0
        self._depth = 0
        self._in_bars = False
        self._bound: set[str] = set()
        """Letters that a sum or product counts with, i too."""

    def at_end(self) -> bool:
        self._skip()
        return self.position >= len(self.text)

    def sum(self) -> Node:
        """Terms with + - and plus-minus between."""
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
                node = ("/", node, self._after_operator())
            elif not until_function and self._command() in ("bmod", "mod"):
                self.position += 1 + len(self._command())
                node = ("of", "mod", node, self._after_operator())
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
        if sign == "+":
            return self._signed()
        return (sign, self._signed() if self._peek() in "+-" and self._peek() else self.product())

    def _after_operator(self) -> Node:
        """A factor that may have its own sign, as in 2 * -3."""
        if self._take("-"):
            return ("-", self._factor())
        self._take("+")
        return self._factor()

    def _sign(self) -> str:
        self._skip()
        if match := _PLUS_MINUS.match(self.text, self.position):
            if self._taken == len(self._signs):
                raise Unreadable("a plus-minus sign")
            self.position, self._taken = match.end(), self._taken + 1
            return self._signs[self._taken - 1]
        if self._command() == "mp" and self._signs:
            self.position += len("\\mp")
            return "-" if self._signs[0] == "+" else "+"
        return "+" if self._take("+") else "-" if self._take("-") else ""

    def _factor(self) -> Node:
        node = self._primary()
        while True:
            if self._take("^"):
                power = self._exponent()
                if node[0] == "s" and "_" not in node[1] and self._peek() == "_":  # v^2_0 is v_0^2
                    node = ("s", self._name(node[1]))
                node = _combinations(node, power) or ("^", node, power)
            elif self._take("!"):
                double = self._take("!")
                if self._peek() == "!":
                    raise Unreadable("a triple factorial")
                node = ("f", "factorial2" if double else "factorial", node)
            elif self._take("%"):
                node = ("/", node, ("n", Fraction(100)))
            elif self._command() == "degree":
                self.position += len("\\degree")
                node = ("deg", node)
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
        if match := _MIXED.match(self.text, self.position):
            above, below = re.findall(r"\d+", match.group()) if "{" in match.group() else list(match.group()[-2:])
        elif match := _MIXED_SLASHED.match(self.text, self.position):
            above, below = match.groups()
        else:
            return whole
        if int(below) == 0 or int(above) >= int(below):
            raise Unreadable("not a mixed number")
        self.position = match.end()
        return whole + Fraction(int(above), int(below))

    def _enclosed(self, length: int, close: str) -> Node:
        """What stands between a bracket of so many characters and the one that closes it."""
        self.position += length
        bars, self._in_bars = self._in_bars, close == "|"
        node = self.sum()
        self._in_bars = bars
        if not self._take(close):
            raise Unreadable(f"no {close}")
        return node

    def _bracket(self) -> Node:
        sign = self._peek()
        return self._enclosed(1, _CLOSING[sign]) if sign != "|" else ("f", "abs", self._enclosed(1, "|"))

    def _macro(self) -> Node:
        command = self._command()
        start = self.position
        self.position += len(command) + 1
        if command == "frac":
            return ("/", self._argument(), self._argument())
        if command == "binom":
            return ("binom", self._argument(), self._argument())
        if command == "sqrt":
            return self._root()
        if command in ("sum", "prod"):
            return self._sum_or_product(command)
        if command in _SEVERAL:
            return self._of_several(command)
        if command in ("lfloor", "lceil"):
            return ("f", command[1:], self._enclosed(0, "\\r" + command[1:]))
        if command in ("pi", "infty"):
            return ("c", _WORD_CONSTANTS[command])
        if command in FUNCTIONS:
            return self._function(command)
        if command in _DECORATED:
            return ("s", self._name(command + ":" + self._raw_argument()))
        if command in _NAMES:
            return ("s", self._name(command))
        self.position = start
        raise Unreadable(f"unknown \\{command}")

    def _sum_or_product(self, kind: str) -> Node:
        """With both bounds, in any order."""
        bounds: dict[str, Node] = {}
        name = ""
        while (sign := self._peek()) and sign in "_^" and sign not in bounds:
            self.position += 1
            if sign == "_":
                if not (index := _INDEX.match(self.text, self.position)):
                    raise Unreadable(f"a {kind} without bounds")
                self.position, name = index.end(), index[1]
                self._bound.add(name)
                bounds[sign] = self.sum()
                if not self._take("}"):
                    raise Unreadable("brace not closed")
            else:
                bounds[sign] = self._exponent()
        if len(bounds) < 2:
            raise Unreadable(f"a {kind} without bounds")
        body = self.product()
        self._bound.discard(name)
        return ("big", kind, name, bounds["_"], bounds["^"], body)

    def _of_several(self, name: str) -> Node:
        """max(a, b), also in braces or with spaces."""
        opening = "\\{" if self.text.startswith("\\{", self.position) else self._peek()
        if opening not in ("(", "[", "\\{"):
            raise Unreadable(f"{name} without a bracket")
        self.position += len(opening)
        parts = [self.sum()]
        while self._take(","):
            parts.append(self.sum())
        if not self._take(_CLOSING.get(opening, "\\}")) or len(parts) > 20:
            raise Unreadable("bracket not closed")
        return ("of", name, *parts)

    def _root(self) -> Node:
        degree: Node = self._enclosed(1, "]") if self._peek() == "[" else ("n", Fraction(2))
        sign = self._peek()
        return ("root", degree, self._primary() if sign.isdigit() or sign in _CLOSING else self._argument())

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
        self._skip()
        if self._peek() == "{":
            end = closing(self.text, self.position)
            if end < 0:
                raise Unreadable("brace not closed")
            inside = self.text[self.position + 1 : end]
            self.position = end + 1
            return re.sub(r"[\s{}]", "", inside)
        match = _TOKEN.match(self.text, self.position)
        if match is None:
            raise Unreadable("missing argument")
        self.position = match.end()
        return match.group()

    def _word(self) -> Node:
        match = _LETTERS.match(self.text, self.position)
        assert match is not None
        word = match.group()
        if word in _WORD_CONSTANTS:
            self.position = match.end()
            return ("c", _WORD_CONSTANTS[word])
        for length in range(len(word), 1, -1):
            head, end = word[:length], self.position + length
            if head in FUNCTIONS or head == "sqrt" or (head in _SEVERAL and self.text.startswith("(", end)):
                self.position = end
                if head in _SEVERAL:
                    return self._of_several(head)
                return self._root() if head == "sqrt" else self._function(head)
        if len(word) > 3:
            raise Unreadable(f"the word {word!r}")
        if word == "C" and (choices := _CHOICES.match(self.text, self.position)):
            above, below = parse(choices[1]), parse(choices[2])
            if above[0] == below[0] == "n" and not above[1] >= below[1] >= 0:
                raise Unreadable("a point C")
            self.position = choices.end()
            return ("binom", above, below)
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
            if self._peek() == "_" and base is None and name == "log":
                self.position += 1
                base = self._argument()
            elif self._peek() == "^" and power is None:
                self.position += 1
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
        node: Node
        if name == "log":
            node = ("log", base, inside)
        elif name == "cis":
            node = ("+", ("f", "cos", inside), ("*", ("c", "i"), ("f", "sin", inside)))
        elif power == ("-", ("n", Fraction(1))) and name in _INVERSE:
            return ("f", _INVERSE[name], inside)
        else:
            node = ("f", name, inside)
        return node if power is None else ("^", node, power)

    def _starts_factor(self) -> bool:
        sign = self._peek()
        if not sign:
            return False
        if sign == "\\":
            return self._command() not in ("pm", "mp", "degree", "rfloor", "rceil", "bmod", "mod", "")
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


def _combinations(node: Node, power: Node) -> Node | None:
    """C_{20}^{10}, as much of the world writes a binomial coefficient; C_1^2 is the square of a constant."""
    if node[0] != "s" or power[0] != "n" or not re.fullmatch(r"C_\d{1,4}", node[1]):
        return None
    total = Fraction(node[1][2:])
    return ("binom", ("n", total), power) if 2 < total >= power[1] else None
