"""Numbers as people write them, read exactly: most gradings need nothing more than this file."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 2000
"""Longer literals are not read as numbers (int() of a long text takes quadratic time)."""
MAX_EXPONENT = 5000
"""Of scientific notation; 1e999999999 would fill the memory."""

_PLAIN = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|[+-]?\.\d+", re.ASCII)
_SLASHED = re.compile(r"([+-]?\d+)\s*/\s*(-?\d+)", re.ASCII)
_FRAC = re.compile(r"([+-]?)\s*\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}", re.ASCII)
_POWER_OF_TEN = re.compile(
    r"([+-]?(?:\d++\.?\d*+|\.\d++))\s*(?:\*|x)\s*10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|(\d))", re.ASCII
)
_E_NOTATION = re.compile(r"([+-]?(?:\d++\.?\d*+|\.\d++))[eE]([+-]?\d+)", re.ASCII)
_GROUPED = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?", re.ASCII)
_DOTTED = re.compile(r"[+-]?[1-9]\d{0,2}(?:(?:\.\d{3}){2,}|(?:\.\d{3})+,\d+)", re.ASCII)
_ENDLESS = re.compile(r"([+-]?\d*\.\d*?)(?:(\d)\2{2,}|(\d{2,6}?)\3+)\s*\\ldots", re.ASCII)
REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{\s*(\d+)\s*\}", re.ASCII)
"""0.1\\overline{6}, without a sign."""


def read_number(text: str) -> Fraction | None:
    """The exact value of a literal: 7, -1,234.50, .5, 3/4, \\frac{3}{4}, 1.2e-3, 4 * 10^{5}, 1 000, 0.1\\overline{6}.

    Example:
        >>> read_number("-1,234.50")
        Fraction(-2469, 2)
    """
    if not text or len(text) > MAX_DIGITS:
        return None
    if _PLAIN.fullmatch(text):
        return _decimal(text)
    if match := _FRAC.fullmatch(text):
        sign, above, below = match.groups()
        return Fraction(int(f"{sign}1") * int(above), int(below)) if int(below) else None
    if match := _SLASHED.fullmatch(text):
        above, below = match.groups()
        return None if int(below) == 0 else Fraction(int(above), int(below))
    if match := _E_NOTATION.fullmatch(text) or _POWER_OF_TEN.fullmatch(text):
        exponent = int(next(group for group in match.groups()[1:] if group))
        return _scaled(_decimal(match[1]), exponent) if abs(exponent) <= MAX_EXPONENT else None
    if _GROUPED.fullmatch(text):
        return _decimal(text.replace(" ", ""))
    if _DOTTED.fullmatch(text):  # 1.234.567 and 1.234,50
        return _decimal(text.replace(".", "").replace(",", "."))
    if match := _ENDLESS.fullmatch(text):
        text = f"{match[1]}\\overline{{{match[2] or match[3]}}}"
    if match := REPEATING.fullmatch(text[1:] if text[0] in "+-" else text):
        return -repeating(match) if text[0] == "-" else repeating(match)
    return None


def repeating(match: re.Match[str]) -> Fraction:
    """The value of what `REPEATING` has matched.

    Example:
        >>> repeating(REPEATING.fullmatch("0.1\\\\overline{6}"))
        Fraction(1, 6)
    """
    whole, fixed, again = match.groups()
    nines = 10 ** len(again) - 1
    return Fraction(int(whole or 0)) + Fraction(int(fixed or 0) * nines + int(again), nines * 10 ** len(fixed))


def is_decimal(text: str) -> bool:
    """Whether the literal has a decimal point or an exponent, so that it may be a rounded value."""
    return bool(re.fullmatch(r"[+-]?[\d,]*\.\d+", text, re.ASCII) or _E_NOTATION.fullmatch(text)) or bool(
        _POWER_OF_TEN.fullmatch(text)
    )


def significant_digits(text: str) -> int:
    """How many digits a literal states: 0.10 has 2, 4.5e33 has 2, 1.20 * 10^{3} has 3; 0 where that cannot be said."""
    mantissa = re.match(r"[+-]?([\d,]*\.?\d*)", text, re.ASCII)
    digits = mantissa[1].replace(",", "") if mantissa else ""
    return len(digits.replace(".", "").lstrip("0"))


def _decimal(text: str) -> Fraction:
    text = text.replace(",", "").rstrip(".")
    whole, _, part = text.partition(".")
    if not part:
        return Fraction(int(whole))
    return Fraction(int((whole + part).replace("+", "")), 10 ** len(part))


def _scaled(value: Fraction, exponent: int) -> Fraction:
    scale: int = 10 ** abs(exponent)
    return value * scale if exponent >= 0 else value / scale
