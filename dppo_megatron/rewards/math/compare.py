"""Whether two answers are the same, decided by the reference's own kind.

Every comparison says True, False, or None where it cannot know, which is no reward either.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TypeVar

from dppo_megatron.rewards.math.answers import (
    TURNED,
    Answer,
    AnswerList,
    Cases,
    Clock,
    Congruence,
    Grid,
    Intervals,
    Named,
    Node,
    Piece,
    Ratio,
    Relation,
    Value,
    Words,
    substituted,
    symbols,
)
from dppo_megatron.rewards.math.equality import same
from dppo_megatron.rewards.math.evaluate import WorkLimit, rational
from dppo_megatron.rewards.math.number_sets import as_spans, normal
from dppo_megatron.rewards.math.patterns import regex
from dppo_megatron.rewards.math.units import DOUBTS, MONTHS
from dppo_megatron.rewards.math.values import (
    Rules,
    Verdict,
    all_of,
    any_of,
    equal_nodes,
    equal_values,
    parameter_turn,
)

_ARTICLES = {"the", "a", "an"}
T = TypeVar("T")


def equal(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """Whether `other` is the reference."""
    rules.work.spend(_EACH)
    if gold == other:
        return True
    for kind, compared in _BY_KIND:
        if isinstance(gold, kind) or isinstance(other, kind):
            return compared(gold, other, rules)
    assert isinstance(gold, Value) and isinstance(other, Value)
    return equal_values(gold, other, rules)


_EACH = 6
"""Operations of a comparison beside those of its expressions: two lists of 100 may take 10,000 comparisons."""


def _named(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """x = 5 and 5 are the same; x = 5 and y = 5 are not; f(x) = 2x and y = 2x are."""
    if isinstance(gold, Named) and isinstance(other, Named):
        other = _with_variables(other, gold)
        if _differ(gold.name, other.name):
            return False
        verdict = equal(gold.value, other.value, rules)
        return verdict if verdict is not False else _as_relations(gold, other, rules)
    named, plain = (gold, other) if isinstance(gold, Named) else (other, gold)
    assert isinstance(named, Named)
    if isinstance(plain, Relation):
        return _as_relations(gold, other, rules)
    return equal(gold.value, other, rules) if isinstance(gold, Named) else equal(gold, named.value, rules)


_OF = regex(r"(?P<head>[^()]+)\((?P<letters>[a-z](?:,[a-z])*)\)")
_FIGURE = regex(r"(?:\\angle|\\overline)?\|?([A-Z]{2,4})\|?")
_LABEL = regex(r"([A-Za-z]{3,}):?")
_SYMBOL = regex(r"[A-Za-z]|[a-z][A-Za-z]{1,2}|.*_.*|\\.*|.*:")


def _differ(gold: str, other: str) -> bool:
    """Whether two names are of different things for certain: x and y, f(x) and g(x), AB and CD, Area and Volume; but
    y is f(x), and anything may be called by a letter of its own."""
    gold, other = (name.removeprefix("\\text") for name in (gold, other))
    if gold == other:
        return False
    ours, theirs = (name.partition("(")[0] for name in (gold, other))
    primes = "'" * max(ours.count("'"), theirs.count("'"))
    if "(" in gold or "(" in other:
        if gold[0] == other[0] == "(":
            return sorted(gold) == sorted(other)
        return ("(" in gold and "(" in other) or not (
            ours == theirs or {ours, theirs} & {"", f"y{primes}", f"z{primes}"}
        )
    if (left := _FIGURE.fullmatch(gold)) and (right := _FIGURE.fullmatch(other)):
        return sorted(left[1]) != sorted(right[1]) or (len(left[1]) == 3 and left[1][1] != right[1][1])
    if (left := _LABEL.fullmatch(gold)) and (right := _LABEL.fullmatch(other)):
        return left[1] not in right[1] and right[1] not in left[1]
    if gold.isalpha() and sorted(gold) == sorted(other):  # a product
        return False
    return all(map(_SYMBOL.fullmatch, (gold, other)))


def _with_variables(other: Named, gold: Named) -> Named:
    """f(t) = t^2 with the reference's variable."""
    ours, theirs = _OF.fullmatch(gold.name), _OF.fullmatch(other.name)
    if ours is None or theirs is None or ours["head"] != theirs["head"] or not isinstance(other.value, Value):
        return other
    letters = [match["letters"].split(",") for match in (ours, theirs)]
    if len(letters[0]) != len(letters[1]) or letters[0] == letters[1]:
        return other
    node = other.value.node
    if symbols(node) & set(letters[0]) - set(letters[1]):
        return other
    for index, letter in enumerate(letters[1]):
        node = substituted(node, letter, ("s", f"?{index}"))
    for index, letter in enumerate(letters[0]):
        node = substituted(node, f"?{index}", ("s", letter))
    return Named(gold.name, replace(other.value, node=node))


def _cases(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    if not isinstance(gold, Cases) or not isinstance(other, Cases) or len(gold.rows) != len(other.rows):
        return False
    exact = rules.exact()
    return _matched(gold.rows, other.rows, lambda _, a, b: all_of([equal(a[0], b[0], exact), equal(a[1], b[1], exact)]))


def _as_relations(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """y = 2x + 3 and y - 2x = 3."""
    sides = [_relation(gold), _relation(other)]
    if sides[0] is None or sides[1] is None:
        return False
    return _relations(sides[0], sides[1], rules)


def _relation(answer: Answer) -> Relation | None:
    if isinstance(answer, Relation):
        return answer
    if isinstance(answer, Named) and answer.left is not None and isinstance(answer.value, Value):
        return Relation((answer.left, answer.value.node), ("=",))
    return None


def _relations(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """Equations with the same solutions up to a constant factor, inequalities up to a positive one, chains side by
    side. An equation is its last side where the others are names or equal to it: xy = 6, 2 + 3 = 5; m + n = 12 as an
    answer only, since the reference x + y = 12 is a line."""
    if isinstance(gold, Relation) and isinstance(other, Relation):
        if len(gold.sides) == len(other.sides) == 2:
            return _same_solutions(gold, other, rules.work)
        if gold.ops != other.ops:
            return False
        return all_of([equal_nodes(a, b, rules.exact()) for a, b in zip(gold.sides, other.sides, strict=True)])
    chain, plain = (gold, other) if isinstance(gold, Relation) else (other, gold)
    assert isinstance(chain, Relation)
    *before, last = chain.sides
    if not isinstance(plain, Value) or set(chain.ops) != {"="}:
        return False
    if chain is other and symbols(plain.node) | symbols(last):
        return False
    names = "*/" if chain is gold else "*/+-" if last != ("n", 0) else ""  # x + y = 0 is a line
    holds: list[Verdict] = [_only_names(side, names) or same(side, last, rules.work) for side in before]
    value = Value(last)
    return all_of([*holds, equal_values(value, plain, rules) if chain is gold else equal_values(plain, value, rules)])


def _same_solutions(gold: Relation, other: Relation, work: WorkLimit) -> Verdict:
    left, right = _difference(gold), _difference(other)
    if left[0] != right[0] or symbols(left[1]) != symbols(right[1]):
        return False
    ratio = _constant_ratio(left[1], right[1], work)
    if ratio is None or ratio is False:
        return ratio
    return ratio > 0 or left[0] in ("=", "\\ne")


def _only_names(node: Node, operations: str) -> bool:
    return node[0] == "s" or (node[0] in operations and all(_only_names(part, operations) for part in node[1:]))


def _difference(relation: Relation) -> tuple[str, Node]:
    """`0 op difference`, with > and >= turned round."""
    (left, right), (op,) = relation.sides, relation.ops
    if op in (">", "\\ge"):
        return TURNED[op], ("+", left, ("-", right))
    return op, ("+", right, ("-", left))


def _constant_ratio(left: Node, right: Node, work: WorkLimit) -> Fraction | Verdict:
    """The constant c with left = c * right; False if there is none, None if that cannot be said."""
    point = {name: Fraction(p, 7) for name, p in zip(sorted(symbols(left)), (11, 17, 5, 23, 29, 3), strict=False)}
    above, below = rational(left, point, work), rational(right, point, work)
    if above and below:
        return above / below if same(left, ("*", ("n", above / below), right), work) else False
    return same(left, right, work) or None


def _rows(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """Order matters in tuples only; how often something is listed matters in lists only."""
    if not isinstance(gold, AnswerList) or not isinstance(other, AnswerList):
        row = gold if isinstance(gold, AnswerList) else other
        assert isinstance(row, AnswerList)
        if len(row.items) > 1 or row.kind != "set":
            return False
        return equal(row.items[0], other, rules) if row is gold else equal(gold, row.items[0], rules)  # {5} and 5
    kinds = {gold.kind, other.kind}
    if kinds == {"tuple", "set"} or ("tuple" in kinds and (gold.signs or other.signs)):
        return False  # the point (3, -3) for plus-minus 3
    ours, theirs = gold.items, _as_named(other.items, gold.items)
    is_ordered = len(set(_labels(ours))) == len(ours) and not any(isinstance(item, Named) for item in theirs)
    if is_ordered and sorted(_labels(ours)) == sorted(_labels(theirs)):
        theirs = tuple(theirs[_labels(theirs).index(label)] for label in _labels(ours))
    elif is_ordered and not isinstance(ours[0], Named):
        is_ordered = False
    if "tuple" in kinds or (is_ordered and kinds == {"list"}):
        if len(ours) != len(theirs):
            return False
        return all_of([equal(a, b, rules.item(i)) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))])
    # a solution listed twice is still one solution
    if "set" in kinds or (len(theirs) > len(ours) and all(isinstance(item, AnswerList) for item in ours)):
        return all_of([_covered(ours, theirs, rules), _covered(theirs, ours, rules)])
    if len(ours) != len(theirs):
        return False
    return _matched(ours, theirs, lambda index, a, b: equal(a, b, rules.item(index)), ordered=len(rules.tolerances) > 1)


def _labels(items: Sequence[Answer]) -> list[str]:
    """What the items are called or counted in, where all of them are."""
    labels = [
        item.name.partition("_")[0]
        if isinstance(item, Named)
        else item.unit.words
        if isinstance(item, Value) and item.unit
        else ""
        for item in items
    ]
    return labels if all(labels) else []


def _as_named(items: tuple[Answer, ...], gold: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """Names are dropped where the reference has none: a = 1, b = 2 for 1, 2."""
    if any(isinstance(item, Named) for item in gold):
        return items
    names = [item.name for item in items if isinstance(item, Named)]
    if len(names) == len(items) and names != sorted(names) and set(names) <= {"x", "y", "z"}:
        items = tuple(sorted(items, key=lambda item: item.name if isinstance(item, Named) else ""))
    return tuple(item.value if isinstance(item, Named) else item for item in items)


def _matched(
    gold: Sequence[T], other: Sequence[T], same_item: Callable[[int, T, T], Verdict], *, ordered: bool = False
) -> Verdict:
    """One to one in any order; first, unless each has a rule of its own, those that are written alike: a long list
    would take n^2 comparisons."""
    left = collections.Counter(other)
    open_ones: list[tuple[int, T]] = []
    for index, item in enumerate(gold):
        if left[item] and not ordered:
            left[item] -= 1
        else:
            open_ones.append((index, item))
    candidates, doubtful = list(left.elements()), False
    for index, item in open_ones:
        for position, candidate in enumerate(candidates):
            verdict = same_item(index, item, candidate)
            if verdict:
                candidates.pop(position)
                break
            doubtful |= verdict is None
        else:
            return None if doubtful else False
    return True


def _covered(gold: Sequence[Answer], other: Sequence[Answer], rules: Rules) -> Verdict:
    written = set(other)
    for item in gold:
        if item not in written:
            alike = [candidate for candidate in other if _is_set(candidate) == _is_set(item)]  # {2} is no member of {2}
            found = any_of([equal(item, candidate, rules) for candidate in alike])
            if not found:
                return found
    return True


def _is_set(answer: Answer) -> bool:
    return isinstance(answer, AnswerList) and answer.kind == "set"


def _spans(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    left, right = as_spans(gold), as_spans(other)
    if left is None or right is None or isinstance(gold, Value) or isinstance(other, Value):
        return False
    if left.name and right.name and left.name != right.name:
        return False
    merged = normal(left), normal(right)
    if all(merged_one.pieces for merged_one in merged):  # else ends in the wrong order, which is no interval
        left, right = merged
    if len(left.pieces) != len(right.pieces):
        return False
    return _matched(left.pieces, right.pieces, lambda _, ours, theirs: _same_piece(ours, theirs, rules.exact()))


def _same_piece(gold: Piece, other: Piece, rules: Rules) -> Verdict:
    if (gold.low_closed, gold.high_closed) != (other.low_closed, other.high_closed):
        return False
    return all_of([equal_nodes(gold.low, other.low, rules), equal_nodes(gold.high, other.high, rules)])


def _grids(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    left, right = _cells(gold), _cells(other)
    if left is None or right is None:
        return False
    if isinstance(gold, Grid) and isinstance(other, Grid):
        if [len(row) for row in gold.rows] != [len(row) for row in other.rows]:
            return False
    elif not all(_is_vector(grid) for grid in (gold, other)):
        return False
    if len(left) != len(right):
        return False
    return all_of([equal_nodes(a, b, rules.exact()) for a, b in zip(left, right, strict=True)])


def _is_vector(answer: Answer) -> bool:
    return not isinstance(answer, Grid) or len(answer.rows) == 1 or all(len(row) == 1 for row in answer.rows)


def _cells(answer: Answer) -> list[Node] | None:
    if isinstance(answer, Grid):
        return [cell for row in answer.rows for cell in row]
    if isinstance(answer, AnswerList) and answer.kind == "tuple":
        cells = [item.node for item in answer.items if isinstance(item, Value)]
        return cells if len(cells) == len(answer.items) else None
    if isinstance(answer, Intervals) and len(answer.pieces) == 1:  # [1, 2] may be a vector
        piece = answer.pieces[0]
        return [piece.low, piece.high] if piece.low_closed and piece.high_closed else None
    return None


def _congruences(gold: Answer, other: Answer, rules: Rules) -> Verdict:
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


def _words(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    if not isinstance(gold, Words) or not isinstance(other, Words):
        return False
    return _folded(gold.text) == _folded(other.text) or _answers(gold.text, other.text)


def _folded(text: str) -> str:
    if text in ("dne", "d n e"):
        return "doesnotexist"
    words = [word for word in text.replace("-", " ").split() if word not in _ARTICLES]
    if MONTHS & set(words):  # 12th of May
        words = sorted(re.sub(r"(?<=\d)(?:st|nd|rd|th)$", "", word) for word in words if word not in ("of", "on"))
    return "".join(words)


def _answers(gold: str, other: str) -> bool:
    """Whether a sentence states a short reference: yes or no as its first word, or what something is."""
    first, *words = other.split()
    if gold in ("yes", "true"):
        return first == gold and (DOUBTS | _CONDITIONS).isdisjoint(words)
    if gold in ("no", "false"):  # which `no solution` and `no more than 5` are not
        return first == gold and not DOUBTS.isdisjoint(words) and _CONDITIONS.isdisjoint(words)
    if len(gold.split()) > 3 or not DOUBTS.isdisjoint(words):
        return False
    _, found, said = f" {' '.join(words)}".partition(" is ")
    return bool(found) and first in ("the", "this", "it", "that") and _folded(said) == _folded(gold)


_CONDITIONS = frozenset(["yes", "true", "but", "or", "only", "for", "when", "some", "sometimes", "wait", "t"])  # isn't


def _clocks(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    if isinstance(gold, Clock) and isinstance(other, Clock):
        bare = [clock for clock in (gold, other) if not clock.half]  # 4:30 and 16:30 are 4:30 p.m., and not each other
        if gold.minute != other.minute or (len(bare) == 1 and 0 < bare[0].hour <= 12):
            return gold.minute == other.minute and (gold.hour - other.hour) % 12 == 0
        return gold.hour == other.hour
    clock, plain = (gold, other) if isinstance(gold, Clock) else (other, gold)
    assert isinstance(clock, Clock)
    if isinstance(plain, Value) and plain.unit is None and clock is gold and clock.half and not clock.minute:
        return same(("n", Fraction((clock.hour - 1) % 12 + 1)), plain.node, rules.work)  # 9 for 9 p.m.
    if isinstance(plain, (Value, Ratio)) and not clock.half and clock.minute:
        ratio = Ratio((("n", Fraction(clock.hour)), ("n", Fraction(clock.minute))))
        return _ratios(ratio, plain, rules) if clock is gold else _ratios(plain, ratio, rules)
    return False


def _ratios(gold: Answer, other: Answer, rules: Rules) -> Verdict:
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


_BY_KIND: tuple[tuple[type, Callable[[Answer, Answer, Rules], Verdict]], ...] = (
    (Named, _named),
    (Grid, _grids),
    (Intervals, _spans),
    (AnswerList, _rows),
    (Congruence, _congruences),
    (Cases, _cases),
    (Words, _words),
    (Clock, _clocks),
    (Ratio, _ratios),
    (Relation, _relations),
)
