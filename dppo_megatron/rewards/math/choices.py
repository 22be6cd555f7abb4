"""Choice letters, where the reference is nothing but letters of choices: `(C) 12` for `C`, `AC` for `A, C`."""

from __future__ import annotations

import re

from dppo_megatron.rewards.math.answers import AnswerList, Words
from dppo_megatron.rewards.math.read import read_answer
from dppo_megatron.rewards.math.special import WRAPPED_TEXT, without_sentence
from dppo_megatron.rewards.math.trees import Unreadable

_ONE = re.compile(r"\(?\s*([A-Za-z])\s*(?:[).:]\s*(?P<value>.*))?", re.DOTALL)
_WITH_VALUE = re.compile(
    r"\(?([A-J])\s*(?:\)\s*(?:[a-z]{2}|-?\s*(?:[\d.]|\\(?:frac|sqrt|pi)(?![A-Za-z])))|\.\s*\d)(?!.*\([A-J]\)).*"
)
_SEPARATOR = re.compile(r"\band\b|[,;&]")


def same_choices(reference: str, other: str, problem: str) -> bool | None:
    """Whether both, cleaned, name the same choices; None where the reference names none.

    A choice may have its value beside it, which is mathematics or what the problem offers under its letter. A small
    letter is one where the problem, if it is known, offers it; a capital one may else be a point or a matrix.

    Example:
        >>> same_choices("A, C", "AC", ""), same_choices("C", "c) 12", ""), same_choices("C", "(C) is wrong", "")
        (True, True, False)
    """
    gold, theirs = (without_sentence(WRAPPED_TEXT.sub(r"\1", text).strip()) for text in (reference, other))
    if letter := re.fullmatch(r"\(?\s*([A-Z])\s*\)?[.:]?", gold):
        led = _ONE.fullmatch(theirs)
        if led is None or led[1].upper() != letter[1]:
            return None
        offered = re.search(rf"(?<![A-Za-z]){letter[1]}\s*[).:}}]", problem) if problem else letter[1] in "ABCDE"
        if led[1].islower() and not offered:
            return None
        return not led["value"] or _is_value(led["value"], letter[1], problem)
    letters = _several(gold)
    if letters is None or not (gold.isupper() or "and" in gold):  # (a, b) is a point
        return None
    if letters == gold and gold != "".join(sorted(gold)):  # BAD is a word
        return None
    if (named := _several(theirs)) is not None:
        return sorted(named) == sorted(letters)
    return False if re.search(r"\bor\b", theirs) else None


def led_letter(reference: str) -> str:
    """The letter of a reference, cleaned, that is a choice with its value, such as NuminaMath's `\\textbf{(C)}\\ 15`;
    else empty. For what reads as nothing else: `(C) x` is a product."""
    led = _WITH_VALUE.fullmatch(WRAPPED_TEXT.sub(r"\1", reference).strip())
    return led[1] if led else ""


def _several(text: str) -> str | None:
    bare = re.sub(r"[\s()\\]", "", _SEPARATOR.sub("", text))
    if not re.fullmatch("[A-Ja-j]{2,6}", bare) or len(set(bare)) < len(bare):
        return None
    return bare.upper() if bare.isupper() or _SEPARATOR.search(text) else None


def _is_value(text: str, letter: str, problem: str) -> bool:
    if re.search(rf"(?<![A-Za-z]){letter}\s*[).:}}][\s}}$]*{re.escape(text)}", problem):
        return True
    try:
        answer = read_answer(text)
    except (Unreadable, RecursionError, ValueError):
        return False
    return not isinstance(answer, (AnswerList, Words)) and not re.search(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])", text)
