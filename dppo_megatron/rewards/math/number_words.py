"""Numbers in words: `twelve`, `one hundred and five`, `two thirds`, `three and a half`, `minus four point two`.

Only runs of words that are one number are read: `seven or eight`, `one two` and `second` are left as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

_ONES = dict(zip("zero one two three four five six seven eight nine".split(), range(10), strict=True))  # noqa: SIM905
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_SMALL = {
    **_ONES,
    **dict(zip(_TEENS.split(), range(10, 20), strict=True)),
    **dict(zip(_TENS.split(), range(20, 100, 10), strict=True)),
    "fourty": 40,
}
_SCALES = {"dozen": 12, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {
    "half": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
    "eleventh": 11,
    "twelfth": 12,
    "twentieth": 20,
    "hundredth": 100,
    "thousandth": 1000,
}
_DENOMINATORS = {**_PARTS, **{f"{name}s": part for name, part in _PARTS.items()}, "halves": 2}
_SIGNS = ("minus", "negative")

_WORD = "|".join(
    sorted({*_SMALL, *_SCALES, *_DENOMINATORS, "hundred", "point", "and", "an", "a"}, key=len, reverse=True)
)
_RUN = re.compile(
    rf"(?<![\w\\-])(?:(?:{'|'.join(_SIGNS)})[ ]+)?(?:{_WORD})(?:(?:-|[ ]+)(?:{_WORD}))*(?![\w-])", re.IGNORECASE
)
_SAID_TWICE = re.compile(r"([A-Za-z -]+)\(\s*(\d[\d,]*)\s*\)|(\d[\d,]*)\s*\(([A-Za-z -]+)\)")
_GOES_ON = re.compile(r"\s*[\[(\\^_\d]|\s+(?:first|second)\b", re.IGNORECASE)
_ANY = re.compile("|".join((*_SMALL, "half", "hundred", "thousand", "million", "dozen", "quarter")), re.IGNORECASE)


def read_number_words(text: str) -> Fraction | None:
    """The number that the words are, all of them.

    Example:
        >>> read_number_words("One hundred twenty-five"), read_number_words("two and two thirds")
        (Fraction(125, 1), Fraction(8, 3))
    """
    words = text.lower().replace("-", " ").split()
    if not words or len(words) > 30:
        return None
    negative = words[0] in _SIGNS
    value = _number(words[negative:])
    return -value if value is not None and negative else value


def with_digits(text: str) -> str:
    """The text with its numbers in words as digits, where they are surely numbers.

    Example:
        >>> with_digits("twelve apples"), with_digits("three to two"), with_digits("the second")
        ('12 apples', '3 to 2', 'the second')
    """
    if not _ANY.search(text):
        return text
    if twice := _SAID_TWICE.fullmatch(text):
        digits = (twice[2] or twice[3]).replace(",", "")
        if read_number_words(twice[1] or twice[4]) == int(digits):
            return digits
    return _RUN.sub(_as_digits, text)


def _as_digits(run: re.Match[str]) -> str:
    value = read_number_words(run.group())
    # what an expression follows would become a product; twenty second is no number of seconds
    if value is None or _GOES_ON.match(run.string, run.end()):
        return run.group()
    return str(value)


def _number(words: Sequence[str]) -> Fraction | None:
    if "point" in words:
        at = list(words).index("point")
        whole, digits = _whole(words[:at]) if at else 0, [_ONES.get(word) for word in words[at + 1 :]]
        if whole is None or not digits or None in digits:
            return None
        return Fraction(f"{whole}.{''.join(map(str, digits))}")
    if words and words[-1] in _DENOMINATORS:
        return _fraction(words)
    whole = _whole(words)
    return None if whole is None else Fraction(whole)


def _fraction(words: Sequence[str]) -> Fraction | None:
    """`two thirds`, `a half`, `half`, `three and a half`; an ordinal without a number of parts is none."""
    below = _DENOMINATORS[words[-1]]
    if list(words) == ["half"]:
        return Fraction(1, 2)
    whole: int | None = 0
    above = list(words[:-1])
    if "and" in above:
        at = len(above) - 1 - above[::-1].index("and")
        if (value := _whole(above[:at])) is not None and at + 1 < len(above):
            whole, above = value, above[at + 1 :]
    parts = _whole(above) if above not in (["a"], ["an"]) else 1
    if parts is None or whole is None or (whole and parts >= below):
        return None
    # one third and two thirds, not twenty fourth: an ordinal behind tens is a date or a place
    if parts > 1 and not words[-1].endswith("s"):
        return None
    return whole + Fraction(parts, below)


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
