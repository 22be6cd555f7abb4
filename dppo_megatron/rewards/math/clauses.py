"""Clauses behind an answer: `for all x`, `where k is an integer`.

A reference's clause is left out. An answer's is too where it says no less than the reference; one that restricts the
answer stays, so that what it belongs to is not read as more than it says.
"""

from __future__ import annotations

import re

from dppo_megatron.rewards.math.patterns import regex

# what stands behind an answer and says only what its letters are; up to the next answer of a list
_CLAUSE = regex(
    r",?\s*(?:\\text\{\s*,?\s*|\(\s*)?(?:\bfor (?:all|any|every|each|some)\b|\\forall(?![A-Za-z])"
    r"|\b(?:where|with|for)\b(?=[\s}$]*[A-Za-z](?:,\s*[A-Za-z])*[\s$]*"
    r"(?:\\in(?![A-Za-z])|(?:\\text\{\s*)?(?:is an?|is any|are) ))"
    r"|(?<=,)\s*[a-zA-Z]\s*\\in\s*\\mathbb\{?\s*[ZNRQ]\s*\}?\s*(?=\)|\Z))"
    r"(?:(?!,?\s*(?:\\text\{\s*,?\s*)?(?:and|or)\b|;|,\s*-?[\d.]+\s*\Z).)*",
    re.DOTALL,
)
_SETS = {"R": " real ", "Z": " integer ", "N": " positive integer ", "Q": " rational ", "C": " complex "}
_SET = regex(r"\\mathbb\{([RZNQC])\}(?:\s*[\^_]\s*\{?\s*(\+|>\s*0)\s*\}?)?|(natural)")
_POSITIVE = regex(r"(?:>\s*0|\\ge\s*1)(?![\d.])")
_NONNEGATIVE = regex(r"\\ge\s*0(?![\d.])|non-?negative")
_WHOLE = frozenset("ijklmnIJKLMN")
_KINDS = frozenset(["real", "integer", "rational", "complex"])
_EVERY = frozenset(["all", "any", "every", "each", "\\forall"])
_FILLING = "for some where with i an are and in of \\in number value constant arbitrary text it"
_NEUTRAL = _EVERY | frozenset(_FILLING.split())


def without_clauses(text: str, gold: str | None = None) -> str:
    """The text without what says only what its letters are (`for all x`, `where k is an integer`). An answer keeps a
    clause that says less than the reference `gold` does: `k \\in \\mathbb{N}`, `for all x > 7`.

    Example:
        >>> without_clauses("f(x)=x, \\\\forall x \\\\in \\\\mathbb{R}", ""), without_clauses("x for all x > 7", "x")
        ('f(x)=x', 'x for all x > 7')
    """
    if not ("for" in text or "\\in" in text or "wh" in text or "with" in text) or "\\begin{cases}" in text:
        return text
    stated = None if gold is None else set().union(*(_domain(found[0]) for found in _CLAUSE.finditer(gold)))
    return _CLAUSE.sub(lambda found: "" if _says_no_less(found[0], stated) else found[0], text).strip() or text


def _says_no_less(clause: str, stated: set[str] | None) -> bool:
    if stated is None:
        return True
    words = _domain(clause)
    kinds, restricted = words & _KINDS, words - _KINDS - _NEUTRAL
    if stated:
        return restricted <= stated and (not kinds or not stated & _KINDS or kinds == stated & _KINDS)
    if words & _EVERY:
        return restricted <= {"positive", "nonnegative"}
    letters = set(re.findall(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", clause)) - set("aCNQRZ")
    is_restricted = letters & set("tuvwxyz") and "some" in words
    return not restricted and not is_restricted and (letters <= _WHOLE or not kinds & {"integer", "rational"})


def _domain(clause: str) -> set[str]:
    """Its words and signs, with sets of numbers in words, without single letters."""
    spelled = _SET.sub(lambda found: _SETS[found[1] or "N"] + ("positive" if found[2] else ""), clause)
    spelled = _NONNEGATIVE.sub(" nonnegative ", _POSITIVE.sub(" positive ", spelled))
    words = re.findall(r"\\?[A-Za-z]+|\S", re.sub(r"[{}(),.$\s]+|\\text", " ", spelled))
    return {word.removesuffix("s") for word in words if not (len(word) == 1 and word.isalpha())}
