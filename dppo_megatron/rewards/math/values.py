"""Whether two numbers or expressions are the same: units, percent, tolerance and rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import permutations
from typing import Any

from dppo_megatron.rewards.math.answers import INFINITY, PI, Node, Value, substituted, symbols, walk
from dppo_megatron.rewards.math.equality import same
from dppo_megatron.rewards.math.evaluate import WorkLimit, approximate, rational
from dppo_megatron.rewards.math.parse import DEGREE
from dppo_megatron.rewards.math.patterns import regex
from dppo_megatron.rewards.math.units import Unit, compatible, read_unit

_NO_UNIT = Unit("")
_CONSTANT = regex(r"[Cc](?:_\d)?")
_FREE = regex(r"[ABCDKkc]|[Cc]_\d")
_GIVEN = frozenset("abcdgkmnC")
_VARIABLES = frozenset("xyztuvw")


@dataclass(frozen=True, slots=True)
class Rules:
    """How a reference is compared, by its row or by the digits of both sides."""

    tolerances: tuple[Fraction, ...] = ()
    """Largest absolute errors: one for each item, or one for all."""
    unit: Unit | None = None
    """The reference's unit, if it does not state one itself."""
    last_place: Fraction = Fraction(0)
    """The value of 1 in the last digit of a rounded reference. If `is_exact`, it is not known to be rounded, and this
    is used only for answers that no decimal equals."""
    is_exact: bool = True
    their_last_place: Fraction = Fraction(0)
    """The same for an answer that is a decimal of twelve digits or more, at most in the fifteenth digit."""
    wholes: frozenset[str] = frozenset()
    """Letters of the reference that stand for any whole number."""
    work: WorkLimit = field(default_factory=WorkLimit, compare=False)
    """Operations that are left for all comparisons of the grading."""

    def item(self, index: int) -> Rules:
        """The rules for one item of a list."""
        if len(self.tolerances) < 2:
            return self
        return replace(self, tolerances=self.tolerances[index : index + 1])

    def exact(self) -> Rules:
        """The rules for parts that have to be exactly equal: ends of intervals, cells of matrices."""
        return Rules(wholes=self.wholes, work=self.work)


def equal_values(gold: Value, other: Value, rules: Rules) -> bool:
    """Whether two values with their units are equal; an answer without a unit is taken in the reference's."""
    gold_unit = gold.unit or rules.unit or _NO_UNIT
    other_unit = other.unit or _NO_UNIT
    if gold_unit.dimension == "percent" or other_unit.dimension == "percent":
        return _percents(gold, gold_unit, other, other_unit, rules)
    for angle, plain in ((gold, other), (other, gold)):  # 90 degrees and pi/2
        in_radians = plain.unit.dimension == "radians" if plain.unit else PI in walk(plain.node)
        if angle.unit is not None and angle.unit.dimension == "angle" and in_radians:
            return bool(same(("*", angle.node, DEGREE), plain.node, rules.work))
    if gold_unit.dimension and other.unit is None and (measure := _with_unit(other.node, gold_unit)):
        return equal_values(gold, measure, rules)
    stated = gold.unit.words if gold.unit else gold_unit.dimension
    if stated and other_unit.words:
        if not compatible(gold_unit, other_unit):
            return False
        if gold_unit.dimension == other_unit.dimension and gold_unit.factor != other_unit.factor:
            in_gold_unit = ("*", other.node, ("n", other_unit.factor / gold_unit.factor))
            return equal_nodes([(gold.node, in_gold_unit)], rules)
    return equal_nodes([(gold.node, other.node)], rules)


def _with_unit(node: Node, gold: Unit) -> Value | None:
    """5m or 0.05 m without \\text, which were read as products, with their unit if it has the reference's dimension."""
    if node[0] != "*" or node[2][0] != "s" or len(node[2][1]) > 2:
        return None
    unit = read_unit(node[2][1])
    return Value(node[1], unit) if unit is not None and unit.dimension == gold.dimension else None


def _percents(gold: Value, gold_unit: Unit, other: Value, other_unit: Unit, rules: Rules) -> bool:
    """50 % equals 50 % and 0.5. A reference that lacks its % (MATH drops it) is a number of percent, if it is a whole
    number or above 1: 0.5 is not 0.5 %."""
    alike = gold_unit.dimension == other_unit.dimension
    if gold_unit.words and other_unit.words and not alike:
        return False
    is_stated = gold_unit.dimension == "percent"
    scaled = ("*" if is_stated else "/", other.node, ("n", Fraction(100)))
    if not alike and equal_nodes([(gold.node, scaled)], rules):
        return True
    value = rational(gold.node)
    is_count = value is not None and (value.denominator == 1 or abs(value) > 1)
    return (is_stated or is_count) and equal_nodes([(gold.node, other.node)], rules)


def equal_nodes(pairs: Sequence[tuple[Node, Node]], rules: Rules) -> bool:
    """Whether the expressions of each pair have the same value, with one renaming of parameters for all pairs."""
    unequal = [pair for pair in pairs if not _equal(*pair, rules)]
    if not unequal or any(INFINITY in walk(side) for pair in unequal for side in pair):
        return not unequal
    renamings = _renamings(*unequal[0], rules) if all(symbols(one) | symbols(two) for one, two in unequal) else ()
    return any(all(same(one, substituted(two, by), rules.work) for one, two in pairs) for by in renamings)


def _equal(gold: Node, other: Node, rules: Rules) -> bool:
    if gold == other or INFINITY in (gold, other, gold[1], other[1]):
        return gold == other
    return bool(same(gold, other, rules.work)) or (not symbols(gold) | symbols(other) and _near(gold, other, rules))


def _renamings(gold: Node, other: Node, rules: Rules) -> Iterator[Mapping[str, Node]]:
    """What the letters of `other` may stand for if it is to equal `gold`: parameters and constants by other names."""
    ours, theirs = symbols(gold), symbols(other)
    if "_" in theirs and not ours:  # 3 modulo 5 for the reference 3
        yield {"_": ("n", Fraction(0))}
    elif ours <= rules.wholes | {"_"} or (PI in walk(gold) and ours | theirs <= {"k", "m", "n"}):
        yield from () if theirs & {"x", "y", "z"} else _shifted(gold, other, rules.work)
    elif ours & _VARIABLES:
        yield from _with_constants(gold, other, rules.work)


def _near(gold: Node, other: Node, rules: Rules) -> bool:
    """Equal within the row's tolerance, or rounded to the digits of a reference that the row calls rounded; else the
    answer 1587/52 to 30.52, or 0.0833333333333333 to 1/12, but not 3.14 to pi, nor 0.25 to the decimal 249/1000."""
    if not (rules.tolerances or rules.last_place or rules.their_last_place):
        return False
    stated, value = approximate(gold, None, rules.work), approximate(other, None, rules.work)
    if stated is None or value is None:
        return False
    difference = abs(value - stated)
    if rules.tolerances:
        return difference <= rules.tolerances[0]
    if difference * 2 <= rules.last_place and (_is_endless(value) or not rules.is_exact):
        return True
    return _is_endless(stated) and difference <= rules.their_last_place


def _is_endless(value: Fraction) -> bool:
    """Whether no decimal equals it. An irrational number is a double here, with a power of two as its denominator."""
    rest = value.denominator
    while rest % 5 == 0:
        rest //= 5
    return rest & (rest - 1) != 0 or rest >= 2**30


def _shifted(gold: Node, other: Node, work: WorkLimit) -> Iterator[Mapping[str, Node]]:
    """The parameter of `other` by another name, shifted by a whole number, or reversed, if both sides are linear in one
    parameter: n pi, k pi and (1 - k) pi are the same numbers for whole k.

    Nothing if both have the same name other than k, since it need not be a parameter: if (n - 2) pi is the sum of a
    polygon's angles, (n - 1) pi is another number.
    """
    ours, theirs = symbols(gold), symbols(other)
    if not len(ours) == len(theirs) == 1 or (ours == theirs and ours != {"k"}):
        return
    (mine,), (name,) = ours, theirs
    pairs = ((node, letter, at) for node, letter in ((gold, mine), (other, name)) for at in (0, 1))
    ends: list[Any] = [approximate(node, {letter: Fraction(at)}, work) for node, letter, at in pairs]
    start, end, other_start, other_end = (math.nan if value is None else value for value in ends)
    step = end - start
    if math.isnan(step + other_end - other_start):
        return
    back = -1 if step * (other_end - other_start) < 0 else 1
    shift = back * round((start - other_start) / step) if step else 0
    if not shift or mine in "k_" or abs(start) < abs(step):
        yield {name: ("+", ("*", ("n", Fraction(back)), ("s", mine)), ("n", Fraction(shift)))}


def _with_constants(gold: Node, other: Node, work: WorkLimit) -> Iterator[Mapping[str, Node]]:
    """Constants of integration: x^2 + k for the reference x^2 + C, (x + 1)^2 + C for x^2 + 2x + C, A e^x for C e^x, and
    A, B or c_1, c_2 for C_1, C_2. In C x + 1, C is no such constant, since only some of its values may be meant."""
    ours, theirs = symbols(gold), symbols(other)
    missing, added = ours - theirs, theirs - ours
    is_swapped = missing == {name.swapcase() for name in added} and all(map(_CONSTANT.fullmatch, added))
    if missing and is_swapped and (missing != {"c"} or len(ours) == 2):  # ax^2 + bx + c has no constant of integration
        yield {name: ("s", name.swapcase()) for name in added}
    if len(missing) != len(added) or len(added) > 3 or not all(map(_FREE.fullmatch, added)):
        return
    if len(missing) > 1 and any(all(map(_CONSTANT.fullmatch, names)) for names in (missing, added)):
        yield from (dict(zip(added, (("s", name) for name in order), strict=True)) for order in permutations(missing))
    elif "C" in ours and missing <= {"C"} and not {"A", "B"} & ours:
        (name,) = added or {"C"}
        none, constant = ("n", Fraction(0)), ("s", "C")
        start, other_start = substituted(gold, {"C": none}), substituted(other, {name: none})
        difference: Node = ("+", start, ("-", other_start))
        elsewhere = substituted(difference, {name: ("s", f"{name}'") for name in symbols(difference) - _GIVEN})
        if same(start, none, work):
            if any(part[0] == "^" and symbols(part[2]) for part in walk(gold)):  # in C x and k x, C and k may be given
                yield {name: constant}
        elif same(gold, ("+", start, constant), work) and same(difference, elsewhere, work):
            yield {name: ("+", constant, difference)}
