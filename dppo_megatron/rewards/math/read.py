"""Parses a cleaned text into the answer that it states."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from dppo_megatron.rewards.math import answers
from dppo_megatron.rewards.math.answers import Answer, AnswerList, Node, Unreadable, Value, symbols
from dppo_megatron.rewards.math.clean import closing, split_top
from dppo_megatron.rewards.math.number_sets import as_spans, complement, intersection, read_inequality, whole_members
from dppo_megatron.rewards.math.numbers import MULTIPLIERS, read_number
from dppo_megatron.rewards.math.parse import DEGREE, parse, parse_signs
from dppo_megatron.rewards.math.patterns import regex
from dppo_megatron.rewards.math.special import WRAPPED_TEXT, read_special, read_words, without_sentence
from dppo_megatron.rewards.math.units import Unit, is_glued, read_compound, read_unit

_MAX_ITEMS = 100
_SEPARATOR = regex(
    r"\s*[,;]\s*(?:\\text\{\s*(?:and|or)\s*\}|(?:and|or)(?![A-Za-z]))?|\s+(?:and|or)\s+|(?<=[)\]])(?:and|or)(?=[(\[])"
    r"|\s*\\text\{\s*,?\s*(?:and|or)\s*\}\s*|\s*\\(?:lor|vee)(?![A-Za-z])\s*"
)
_ANY_OR = regex(r"\bor\b|\\(?:lor|vee)(?![A-Za-z])")
_ANY_AND = regex(r"\band\b|\\(?:land|wedge)(?![A-Za-z])")
_RELATION = regex(r"\\(?:le|ge|ne|approx|in|to|equiv|sim|simeq|Rightarrow|implies|subset)(?![A-Za-z])|[<>=]")
_UNION = regex(r"\\cup(?![A-Za-z])|(?<=[)\]])\s*U\s*(?=[(\[])")
_COMMA = regex(r"[,;]")
_BAR = regex(r"\||:")
_UNIT_TAIL = regex(
    r"(?<![\s{(^_])\s*(?P<unit>(?:\\text\{[^{}]*\}|/)(?:\\text\{[^{}]*\}|[\s/*]|/\s*[a-z](?![A-Za-z])|\^\s*\{?\s*-?\d\s*\}?)*)$"
)
_PERCENT_TAIL = regex(
    r"\s*(?:%|\\text\{\s*(?:%|percent|per cent|pct)\s*\}|(?<=[\d)}\s])(?:percent|per cent|pct))\s*$", re.IGNORECASE
)
_WORD_TAIL = regex(r"(?<=[\d)}\]iex])\s+(?P<unit>[A-Za-z][A-Za-z'. /-]*(?:\^\s*\{?\s*\d\s*\}?)?)$")
_GLUED_TAIL = regex(r"(?<=[\d}])(?P<unit>[A-Za-z]+(?:\^\s*\{?\s*[23]\s*\}?)?)$")
_LABEL = regex(r"\s*(?:\\text\{\s*)?([A-Z][A-Za-z' ]{0,30}):\s*\}?\s*(?=[-\d\\(])(.+)", re.DOTALL)
_CAPITALS = regex("[A-Z]{3,}")
_WORD = regex("[A-Z][a-z]+")
_FRENCH = regex(r"(?P<lead>\A|\\(?:cup|in)(?![A-Za-z])|=|[,;]|\bor\b\s*\}?)(?P<body>\s*[\[\]][^\[\]()]{1,200}[\[\]])")
_MAPPED = regex(
    r"(?:[A-Za-z]\s*:\s*)?(?:[^:\n]{1,80}?\\(?:to|rightarrow)(?![A-Za-z])[^:\n]{1,80}?[,;:]?\s*)?"
    r"(?P<name>[a-z])\s*\\mapsto(?![A-Za-z])(?P<value>.+)",
    re.DOTALL,
)


def _open_outwards(found: re.Match[str]) -> str:
    """]1, 2[ is (1, 2)."""
    body = found["body"].strip()
    if not re.search(r"[,;]", body) or (body[0], body[-1]) == ("[", "]"):
        return found.group()
    return found["lead"] + " " + ("(" if body[0] == "]" else "[") + body[1:-1] + (")" if body[-1] == "[" else "]")


def read_answer(text: str, *, depth: int = 0) -> Answer:
    """The answer that a text, as `clean` gives it, states within `depth` brackets. Raises Unreadable where it is of no
    kind that is known here."""
    if depth > 6 or not text.strip():
        raise Unreadable("nested too deeply" if text.strip() else "empty")
    text = text.strip()
    if depth:
        text = text.rstrip(".")
    value = read_number(text) if depth == 0 or "," not in text else None
    if text.startswith("\\approx"):
        return read_answer(text[len("\\approx") :], depth=depth + 1)
    if value is not None:
        return Value(("n", value))
    if text[0] == "(" and "^" in text:
        text = re.sub(r"\)\s*\^\s*\{?\s*T\s*\}?\Z", ")", text)  # a column
    if "\\begin{cases}" in text and (pieces := _cases(text, depth)):
        return pieces
    if depth == 0 and text[-1] in "[]":
        text = _FRENCH.sub(_open_outwards, text).strip()
    if "mapsto" in text and (mapped := _MAPPED.fullmatch(text)):
        return answers.Named(f"f({mapped['name']})", read_answer(mapped["value"], depth=depth + 1))
    if (depth == 0 and text[:1].isalpha()) or text.startswith("\\text"):
        text = without_sentence(text)
        if (value := read_number(text)) is not None:
            return Value(("n", value))
    for reader in (read_special, _read_text, _read_separated, _read_relation, _read_bracketed, _read_value):
        found = reader(text, depth)
        if found is not None:
            return found
    return read_words(text)


def _read_text(text: str, depth: int) -> Answer | None:
    """What \\text{...} holds: words, or an answer that was written as text; capital letters, whose order counts."""
    if _CAPITALS.fullmatch(text):
        return answers.Words(text.lower())
    match = WRAPPED_TEXT.fullmatch(text)
    if match is None or not match[1].strip():
        return None
    inner = match[1].strip()
    names = _SEPARATOR.split(inner)
    if len(names) > 1 and all(map(_WORD.fullmatch, names)):
        return AnswerList("list", tuple(map(read_words, names)))
    if re.search(r",|;|\b(?:and|or)\b|^\(?[A-Za-z]\)?$", inner) or inner[0].isdigit() or inner[0] in "-.":
        return read_answer(inner, depth=depth + 1)
    return read_words(text)


def _split(text: str, separators: re.Pattern[str]) -> list[str]:
    parts = split_top(text, separators)
    if len(parts) > _MAX_ITEMS:
        raise Unreadable("too many items")
    return parts


def _read_separated(text: str, depth: int) -> Answer | None:
    """Comma lists and unions."""
    unions = _split(text, _UNION)
    if len(unions) > 1:
        name, unions[0] = _membership(unions[0])
        return replace(_union([read_answer(part, depth=depth + 1) for part in unions]), name=name)
    parts = _split(text, _SEPARATOR)
    if len(parts) == 1:
        return None
    read = [_item(part, depth) for part in parts if part.strip()]
    if not read:
        raise Unreadable("separators without items")
    spans = [item for item in read if isinstance(item, answers.Intervals)]
    if spans and _ANY_OR.search(text):
        return replace(_union(read), name=spans[0].name)
    if len(spans) == len(read) == 2 and spans[0].name and spans[0].name == spans[1].name:
        both = intersection(spans[0], spans[1])
        if both is not None and (both.pieces or _ANY_AND.search(text)):  # x > 1 and x < 5
            return both
        if not _ANY_AND.search(text):  # x < 1, x > 5
            return replace(_union(read), name=spans[0].name)
    items = _flat(read)
    return AnswerList("list", tuple(items)) if len(items) > 1 else items[0]


def _flat(items: Sequence[Answer]) -> list[Answer]:
    """A list within a list (of values with plus-minus signs, say) is one list."""
    lists = (item.items if isinstance(item, AnswerList) and item.kind == "list" else (item,) for item in items)
    return [item for inner in lists for item in inner]


def _item(text: str, depth: int) -> Answer:
    """One of several, with the label that it may have: `Paolo: 18`."""
    if match := _LABEL.fullmatch(text):
        return answers.Named(match[1] + ":", read_answer(match[2], depth=depth + 1))
    return read_answer(text, depth=depth + 1)


_CASES = regex(r"(?:(?P<name>[A-Za-z]\(\w\)|[A-Za-z])\s*=\s*)?\\begin\{cases\}(?P<rows>.*)\\end\{cases\}", re.DOTALL)
_CONDITION = regex(r"[,;]?\s*&\s*|\s*[,;]?\s*(?:\\text\{\s*,?\s*(?=(?:if|for|when)\b)|(?:if|for|when)\b)")
_OTHERWISE = answers.Words("otherwise")
_IF = regex(r"\A[\s&]*(?:\\text\{\s*)?(?:if|for|when|where|\s)*\}?\s*")


def _cases(text: str, depth: int) -> Answer | None:
    """Pieces of a function with their conditions; of equations without conditions a list."""
    match = _CASES.fullmatch(text)
    if match is None:
        return None
    rows = [row.strip(" .,;") for row in match["rows"].split("\\\\") if row.strip()]
    if not any(_CONDITION.search(row) for row in rows):
        return read_answer(", ".join(rows), depth=depth + 1)
    read: list[tuple[Answer, Answer]] = []
    for row in rows:
        parts = _CONDITION.split(row, maxsplit=1)
        where = _IF.sub("", parts[1]).strip(" .,;") if len(parts) > 1 else ""
        rest = re.match(r"(?:\\text\{\s*)?(?:otherwise|else)", where)
        condition = _OTHERWISE if rest or not where else read_answer(where, depth=depth + 1)
        read.append((read_answer(parts[0].strip(" ,;"), depth=depth + 1), condition))
    covered = answers.Intervals(
        tuple(piece for _, where in read if isinstance(where, answers.Intervals) for piece in where.pieces)
    )
    left = complement(covered) or _OTHERWISE
    pairs = ((value, left if where == _OTHERWISE else where) for value, where in read)
    return AnswerList("cases", tuple(AnswerList("tuple", pair) for pair in pairs))


def _read_relation(text: str, depth: int) -> Answer | None:
    sides = split_top(text, _RELATION)
    if len(sides) == 1:
        return _ratio(text)
    ops: list[str] = []
    position = 0
    for side in sides[:-1]:
        op = _RELATION.match(text, position + len(side))
        assert op is not None
        ops.append(op.group())
        position = op.end()
    sides = [side.strip() for side in sides]
    if not sides[-1] and ops[-1] == "=":  # `x = ` states nothing
        raise Unreadable("an empty side")
    if "\\approx" in ops:  # the exact side is the answer
        first = ops.index("\\approx")
        sides, ops = sides[: first + 1], ops[:first]
    if not ops or (not sides[0] and ops == ["="]):
        return read_answer(sides[-1], depth=depth + 1)
    if ops == ["\\in"]:
        found = read_answer(sides[1], depth=depth + 1)
        parse(sides[0])  # x \\not is no name
        name = re.sub(r"\s", "", sides[0])
        if isinstance(found, AnswerList) and found.kind == "tuple" and len(found.items) == 2 and len(name) == 1:
            found = _union([found])  # x in (1, 2)
        return replace(found, name=name) if isinstance(found, answers.Intervals) else found
    if any(op not in ("=", "<", ">", "\\le", "\\ge", "\\ne") for op in ops):
        raise Unreadable("a relation that is not known here")
    if set(ops) == {"="}:
        return _equation(sides, depth)
    return read_inequality(sides, ops)


_NAME = regex(
    r"[A-Za-z]\^\{-1\}\s*\([a-z]\)|\\?[A-Za-z]+(?:_\{?[\w\\]+\}?)?'*(?:\s*\([^()=]*\))?(?:_\{[^{}]*\})?|\|[A-Z]{1,3}\||\([A-Za-z](?:\([a-z]\))?(?:\s*,\s*[A-Za-z](?:_\{?\w\}?)?(?:\([a-z]\))?)*\)"
    r"|[A-Za-z]_\{\s*\\text\{[^{}]*\}\s*\}|[a-z]_\{\s*\\(?:max|min)\s*\}"
    r"|\\text\{[A-Za-z ]+\}|[A-Z][a-z]+(?: [a-z]+){0,3}"
    r"|(?:\\overline\{)?[A-Z]{2,4}\}?|\\angle\s*[A-Z]{1,3}|\\frac\s*\{\s*[A-Z]{2}\s*\}\s*\{\s*[A-Z]{2}\s*\}"
)


_OVER = regex(r"[A-Za-z](?:\s*\\in\s*\\mathbb\{([RZN])\})?")


_TO = regex(r"\s+to\s+|\s*\\text\{\s*(?:is )?to\s*\}\s*")
_TERM = regex(r"\d+(?:\.\d+)?(?:/\d+)?|[a-z]", re.ASCII)


def _ratio(text: str) -> Answer | None:
    """`3 : 2` of any expressions, `3 to 2` of numbers and letters only."""
    parts = _TO.split(text)
    if len(parts) == 1 or not all(_TERM.fullmatch(part) for part in parts):
        parts = split_top(text, regex(r"\s*:\s*"))
    if len(parts) == 1 or text.startswith("\\{"):
        return None
    return answers.Ratio(tuple(parse(part) for part in parts))


def _equation(sides: list[str], depth: int) -> Answer:
    """`name = value`, or an equation between two expressions, or equal values."""
    if all(_NAME.fullmatch(side) for side in sides[:-1]):
        name = re.sub(r"[\s{}]", "", sides[0])
        left: Node | None = None
        with contextlib.suppress(Unreadable):
            left = parse(sides[0])
        value = read_answer(sides[-1], depth=depth + 1)
        index = re.fullmatch("([A-Za-z])_([a-z])", name)
        if index and isinstance(value, Value) and index[2] in symbols(value.node):  # a sequence
            name = f"{index[1]}({index[2]})"
        return answers.Named(name, value, left)
    if len(sides) == 2 and re.fullmatch(r"[a-zA-Z]", sides[1]) and sides[1] not in symbols(parse(sides[0])):
        return _equation(sides[::-1], depth)  # 5 = x
    if len(sides) > 2 and _NAME.fullmatch(sides[0]):
        return answers.Named(re.sub(r"[\s{}]", "", sides[0]), _equation(sides[1:], depth))
    if len(sides) == 2 and (":" in sides[0] or ":" in sides[1]):
        return answers.Named(re.sub(r"[\s{}]", "", sides[0]), read_answer(sides[1], depth=depth + 1))
    return answers.Relation(tuple(parse(side) for side in sides), ("=",) * (len(sides) - 1))


def _read_bracketed(text: str, depth: int) -> Answer | None:
    if text.startswith("\\{") and text.endswith("\\}") and closing(text, 0) == len(text) - 2:
        return _set(text[2:-2].strip(), depth)
    if text.startswith("\\langle") and text.endswith("\\rangle"):
        items = split_top(text[7:-7], _COMMA)
        return AnswerList("tuple", tuple(read_answer(item, depth=depth + 1) for item in items))
    if "\\setminus" in text:
        return _without_points(text, depth)
    if not text or text[0] not in "([" or text[-1] not in ")]" or closing(text, 0) < len(text) - 1:
        return None
    items = _split(text[1:-1], _COMMA)
    if text[0] == "[" and (rows := _matrix_rows(text[1:-1])):
        return answers.Grid(tuple(tuple(parse(cell) for cell in row) for row in rows))
    if len(items) == 1:
        if text[0] == "(" and text[-1] == ")":
            inner = text[1:-1].strip()
            return read_answer(inner, depth=depth + 1) if "(" in inner[:1] or "=" in inner else None
        return None
    if len(items) == 2:
        low, high = items
        endless = "infty" in low + high or "infinity" in low + high
        if text[0] == "[" or text[-1] == "]" or endless:
            return answers.Intervals((answers.Piece(parse(low), text[0] == "[", parse(high), text[-1] == "]"),))
    read = [read_answer(item, depth=depth + 1) for item in items]
    if any(isinstance(item, AnswerList) and item.signs for item in read):  # (\\pm 1, 2) are two points
        choices = itertools.islice(itertools.product(*(_flat([item]) for item in read)), 16)
        return AnswerList("list", tuple(AnswerList("tuple", choice) for choice in choices))
    return AnswerList("tuple", tuple(read))


def _matrix_rows(inner: str) -> list[list[str]]:
    """The cells of [[1, 2], [3, 4]] and [1, 2; 3, 4]; none if that is no matrix."""
    rows = [row.strip() for row in split_top(inner, _COMMA)]
    if all(row.startswith("[") and row.endswith("]") and closing(row, 0) == len(row) - 1 for row in rows):
        cells = [split_top(row[1:-1], _COMMA) for row in rows]
    else:
        is_plain = "," in inner and not set(inner) & set("[]()")
        cells = [row.split(",") for row in inner.split(";")] if is_plain else []
    return cells if len(cells) > 1 and len({len(row) for row in cells}) == 1 else []


def _set(inner: str, depth: int) -> Answer:
    if not inner:
        return answers.Intervals(())
    conditions = split_top(inner, _BAR)
    if len(conditions) == 2 and (over := _OVER.fullmatch(conditions[0].strip())):
        found = read_answer(conditions[1], depth=depth + 1)
        if over[1] in (None, "R") or not isinstance(found, answers.Intervals):
            return found
        return whole_members(found, -math.inf if over[1] == "Z" else 1)
    items = _flat([read_answer(part, depth=depth + 1) for part in _split(inner, _COMMA)])
    if any(isinstance(item, answers.Intervals) for item in items):
        raise Unreadable("a set of sets")
    if len(items) == 1 and isinstance(items[0], AnswerList) and items[0].kind == "tuple":
        return items[0]  # {(1, 2)} is the one solution (1, 2)
    return AnswerList("set", tuple(items))


def _without_points(text: str, depth: int) -> Answer:
    """A set of reals without a set or some points."""
    whole, _, points = text.partition("\\setminus")
    name, whole = _membership(whole)
    removed = complement(_union([read_answer(points, depth=depth + 1)]))
    left = removed and intersection(replace(_union([read_answer(whole, depth=depth + 1)]), name=name), removed)
    if left is None:
        raise Unreadable("a difference of sets")
    return left


def _membership(text: str) -> tuple[str, str]:
    """The variable and the set of `x \\in ...`."""
    match = re.match(r"\s*([^\s\\()\[\]{}]+)\s*\\in(?![A-Za-z])", text)
    return (match[1], text[match.end() :]) if match else ("", text)


def _union(parts: Sequence[Answer]) -> answers.Intervals:
    spans = [as_spans(part) for part in parts]
    if None in spans:
        raise Unreadable("not a part of a union")
    return answers.Intervals(tuple(piece for part in spans if part for piece in part.pieces))


def read_decimal_comma(text: str) -> Fraction | None:
    """1000,99 as much of Europe writes it; for references that are decimals."""
    return read_number(text.replace(",", ".")) if re.fullmatch(r"-?\d+,\d+", text, re.ASCII) else None


def _read_value(text: str, depth: int) -> Answer | None:
    """An expression with or without a unit; several where it has plus-minus signs."""
    if compound := read_compound(text):
        return Value(("n", compound[0]), compound[1])
    if percent := _PERCENT_TAIL.search(text):
        core = text[: percent.start()].strip()
        return _with_words(core, "percent") if core else None
    word, letters = _WORD_TAIL.search(text), _GLUED_TAIL.search(text)
    glued = word or letters
    if glued is None or len(glued["unit"]) < 2 or not is_glued(glued["unit"]):  # 25 mph is not 25 m p h
        with contextlib.suppress(Unreadable):
            return _spread(parse_signs(text), None)
    for tail in (_UNIT_TAIL.search(text), word, letters):
        words = WRAPPED_TEXT.sub(r"\1", tail["unit"]) if tail and tail.start("unit") else ""
        if tail and re.search("[A-Za-z%]", words) and (tail is not letters or is_glued(words)):
            found = _with_words(text[: tail.start("unit")].strip(), words)
            if found is not None:
                return found
    return None


def _with_words(core: str, words: str) -> Answer | None:
    first, _, rest = words.strip().partition(" ")
    factor = MULTIPLIERS.get(first.lower().strip("."), 1)
    unit = read_unit(words if factor == 1 else rest)
    if unit is None:
        return None
    value = read_number(core)
    nodes: list[Node] = [("n", value)] if value is not None else []
    with contextlib.suppress(Unreadable):
        nodes = nodes or parse_signs(core)
    if factor != 1:
        nodes = [("*", node, ("n", Fraction(factor))) for node in nodes]
    return _spread(nodes, unit if unit.words else None) if nodes else None


def _spread(nodes: list[Node], unit: Unit | None) -> Answer:
    if len(nodes) > 1:
        return AnswerList("list", tuple(Value(node, unit) for node in nodes), signs=True)
    (node,) = nodes
    if node[0] == "-" and node[1][0] == "*" and node[1][2] == DEGREE:
        node = ("*", ("-", node[1][1]), DEGREE)
    return Value(node[1], read_unit("degrees")) if node[0] == "*" and node[2] == DEGREE else Value(node, unit)
