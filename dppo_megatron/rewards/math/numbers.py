"""Numbers as people write them, read exactly: most gradings need nothing more than this file.

Words are read only if all of a run make one number: `seven or eight`, `one two` and `second` are left as they are.
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
_DECIMAL = regex(
    r"[+-]?([\d,]*)(?:\.(\d*))?(?:[eE]([+-]?\d+)|\s*\*\s*10\s*\^\s*\{?\s*([+-]?\d+)\s*\}?)?(?:\s*[%\\A-Za-z].*)?",
    re.ASCII,
)
_SPACED = regex(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?", re.ASCII)
_DOTTED = regex(r"[+-]?[1-9]\d{0,2}(?:(?:\.\d{3}){2,}|(?:\.\d{3})+,\d+)", re.ASCII)

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


def read_number(text: str) -> Fraction | None:
    """The exact value of a decimal: 7, -1,234.50, .5, 1 000, 1.234,50.

    Example:
        >>> read_number("-1,234.50")
        Fraction(-2469, 2)
    """
    if not text or len(text) > MAX_DIGITS:
        return None
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "")
    elif _DOTTED.fullmatch(text):
        text = text.replace(".", "").replace(",", ".")
    return Fraction(text.replace(",", "").rstrip(".")) if _PLAIN.fullmatch(text) else None


def stated_digits(text: str) -> tuple[int, Fraction]:
    """The number of digits of a decimal, and the value of 1 in the last of them: 3 and 1/10 for 12.0 or 1.20e1. Both
    are 0 without point and exponent, since such a number is exact."""
    match = _DECIMAL.fullmatch(text)
    whole, places, *exponents = match.groups() if match else ("", None, None, None)
    exponent = exponents[0] or exponents[1]
    if (places is None and exponent is None) or len(exponent or "") > 5:
        return 0, Fraction(0)
    digits = (whole + (places or "")).replace(",", "").lstrip("0")
    return len(digits), Fraction(10) ** (int(exponent or 0) - len(places or ""))


def read_number_words(text: str) -> Fraction | None:
    """The number that all of the words make together; None if they make none.

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
    # `one third` and `two thirds`, but not `twenty fourth`: an ordinal after tens is a date or a rank
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
        # before an expression it would become a factor; `twenty second` is no number of seconds
        return run.group() if value is None or _GOES_ON.match(text, run.end()) else str(value)

    return _RUN.sub(as_digits, text)


def _whole(words: Sequence[str]) -> int | None:
    """A cardinal number; each scale (million, thousand ...) has to be smaller than the one before."""
    if not words or words[-1] in ("a", "an", "and") or (len(words) > 1 and "zero" in words):
        return None
    total, group, bound = 0, 0, 10**15
    for word in words:
        value = _SMALL.get(word)
        if value is not None and (group % 100 == 0 or (group % 100 >= 20 and group % 10 == 0 and value < 10)):
            group += value
        elif word in ("a", "an") and not group and not total:
            group = 1
        elif word == "hundred" and 0 < group < 100:
            group *= 100
        elif word in _SCALES and group and _SCALES[word] < bound:
            bound = _SCALES[word]
            total, group = total + group * bound, 0
        elif word != "and" or group % 100 or not group + total:
            return None
    return total + group
