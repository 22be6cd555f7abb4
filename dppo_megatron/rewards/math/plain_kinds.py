"""Whether two answers are the same, of the kinds that hold no other answers: words, times, digits in a base, ratios,
congruences."""

from __future__ import annotations

import re
from fractions import Fraction

from dppo_megatron.rewards.math.answers import Answer, Based, Clock, Congruence, Ratio, Value, Words
from dppo_megatron.rewards.math.equality import same
from dppo_megatron.rewards.math.trees import Node, substituted, symbols
from dppo_megatron.rewards.math.values import Rules, Verdict, all_of, parameter_turn

_ARTICLES = {"the", "a", "an"}
_MONTHS = frozenset(["january", "february", "march", "april", "may", "june", "july", "august", "september", "october"])
_MONTHS |= {"november", "december"}
_NEGATIONS = frozenset(["not", "no", "never", "neither", "nor"])


def equal_congruences(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """x = 5k + 3 is x congruent 3 modulo 5; and 3 modulo 5 is 3, where that is asked for."""
    if isinstance(gold, Congruence) and isinstance(other, Congruence):
        return gold == other
    class_, plain = (gold, other) if isinstance(gold, Congruence) else (other, gold)
    assert isinstance(class_, Congruence)
    if not isinstance(plain, Value):
        return False
    if not symbols(plain.node):
        return class_ is other and same(plain.node, ("n", Fraction(class_.remainder)), rules.work)
    if class_ is other:
        return False  # x modulo 1 would be right for every letter
    members = ("+", ("*", ("n", Fraction(class_.modulus)), ("s", "_")), ("n", Fraction(class_.remainder)))
    turn = parameter_turn(members, plain.node, rules.work)
    return turn is not None and same(members, substituted(plain.node, *turn), rules.work)


def equal_words(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    if not isinstance(gold, Words) or not isinstance(other, Words):
        return False
    return _folded(gold.text) == _folded(other.text) or _answers(gold.text, other.text)


def _folded(text: str) -> str:
    if text in ("dne", "d n e"):
        return "doesnotexist"
    words = [word for word in text.replace("-", " ").split() if word not in _ARTICLES]
    if _MONTHS & set(words):  # 12th of May
        words = sorted(re.sub(r"(?<=\d)(?:st|nd|rd|th)$", "", word) for word in words if word not in ("of", "on"))
    return "".join(words)


def _answers(gold: str, other: str) -> bool:
    """Whether a sentence states a short reference: yes or no as its first word, or what something is."""
    words = other.split()
    if gold in ("yes", "no", "true", "false"):
        return len(words) > 1 and words[0] == gold and not {"yes", "no", "true", "false"} & set(words[1:])
    if len(gold.split()) > 3 or _NEGATIONS & set(words):
        return False
    _, found, said = re.sub(r"^(?:the|this|it|its|that)\b", "", other).partition(" is ")
    return bool(found) and other.split()[0] in ("the", "this", "it", "that") and _folded(said) == _folded(gold)


def equal_clocks(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    if isinstance(gold, Clock) and isinstance(other, Clock):
        if (gold.hour, gold.minute) == (other.hour, other.minute):
            return gold.half == other.half or not gold.half or not other.half
        return _day_minutes(gold) == _day_minutes(other) and bool(gold.half) != bool(other.half)
    clock, plain = (gold, other) if isinstance(gold, Clock) else (other, gold)
    assert isinstance(clock, Clock)
    if isinstance(plain, Value) and clock is gold and clock.half and not clock.minute:
        return same(("n", Fraction(clock.hour)), plain.node, rules.work)  # 9 for 9 a.m.
    if isinstance(plain, (Value, Ratio)) and not clock.half and clock.minute:
        ratio = Ratio((("n", Fraction(clock.hour)), ("n", Fraction(clock.minute))))
        return equal_ratios(ratio, plain, rules) if clock is gold else equal_ratios(plain, ratio, rules)
    return False


def _day_minutes(clock: Clock) -> int:
    hour = clock.hour
    if clock.half:
        hour = hour % 12 + (12 if clock.half == "p" else 0)
    return hour % 24 * 60 + clock.minute


def equal_based(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """Digits and base; a number in base ten may leave the base out. Another base is another answer: a question that
    asks for a conversion would else be answered by itself."""
    if isinstance(gold, Based) and isinstance(other, Based):
        return gold.base == other.base and _digits(gold) == _digits(other)
    based, plain = (gold, other) if isinstance(gold, Based) else (other, gold)
    assert isinstance(based, Based)
    if based.base != 10 or not isinstance(plain, Value):
        return False
    return same(("n", Fraction(based.digits)), plain.node, rules.work)


def _digits(number: Based) -> str:
    sign = "-" if number.digits.startswith("-") else ""
    digits = number.digits.lstrip("-").lstrip("0")
    return sign + (digits.rstrip("0").rstrip(".") if "." in digits else digits)


def equal_ratios(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """3 : 1 is 6 : 2 and 3/1."""
    left, right = _parts(gold), _parts(other)
    if left is None or right is None or len(left) != len(right):
        return False
    pairs = zip(left[1:], right[1:], strict=True)
    return all_of([same(("*", left[0], b), ("*", a, right[0]), rules.work) for a, b in pairs])


def _parts(answer: Answer) -> tuple[Node, ...] | None:
    if isinstance(answer, Ratio):
        return answer.parts
    return (answer.node, ("n", Fraction(1))) if isinstance(answer, Value) else None
