"""Choice letters: `AC` for `A, C`, and `c` for `C`, where the reference is nothing but letters of choices."""

from __future__ import annotations

import re

_LIST = re.compile(r"\(?[A-J]\)?(?:(?:\s*(?:[,;]|\\text\{\s*(?:,\s*)?and\s*\}|\band\b))+\s*\(?[A-J]\)?)+")
_GLUED = re.compile(r"[A-J]{2,6}")
_PAINT = re.compile(r"\\text\b|\band\b|\\?&|[{}()\[\],;.\s]")
_ONE = re.compile(r"\(?([A-E])\)?|\\text\{\s*\(?([A-E])\)?\s*\}")
_LED = re.compile(r"(?:\\text\{\s*)?\(?([a-e])(?=\s*\Z|\s*[).:}])")


def same_choices(reference: str, other: str) -> bool:
    """Whether both, cleaned, name the same choices, two or more of them; False where that cannot be said.

    The reference's letters count without commas in alphabetical order only: `BAD` is a word.

    Example:
        >>> same_choices("A, C", "AC"), same_choices("AC", "(A) and (C)"), same_choices("A, C", "ABC")
        (True, True, False)
    """
    letters = _letters(reference, in_order=True)
    return letters is not None and letters == _letters(other)


def _letters(text: str, *, in_order: bool = False) -> frozenset[str] | None:
    if not 2 <= len(text) <= 80:
        return None
    bare = _PAINT.sub("", text)
    if not _GLUED.fullmatch(bare.upper()) or len(set(bare.upper())) < len(bare):
        return None
    if in_order and not bare.isupper():  # (a, b) is a point
        return None
    if _LIST.fullmatch(text.upper().replace("\\TEXT", "\\text").replace("AND", "and")):
        return frozenset(bare.upper())
    return frozenset(bare) if bare.isupper() and (not in_order or bare == "".join(sorted(bare))) else None


def as_choice(reference: str, other: str, problem: str) -> str:
    """An answer that is led by a small letter, with the capital one if the reference is a single choice letter.

    Args:
        problem: where it is known, it has to offer that choice; a capital letter may else be a point or a matrix.

    Example:
        >>> as_choice("C", "c", ""), as_choice("C", "c) 12", "... (A) 10 (B) 11 (C) 12"), as_choice("C", "c", "AB = c")
        ('C', 'C) 12', 'c')
    """
    one, led = _ONE.fullmatch(reference), _LED.match(other)
    if not one or not led:
        return other
    letter = one[1] or one[2]
    if problem and not re.search(rf"(?<![A-Za-z]){letter}\s*[).:}}]", problem):
        return other
    return other[: led.start(1)] + led[1].upper() + other[led.end(1) :]
