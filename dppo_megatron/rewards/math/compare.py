"""Whether two answers are equal, decided by the reference's kind. Undecided comparisons count as not equal."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from dppo_megatron.rewards.math import answers, regex
from dppo_megatron.rewards.math.answers import Answer, AnswerList, Named, Node, Value, substituted, symbols
from dppo_megatron.rewards.math.equality import Rules, equal_nodes, equal_values, same
from dppo_megatron.rewards.math.evaluate import WorkLimit, rational
from dppo_megatron.rewards.math.number_sets import as_spans, half_lines, normal
from dppo_megatron.rewards.math.units import DOUBTS, MONTHS

_UNIT_VECTORS = {"hat:i", "hat:j", "hat:k"}
_HYPHEN = regex(r"(?<=\w) ?-(?=[a-z]{3})(?!inf)")  # self-inverse; $x$-axis
_EACH = 6  # operations charged per comparison, besides those of its expressions: two lists of 100 may take 10,000
_OF = regex(r"(?P<head>[^()]+)\((?P<letters>[a-z](?:,[a-z])*)\)")
_COUNTED = regex(r"(?:(?<=[xyzt])|(?<=\\lambda))_\d+\Z|_\\?(?:min|max)\Z")
_FIGURE = regex(r"(?:\\angle|\\overline)?\|?([A-Z]{1,4})\|?")
_LABEL = regex(r"([A-Za-z]{3,}):?")
_SYMBOL = regex(r"[A-Za-z]|[A-Z]\^-1|[a-z][A-Za-z]{1,2}|.*_.*|.*\\.*|.*:")
_PARAMETERS = frozenset("ckmnstuvwxyz")
_IN_MATHS = regex(
    r"(?<!\\)\$[^$]*\$|\\[(\[].*?\\[)\]]|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|\S*[\d=+*/^_()<>-]\S*", re.DOTALL
)
_IN_ORDER = regex(  # asked of the answer, not told of the numbers in the problem
    r"(?:\A|[.?!:;(,]\s*|\band |[Pp]lease )(?i:list|give|express|write|enter|arrange|order|rank|sort|what are)\b"
    r"[^.?!]{0,300}\b(?:from (?:the )?(?:\w+st|(?:mo|lea)st \w+) to"
    r"|(?<!necessarily )in (?:(?:in|de)creasing |\w+scending |th(?:is|at) )?order(?! to))\b"
)
_ASKS = regex(r"\b(?i:find|determine|compute|calculate|what|values?|give|enter|state|solve|ordered|pairs?|triples?)\b")
_AS_NAMED = regex(  # the median and the mean, in that order; f(6), f(16), and f(72)
    r"\bin that order|, respectively(?= *[.?])|(?<!\w)([A-Za-z]\()-?\d+\)\$?,? (?:and )?\$?\1-?\d+\)(?=[\s$,.?])"
)
_ASKS_FOR = regex(
    r"\b(?i:find|compute|determine|evaluate|calculate|what (?:is|are))\b"
    r"(?:(?!\b(?:if|where|when|whose|which|such|that|with|given)\b)[^.?!])*\Z"
)


@functools.lru_cache(maxsize=64)
def _asks_named(problem: str) -> bool:
    ends = [found.start() for found in _AS_NAMED.finditer(problem)]
    return any(_ASKS_FOR.search(problem, max(0, end - 300), end) for end in ends[-9:])


asks_order = functools.lru_cache(maxsize=64)(lambda problem: bool(_IN_ORDER.search(problem)) or _asks_named(problem))
_DAYS = frozenset("monday tuesday wednesday thursday friday saturday sunday".split())  # noqa: SIM905
_CALENDAR = {"sept": "september"} | {name[:3]: name for name in MONTHS}
_VERBS = frozenset(["converges", "diverges", "exists", "does", "increases", "decreases"])
_CONDITIONS = frozenset(["yes", "true", "but", "or", "only", "for", "when", "some", "sometimes", "wait", "t"])  # isn't


def equal(gold: Answer, other: Answer, rules: Rules) -> bool:
    """Whether `other` is the reference."""
    rules.work.spend(_EACH)
    if gold == other:
        return True
    if isinstance(gold, AnswerList) and gold.kind == "grid":
        other = _as_grid(other, gold)
    if isinstance(other, AnswerList) and other.kind == "grid":
        gold = _as_grid(gold, other)
    kind = next(kind for kind in _BY_KIND if isinstance(gold, kind) or isinstance(other, kind))
    return _BY_KIND[kind](gold, other, rules)


def _named(gold: Answer, other: Answer, rules: Rules) -> bool:
    """x = 5 equals 5, but not y = 5; f(x) = 2x equals y = 2x; y = 2x + 3 equals y - 2x = 3."""
    mine, theirs = letters(gold), letters(other)
    if "_" in mine | theirs and (not mine or (isinstance(gold, Named) and gold.name in theirs)):
        return False  # `n is even` is neither 0 nor 2n
    if isinstance(gold, Named) and isinstance(other, Named):
        other = _with_variables(other, gold)
        if not differ(gold.name, other.name) and equal(gold.value, other.value, rules):
            return True
        is_map = gold.name == other.name and "(" in gold.name
        if is_map and _up_to_a_parameter([gold.value], [other.value], {*gold.name, *"xyz"}, rules):
            return True
    elif not (isinstance(gold, answers.Relation) or isinstance(other, answers.Relation)):
        one, two = (side.value if isinstance(side, Named) else side for side in (gold, other))
        return equal(one, two, rules)
    left, right = _relation(gold), _relation(other)
    return left is not None and right is not None and _relations(left, right, rules)


def letters(answer: Answer) -> frozenset[str]:
    """The variables in its values; "_" for a residue class."""
    if isinstance(answer, Named):
        return letters(answer.value)
    if isinstance(answer, AnswerList):
        return frozenset().union(*map(letters, answer.items))
    return frozenset(symbols(answer.node)) if isinstance(answer, Value) else frozenset()


def differ(gold: str, other: str) -> bool:
    """Whether two names certainly mean different things: x and y, y and y', f(x) and g(x), AB and CD, Area and
    Volume. But y may be f(x), and a letter may stand for anything that is not called by a letter itself."""
    gold, other = (name.removeprefix("\\text") for name in (gold, other))
    ours, theirs = (name.partition("(")[0] for name in (gold, other))
    if ours and theirs and ours.count("'") != theirs.count("'"):
        return True
    gold, other, ours, theirs = (name.replace("'", "") for name in (gold, other, ours, theirs))
    if other in (gold, _COUNTED.sub("", gold)) or gold == _COUNTED.sub("", other):  # x_1 = 1, x_2 = 2
        return False
    if sorted(gold.split(":")) == sorted(other.split(":")):  # l:w is not w:l
        return True
    if "(" in gold or "(" in other:
        is_result = ours == theirs or {ours, theirs} & {"", "y", "z"}
        return ("(" in gold and "(" in other) or not is_result
    if (left := _FIGURE.fullmatch(gold)) and (right := _FIGURE.fullmatch(other)):
        return sorted(left[1]) != sorted(right[1]) or (len(left[1]) == 3 and left[1][1] != right[1][1])
    if (left := _LABEL.fullmatch(gold)) and (right := _LABEL.fullmatch(other)):
        ours, theirs = left[1].lower(), right[1].lower()
        return ours not in theirs and theirs not in ours
    is_product = gold.isalpha() and sorted(gold) == sorted(other)
    return not is_product and all(map(_SYMBOL.fullmatch, (gold, other)))


def _with_variables(other: Named, gold: Named) -> Named:
    """f(t) = t^2 as f(x) = x^2, if x is the reference's variable."""
    ours, theirs = _OF.fullmatch(gold.name), _OF.fullmatch(other.name)
    if ours is None or theirs is None or ours["head"] != theirs["head"] or not isinstance(other.value, Value):
        return other
    old, new = theirs["letters"].split(","), ours["letters"].split(",")
    if len(old) != len(new) or symbols(other.value.node) & set(new) - set(old):
        return other
    node = substituted(other.value.node, {letter: ("s", by) for letter, by in zip(old, new, strict=True)})
    return Named(gold.name, replace(other.value, node=node))


def _relation(answer: Answer) -> answers.Relation | None:
    if isinstance(answer, answers.Relation):
        return answer
    if isinstance(answer, Named) and answer.left and isinstance(answer.value, Value) and not answer.value.unit:
        return answers.Relation((answer.left, answer.value.node), ("=",))
    return None


def _relations(gold: Answer, other: Answer, rules: Rules) -> bool:
    """Compares equations up to a constant factor, inequalities up to a positive one, chains side by side. An equation
    equals its last side if the others are equal to that (2(x + 1) = 2x + 2) or names: xy = 6, xy = 2t; m + n = 12 only
    in an answer, since the reference x + y = 12 is a line."""
    if isinstance(gold, answers.Relation) and isinstance(other, answers.Relation):
        if len(gold.sides) == len(other.sides) == 2:
            return _same_solutions(gold, other, rules.work)
        pairs = zip(gold.sides, other.sides, strict=False)
        return gold.ops == other.ops and all(equal_nodes([pair], rules.exact()) for pair in pairs)
    chain, plain = (gold, other) if isinstance(gold, answers.Relation) else (other, gold)
    if not isinstance(chain, answers.Relation) or not isinstance(plain, Value) or set(chain.ops) != {"="}:
        return False
    *before, last = chain.sides
    known = symbols(plain.node) | symbols(last)
    has_names = chain is gold or known.isdisjoint(letter for side in before for letter in symbols(side))
    names = "*/" if chain is gold or known else "*/+-" if last != ("n", 0) else ""  # x + y = 0 is a line
    value = Value(last)
    holds = all((has_names and _only_names(side, names)) or same(side, last, rules.work) for side in before)
    return holds and (equal_values(value, plain, rules) if chain is gold else equal_values(plain, value, rules))


def _same_solutions(gold: answers.Relation, other: answers.Relation, work: WorkLimit) -> bool:
    left, right = (("+", two, ("-", one)) for one, two in (gold.sides, other.sides))
    names, op = symbols(left), gold.ops[0]
    if other.ops[0] != op or names != symbols(right):
        return False
    point = {name: Fraction(p, 7) for name, p in zip(sorted(names), (11, 17, 5, 23, 29, 3), strict=False)}
    above, below = rational(left, point, work), rational(right, point, work)
    ratio = above / below if above and below else Fraction(1)
    return (ratio > 0 or op in ("=", "\\ne")) and bool(same(left, ("*", ("n", ratio), right), work))


def _only_names(node: Node, operations: str) -> bool:
    return node[0] == "s" or (node[0] in operations and all(_only_names(part, operations) for part in node[1:]))


def _rows(gold: Answer, other: Answer, rules: Rules) -> bool:
    """Compares rows: order counts in tuples only, repetition in lists only."""
    if not isinstance(gold, AnswerList) or not isinstance(other, AnswerList):
        row, plain = (gold, other) if isinstance(gold, AnswerList) else (other, gold)
        assert isinstance(row, AnswerList)
        if row.kind in ("tuple", "grid") and isinstance(plain, Value):
            return _is_sum_of(row, plain, rules)
        if row is other and row.signs:  # 1/2 or 50 %
            return all(equal(gold, item, rules) for item in row.items)
        if row.kind != "set" or len(row.items) != 1:
            return False
        return equal(row.items[0], plain, rules) if row is gold else equal(plain, row.items[0], rules)  # {5} and 5
    kinds = {gold.kind, other.kind}
    if kinds & {"cases", "ratio", "grid"}:
        if len(kinds) > 1:
            return False
        rules = rules.exact()
    if kinds == {"tuple", "set"} or ("tuple" in kinds and (gold.signs or other.signs)):
        return False  # plus-minus 3 is not the point (3, -3)
    names = [{item.name.partition("_")[0] for item in row.items if isinstance(item, Named)} for row in (gold, other)]
    if (gold.signs or other.signs) and max(map(len, names)) > 1 and min(map(len, names)) < 1:
        return False  # `x = 2 or y = 3` is not 2, 3
    others, is_placed = _as_named(other.items, gold.items, rules.problem)
    items = gold.items
    labels, other_labels = _labels(items), _labels(others)
    is_labelled = len(set(labels)) == len(items)
    if is_labelled and sorted(labels) == sorted(other_labels):
        others = tuple(others[other_labels.index(label)] for label in labels)
    elif not isinstance(items[0], Named) or any(isinstance(item, Named) for item in others):
        is_labelled = False
    in_order = is_labelled or is_placed or (asks_order(rules.problem) and not gold.signs | other.signs)
    if kinds & {"tuple", "ratio", "grid"} or (in_order and kinds == {"list"}):
        if len(items) != len(others) or _in_order(items, others, rules):
            return len(items) == len(others)
        bare = _as_named(items)[0], _as_named(others)[0]
        return kinds <= {"tuple", "list"} and _up_to_a_parameter(*bare, set(), rules)
    # a solution listed twice is still one solution
    is_set = "set" in kinds or (len(others) > len(items) and all(isinstance(item, AnswerList) for item in items))
    return _matched(items, others, rules, is_set)


def _is_sum_of(point: AnswerList, value: Value, rules: Rules) -> bool:
    """Whether `value` is the point as a sum of unit vectors: 2 i - 3 j is (2, -3), also as a column or a row."""
    rows = [row.items for row in point.items if isinstance(row, AnswerList) and point.kind == "grid"]
    items = [*itertools.chain(*rows)] or point.items
    sides = [item.node for item in items if isinstance(item, Value)]
    axes = sorted(_UNIT_VECTORS)[: len(items)]
    if not len(items) == len(sides) == len(axes) or axes != sorted(symbols(value.node) & _UNIT_VECTORS):
        return False
    total: Node = ("n", Fraction(0))
    for letter, side in zip(axes, sides, strict=True):
        total = ("+", total, ("*", ("s", letter), side))
    return equal_nodes([(total, value.node)], rules)


def _in_order(items: Sequence[Answer], others: Sequence[Answer], rules: Rules) -> bool:
    """Compares pair by pair. A parameter is renamed in all of them alike, if the items have no names or it stands for
    any whole number."""
    rows = [[row for row in side if isinstance(row, AnswerList) and row.kind == "tuple"] for side in (items, others)]
    ours, theirs = ([row.items for row in side] for side in rows)
    if len(ours) == len(items) and [*map(len, ours)] == [*map(len, theirs)]:  # all cells of a matrix
        return _in_order([*itertools.chain(*ours)], [*itertools.chain(*theirs)], rules)
    pairs = list(zip(items, others, strict=True))
    if any(differ(a.name, b.name) for a, b in pairs if isinstance(a, Named) and isinstance(b, Named)):
        return False
    bare = [[item.value if isinstance(item, Named) else item for item in side] for side in (items, others)]
    one, two = ([item.node for item in side if isinstance(item, Value) and not item.unit] for side in bare)
    is_joint = [*items] == bare[0] or any(symbols(node) & rules.wholes for node in one)
    if is_joint and len(one) == len(two) == len(items) and any(map(symbols, one)):
        return equal_nodes([*zip(one, two, strict=True)], rules)
    return all(equal(a, b, rules.item(index)) for index, (a, b) in enumerate(pairs))


def _up_to_a_parameter(items: Sequence[Answer], others: Sequence[Answer], given: set[str], rules: Rules) -> bool:
    """Whether the items are equal once parameters are renamed: the letters that the other side lacks, if none is in
    `given` or in the problem. Only letters that a clause of the reference declares may be several, or any but
    `_PARAMETERS`. In a tuple one is a number in several items: (t, 2t), not (t, 2)."""
    one, two = ([item.node for item in side if isinstance(item, Value) and not item.unit] for side in (items, others))
    ours, theirs = (frozenset[str]().union(*map(symbols, side)) for side in (one, two))
    both, mine, names = ours ^ theirs, sorted(ours - theirs), sorted(theirs - ours)
    is_free = rules.free.issuperset(mine)
    if len(one) != len(items) or len(two) != len(others) or not 1 <= len(mine) == len(names) <= (3 if is_free else 1):
        return False
    allowed = (_PARAMETERS | {*"abdpqr"} if is_free else _PARAMETERS) - given
    if not both <= allowed or both <= set("xyz") or both & (rules.wholes | letters_of(rules.problem)):
        return False
    if len(one) > 1 and sum(mine[0] in symbols(node) for node in one) < 2:
        return False
    renamed = (dict(zip(names, (("s", name) for name in order), strict=True)) for order in itertools.permutations(mine))
    return any(equal_nodes([(a, substituted(b, by)) for a, b in zip(one, two, strict=True)], rules) for by in renamed)


def letters_of(problem: str) -> set[str]:
    """The letters in its formulas."""
    return set("".join(re.sub(r"\\[A-Za-z]+", " ", part) for part in _IN_MATHS.findall(problem)))


def _labels(items: Sequence[Answer]) -> list[str]:
    """The items' names or units, if all items have one; else empty."""
    units = [item.unit.words if isinstance(item, Value) and item.unit else "" for item in items]
    names = [item.name.partition("_")[0] if isinstance(item, Named) else "" for item in items]
    labels = [name or unit for name, unit in zip(names, units, strict=True)]
    return labels if all(labels) else []


def _as_named(items: Sequence[Answer], gold: Sequence[Answer] = (), problem: str = "") -> tuple[Sequence[Answer], bool]:
    """The items without their names, if the reference has none: a = 1, b = 2 becomes 1, 2; and whether they are in the
    order in which the problem asks for these letters (`find $b$ and $a$`)."""
    named = {item.name: item for item in items if isinstance(item, Named)}
    if any(isinstance(item, Named) for item in gold):
        return items, False
    orders = (
        [re.findall(r"\b[A-Za-z]\b", found) for found in _enumerated(problem)] if len(named) == len(items) > 1 else []
    )
    order: list[str] = next((order for order in reversed(orders) if {*order} == {*named}), [])
    if not order and len(named) == len(items) and min(map(len, named), default=0) > 2 and _asks_named(problem):
        at = {name: problem.lower().find(name.strip(":").removeprefix("\\text").lower()) for name in named}
        order = sorted(named, key=at.__getitem__) if min(at.values()) >= 0 else []
    if order or (len(named) == len(items) and {*named} <= {"x", "y", "z"}):
        items = [named[name] for name in order or sorted(named)]
    return tuple(item.value if isinstance(item, Named) else item for item in items), bool(order)


@functools.lru_cache(maxsize=64)
def _enumerated(problem: str) -> list[str]:
    """`a b c`, where the problem asks for $a, b$ and $c$, or for the length $b$ and the width $c$."""
    apart = re.sub(r"[$,()&]|\\\\?[()]|\\(?:text|quad|ldots)(?![a-z])", " ", problem)
    letter = r"(?<![^\s{])[A-Za-z](?![^\s.;:?}])"
    run = rf"{letter}(?:\s+(?:(?:of|and|or|the|both|to|value)\s+)*(?:and\s+(?:the\s+)?\w+\s+)?{letter})+"
    if re.search(r"\b(?:any|either) order\b", problem):
        return []
    told = ((found[0], re.split("[.?!]", apart[: found.start()])[-1]) for found in re.finditer(run, apart))
    return [found for found, before in told if _ASKS.search(before)]


def _matched(gold: Sequence[Answer], other: Sequence[Answer], rules: Rules, is_set: bool) -> bool:
    """Compares in any order; in a set, some may be the same. Items that are written alike are matched first, since a
    long list would take n^2 comparisons, unless each item has a tolerance of its own."""

    def alike(item: Answer, one: Answer, index: int = 0) -> bool:  # among other items, {2} is not 2
        are_sets = {isinstance(side, AnswerList) and side.kind == "set" for side in (item, one)}
        return len(are_sets) == 1 and equal(item, one, rules.item(0 if is_set else index))

    unmatched = list(other)
    for index, item in sorted(enumerate(gold), key=lambda at: at[1] not in other):
        left = other if is_set else unmatched
        is_there = item in left and len(rules.tolerances) < 2
        match = item if is_there else next((one for one in left if alike(item, one, index)), None)
        if match is None:
            return False
        if match in unmatched:
            unmatched.remove(match)
    return all(is_set and (one in gold or any(alike(item, one) for item in gold)) for one in unmatched)


def _spans(gold: Answer, other: Answer, rules: Rules) -> bool:
    if isinstance(gold, answers.Relation) or isinstance(other, answers.Relation):
        pairs = itertools.product(half_lines(gold), half_lines(other))
        return any(_spans(one, two, rules) for one, two in pairs)
    left, right = as_spans(gold), as_spans(other)
    if left is None or right is None or isinstance(gold, Value) or isinstance(other, Value):
        return False
    if left.name and right.name and left.name != right.name:
        return False
    merged = normal(left), normal(right)
    if all(spans.pieces for spans in merged):  # else the ends are in the wrong order: compared as written
        left, right = merged

    def alike(one: answers.Piece, two: answers.Piece) -> bool:
        are_closed = [(piece.low_closed, piece.high_closed) for piece in (one, two)]
        ends = [(one.low, two.low), (one.high, two.high)]
        return are_closed[0] == are_closed[1] and equal_nodes(ends, rules.exact())

    orders = (right.pieces, right.pieces[::-1]) if len(left.pieces) == len(right.pieces) else ()
    return any(all(map(alike, left.pieces, pieces)) for pieces in orders)


def _as_grid(answer: Answer, like: AnswerList) -> Answer:
    """A tuple as a matrix of one row or column, whichever `like` is; other answers as they are."""
    if not isinstance(answer, AnswerList) or answer.kind != "tuple":
        return answer
    rows = (answer.items,) if len(like.items) == 1 else tuple((item,) for item in answer.items)
    return AnswerList("grid", tuple(AnswerList("tuple", row) for row in rows))


def _words(gold: Any, other: Any, rules: Rules) -> bool:
    are_words = isinstance(gold, answers.Words) and isinstance(other, answers.Words)
    one, two = (side.text for side in (gold, other)) if are_words else ("", "")
    return are_words and (_folded(one) == _folded(two) or _answers(one, two) or _answers(two, one))


def _folded(text: str) -> str:
    # a minus sign stays, a hyphen does not: at most -3, won 2-1
    text = _HYPHEN.sub(" ", text)
    words = [_CALENDAR.get(word, word) for word in text.split() if word not in ("the", "a", "an")]
    if [len(names.intersection(words)) for names in (MONTHS, _DAYS)] in ([0, 1], [1, 0], [1, 1]):  # on the 12th of May
        kept = (word for word in words if word not in ("of", "on", "in"))
        words = sorted(re.sub(r"(?<![a-z])(?:st|nd|rd|th)$", "", word) for word in kept)
    return re.sub(r"(?<!\d) (?!-)|(?<=\d) (?!\d)", "", " ".join(words))


def _answers(gold: str, other: str) -> bool:
    """Whether the sentence `other` states a short reference: yes or no as its first word, or what something is."""
    first, *words = (word.strip("()[]*") for word in other.split())  # true (false)
    if gold in ("yes", "true", "no", "false"):  # `no solution` and `no more than 5` are not no
        is_doubted = not DOUBTS.isdisjoint(words)
        return first == gold and is_doubted == (gold in ("no", "false")) and _CONDITIONS.isdisjoint(words)
    subject = re.sub(r" (?:the|an?) \Z", " ", other.removesuffix(gold)).split()
    ends = ("is", "are") if gold.split()[0] not in _VERBS else tuple(subject[1:2])
    verbs = [word for word in subject if word in ends]  # two in `it is A or it is B`
    has_subject = len(first) == 1 or first in ("the", "this", "it", "that", "they")
    is_stated = has_subject and len(verbs) == 1 and verbs == subject[-1:]
    is_stated = is_stated and len(gold.split()) <= 3 and other.endswith(f" {gold}") and DOUBTS.isdisjoint(subject)
    return is_stated or other in (f"on {gold}", f"in {gold}")


_BY_KIND: dict[type, Callable[[Any, Any, Rules], bool]] = {
    Named: _named,
    answers.Intervals: _spans,
    AnswerList: _rows,
    answers.Words: _words,
    answers.Relation: _relations,
    Value: equal_values,
}
