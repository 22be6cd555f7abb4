"""Answers with special forms (words, digits in a base, times, matrices, whole sets), and clauses after an answer.

A reference's clauses (`for all x`, `where k is an integer`) are dropped, and an answer's that state nothing beyond the
reference's. One that restricts the answer stays, so that the answer is not taken for a wider one.
"""

from __future__ import annotations

import re
from fractions import Fraction

from dppo_megatron.rewards.math import answers, regex
from dppo_megatron.rewards.math.answers import Answer, AnswerList, Node, Unreadable, Value
from dppo_megatron.rewards.math.number_sets import half_line
from dppo_megatron.rewards.math.parse import ONE, parse
from dppo_megatron.rewards.math.units import DOUBTS, SMALL

_IN_TEXT = regex(r"\\text\{([^{}]*)\}")
_GROUPING = regex(r"(?<=\d),(?=\d{3}(?!\d))")
_PUNCTUATION = regex(r"[,;!\"`]|(?<!\b[A-Za-z])'|'(?=[A-Za-z])|\.(?!\d)|(?<=[A-Za-z])\.|(?<!\d):|:(?!\d\d)")
_CLOCK = regex(r"(0?\d|1[0-2])(?:\s*:\s*([0-5]\d))?(?:\s*:\s*([0-5]\d))?\s*([AaPp])\.?\s*[Mm]\.?")
_BASED = regex(
    r"\(?(-?[0-9A-Za-z]{0,99}[0-9][0-9A-Za-z]{0,99}(?:\.[0-9A-Za-z]+)?)\)?\s*_\s*\{?\s*(?:\\text\{)?\s*(\d+|[a-z]+)\s*\}?\}?"
)
_BASED_WORDS = regex(r"([0-9A-Fa-f]+)\s*(?:\\text\{)?\s*\(?(?:in )?base\s*\}?\s*(\d+|[a-z]+)\)?\}?")
_ENVIRONMENT = regex(
    r"(?P<scale>[^&=,;]*?)\s*[(\[]?\s*\\begin\s*\{(?P<kind>[pbB]?(?:small)?matrix|array)\}\s*(?:\{[lcr| ]*\})?"
    r"(?P<rows>(?:(?!\\begin).)*)\\end\s*\{(?P=kind)\}\s*[\])]?(?P<turned>\s*\^\s*\{?\s*T\s*\}?)?",
    re.DOTALL,
)
_LEAD = regex(
    r"(?:so|thus|hence|therefore)?,?\s*(?:the\s+)?(?:final\s+)?(?:correct\s+)?(?:answer|solution|result|option|choice)s?(?![A-Za-z])"
    r"(?:\s+set)?\s*(?:is|are|:|=)?\s*:?\s*",
    re.IGNORECASE,
)
_SENTENCE = regex(
    r"(?:\\text\{)?(?!Minus|Negative)[A-Z][A-Za-z ,'()-]+(?:\b(?:is|are|equals)|:)"
    r"(?:\s*\}\s*|\s+)(?P<rest>(?!not\b|at\b|neither\b|either\b).+)"
)
_HALF_LINE = regex(r"([a-z]?)\\mathbb\{R\}\s*(?:\^\s*\{?\s*([+-])\s*\}?|_\s*\{?\s*(?:([<>]|\\[lg]e)\s*0|[+])\s*\}?)")
_RESIDUE = r"[-+]?\s*+\d{1,9}"
_CONGRUENCE = regex(
    rf"(?:(?:(?P<name>[a-zA-Z])|(?P<number>[\d^{{}}()+*! -]*+))\s*+(?:\\equiv|=)\s*+)?(?P<residues>{_RESIDUE}"
    rf"(?:\s*+(?:(?:,\s*+)?(?:\\text\{{\s*+)?(?:and|or)\s*+\}}?\s*+|,\s*+){_RESIDUE})*+)\s*+"
    r"(?:\\pmod|\(?\s*+\\?(?:text\{\s*+)?b?mod(?![a-z]))\s*+\}?\s*+\{?\s*+(?P<modulus>\d{1,9})\s*+\}?\s*+\)?"
)
# conditions in words or by another sign, and their spelling here
_SPELLED = {
    regex(r"(?:all |if )?(odd|even) ([i-q])"): r"\2 is \1",
    regex(r"([a-z]) is (?:divisible by|a multiple of) (\d{1,9})"): r"\2|\1",
    regex(r"(\d{1,9}) ?\| ?([a-z])"): r"\2\\equiv 0\\pmod{\1}",
}
for _index, _word in enumerate(["even", "odd"]):
    _SPELLED[regex(rf"(?:if )?([i-q]) (?:is )?(?:an )?{_word}(?: integer)?")] = rf"\1\\equiv {_index}\\pmod{{2}}"
for _sign, _word in {">": "positive", "<": "negative", r"\\ge": "non-?negative", r"\\le": "non-?positive"}.items():
    _pattern = regex(rf"(?:all )?(?:the )?{_word} (?:real |number)+s|([a-z]) is {_word}")
    _SPELLED[_pattern] = rf"\1\\mathbb{{R}}_{{{_sign}0}}"
_NATURAL = answers.Words("every positive integer")
EVERY_REAL = (answers.Piece(("-", answers.INFINITY), False, answers.INFINITY, False),)
# whole answers in words or by a sign; nouns that do not change what they mean
_NONE = r"no (?:such [a-z]+(?: [a-z]+)?|(?:real |possible |valid )?(?:solution|root|value|answer)s?)(?: exists?)?"
_MANY = (
    r"(?: (?:such|positive|ordered|distinct|integer|real))?(?: (?:solution|pair|triple|integer|number|value|prime)s)?"
)
_EACH = r"(?:the set of )?(?:all|every|any|each|the)"
_NAMED: dict[str, Answer] = {
    rf"\\emptyset|\\\{{ ?\\\}}|(?:the )?empty set|none|(?:there (?:is|are|exists?) )?{_NONE}": answers.Intervals(()),
    rf"\\mathbb\{{r\}}|{_EACH} reals?(?: numbers?)?(?: [a-z])?": answers.Intervals(EVERY_REAL),
    rf"(?:there (?:are|exist) )?infinitely many{_MANY}|infinite|infinity": Value(answers.INFINITY),
    rf"\\mathbb\{{(?:n\}}|z\}} ?\^ ?\{{?\+\}}?)|{_EACH} (?:positive integer|natural number)s?(?: [i-q])?": _NATURAL,
    rf"\\mathbb\{{z\}}|{_EACH} integers?(?: [i-q])?": answers.Words("every integer"),
    "does not exist|dne|d n e": answers.Words("does not exist"),
    **{word: answers.Words(word) for word in ("yes", "no", "odd")},  # else they would be products of letters
}
_BY_NAME = regex("|".join(f"({names})" for names in _NAMED))
_IS_OF_A_SET = r"[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\\in\s*\\mathbb\{\s*[ZNRQ]\s*\}\s*(?:[\^_]\s*\{?\s*[*+]\s*\}?\s*)?"
# a clause after an answer that only states what its letters are; up to the next answer of a list
_CLAUSE = regex(
    r",?\s*(?:\\text\{\s*,?\s*|\(\s*)?(?:\bfor (?:all|any|every|each|some|integers?)\b|\\forall(?![A-Za-z])"
    r"|\b(?:where|with|for)\b(?=[\s}$]*[A-Za-z](?:,\s*[A-Za-z])*[\s$]*"
    r"(?:\\in(?![A-Za-z])|(?:\\text\{\s*)?(?:is an?|is any|are) )))"
    r"(?:(?!,?\s*(?:\\text\{\s*,?\s*)?(?:and|or)\b|;|,\s*-?[\d.]+\s*\Z).)*"
    rf"|,\s*{_IS_OF_A_SET}(?=\)|\\\}}|\Z)|\(\s*{_IS_OF_A_SET}\)(?!\s*[=<>])",
    re.DOTALL,
)
_OF_CLAUSES = regex(r"for|where|with|\\in")
_ARGUMENTS = regex(r"(?:(?<![A-Za-z\\])[A-Za-z]\(|_\{?)((?<=[({])[^(){}]*|[a-z])")
_SETS = {"R": " real ", "Z": " integer ", "N": " positive integer ", "Q": " rational ", "C": " complex "}
_SET = regex(r"\\mathbb\{(?:N\}\s*[\^_]\s*\{?\s*\*\s*\}?|([RZNQC])\}(?:\s*[\^_]\s*\{?\s*(\+|>\s*0)\s*\}?)?)|natural")
_LETTER = regex(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_WHOLE = frozenset("ijklmnIJKLMN")
_KINDS = frozenset(["real", "integer", "rational", "complex"])
_EVERY = frozenset(["all", "any", "every", "each", "\\forall"])
_SAYS_NOTHING = "for some where with i an are and in of \\in number value constant arbitrary text it"
_NEUTRAL = _EVERY | frozenset(_SAYS_NOTHING.split())


def read_special(text: str, _depth: int) -> Answer | None:
    """The answer, if it has a special form; else None."""
    plain = plain_words(text)
    for pattern, spelled in _SPELLED.items() if "!" not in text and (" " in plain or "|" in plain) else ():
        if found := pattern.fullmatch(plain):
            text = plain = found.expand(spelled)
    if named := _BY_NAME.fullmatch(plain):
        return [*_NAMED.values()][(named.lastindex or 0) - 1]
    if "\\mathbb" in text and (match := _HALF_LINE.fullmatch(text)):
        return half_line(match[1], match[3] or ("<" if match[2] == "-" else ">"), ("n", Fraction(0)))
    if ("_" in text or "base" in text) and (match := _BASED.fullmatch(bare(text)) or _BASED_WORDS.fullmatch(text)):
        base = int(match[2]) if match[2].isdigit() and len(match[2]) < 4 else SMALL.get(match[2], 0)
        if 2 <= base <= 36 and all(sign in "-." or int(sign, 36) < base for sign in match[1]):
            return _based(match[1].upper(), base)
    if match := _CLOCK.fullmatch(bare(text).strip()):
        seconds = f":{match[3]}" if match[3] else ""
        return answers.Words(f"{int(match[1]) % 12 + 12 * (match[4] in 'pP')}:{match[2] or '00'}{seconds}")
    if "mod" in text and (match := _CONGRUENCE.fullmatch(text)):
        if (match["number"] or " ") > " ":  # 2^{100} is 5 modulo 7
            return Value(("n", Fraction(match["residues"])))
        residues = _residues(match["residues"], int(match["modulus"]))
        return answers.Named(match["name"], residues) if residues and match["name"] else residues
    if "\\begin" in text and (match := _ENVIRONMENT.fullmatch(text)):
        scale = match["scale"].strip(" *")
        return read_grid(match["rows"], parse(f"{scale}1" if scale in ("", "-") else scale), bool(match["turned"]))
    return None


def _residues(text: str, modulus: int) -> Answer | None:
    """The numbers that are congruent to one of the residues in `text`."""
    residues = {int(number) % modulus for number in re.findall(_RESIDUE, text.replace(" ", "")) if modulus}
    period = ("*", ("n", Fraction(modulus)), ("s", "_"))  # `_` stands for every whole number
    found = tuple(Value(("+", period, ("n", Fraction(residue)))) for residue in sorted(residues))
    return AnswerList("set", found) if len(found) > 1 else found[0] if found else None


def without_sentence(text: str) -> str:
    """The answer in `the solution is ...` or `The largest n is ...`; other texts as they are."""
    if (lead := _LEAD.match(text)) and lead.end() < len(text):
        text = text[lead.end() :].strip()
    match = _SENTENCE.fullmatch(text) if text.count(":") < 2 else None
    if match and re.search(r"[\d\\]", match["rest"]) and DOUBTS.isdisjoint(re.findall("[a-z]+", match[0].lower())):
        return match["rest"].strip()
    return text


def read_words(text: str) -> Answer:
    """The text as words. Raises Unreadable if it has none, or mathematical signs."""
    plain = plain_words(text)
    if not plain or not re.search(r"[a-z]{2}", plain) or re.search(r"[\\^_{}=<>]", plain):
        raise Unreadable("neither mathematics nor words")
    return answers.Words(plain)


def plain_words(text: str) -> str:
    """Without punctuation, but with decimal points and the primes of letters: less than 1.5, point A'."""
    text = _GROUPING.sub("", bare(text, " "))
    return " ".join(_PUNCTUATION.sub(" ", text).lower().split())


def bare(text: str, beside: str = "") -> str:
    """The text without the command \\text and its braces; with `beside` before and after their content."""
    return _IN_TEXT.sub(lambda found: beside + found[1] + beside, text) if "\\text" in text else text


def _based(digits: str, base: int) -> Answer:
    """Digits without zeros at the ends. Numbers in different bases are different answers, even if they are equal: else
    the number in the question would answer a question for its conversion."""
    if base == 10:
        return Value(("n", Fraction(digits)))
    whole, point, rest = digits.lstrip("-").lstrip("0").partition(".")
    return answers.Words(f"{'-' * digits.startswith('-')}{whole}{(point + rest).rstrip('0').rstrip('.')}_{base}")


def read_grid(body: str, scale: Node = ONE, is_turned: bool = False) -> AnswerList:
    """The rows of a matrix in LaTeX, or in 1, 2], [3, 4 or 1, 2; 3, 4; times `scale`, transposed if `is_turned`."""
    sign = "&" if "&" in body or "\\\\" in body else ","
    lines = (row.split(sign) for row in re.split(r"\\\\(?:\[[^\]]*\])?|\]\s*,\s*\[|;", body) if row.strip())
    rows = [tuple(Value(parse(cell) if scale == ONE else ("*", scale, parse(cell))) for cell in row) for row in lines]
    if not rows:
        raise Unreadable("a matrix without cells")
    turned = zip(*rows, strict=True) if is_turned else rows
    return AnswerList("grid", tuple(AnswerList("tuple", row) for row in turned))


def without_clauses(text: str, gold: str | None = None) -> str:
    """The text without clauses that only state what its letters are (`for all x`, `where k is an integer`). An answer
    keeps a clause that restricts it beyond the reference `gold`, so that it is not taken for a wider one.

    Example:
        >>> without_clauses("f(x)=x, \\\\forall x \\\\in \\\\mathbb{R}", ""), without_clauses("x for all x > 7", "x")
        ('f(x)=x', 'x for all x > 7')
    """
    if "\\begin{cases}" in text or not _OF_CLAUSES.search(text):
        return text.strip() or text
    stated = set().union(*(_domain(found[0]) for found in _CLAUSE.finditer(gold or "")))
    if re.search(r"mod(?![a-z])|\\n?mid(?![a-z])|\b(?:odd|even)\b", gold or ""):
        stated.add("integer")
    rest = _CLAUSE.sub(lambda found: "" if gold is None or _adds_nothing(found[0], stated) else found[0], text)
    return rest.strip() or text


def _adds_nothing(clause: str, stated: set[str]) -> bool:
    words, letters = _domain(clause), set(_LETTER.findall(clause)) - set("aCNQRZ")
    if "some" in words - stated and letters & set("tuvwxyz"):
        return False
    if stated:
        allowed = stated if stated & _KINDS else stated | _KINDS
    elif words & _EVERY:
        allowed = {*_KINDS, "positive", "nonnegative"}
    else:
        allowed = {*_KINDS} if letters <= _WHOLE else {"real", "complex"}
    return words - _NEUTRAL <= allowed


def whole_letters(text: str, *, any_number: bool = False) -> frozenset[str]:
    """The letters that a clause calls integers, or with `any_number` all letters in clauses; without the arguments of
    functions and sequences: f(k) = k + 1."""
    clauses = [found[0] for found in _CLAUSE.finditer(text)] if _OF_CLAUSES.search(text) else []
    parts = (part for part in clauses if any_number or _domain(part) - (_NEUTRAL - _EVERY) == {"integer"})
    letters = (set(_LETTER.findall(part)) - (set() if any_number else {"a"}) - set("CNQRZ") for part in parts)
    return frozenset().union(*letters) - set("".join(_ARGUMENTS.findall(text))) if clauses else frozenset()


def _domain(clause: str) -> set[str]:
    """The clause's words and signs without single letters; sets of numbers are spelled as words."""
    spelled = _SET.sub(lambda found: _SETS[found[1] or "N"] + ("positive" if found[2] else ""), clause)
    spelled = re.sub(r"(?:>\s*0|\\ge\s*1)(?![\d.])", " positive ", spelled)
    spelled = re.sub(r"\\ge\s*0(?![\d.])|non-?negative", " nonnegative ", spelled)
    words = re.findall(r"\\?[A-Za-z]+|\S", re.sub(r"[{}(),.$\s]+|\\text", " ", spelled))
    return {word.removesuffix("s") for word in words if not (len(word) == 1 and word.isalpha())}
