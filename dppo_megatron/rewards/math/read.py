"""Parses a cleaned text into the answer that it states."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from dppo_megatron.rewards.math import answers, regex
from dppo_megatron.rewards.math.answers import Answer, AnswerList, Node, Unreadable, Value, symbols
from dppo_megatron.rewards.math.clean import closing, split_top
from dppo_megatron.rewards.math.number_sets import as_spans, complement, intersection, read_inequality, whole_members
from dppo_megatron.rewards.math.parse import CURRENCIES, DEGREE, parse
from dppo_megatron.rewards.math.special import bare, read_grid, read_special, read_words, without_sentence
from dppo_megatron.rewards.math.units import MULTIPLIERS, Unit, changes, read_number, read_unit

_SEPARATOR = (
    r"\s*[,;]\s*(?:\\text\{\s*(?:and|or)\s*\}|(?:and|or)(?![A-Za-z]))?|\s+(?:and|or)\s+|(?<=[)\]])(?:and|or)(?=[(\[])"
    r"|\s*\\text\{\s*,?\s*(?:and|or)\s*\}\s*|\s*\\(?:vee|wedge(?=[^,;]*(?:[<>=]|\\[lgn]e)))(?![A-Za-z])\s*"
)
_ANY_OR = regex(r"\bor\b|\\vee(?![A-Za-z])")
_ANY_AND = regex(r"\band\b|\\wedge(?![A-Za-z])")
_RELATION = r"\\(?:le|ge|ne|approx|to|equiv|sim|simeq|Rightarrow|implies|subset)(?![A-Za-z])|[<>=]"
UNDONE = regex(r"\\(?:i*int|oint|lim|sum|prod)(?![A-Za-z])")
_UNIT_TAIL = regex(
    r"(?<![\s{(^_/])\s*(?P<unit>(?:\\text\{[^{}]*\}|[/%])(?:\\text\{[^{}]*\}|/\s*[a-z](?![A-Za-z])|[\s/*]|\^\s*\{?\s*-?\d\s*\}?)*+)$"
)
_WORD_TAIL = regex(r"(?<=[\d)}\]iex])\s+(?P<unit>[A-Za-z][A-Za-z'. /*-]{0,99}(?:\^\s*\{?\s*\d\s*\}?)?)$")
_GLUED_TAIL = regex(  # 5cm; but 3mL may be a product of letters
    r"(?<=[\d}])(?P<unit>(?:[ckm]m|kg|mph|ft|lbs?|oz|hrs?|mins?|secs?|[a-z]{5,})(?:\^\s*\{?\s*[23]\s*\}?)?)$"
)
_MONEY = regex(
    rf"(-?)\s*\\(?P<sign>{'|'.join(CURRENCIES)})(?![a-z])\s*(?P<behind>.+)|(?P<before>.+?)\s*\\(?P<currency>{'|'.join(CURRENCIES)})"
)
_PARTS = (
    "max min(?!u) cent(?!s) radi vert foc area peri slope mean medi quot remain length width height domain range ampl"
)
_LABEL = regex(
    r"(?:\\text\{\s*)?((?!Not|Wrong|False|Minus|Negative)[A-Z][A-Za-z' ]{0,30}):\s*\}?\s*(?=[-\d\\(])(.+)"
    rf"|\\text\{{\s*((?i:{_PARTS.replace(' ', '|')})[a-z]*)(?: value)?\s*\}}\s*(?=[-\d\\(])(.+)",
    re.DOTALL,
)
_PART_LABEL = regex(r"[\s,;.]{0,9}(?:\\text\{[\s,;.]{0,9}(?:and\b)?\s*)?\((\d\d?|[a-h]|i{1,3}|iv|v)\)\s*\}?\s*")
_PART = regex(r"(?![\^*/+=<>_!)]).*[^-+*/=<>(\s]\s*", re.DOTALL)
_PART_LABELS = (" ".join(map(str, range(1, 100))), "a b c d e f g h", "i ii iii iv v")
_CASES = regex(r"(?:(?P<name>[A-Za-z]\(\w\)|[A-Za-z])\s*=\s*)?\\begin\{cases\}(?P<rows>.*)\\end\{cases\}", re.DOTALL)
_CONDITION = regex(r"[,;]?\s*&\s*|\s*[,;]?\s*(?:\\text\{\s*,?\s*(?=(?:if|for|when)\b)|(?:if|for|when)\b)")
_OTHERWISE = answers.Words("otherwise")
_MEMBER = r"\s*(?:[A-Za-z]|\\(?!pi|inf|text)[a-z]{2,7})(?:_\{?\w\}?)?(?:\([a-z]\))?\s*"
_ARROW = r"\\(?:overline|hat|vec|tilde|angle)\s*\{?\s*(?:[A-Z]{1,4}|[a-z])\s*\}?"
_NAME = regex(
    r"[A-Za-z]\^\{-1\}\s*\([a-z]\)|\\?[A-Za-z]+(?:_\{?[\w\\]+\}?)?'*(?:\s*\([^()=]*\))?(?:_\{[^{}]*\})?|\|[A-Z]{1,3}\|"
    rf"|[A-Z]\^\{{-1\}}|\({_MEMBER}(?:[,;]{_MEMBER})*\)|[A-Za-z]\s*\^\s*\{{?\s*[a-z]\s*\}}?\s*\([a-z]\)"
    r"|[A-Za-z]_\{\s*\\text\{[^{}]*\}\s*\}|\\text\{(?:[A-Za-z ]+|[A-Z]\([A-Za-z ]+\))\}|[A-Z][a-z]+(?: [a-z]+){0,3}"
    rf"|{_ARROW}(?:\s*\*\s*{_ARROW})?|[A-Z]\s*\\c[au]p\s*[A-Z]|\\frac\s*\{{\s*[A-Z]{{2}}\s*\}}\s*\{{\s*[A-Z]{{2}}\s*\}}"
)
_POINT = regex(r"(?P<name>[A-Z](?:_\{?\w\}?)?'*|[-\\\d](?:[^(]*[\d}])?)\s*(?P<at>\(.*[,;].*\))")  # A(1, 2), -(1, 2)
_PART_OF_MEASURE = r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)\.?\s*(?:\band\s+)?"
_COMPOUND = regex(rf"(?:{_PART_OF_MEASURE}){{2,4}}", re.ASCII)
_TO = regex(r"\s+to\s+|\s*\\text\{\s*(?:is )?to\s*\}\s*")
_TERM = regex(r"\d+(?:\.\d+)?(?:/\d+)?|[a-z]", re.ASCII)


def read_answer(text: str, depth: int = 0) -> Answer:
    """The answer that a cleaned text states, `depth` levels deep within another answer. Raises Unreadable if it is of
    no known kind."""
    text = text.strip()
    if depth > 6 or not text:
        raise Unreadable("nested too deeply" if text else "empty")
    if (label := _LABEL.fullmatch(text)) and (depth or label[3]):
        return answers.Named((label[1] or label[3]).lower() + ":", read_answer(label[2] or label[4], depth + 1))
    if (depth == 0 and text[0].isalpha()) or text.startswith("\\text"):
        text = without_sentence(text)
    if (depth == 0 or "," not in text) and (value := read_number(text)) is not None:
        return Value(("n", value))
    for reader in _READERS:
        found = reader(text, depth)
        if found is not None:
            return found
    return read_words(text)


def _read_compound(text: str) -> Answer | None:
    """A measure of several parts (1 hour 30 minutes, 5 feet 6 inches), in its last unit. 3 m and 5 m are two."""
    plain = bare(text, " ").strip()
    parts = re.findall(_PART_OF_MEASURE, plain) if _COMPOUND.fullmatch(plain) else []
    measures = [(Fraction(number), unit) for number, words in parts if (unit := read_unit(words)) and unit.dimension]
    sizes = [(number * unit.factor, unit.factor) for number, unit in measures]
    are_parts = all(part <= above > unit for (_, above), (part, unit) in itertools.pairwise(sizes))
    if not parts or len(measures) < len(parts) or len({unit.dimension for _, unit in measures}) > 1 or not are_parts:
        return None
    return Value(("n", sum(size for size, _ in sizes) / sizes[-1][1]), measures[-1][1])


def _read_text(text: str, depth: int) -> Answer | None:
    """An answer, or a list of words, inside \\text{...}. Also three or more capital letters, whose order counts, and a
    measure of several parts, which is not read as a list."""
    if compound := _read_compound(text):
        return compound
    if re.fullmatch("[A-Z]{3,}", text):
        return answers.Words(text.lower())
    is_text = text.startswith("\\text{") and closing(text, 5) == len(text) - 1
    inner = text[6:-1].strip() if is_text else ""
    names = re.split(_SEPARATOR, inner or text) if is_text or text[0].isupper() else []
    if len(names) > 1 and all(re.fullmatch("[A-Z][a-z]+", name) for name in names):
        return AnswerList("list", tuple(map(read_words, names)))
    is_answer = inner and re.search(r",|;|\b(?:and|or)\b|^\(?[A-Za-z]\)?$|^[\d.-]|\{", inner)
    return read_answer(inner, depth + 1) if is_answer else None


def _read_list(text: str, depth: int) -> Answer | None:
    """Several answers, or conditions, which are combined."""
    before, *labelled = _PART_LABEL.split(text) if "(" in text else [text]
    labels, contents = labelled[::2], labelled[1::2]
    is_counted = any({*labels} == {*every.split()[: len(labels)]} for every in _PART_LABELS)
    if len(labels) > 1 and not before and is_counted and all(map(_PART.fullmatch, contents)):  # (a) 4 (b) 7
        items = [read_answer(content, depth + 1) for content in contents]
        return AnswerList("list", tuple(answers.Named(f"{at}:", one) for at, one in zip(labels, items, strict=True)))
    parts = split_top(text, _SEPARATOR)
    if len(parts) == 1:
        return _read_signs(text, depth)
    read = [read_answer(part, depth + 1) for part in parts if part.strip()]
    if not read:
        raise Unreadable("separators without items")
    spans = [item for item in read if isinstance(item, answers.Intervals)]
    if spans and _ANY_OR.search(text):
        return _union(read)
    if len(spans) == len(read) == 2 and spans[0].name and spans[0].name == spans[1].name:
        both = intersection(spans[0], spans[1])
        if both is not None and (both.pieces or _ANY_AND.search(text)):  # x > 1 and x < 5
            return both
    items = _systems(_flat(read))
    return AnswerList("list", tuple(items), bool(_ANY_OR.search(text))) if len(items) > 1 else items[0]


def _flat(items: Sequence[Answer]) -> list[Answer]:
    """The items, with lists among them (of values with plus-minus signs, for example) replaced by their own items."""
    lists = (item.items if isinstance(item, AnswerList) and item.kind == "list" else (item,) for item in items)
    return [item for inner in lists for item in inner]


def _systems(items: list[Answer]) -> list[Answer]:
    """x = 1, y = 2, x = 2, y = 1 as two points; other items as they are."""
    names = [item.name if isinstance(item, answers.Named) else "" for item in items]
    size = len(set(names))
    if not 1 < size < len(names) or "" in names or names != names[:size] * (len(names) // size):
        return items
    return [AnswerList("tuple", tuple(items[start : start + size])) for start in range(0, len(items), size)]


def _read_cases(text: str, depth: int) -> Answer | None:
    """A piecewise function's values with their conditions; equations without conditions become a list."""
    match = _CASES.fullmatch(text)
    if match is None or "\\begin" in match["rows"]:
        return None
    rows = [row.strip(" .,;") for row in match["rows"].split("\\\\") if row.strip()]
    if any(row.startswith("=") for row in rows):
        raise Unreadable("an equation over several lines")
    if not any(_CONDITION.search(row) for row in rows):
        return read_answer(", ".join(rows), depth + 1)
    read: list[tuple[Answer, Answer]] = []
    for row in rows:
        parts = _CONDITION.split(row, maxsplit=1)
        where = re.sub(r"\A[\s&]*(?:\\text\{\s*)?(?:if|for|when|where|\s)*\}?", "", "".join(parts[1:])).strip(" .,;")
        otherwise = re.match(r"(?:\\text\{\s*)?(?:otherwise|else)", where)
        condition = _OTHERWISE if otherwise or not where else read_answer(where, depth + 1)
        read.append((read_answer(parts[0].strip(" ,;"), depth + 1), condition))
    covered = _union([where for _, where in read if isinstance(where, answers.Intervals)])
    rest = complement(covered) or _OTHERWISE
    pairs = ((value, rest if where == _OTHERWISE else where) for value, where in read)
    return AnswerList("cases", tuple(AnswerList("tuple", pair) for pair in pairs))


def _read_sets(text: str, depth: int) -> Answer | None:
    """`x \\in` a set, unions, and the difference of two sets of real numbers."""
    if len(split_top(text, "=")) > 1:
        return None
    name, *sets = split_top(text, r"\\in(?![A-Za-z])")
    if len(sets) == 1:
        found = read_answer(sets[0], depth + 1)
        rows = [item for item in found.items if isinstance(item, AnswerList)] if isinstance(found, AnswerList) else []
        short = re.sub(r"\s", "", name)
        letters = short[1:-1].split(",") if short.startswith("(") and _NAME.fullmatch(short) else []
        if rows and {len(row.items) for row in rows} == {len(letters), len(set(letters))}:  # (x, y) in a set of points
            return answers.Named(short, found)
        parse(name)  # raises for x \\not, and for other names of coordinates
        name = short
        if isinstance(found, AnswerList) and found.kind == "tuple" and len(found.items) == 2 and len(name) == 1:
            found = _union([found])  # x in (1, 2)
        return replace(found, name=name) if isinstance(found, answers.Intervals) else found
    parts = split_top(text, r"\\cup(?![A-Za-z])|(?<=[)\]])\s*U\s*(?=[(\[])")
    if len(parts) > 1:
        return _union([read_answer(part, depth + 1) for part in parts])
    whole, *removed = split_top(text, r"\\setminus(?![A-Za-z])")
    if not removed:
        return None
    rest = complement(_union([read_answer(part, depth + 1) for part in removed]))
    return rest and intersection(_union([read_answer(whole, depth + 1)]), rest)


def _read_signs(text: str, depth: int) -> Answer | None:
    """What the text states for each choice of its plus-minus signs; `\\mp` has the opposite sign. In a set they are
    those of its items: {\\pm 1, \\pm 2} has four."""
    first, *others = re.split(r"\\pm(?![A-Za-z])|\+\s*/-", text)
    opposed = "\\mp" in text
    if not (others or opposed) or "\\{" in text:
        return None
    if len(others) > 4 or (opposed and len(others) > 1):
        raise Unreadable("too many plus-minus signs")
    read = []
    for signs in itertools.product("+-", repeat=max(len(others), int(opposed))):
        spelled = first + "".join(sign + part for sign, part in zip(signs, others, strict=False))
        spelled = spelled.replace("\\mp", "-" if signs[0] == "+" else "+")
        read.append(read_answer(spelled.lstrip(" +"), depth + 1))
    return AnswerList("list", tuple(_flat(read)), signs=True)


def _read_relation(text: str, depth: int) -> Answer | None:
    parts = [part.strip() for part in split_top(text, _RELATION, keep=True)]
    sides, ops = parts[::2], parts[1::2]
    if not ops:
        return _ratio(text)
    if "\\approx" in ops and sides[0]:  # the exact side is the answer
        first = ops.index("\\approx") or int(re.fullmatch(_MEMBER, sides[0]) is not None)  # or that of x \approx 3
        sides, ops = sides[: first + 1], ["=" if op == "\\approx" else op for op in ops[:first]]
    if not ops or (not sides[0] and ops in (["="], ["\\approx"])) or (ops == ["="] and UNDONE.match(sides[0])):
        return read_answer(sides[-1], depth + 1)
    is_function = "(" in sides[0] or sides[0] in "fgh"
    if ops == ["\\equiv"] and is_function and _NAME.fullmatch(sides[0]):  # f(x) is 0 everywhere
        ops = ["="]
    if any(op not in ("=", "<", ">", "\\le", "\\ge", "\\ne") for op in ops):
        raise Unreadable("a relation that is not known here")
    if set(ops) == {"="}:
        return _equation(sides, depth)
    return read_inequality(sides, ops)


def _ratio(text: str) -> Answer | None:
    """A ratio: `3 : 2` of any expressions, `3 to 2` of numbers and letters only."""
    parts = _TO.split(text) if "to" in text else [text]
    if len(parts) == 1 or not all(map(_TERM.fullmatch, parts)):
        parts = split_top(text, r"\s*:\s*")
    if len(parts) == 1 or text.startswith("\\{"):
        return None
    first, *others = map(parse, parts)
    if len(others) == 1:
        return Value(("/", first, others[0]))
    return AnswerList("ratio", tuple(Value(("/", part, first)) for part in others))


def _equation(sides: list[str], depth: int) -> Answer:
    """`name = value`, or an equation between two expressions, or equal values."""
    if all(_NAME.fullmatch(side) for side in sides[:-1]):
        name = re.sub(r"[\s{}]", "", sides[0]).replace(";", ",")
        left: Node | None = None
        with contextlib.suppress(Unreadable):
            left = parse(sides[0])
        value = read_answer(sides[-1], depth + 1)
        index = re.fullmatch("([A-Za-z])_([a-z])", name)
        if index and isinstance(value, Value) and index[2] in symbols(value.node):  # a sequence
            name = f"{index[1]}({index[2]})"
        return answers.Named(name, value, left)
    if len(sides) == 2 and re.fullmatch(r"[a-zA-Z]", sides[1]) and sides[1] not in symbols(parse(sides[0])):
        return _equation(sides[::-1], depth)  # 5 = x
    if len(sides) > 2 and _NAME.fullmatch(sides[0]):
        return answers.Named(re.sub(r"[\s{}]", "", sides[0]), _equation(sides[1:], depth))
    if len(sides) == 2 and (":" in sides[0] or ":" in sides[1]):
        return answers.Named(re.sub(r"[\s{}]", "", sides[0]), read_answer(sides[1], depth + 1))
    return answers.Relation(tuple(parse(side) for side in sides), ("=",) * (len(sides) - 1))


def _read_bracketed(text: str, depth: int) -> Answer | None:
    if text.startswith("\\{") and closing(text) == len(text) - 1:
        return _set(text[2:-2].strip(), depth)
    if text[-1] == ")" and (point := _POINT.fullmatch(text)) and closing(text, point.start("at")) == len(text) - 1:
        at = read_answer(point["at"], depth + 1)
        if point["name"][0].isalpha():
            return answers.Named(re.sub(r"[\s{}]", "", point["name"]), at)
        scale = parse(f"{point['name']}1" if point["name"] == "-" else point["name"])
        sides = [item.node for item in at.items if isinstance(item, Value)] if isinstance(at, AnswerList) else []
        return AnswerList("tuple", tuple(Value(("*", scale, side)) for side in sides)) if sides else None
    if text[0] not in "([" or closing(text) < len(text) - 1:
        return None
    items = split_top(text[1:-1], "[,;]")
    if re.match(r"\[\s*\[|\[[^\[\]();]*,[^\[\]();]*;[^\[\]()]*\]\Z", text):
        grid = read_grid(text.strip("[] "))
        if len(grid.items) > 1 and len({len(row.items) for row in grid.items if isinstance(row, AnswerList)}) == 1:
            return grid
    if len(items) == 1:
        inner = text[1:-1].strip()
        is_answer = text[0] == "(" and text[-1] == ")" and ("(" in inner[:1] or "=" in inner)
        return read_answer(inner, depth + 1) if is_answer else None
    if len(items) == 2:
        low, high = items
        endless = "infty" in low + high or "infinity" in low + high
        if text[0] == "[" or text[-1] == "]" or endless:
            return answers.Intervals((answers.Piece(parse(low), text[0] == "[", parse(high), text[-1] == "]"),))
    return AnswerList("tuple", tuple(read_answer(item, depth + 1) for item in items))


def _set(inner: str, depth: int) -> Answer:
    conditions = split_top(inner, "[|:]")
    over = re.fullmatch(r"\s*[A-Za-z](?:\s*\\in\s*\\mathbb\{([RZN])\})?\s*", conditions[0])
    if len(conditions) == 2 and over:
        found = read_answer(conditions[1], depth + 1)
        if over[1] in (None, "R") or not isinstance(found, answers.Intervals):
            return found
        return whole_members(found, -math.inf if over[1] == "Z" else 1)
    items = _flat([read_answer(part, depth + 1) for part in split_top(inner, "[,;]")])
    if any(isinstance(item, answers.Intervals) for item in items):
        raise Unreadable("a set of sets")
    if len(items) == 1 and isinstance(items[0], AnswerList) and items[0].kind == "tuple":
        return items[0]  # {(1, 2)} is the one solution (1, 2)
    return AnswerList("set", tuple(items))


def _union(parts: Sequence[Answer]) -> answers.Intervals:
    spans = as_spans(AnswerList("list", tuple(parts)))
    if spans is None:
        raise Unreadable("not a part of a union")
    return spans


def _read_value(text: str, depth: int) -> Answer | None:
    """An expression with or without a unit."""
    if money := _MONEY.fullmatch(text):
        amount = _read_value((money[1] or "") + (money["behind"] or money["before"]), depth)
        if isinstance(amount, Value) and not (amount.unit and amount.unit.words):
            amount = replace(amount, unit=read_unit(money["sign"] or money["currency"]))
        return amount
    word, letters = _WORD_TAIL.search(text), _GLUED_TAIL.search(text)
    unit = read_unit(word["unit"]) if word and len(word["unit"]) > 1 else None
    if text[-1] != "%" and not letters and not (unit and unit.dimension):  # else 25 mph could be a product of letters
        with contextlib.suppress(Unreadable):
            return _measure(parse(text), None)
    for tail in (_UNIT_TAIL.search(text), word, letters):
        words = bare(tail["unit"]) if tail and tail.start("unit") else ""
        if tail and re.search("[A-Za-z%]", words):
            found = _with_words(text[: tail.start("unit")].strip(), words)
            if found is not None:
                return found
    return None


def _with_words(core: str, words: str) -> Answer | None:
    first, _, rest = words.strip().partition(" ")
    factor = MULTIPLIERS.get(first.lower().strip("."), 1)
    unit, value = read_unit(words if factor == 1 else rest), read_number(core)
    word = words.strip()
    is_noun = not word.endswith(("ed", "ly", "ing", "ble")) and (word == "point" or not changes(word))
    if unit is None and is_noun and (value == 1 or word.startswith("of ")):  # 1 apple, not 1 halved
        unit = read_unit(f"{words}s")
    if unit is None:
        return None
    try:
        node = ("n", value) if value is not None else parse(core)
    except Unreadable:
        return None
    return _measure(node if factor == 1 else ("*", node, ("n", Fraction(factor))), unit if unit.words else None)


def _measure(node: Node, unit: Unit | None) -> Value:
    """The value in its unit, which may be the degree sign within the expression."""
    if node[0] == "-" and node[1][0] == "*" and node[1][2] == DEGREE:
        node = ("*", ("-", node[1][1]), DEGREE)
    return Value(node[1], read_unit("degrees")) if node[0] == "*" and node[2] == DEGREE else Value(node, unit)


_READERS = (_read_cases, read_special, _read_text, _read_list, _read_sets, _read_relation, _read_bracketed, _read_value)
