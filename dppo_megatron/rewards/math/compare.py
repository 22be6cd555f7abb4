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
    Based,
    Cases,
    Clock,
    Congruence,
    Grid,
    Inequalities,
    Intervals,
    Named,
    Piece,
    Ratio,
    Relation,
    Value,
    Words,
)
from dppo_megatron.rewards.math.equality import same
from dppo_megatron.rewards.math.evaluate import WorkLimit, rational
from dppo_megatron.rewards.math.number_sets import as_spans, normal
from dppo_megatron.rewards.math.plain_kinds import (
    equal_based,
    equal_clocks,
    equal_congruences,
    equal_ratios,
    equal_words,
)
from dppo_megatron.rewards.math.trees import Node, renamed, symbols
from dppo_megatron.rewards.math.values import (
    Rules,
    Verdict,
    all_of,
    any_of,
    equal_nodes,
    equal_values,
)

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
"""Operations of a comparison beside those of its expressions: two lists of 200 may take 20,000 comparisons."""


def _named(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """x = 5 and 5 are the same; x = 5 and y = 5 are not; f(x) = 2x and y = 2x are."""
    if isinstance(gold, Named) and isinstance(other, Named):
        single = all(
            len(name) == 1 or "_" in name or name[0] == "\\" or name[-1] == ":" for name in (gold.name, other.name)
        )
        if gold.name != other.name and single:
            return False
        other = _with_variable(other, gold)
        verdict = equal(gold.value, other.value, rules)
        return verdict if verdict is not False else _as_relations(gold, other, rules)
    named, plain = (gold, other) if isinstance(gold, Named) else (other, gold)
    assert isinstance(named, Named)
    if isinstance(plain, Relation):
        return _as_relations(gold, other, rules)
    if isinstance(plain, Intervals) and isinstance(named.value, Value):
        return _spans(gold.value if isinstance(gold, Named) else gold, plain if plain is other else named.value, rules)
    return equal(gold.value, other, rules) if isinstance(gold, Named) else equal(gold, named.value, rules)


_OF = re.compile(r"[A-Za-z]\(([a-z])\)")


def _with_variable(other: Named, gold: Named) -> Named:
    """f(t) = t^2 with the reference's variable."""
    ours, theirs = _OF.fullmatch(gold.name), _OF.fullmatch(other.name)
    if ours is None or theirs is None or ours[1] == theirs[1] or not isinstance(other.value, Value):
        return other
    if ours[1] in symbols(other.value.node):
        return other
    return Named(gold.name, replace(other.value, node=renamed(other.value.node, theirs[1], ours[1])))


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
        return Relation("=", answer.left, answer.value.node)
    return None


def _relations(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """Equations with the same solutions up to a constant factor; inequalities up to a positive one."""
    if isinstance(gold, Relation) and isinstance(other, Value):
        # xy = 6 names its value; x^2 + y = 0 does not
        return same(gold.right, other.node, rules.work) if gold.op == "=" and _only_names(gold.left) else False
    if isinstance(gold, Value) and isinstance(other, Relation) and not symbols(gold.node) | symbols(other.right):
        # m + n = 12 for 12; the reference x + y = 12 is a line
        return (
            same(gold.node, other.right, rules.work) if other.op == "=" and _only_names(other.left, "*/+-") else False
        )
    if not isinstance(gold, Relation) or not isinstance(other, Relation):
        return False
    left, right = _difference(gold), _difference(other)
    if left[0] != right[0]:
        return False
    if symbols(left[1]) != symbols(right[1]):
        return False
    ratio = _constant_ratio(left[1], right[1], rules.work)
    if ratio is None or ratio is False:
        return ratio
    return ratio > 0 or gold.op in ("=", "\\ne")


def _only_names(node: Node, operations: str = "*/") -> bool:
    return node[0] == "s" or (node[0] in operations and all(_only_names(part, operations) for part in node[1:]))


def _difference(relation: Relation) -> tuple[str, Node]:
    """`0 op difference`, with > and >= turned round."""
    if relation.op in (">", "\\ge"):
        return TURNED[relation.op], ("+", relation.left, ("-", relation.right))
    return relation.op, ("+", relation.right, ("-", relation.left))


def _constant_ratio(left: Node, right: Node, work: WorkLimit) -> Fraction | Verdict:
    """The constant c with left = c * right; False if there is none, None if that cannot be said."""
    point = {name: Fraction(p, 7) for name, p in zip(sorted(symbols(left)), (11, 17, 5, 23, 29, 3), strict=False)}
    above, below = rational(left, point, work), rational(right, point, work)
    if above and below:
        return above / below if same(left, ("*", ("n", above / below), right), work) else False
    return same(left, right, work) or None


def _rows(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """Order matters in tuples only; how often something is listed matters in lists only."""
    if isinstance(gold, Intervals) or isinstance(other, Intervals):
        return _spans(gold, other, rules)
    if isinstance(gold, Grid) or isinstance(other, Grid):
        return _grids(gold, other, rules)
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
    if "tuple" in kinds:
        if len(ours) != len(theirs):
            return False
        return all_of([equal(a, b, rules.item(i)) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))])
    # a solution listed twice is still one solution
    if "set" in kinds or (len(theirs) > len(ours) and all(isinstance(item, AnswerList) for item in ours)):
        return all_of([_covered(ours, theirs, rules), _covered(theirs, ours, rules)])
    if len(ours) != len(theirs):
        return False
    return _matched(ours, theirs, lambda index, a, b: equal(a, b, rules.item(index)), ordered=len(rules.tolerances) > 1)


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
            found = any_of([equal(item, candidate, rules) for candidate in other])
            if not found:
                return found
    return True


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


def _chains(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """a < b < c side by side; 2 + 3 = 5 is 5 if it is true."""
    if isinstance(gold, Inequalities) and isinstance(other, Inequalities):
        if gold.ops != other.ops or len(gold.sides) != len(other.sides):
            return False
        return all_of([equal_nodes(a, b, rules.exact()) for a, b in zip(gold.sides, other.sides, strict=True)])
    chain, plain = (gold, other) if isinstance(gold, Inequalities) else (other, gold)
    assert isinstance(chain, Inequalities)
    if not isinstance(plain, Value) or set(chain.ops) != {"="}:
        return False
    last = Value(chain.sides[-1])
    holds = all_of([same(chain.sides[-1], side, rules.work) for side in chain.sides[:-1]])
    return all_of([holds, equal_values(last, plain, rules) if chain is gold else equal_values(plain, last, rules)])


_BY_KIND: tuple[tuple[type, Callable[[Answer, Answer, Rules], Verdict]], ...] = (
    (Named, _named),
    (AnswerList, _rows),
    (Congruence, equal_congruences),
    (Cases, _cases),
    (Grid, _grids),
    (Intervals, _spans),
    (Words, equal_words),
    (Clock, equal_clocks),
    (Based, equal_based),
    (Ratio, equal_ratios),
    (Relation, _relations),
    (Inequalities, _chains),
)
