"""The `math` grader: from a completion to its reward, in these steps (docs/math.md has examples of each).

1. the completion's final answer (`extract`); without one the reward is 0
2. equal strings, then equal numbers: most gradings end here, after some microseconds
3. a comparison by the reference's own kind (`read`, `compare`), which is final if it understands both sides
Everything else is 0, with the reason. No clock is used and nothing can hang: a comparison has a limited number of
operations (`evaluate.WorkLimit`). A text that cannot be read is 0 too; only a bug in the grader is a failed grading.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dppo_megatron.rewards.math import answers, regex
from dppo_megatron.rewards.math.answers import Answer, AnswerList, Intervals, Named, Unreadable, Words
from dppo_megatron.rewards.math.clean import clean
from dppo_megatron.rewards.math.compare import asks_order, equal, letters
from dppo_megatron.rewards.math.equality import Rules
from dppo_megatron.rewards.math.evaluate import TooBig, WorkLimit
from dppo_megatron.rewards.math.extract import extract
from dppo_megatron.rewards.math.number_sets import as_spans, whole_members
from dppo_megatron.rewards.math.read import UNDONE, read_answer
from dppo_megatron.rewards.math.special import (
    bare,
    plain_words,
    whole_letters,
    without_clauses,
    without_sentence,
)
from dppo_megatron.rewards.math.units import DOUBTS, ZERO, read_unit, stated_digits, with_digits

if TYPE_CHECKING:
    from dppo_megatron.types import Grade

_MAX_BOXES = 8  # so many are also compared one by one
_MAX_PROBLEM = 5000  # as much of its end is read: no benchmark's is longer
_GAP = regex(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])")  # spaces that do not separate two words or numbers
_GROUPED = regex(r"(?<![\d,.])\d{1,3}(?:(?:,\d{3})+|(?:,\d\d)+,\d{3})(?!,?\d)")  # 12,34,567 in India
_CHAIN = regex(r"((?:[A-Za-z] ?= ?){2,6})([^=,;<>]+)")  # x = y = z = 1
_CHOICE = regex(r"\(?\s*([A-Za-z])\s*(?:[).:]\s*(?P<value>.*)|\s\((?P<inside>[^()]+)\))?", re.DOTALL)
_LETTER = regex(r"\(?\s*([A-Z])\s*\)?[.:]?")
_CHOICE_WITH_VALUE = regex(  # as NuminaMath has them: \textbf{(C)}\ 15
    r"\(?([A-J])\s*(?:\)\s*(?=[a-z]{2}|-?\s*(?:[\d.]|\\(?:frac|sqrt|pi)(?![A-Za-z])))|\.\s*(?=\d))"
    r"(?P<value>(?!.*\([A-J]\)).*)"
)
_SIGNS = regex(r"\\[A-Za-z]+|[\W_]")  # all but the letters and digits, which are the same in any spelling
_FORMULA = regex(r"(?<!\\)\$+|\\[()\[\]]")  # where one begins or ends
_ASKING = "find|compute|determine|calculate|evaluate|express|expand|simplify"
_OFFERED = regex(r"[(\s{;][A-J][).:}\s;]*\Z")
_REWRITE = regex(  # in a problem whose formulas begin and end with ;
    r"(?:\b(?i:express|write|convert|factor|round|change|simplify)(?: the| number| decimal| fraction| following)*"
    r"|factorization of);?:?;?\s*\Z"
)
# an expression of the problem may be the answer
_WHICH = regex(r"\b[Ww]hich (?:of|\w+ (?:is|are|equals))\b[^.!]{0,300}\?")
_BETWEEN_CHOICES = regex(r"\band\b|[,;&]")
_NO_CHOICE = regex(r"[^A-Ja-jn,;&\s()\\]")
# words of a sentence that says who, but no other player
_OF_GAMES = frozenset("the a wins will win can always has have winning strategy does is game player".split())  # noqa: SIM905
_OPTION = regex(r"(?<![A-Za-z\\$^_])[(\"]?([A-J])\s*(?:[).:]|\"(?= for))")
_OPTION_END = regex(r"\n\s*\n|\s(?:Enter|Your|Express|Choose|Answer|Please|Give|Select|Write|Which|What)\b|\Z")
_cleaned = functools.lru_cache(maxsize=4096)(clean)


def grade_math(
    completion: str,
    answer: str,
    row: Mapping[str, Any],
    *,
    prompt: str = "",
    finish_reason: str = "stop",
    strict: bool = False,
) -> Grade:
    """1.0 if the completion's final answer is the reference, else 0.0. The row's `problem`, `tolerance`, `unit` and
    `source` decide how they are compared. With `strict`, only a box, `<answer>` or `####` marks an answer."""
    from dppo_megatron.types import Grade  # here, since it would add 15 ms to the grader's import

    # base models that end by themselves never close the prompt's tag
    is_cut_off = finish_reason == "length" and prompt.rstrip().endswith("<think>")
    found = extract(f"<think>{completion}" if is_cut_off else completion, strict=strict)
    if not found.parts:
        return Grade(0.0, None, found.why, {"parsed_share": 0.0, "boxed_share": 0.0})
    text = ", ".join(found.parts)
    verdict, why = (True, "exact") if text == answer else _compare(answer, text, row)
    if 1 < len(found.parts) <= _MAX_BOXES and verdict is not True:
        # several boxes for one reference: right if each of them is
        each = [_compare(answer, part, row) for part in found.parts]
        if all(outcome for outcome, _ in each):
            verdict, why = True, each[0][1]
    if len(found.parts) < len(found.every) <= _MAX_BOXES and verdict is not True:
        # an item in each box, with sentences between them
        whole = ", ".join(found.every)
        if (items := _compare(answer, whole, row))[0] and items[1] in ("normalized", "list", "set"):
            text, (verdict, why) = whole, items
    is_marked = found.mark not in ("stated", "equation")
    facts = {"parsed_share": float(verdict is not None), "boxed_share": float(is_marked)}
    return Grade(float(verdict is True), text, why, facts)


grade_math_boxed = functools.partial(grade_math, strict=True)  # for rewards that also teach the format


def is_read(answer: str) -> bool:
    """Whether a reference is understood. If not, an answer is right only if it is written in the same way."""
    with suppress(Unreadable, RecursionError, ArithmeticError, ValueError):
        reference = _reference(answer)
        return _read_both(reference, reference)[0] is not None or bool(
            _same_choices(reference, reference, "", WorkLimit())
        )
    return False


def _compare(answer: str, text: str, row: Mapping[str, Any]) -> tuple[bool | None, str]:
    """True, False, or None if the answer could not be read or compared; and how that was decided."""
    try:
        return _decide(answer, text, row)
    except (Unreadable, RecursionError, ArithmeticError, ValueError) as error:
        return None, f"not understood: {error}"
    except TooBig as error:
        return None, str(error)


def one_spelling(text: str) -> str:
    """An answer cleaned and without spaces that mean nothing: two answers for which it is the same are equal."""
    with suppress(ValueError):  # 5,000 digits that repeat
        return _without_gaps(_cleaned(text)) or text
    return text


def _without_gaps(cleaned: str) -> str:
    return _GAP.sub("", cleaned) if " " in cleaned else cleaned


def _decide(answer: str, text: str, row: Mapping[str, Any]) -> tuple[bool | None, str]:
    reference, other, problem = _reference(answer), _cleaned(text), str(row.get("problem", ""))[-_MAX_PROBLEM:]
    spelled = _without_gaps(other)
    if spelled and spelled == _without_gaps(reference):
        return True, "normalized"
    work = WorkLimit()
    if (chosen := _same_choices(reference, other, problem, work)) is not None:
        return chosen, "choices"
    if stated := _CHOICE_WITH_VALUE.fullmatch(bare(reference).strip()):
        reference = stated["value"]
    other = other if "=" in reference else _without_asked(other, problem)
    gold, theirs, unread = _read_both(reference, other)
    if isinstance(gold, Words) and not isinstance(theirs, Words):  # `odd` without \\text was read as a product
        theirs = Words(plain) if re.fullmatch(r"[a-z0-9.:' -]+", plain := plain_words(other)) else theirs
    if isinstance(gold, Named) and isinstance(theirs, Words):  # `odd` for `n is odd`
        theirs = _read(f"{gold.name} is {theirs.text}")[0] or theirs
    if gold is not None and theirs is not None:
        rules = _rules(row, reference, other, problem, work)
        is_right = equal(gold, theirs, rules)
        if isinstance(gold, Words) and isinstance(theirs, Words):
            is_right = is_right or (not re.search(r"(?i)\d.*m\b", other) and _states(gold.text, theirs.text, problem))
        elif row.get("multiple") is True and isinstance(gold, AnswerList) and isinstance(theirs, AnswerList):
            lists = AnswerList("list", gold.items), AnswerList("list", theirs.items)
            is_right = is_right or equal(*lists, rules)
        if isinstance(gold, answers.Value):  # 2(x + 1) = 2x + 2 states its last side
            text = text.rpartition("=")[2]
            theirs = answers.Value(theirs.sides[-1]) if isinstance(theirs, answers.Relation) else theirs
        if is_right and problem and _is_repeated(text, gold, theirs, problem):
            return False, "repeats the problem"
        if is_right or not rules.work.has_doubt:
            return is_right, gold.kind if isinstance(gold, AnswerList) else type(gold).__name__.lower()
        return None, "neither equal nor different for certain"
    if isinstance(gold, Words) or theirs is not None:
        return None, "words" if theirs is None else "the reference is not understood"
    undone = UNDONE.search(other)
    return None, f"not carried out: {undone.group()}" if undone else f"not understood: {unread}"


def _without_asked(text: str, problem: str) -> str:
    """4 for AD^2 = 4, if the problem asks to find AD^2; other texts as they are."""
    left, sign, rest = text.partition("=")
    if not problem or not sign or not 2 < len(left.strip()) < 80 or re.search(r"[<>,]|\\[lgn]e", left):
        return text
    asked = re.escape(one_spelling(left.strip()))
    asks = rf"(?i:\b(?:{_ASKING}|of|for|is|are))[\s;]*{asked}(?=[\s;.?,:]|\Z)"
    return rest.strip() if re.search(asks, one_spelling(_FORMULA.sub(" ; ", problem))) else text


def _read_both(reference: str, other: str) -> tuple[Answer | None, Answer | None, str]:
    """The reference, the answer, and why the answer could not be read. If they have different numbers of items, their
    commas are read again, as separators or within numbers."""
    stated, other, reference = other, without_clauses(other, reference), without_clauses(reference)
    (gold, _), (theirs, unread) = _read(reference), _read(other)
    ours, spans = as_spans(gold), as_spans(theirs)
    if spans and spans.name and (ours is None or ours.name != spans.name) and spans.name in whole_letters(stated):
        theirs = whole_members(spans)  # whole numbers n with 0 < n < 5 are not the interval (0, 5)
    if gold is not None and theirs is not None and _count(gold) != _count(theirs):
        theirs = _respelled(other, theirs, _count(gold), stated_digits(reference)[0] > 0)
        if _count(gold) != _count(theirs):
            gold = _respelled(reference, gold, _count(theirs), stated_digits(other)[0] > 0, is_gold=True)
    return gold, theirs, unread


def _count(answer: Answer) -> int:
    return len(answer.items) if isinstance(answer, AnswerList) else 1


def _respelled(text: str, answer: Answer, count: int, for_decimal: bool = False, is_gold: bool = False) -> Answer:
    """The answer with `count` items, as the other side has, if its commas can be read so: `1,234 apples` and
    (1,000, 2,000) contain grouped numbers, 45,135 may be two; if the other side is a decimal, so are 1000,99 and the
    reference 0,25. An excluded value may follow an expression (`x \\ne 0`), a condition a reference's whole number."""
    if count == 1 and isinstance(answer, AnswerList) and answer.kind != "list":
        return answer
    if count == 1 and for_decimal and re.fullmatch(r"-?0,\d\d+" if is_gold else r"-?\d+,\d+", text, re.ASCII):
        return _read(text.replace(",", "."))[0] or answer
    if count > 1 and (chain := _CHAIN.fullmatch(text)) and chain[1].count("=") == count:
        return _read(chain[1].replace("=", f"= {chain[2]}, ").rstrip(", "))[0] or answer
    if _GROUPED.search(text):
        grouped = _GROUPED.sub(lambda number: number.group().replace(",", ""), text)
        for spelled in (re.sub(r",(?!0\d)", ", ", text), grouped):
            read = _read(spelled)[0]
            if read is not None and _count(read) == count:
                return read
    if isinstance(answer, AnswerList) and count == 1 and len(answer.items) == 2:
        first, where = answer.items
        name = where.name if isinstance(where, Intervals) else ""
        if name in letters(first) and ("\\ne" in text or (is_gold and name in "ijklmn")):
            return first
    return answer


def _is_repeated(answer: str, gold: Answer, theirs: Answer, problem: str) -> bool:
    """Whether the answer is an expression of the problem with something to carry out; or a number, but no reduced
    fraction, of which it asks for another form. Neither is a choice, nor the reference in another spelling or order."""
    ours, node = (side.value if isinstance(side, Named) else side for side in (gold, theirs))
    if not isinstance(node, (answers.Value, answers.Relation)) or _WHICH.search(problem):
        return False
    is_final = _operations(ours) == _operations(node)
    parts = [*answers.walk(node.node)] if isinstance(node, answers.Value) else []
    numbers = [part[1] for part in parts if part[0] == "n"]
    is_simple = bool(parts) and (":" in answer or (len(numbers) < 2 and all(part[0] in "nsc*-" for part in parts)))
    if is_simple and numbers:
        digits = [str(abs(part)) for part in numbers[0].as_integer_ratio()]
        stated = re.findall(r"\d+", answer)
        is_final = stated == digits or (is_final and digits == ["".join(stated), "1"])
    if is_final or _SIGNS.sub("", answer) not in _SIGNS.sub("", problem):
        return False
    spelled, text = re.escape(one_spelling(answer)), one_spelling(_FORMULA.sub(" ; ", problem))
    found = re.finditer(rf"(?<![\d)}}\^*/+(-])(?<![\w}}^]\{{)(?!\B\w){spelled}(?!\B\w)(?![(\^*/+!-])", text)
    before = [text[max(0, one.start() - 99) : one.start()] for one in found]
    return any(_REWRITE.search(part) if is_simple else not _OFFERED.search(part) for part in before)


def _operations(answer: Answer) -> Any:
    """What a value consists of, in any order: the same for 2 + a and a + 2, not if anything was carried out."""
    if not isinstance(answer, answers.Value):
        return answer
    tree = [*answers.walk(answer.node)]
    parts = [part[:2] if isinstance(part[1], str) else part[:1] for part in tree if part[0] not in "n*"]
    for above, below in (part[1].as_integer_ratio() for part in tree if part[0] == "n"):
        parts += [("/",)] * (below > 1) + [(number,) for number in (above, below) if number != 1]
    return Counter(parts)


def _states(gold: str, other: str, problem: str) -> bool:
    """Whether the answer is the word that a sentence as the reference begins with, if the problem asks who or which; or
    the digits 17 for 17_8, if it names base 8."""
    digits, _, base = gold.partition("_")
    if base:
        return other == digits.lower() and re.search(rf"base\W*{base}\b", with_digits(problem)) is not None
    if other in ("odd", "even"):
        return {"odd", "even"} & {*gold.split()} == {other} and DOUBTS.isdisjoint(gold.split())
    if time := re.fullmatch(r"(\d+)(:\d\d.*)", gold):
        is_half = re.search(r"without[^.?!]*\bp\.?m\b", problem)
        return bool(is_half) and other.removeprefix("0") == f"{int(time[1]) % 12 or 12}{time[2]}"
    asked = [part for part in re.split("[.?!]", problem) if re.search(r"\b(?i:who|whom|whose|which)\b", part)]
    if not asked:
        return False
    if other.startswith(f"{gold} "):  # Alice has a winning strategy
        known = _OF_GAMES.union([] if " or " in asked[-1] else re.findall("[A-Za-z]+", asked[-1])) - DOUBTS
        return len(gold.split()) < 3 and known.issuperset(other.removeprefix(gold).split())
    words = [word for word in gold.split() if word not in ("the", "a", "an", "any", "all", "only")]
    return len(gold.split()) >= 4 and words[:1] == [other] and DOUBTS.isdisjoint(words)


def _same_choices(reference: str, other: str, problem: str, work: WorkLimit) -> bool | None:
    """Whether both, cleaned, name the same choices; None if the reference names none.

    A choice may be followed by its value: mathematics, or what the problem offers under that letter. A lower-case
    letter is a choice only if the problem, if known, offers it; a capital one always, or it may be a point or a matrix.
    """
    gold, theirs = (without_sentence(bare(text).strip()) for text in (reference, other))
    led, letter = _CHOICE.fullmatch(theirs), _LETTER.fullmatch(gold) or _CHOICE_WITH_VALUE.fullmatch(gold)
    options = _options(problem) if problem and (letter or led) else {}
    if letter:
        if led is None or led[1].upper() != letter[1]:
            is_text = letter[1] in options and (led is None or led[1].upper() not in options)
            return True if is_text and _agreeing(other, options, work, letter[1]) == [letter[1]] else None
        offered = re.search(rf"(?<![A-Za-z]){letter[1]}\s*[).:}}]", problem) if problem else letter[1] in "ABCDE"
        if led[1].islower() and not offered:
            return None
        value = led["value"] or led["inside"] or ""
        if value and (alike := _agreeing(value, options, work)):
            return letter[1] in alike
        has_others = re.search(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])", value)
        is_copied = re.search(rf"(?<![A-Za-z]){letter[1]}\s*[).:}}][\s}}$]*{re.escape(value)}", problem)
        if not value or (is_copied and not _OPTION.search(value)):
            return True
        return not (has_others or isinstance(_read(value)[0] or Words(""), (AnswerList, Words)))
    if led is not None and led[1] in options:  # the letter for what the problem offers under it
        alike = _agreeing(reference, options, work)
        value = led["value"] or led["inside"]
        return alike == [led[1]] and (not value or led[1] in _agreeing(value, options, work)) if alike else None
    # (A) and (C) or AC; BAD may be a word
    several = _several(gold)
    is_word = several == gold != "".join(sorted(gold))
    if several is None or is_word or not (gold.isupper() or "and" in gold):  # (a, b) is a point
        return None
    if (named := _several(theirs)) is not None:
        return named == several if asks_order(problem) else sorted(named) == sorted(several)
    return False if re.search(r"\bor\b", theirs) else None


@functools.lru_cache(maxsize=64)
def _options(problem: str) -> dict[str, str]:
    """The choices that the problem lists, cleaned: `(A) 91 (B) 97`, or `"A" for an answer`."""
    runs: list[list[re.Match[str]]] = [[]]
    for mark in _OPTION.finditer(problem):
        if mark[1] == "ABCDEFGHIJ"[len(runs[-1]) % 10]:
            runs[-1].append(mark)
        elif mark[1] == "A":
            runs.append([mark])
    run = max(runs, key=len)
    if len(run) < 2:
        return {letter: _cleaned(text) for letter, text in re.findall(r'"([A-Z])" for ([^,."]+)', problem)}
    ends = [mark.start() for mark in run[1:]]
    ends += [_OPTION_END.search(problem, run[-1].end()).start()]  # type: ignore[union-attr]  # there is an end
    texts = [problem[mark.end() : end] for mark, end in zip(run, ends, strict=True)]
    layout = r"\A\s*\}|\\(?:text|math)(?:bf|rm)?\s*\{\s*\Z|\\q?quad|\\\\|&"
    return {mark[1]: _cleaned(re.sub(layout, " ", text)) for mark, text in zip(run, texts, strict=True)}


def _agreeing(text: str, options: Mapping[str, str], work: WorkLimit, first: str = "") -> list[str]:
    """The options that the text may be; none if `first` is not among them."""
    rules, spelled, found = Rules(work=work), one_spelling(text), []
    read = _read(text)[0] if options else None
    for letter in sorted(options, key=lambda letter: letter != first):
        other = _read(options[letter])[0]
        is_same = spelled == one_spelling(options[letter])
        if is_same or (read is not None and other is not None and equal(other, read, rules)):
            found.append(letter)
        elif letter == first:
            break
    return sorted(found)


def _several(text: str) -> str | None:
    if _NO_CHOICE.search(text):
        return None
    bare = re.sub(r"[\s()\\]", "", _BETWEEN_CHOICES.sub("", text))
    if not re.fullmatch("[A-Ja-j]{2,6}", bare) or len(set(bare)) < len(bare):
        return None
    return bare.upper() if bare.isupper() or _BETWEEN_CHOICES.search(text) else None


@functools.lru_cache(maxsize=4096)
def _reference(answer: str) -> str:
    """The cleaned reference; if it is a whole solution, its final answer."""
    is_marked = "\\boxed" in answer or "####" in answer
    stated = re.findall(r"[Ff]inal answer is \$([^$]+)\$", answer)[-1:]
    parts = extract(answer, strict=True).parts if is_marked else stated
    return clean(", ".join(parts) or answer)


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> tuple[Answer | None, str]:
    """The answer that the text states, or None and the reason why it cannot be read."""
    try:
        return read_answer(with_digits(text)), ""
    except (Unreadable, RecursionError, ValueError) as error:
        return None, str(error)


def _rules(row: Mapping[str, Any], reference: str, other: str, problem: str, work: WorkLimit) -> Rules:
    """The rules that the row states; if it states none, those that follow from the digits of both sides."""
    precision = row.get("precision")  # OlympiadBench's tolerances; a plain number may be a count of digits
    tolerances: tuple[Fraction, ...] = ()
    for stated in (row.get("tolerance", ()), precision if isinstance(precision, list) else ()):
        parts = stated if isinstance(stated, (list, tuple)) else str(stated).split(",")
        with suppress(ValueError):
            tolerances = tolerances or tuple(abs(Fraction(str(part).strip())) for part in parts)
    words = row.get("unit")
    unit = read_unit(clean(words)) if isinstance(words, str) and words.strip() else None
    # references of the OCW problems (Minerva) are rounded to the digits that are written
    is_rounded = "ocw" in str(row.get("source", "")).lower()
    (digits, place), (their_digits, their_place) = stated_digits(reference), stated_digits(other)
    stated = {
        "wholes": whole_letters(reference),
        "free": whole_letters(reference, any_number=True),
        "problem": problem,
        "work": work,
    }
    if tolerances or unit is not None or (is_rounded and digits):
        place = place if is_rounded else ZERO
        return Rules(tolerances, unit, place, is_exact=False, **stated)
    place = place if digits >= 3 else ZERO
    their_place = their_place * 10 ** max(their_digits - 15, 0) if their_digits >= 12 else ZERO
    return Rules(last_place=place, their_last_place=their_place, **stated)
