"""Whether two answers are the same, decided by the reference's own kind.

Every comparison says True, False, or None where it cannot know, which is no reward either.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

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
    as_items,
)
from dppo_megatron.rewards.math.equality import same
from dppo_megatron.rewards.math.evaluate import WorkLimit, rational
from dppo_megatron.rewards.math.number_sets import normal
from dppo_megatron.rewards.math.plain_kinds import (
    equal_based,
    equal_clocks,
    equal_congruences,
    equal_ratios,
    equal_words,
)
from dppo_megatron.rewards.math.trees import Node, renamed, substituted, symbols
from dppo_megatron.rewards.math.values import (
    Rules,
    Verdict,
    all_of,
    any_of,
    equal_nodes,
    equal_values,
    parameter_turn,
)


def equal(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """Whether `other` is the reference."""
    if gold == other:
        return True
    if isinstance(gold, Named) or isinstance(other, Named):
        return _named(gold, other, rules)
    if isinstance(gold, AnswerList) or isinstance(other, AnswerList):
        return _rows(gold, other, rules)
    if isinstance(gold, Congruence) or isinstance(other, Congruence):
        return equal_congruences(gold, other, rules)
    if isinstance(gold, Cases) or isinstance(other, Cases):
        return _cases(gold, other, rules)
    if isinstance(gold, Grid) or isinstance(other, Grid):
        return _grids(gold, other, rules)
    if isinstance(gold, Intervals) or isinstance(other, Intervals):
        return _spans(gold, other, rules)
    if isinstance(gold, Words) or isinstance(other, Words):
        return equal_words(gold, other)
    if isinstance(gold, Clock) or isinstance(other, Clock):
        return equal_clocks(gold, other, rules)
    if isinstance(gold, Based) or isinstance(other, Based):
        return equal_based(gold, other, rules)
    if isinstance(gold, Ratio) or isinstance(other, Ratio):
        return equal_ratios(gold, other, rules)
    if isinstance(gold, Relation) or isinstance(other, Relation):
        return _relations(gold, other, rules)
    if isinstance(gold, Inequalities) or isinstance(other, Inequalities):
        return _chains(gold, other, rules)
    assert isinstance(gold, Value) and isinstance(other, Value)
    return equal_values(gold, other, rules)


def _named(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """x = 5 and 5 are the same; x = 5 and y = 5 are not; f(x) = 2x and y = 2x are."""
    if isinstance(gold, Named) and isinstance(other, Named):
        single = all(
            len(name) == 1 or "_" in name or name[0] == "\\" or name[-1] == ":" for name in (gold.name, other.name)
        )
        if gold.name != other.name and single:
            return False
        other = _with_variable(other, gold)
        verdict = _functions(gold, other.value, rules)
        return verdict if verdict is not False else _as_relations(gold, other, rules)
    named, plain = (gold, other) if isinstance(gold, Named) else (other, gold)
    assert isinstance(named, Named)
    if isinstance(plain, Relation):
        return _as_relations(gold, other, rules)
    if isinstance(plain, Intervals) and isinstance(named.value, Value):
        return _spans(gold.value if isinstance(gold, Named) else gold, plain if plain is other else named.value, rules)
    if isinstance(gold, Named):
        return _functions(gold, other, rules)
    return equal(gold, named.value, rules)


def _functions(gold: Named, other: Answer, rules: Rules) -> Verdict:
    """f(x) = kx for f(x) = cx: the letters of a function's constants are nobody's."""
    verdict, of = equal(gold.value, other, rules), _OF.fullmatch(gold.name)
    if verdict is not False or not of or not isinstance(gold.value, Value) or not isinstance(other, Value):
        return verdict
    ours = sorted(symbols(gold.value.node) - symbols(other.node))
    theirs = sorted(symbols(other.node) - symbols(gold.value.node))
    if not len(ours) == len(theirs) in (1, 2) or of[1] in ours:
        return False
    for names in itertools.permutations(ours):
        node = other.node
        for old, new in zip(theirs, names, strict=True):
            node = renamed(node, old, new)
        if equal(gold.value, Value(node, other.unit), rules):
            return True
    return False


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
    return all_of(
        [
            any_of(
                [all_of([_condition(a, b, rules) for a, b in zip(row, theirs, strict=True)]) for theirs in other.rows]
            )
            for row in gold.rows
        ]
    )


def _condition(gold: Answer | None, other: Answer | None, rules: Rules) -> Verdict:
    return gold is other if gold is None or other is None else equal(gold, other, rules.exact())


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
    names = sorted(symbols(left))
    for values in ([Fraction(p, 7) for p in (11, 17, 5, 23, 29, 3)], [Fraction(p, 5) for p in (3, 13, 7, 2, 17, 11)]):
        point = dict(zip(names, values, strict=False))
        if len(names) > len(point):
            return None
        above, below = rational(left, point, work), rational(right, point, work)
        if above is None or below is None:
            return True if same(left, right, work) else None
        if above and below:
            return above / below if same(left, ("*", ("n", above / below), right), work) else False
    return None


def _rows(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    """Order matters in tuples only; how often something is listed matters in lists only."""
    if isinstance(gold, Intervals) or isinstance(other, Intervals):
        return _spans(gold, other, rules)
    if isinstance(gold, Grid) or isinstance(other, Grid):
        return _grids(gold, other, rules)
    if not isinstance(gold, AnswerList) and not isinstance(other, AnswerList):
        return None
    gold, other = _alone(gold), _alone(other)
    kinds = {answer.kind for answer in (gold, other) if isinstance(answer, AnswerList)}
    if not isinstance(gold, AnswerList) or not isinstance(other, AnswerList):
        row = gold if isinstance(gold, AnswerList) else other
        assert isinstance(row, AnswerList)
        if len(row.items) == 1 and row.kind == "set":  # {5} and 5
            return equal(row.items[0], other, rules) if row is gold else equal(gold, row.items[0], rules)
        plain = other if row is gold else gold
        return isinstance(plain, Value) and row.kind == "tuple" and _grids(gold, other, rules)
    if kinds == {"tuple", "set"}:
        return False
    if "tuple" in kinds and (gold.signs or other.signs):
        return False  # the point (3, -3) for plus-minus 3
    theirs, ours = _as_named(other.items, gold.items), gold.items
    if not any(isinstance(item, Named) for item in other.items) and _are_labelled(ours):
        ours = _as_named(ours, ())
    if "tuple" in kinds and len(ours) == len(theirs):
        theirs = _with_parameter(ours, theirs, rules)
    if "tuple" in kinds:
        if len(ours) != len(theirs):
            return False
        return all_of([equal(a, b, rules.item(i)) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))])
    if "set" in kinds:
        return all_of([_covered(ours, theirs, rules), _covered(theirs, ours, rules)])
    if len(theirs) > len(ours) and all(isinstance(item, AnswerList) for item in ours):
        theirs = _distinct(theirs, rules)  # a solution listed twice is still one solution
    if len(ours) != len(theirs):
        return False
    return _matched(ours, theirs, rules)


def _are_labelled(items: tuple[Answer, ...]) -> bool:
    return all(isinstance(item, Named) and item.name.endswith(":") for item in items)


def _with_parameter(gold: tuple[Answer, ...], other: tuple[Answer, ...], rules: Rules) -> tuple[Answer, ...]:
    """(3 + x, 4 - x) for (2 + t, 5 - t): a parameter has no name of its own, and may be a whole number further."""
    ours = [item.node for item in gold if isinstance(item, Value)]
    theirs = [item.node for item in other if isinstance(item, Value)]
    if len(ours) < len(gold) or len(theirs) < len(other):
        return other
    mine = frozenset[str]().union(*map(symbols, ours))
    for mine_node, node in zip(ours, theirs, strict=True):
        if len(mine) == 1 and (turn := parameter_turn(mine_node, node, rules.work)):
            return tuple(Value(substituted(node, *turn)) for node in theirs)
    return other


def _alone(answer: Answer) -> Answer:
    """The tuple that a set holds alone: {(1, 2)} is the one solution (1, 2)."""
    if (
        isinstance(answer, AnswerList)
        and answer.kind == "set"
        and len(answer.items) == 1
        and isinstance(answer.items[0], AnswerList)
    ):
        return answer.items[0]
    return answer


def _distinct(items: tuple[Answer, ...], rules: Rules) -> tuple[Answer, ...]:
    kept: list[Answer] = []
    for item in items:
        if not any(equal(item, other, rules) for other in kept):
            kept.append(item)
    return tuple(kept)


def _as_named(items: tuple[Answer, ...], gold: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """Names are dropped where the reference has none: a = 1, b = 2 for 1, 2."""
    if any(isinstance(item, Named) for item in gold):
        return items
    names = [item.name for item in items if isinstance(item, Named)]
    if len(names) == len(items) and names != sorted(names) and set(names) <= {"x", "y", "z"}:
        items = tuple(sorted(items, key=lambda item: item.name if isinstance(item, Named) else ""))
    return tuple(item.value if isinstance(item, Named) else item for item in items)


def _matched(gold: Sequence[Answer], other: Sequence[Answer], rules: Rules) -> Verdict:
    """One to one in any order; first those that are written alike, since a long list would take n^2 comparisons."""
    left = collections.Counter(other)
    open_ones: list[tuple[int, Answer]] = []
    for index, item in enumerate(gold):
        if left[item] and len(rules.tolerances) < 2:
            left[item] -= 1
        else:
            open_ones.append((index, item))
    candidates = list(left.elements())
    doubtful = False
    for index, item in open_ones:
        found = None
        for position, candidate in enumerate(candidates):
            verdict = equal(item, candidate, rules.item(index))
            if verdict:
                found = position
                break
            doubtful |= verdict is None
        if found is None:
            return None if doubtful else False
        candidates.pop(found)
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
    left, right = _as_spans(gold), _as_spans(other)
    if left is None or right is None:
        return False
    if left.name and right.name and left.name != right.name:
        return False
    merged = normal(left), normal(right)
    if all(merged_one.pieces for merged_one in merged):  # else ends in the wrong order, which is no interval
        left, right = merged
    if len(left.pieces) != len(right.pieces):
        return False
    return _pieces_matched(list(left.pieces), list(right.pieces), rules)


def _as_spans(answer: Answer) -> Intervals | None:
    if isinstance(answer, Intervals):
        return answer
    if isinstance(answer, AnswerList) and answer.kind == "tuple" and len(answer.items) == 2:
        low, high = answer.items
        if isinstance(low, Value) and isinstance(high, Value):
            return Intervals((Piece(low.node, False, high.node, False),))
    if isinstance(answer, AnswerList) and answer.kind == "list":  # (-oo, 1), (2, oo)
        parts = [_as_spans(item) for item in answer.items]
        if None in parts or not any(isinstance(item, Intervals) for item in answer.items):
            return None
        return Intervals(tuple(piece for part in parts if part for piece in part.pieces))
    if isinstance(answer, AnswerList) and answer.kind == "set":
        points = [item.node for item in as_items(answer) if isinstance(item, Value)]
        if len(points) < len(answer.items):  # a set of points of the plane, say
            return None
        return Intervals(tuple(Piece(node, True, node, True) for node in points))
    return None


def _pieces_matched(gold: list[Piece], other: list[Piece], rules: Rules) -> Verdict:
    doubtful = False
    for piece in gold:
        verdicts: list[Verdict] = [_piece(piece, candidate, rules) for candidate in other]
        if True not in verdicts:
            return None if None in verdicts or doubtful else False
        other = [candidate for index, candidate in enumerate(other) if index != verdicts.index(True)]
    return True


def _piece(gold: Piece, other: Piece, rules: Rules) -> Verdict:
    if (gold.low_closed, gold.high_closed) != (other.low_closed, other.high_closed):
        return False
    return all_of([equal_nodes(gold.low, other.low, rules.exact()), equal_nodes(gold.high, other.high, rules.exact())])


def _grids(gold: Answer, other: Answer, rules: Rules) -> Verdict:
    left, right = _cells(gold), _cells(other)
    if left is None or right is None:
        cells, sum_ = (left, other) if isinstance(other, Value) else (right, gold)
        return _along_axes(cells, sum_, rules) if cells else False
    if isinstance(gold, Grid) and isinstance(other, Grid):
        if [len(row) for row in gold.rows] != [len(row) for row in other.rows]:
            return False
    elif not all(_is_vector(grid) for grid in (gold, other)):
        return False
    if len(left) != len(right):
        return False
    return all_of([equal_nodes(a, b, rules.exact()) for a, b in zip(left, right, strict=True)])


def _along_axes(cells: list[Node], other: Answer, rules: Rules) -> Verdict:
    """i - 2j + 3k for (1, -2, 3)."""
    if len(cells) not in (2, 3) or not isinstance(other, Value) or not symbols(other.node) & {"j", "k"}:
        return False
    axes: tuple[Node, ...] = (("c", "i"), ("s", "j"), ("s", "k"))
    terms = [("*", cell, axis) for cell, axis in zip(cells, axes, strict=False)]
    return same(functools.reduce(lambda one, two: ("+", one, two), terms), other.node, rules.work)


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
            turned = tuple(TURNED.get(op, op) for op in reversed(other.ops))
            if gold.ops != turned or len(gold.sides) != len(other.sides):
                return False
            other = Inequalities(tuple(reversed(other.sides)), turned)
        return all_of([equal_nodes(a, b, rules.exact()) for a, b in zip(gold.sides, other.sides, strict=True)])
    chain, plain = (gold, other) if isinstance(gold, Inequalities) else (other, gold)
    assert isinstance(chain, Inequalities)
    if not isinstance(plain, Value) or set(chain.ops) != {"="}:
        return False
    last = Value(chain.sides[-1])
    holds = all_of([same(chain.sides[-1], side, rules.work) for side in chain.sides[:-1]])
    return all_of([holds, equal_values(last, plain, rules) if chain is gold else equal_values(plain, last, rules)])
