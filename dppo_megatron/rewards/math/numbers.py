"""Numbers as people write them, read exactly: most gradings need nothing more than this file.

Of numbers in words only runs that are one number are read: `seven or eight`, `one two` and `second` are left as they
are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from dppo_megatron.rewards.math.patterns import regex

MAX_DIGITS = 2000
"""Longer literals are not read as numbers (int() of a long text takes quadratic time)."""
MAX_EXPONENT = 5000
"""Of scientific notation; 1e999999999 would fill the memory."""

_PLAIN = regex(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|[+-]?\.\d+", re.ASCII)
_SLASHED = regex(r"([+-]?\d+)\s*/\s*(-?\d+)", re.ASCII)
_FRAC = regex(r"([+-]?)\s*\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}", re.ASCII)
_POWER_OF_TEN = regex(r"([+-]?(?:\d++\.?\d*+|\.\d++))\s*(?:\*|x)\s*10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|(\d))", re.ASCII)
_E_NOTATION = regex(r"([+-]?(?:\d++\.?\d*+|\.\d++))[eE]([+-]?\d+)", re.ASCII)
_POINTED = regex(r"[+-]?[\d,]*\.\d+", re.ASCII)
_GROUPED = regex(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?", re.ASCII)
_DOTTED = regex(r"[+-]?[1-9]\d{0,2}(?:(?:\.\d{3}){2,}|(?:\.\d{3})+,\d+)", re.ASCII)
_ENDLESS = regex(r"([+-]?\d*\.\d*?)(?:(\d)\2{2,}|(\d{2,6}?)\3+)\s*\\ldots", re.ASCII)
REPEATING = regex(r"(\d*)\.(\d*)\\overline\s*\{\s*(\d+)\s*\}", re.ASCII)
"""0.1\\overline{6}, without a sign."""


_UP_TO_NINETEEN = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_SMALL = {word: value for value, word in enumerate(_UP_TO_NINETEEN.split())}
_SMALL |= {word: value for value, word in zip(range(20, 100, 10), _TENS.split(), strict=True)}
_SCALES = {"dozen": 12, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = "half third quarter fourth fifth sixth seventh eighth ninth tenth"
_DENOMINATORS = dict(zip(_PARTS.split(), (2, 3, 4, 4, 5, 6, 7, 8, 9, 10), strict=True)) | {"halve": 2}
MULTIPLIERS = {"hundred": 100, **_SCALES}
NUMBER_WORDS = frozenset({*_SMALL, *MULTIPLIERS, *_DENOMINATORS})
_SIGNS = ("minus", "negative")

_WORD = "|".join(sorted({*_SMALL, *_SCALES, "hundred", "and", "an", "a", *(f"{p}s?" for p in _DENOMINATORS)}, key=len))
_RUN = regex(
    rf"(?<![\w\\-])(?:(?:{'|'.join(_SIGNS)})[ ]+)?(?:{_WORD})(?:(?:-|[ ]+)(?:{_WORD}))*(?![\w-])", re.IGNORECASE
)
_GOES_ON = regex(r"\s*[\[(\\^_\d]|\s+(?:first|second)\b", re.IGNORECASE)
_ANY = regex("|".join((*_SMALL, "half", "hundred", "thousand", "million", "dozen", "quarter")), re.IGNORECASE)


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
        return _decimal(match[1]) * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None
    if _GROUPED.fullmatch(text):
        return _decimal(text.replace(" ", ""))
    if _DOTTED.fullmatch(text):  # 1.234.567 and 1.234,50
        return _decimal(text.replace(".", "").replace(",", "."))
    if text.endswith("\\ldots") and len(text) < 100 and (match := _ENDLESS.fullmatch(text)):  # quadratic
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
    return any(pattern.fullmatch(text) for pattern in (_POINTED, _E_NOTATION, _POWER_OF_TEN))


def significant_digits(text: str) -> int:
    """How many digits a literal states: 0.10 has 2, 4.5e33 has 2, 1.20 * 10^{3} has 3; 0 where that cannot be said."""
    mantissa = re.match(r"[+-]?([\d,]*\.?\d*)", text, re.ASCII)
    digits = mantissa[1].replace(",", "") if mantissa else ""
    return len(digits.replace(".", "").lstrip("0"))


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip("."))


def read_number_words(text: str) -> Fraction | None:
    """The number that the words are, all of them.

    Example:
        >>> read_number_words("One hundred twenty-five"), read_number_words("two and two thirds")
        (Fraction(125, 1), Fraction(8, 3))
    """
    words = text.lower().replace("-", " ").split()
    if not words or len(words) > 30:
        return None
    if words[0] in _SIGNS:
        value = read_number_words(" ".join(words[1:]))
        return None if value is None else -value
    below = _DENOMINATORS.get(words[-1].removesuffix("s"))
    if below is None:
        whole = _whole(words)
        return None if whole is None else Fraction(whole)
    before, _, above = " ".join(words[:-1]).rpartition("and ")
    parts = 1 if above in ("a", "an") or words == ["half"] else _whole(above.split())
    rest = _whole(before.split()) if before else 0
    # one third and two thirds, not twenty fourth: an ordinal behind tens is a date or a place
    if parts is None or rest is None or (rest and parts >= below) or (parts > 1) != words[-1].endswith("s"):
        return None
    return rest + Fraction(parts, below)


def with_digits(text: str) -> str:
    """The text with its numbers in words as digits, where they are surely numbers.

    Example:
        >>> with_digits("twelve apples"), with_digits("three to two"), with_digits("the second")
        ('12 apples', '3 to 2', 'the second')
    """

    def as_digits(run: re.Match[str]) -> str:
        value = read_number_words(run.group())
        # what an expression follows would become a product; twenty second is no number of seconds
        return run.group() if value is None or _GOES_ON.match(text, run.end()) else str(value)

    return _RUN.sub(as_digits, text) if _ANY.search(text) else text


def _whole(words: Sequence[str]) -> int | None:
    """A cardinal number; each scale is smaller than the one before it."""
    total, group, last, bound = 0, 0, "start", 10**15
    for index, word in enumerate(words):
        after = words[index + 1] if index + 1 < len(words) else ""
        if word in ("a", "an") and last == "start" and (after in _SCALES or after == "hundred"):
            group, last = 1, "ones"
        elif word == "and" and last in ("hundred", "scale") and after in _SMALL:
            continue
        elif word in _SMALL:
            value = _SMALL[word]
            fits = last in ("start", "hundred", "scale") or (last == "tens" and 0 < value < 10)
            if not fits or (value == 0 and len(words) > 1):
                return None
            group += value
            last = "tens" if value >= 20 else "ones"
        elif word == "hundred" and 0 < group < 100 and last in ("ones", "tens"):
            group, last = group * 100, "hundred"
        elif word in _SCALES and group and _SCALES[word] < bound:
            bound = _SCALES[word]
            total, group, last = total + group * bound, 0, "scale"
        else:
            return None
    return total + group if last != "start" else None
