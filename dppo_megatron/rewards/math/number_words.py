"""Numbers in words: `twelve`, `one hundred and five`, `minus two thirds`, `three and a half`.

Only runs of words that are one number are read: `seven or eight`, `one two` and `second` are left as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

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
_RUN = re.compile(
    rf"(?<![\w\\-])(?:(?:{'|'.join(_SIGNS)})[ ]+)?(?:{_WORD})(?:(?:-|[ ]+)(?:{_WORD}))*(?![\w-])", re.IGNORECASE
)
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
