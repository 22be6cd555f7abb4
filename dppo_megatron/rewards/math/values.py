"""Whether two numbers or expressions are the same: units, percent, tolerance and rounding."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from dppo_megatron.rewards.math.answers import ANY_WHOLE, INFINITY, PI, Node, Value, substituted, symbols, walk
from dppo_megatron.rewards.math.equality import same
from dppo_megatron.rewards.math.evaluate import WorkLimit, approximate, rational
from dppo_megatron.rewards.math.parse import DEGREE
from dppo_megatron.rewards.math.patterns import regex
from dppo_megatron.rewards.math.units import Unit, compatible, read_unit

_NO_UNIT = Unit("")
_CONSTANTS = frozenset(["K", "k", "C_1", "c_1", "C_0"])
_CONSTANT = regex(r"[Cc](?:_\d)?")
_VARIABLES = frozenset("xyztuvw")


@dataclass(frozen=True, slots=True)
class Rules:
    """What the row says about how its reference is to be compared."""

    tolerances: tuple[Fraction, ...] = ()
    """Largest absolute errors, of each item or of all."""
    unit: Unit | None = None
    """Of a reference that does not state it."""
    last_place: Fraction = Fraction(0)
    """What one more is worth in the last digit of a reference that is rounded; where `is_exact`, of one that may be, if
    the answer is an exact form that no decimal equals."""
    is_exact: bool = True
    their_last_place: Fraction = Fraction(0)
    """Of an answer that is a decimal of twelve digits or more; of more than fifteen, in the fifteenth."""
    context: str = ""
    """Of the problem and its reference, in lower case: what words may be units."""
    work: WorkLimit = field(default_factory=WorkLimit, compare=False)
    """Operations that are left for all of the grading's comparisons."""

    def item(self, index: int) -> Rules:
        """The rules for one item of a list."""
        if len(self.tolerances) < 2:
            return self
        return replace(self, tolerances=self.tolerances[index : index + 1])

    def exact(self) -> Rules:
        """For what has to be equal whatever the row says: ends of intervals, cells of matrices."""
        return Rules(context=self.context, work=self.work)


def equal_values(gold: Value, other: Value, rules: Rules) -> bool:
    """Whether two values with their units are equal; the reference's unit counts where the answer states none."""
    gold_unit = gold.unit or rules.unit or _NO_UNIT
    other_unit = other.unit or _NO_UNIT
    if not other_unit.is_noun and not _may_count(other, rules.context):
        rules.work.has_doubt = True
        return False
    if gold_unit.dimension == "percent" or other_unit.dimension == "percent":
        return _percents(gold, gold_unit, other, other_unit, rules)
    for angle, plain in ((gold, other), (other, gold)):  # 90 degrees and pi/2
        in_radians = plain.unit.dimension == "radians" if plain.unit else PI in walk(plain.node)
        if angle.unit is not None and angle.unit.dimension == "angle" and in_radians:
            return bool(same(("*", angle.node, DEGREE), plain.node, rules.work))
    if gold_unit.dimension and other.unit is None and (written := _with_unit(other.node, gold_unit)):
        return equal_values(gold, written, rules)
    stated = gold.unit.words if gold.unit else gold_unit.dimension
    if stated and other_unit.words:
        if not compatible(gold_unit, other_unit):
            return False
        if gold_unit.dimension == other_unit.dimension and gold_unit.factor != other_unit.factor:
            in_gold_unit = ("*", other.node, ("n", other_unit.factor / gold_unit.factor))
            return equal_nodes(gold.node, in_gold_unit, rules)
    return equal_nodes(gold.node, other.node, rules)


def _may_count(value: Value, context: str) -> bool:
    """Whether words that are no plural are a unit still: those of the problem, and what there is one of."""
    words = re.findall("[a-z]+", value.unit.words if value.unit else "")
    if words[-1].endswith(("ed", "ly", "ing", "ble")):
        return False
    if value.node[0] == "n" and 0 < abs(value.node[1]) <= 1:
        return (len(words) < 4 and min(map(len, words)) > 2) or words[0] == "of"
    return all(re.search(rf"(?<![a-z]){word}", context) for word in words)


def _with_unit(node: Node, gold: Unit) -> Value | None:
    """5m and 0.05 m without \\text, which read as products, where the reference measures the same thing."""
    if node[0] != "*" or node[2][0] != "s" or len(node[2][1]) > 2:
        return None
    unit = read_unit(node[2][1])
    return Value(node[1], unit) if unit is not None and unit.dimension == gold.dimension else None


def _percents(gold: Value, gold_unit: Unit, other: Value, other_unit: Unit, rules: Rules) -> bool:
    """50 % is 50 % and 0.5. A reference that should say % and does not (MATH drops it) is the number of percent, but
    0.5 is not 0.5 %."""
    alike = gold_unit.dimension == other_unit.dimension
    if gold_unit.words and other_unit.words and not alike:
        return False
    is_stated = gold_unit.dimension == "percent"
    scaled = ("*" if is_stated else "/", other.node, ("n", Fraction(100)))
    if not alike and equal_nodes(gold.node, scaled, rules):
        return True
    value = None if symbols(gold.node) else rational(gold.node)
    is_count = value is not None and (value.denominator == 1 or abs(value) > 1)
    return (is_stated or is_count) and equal_nodes(gold.node, other.node, rules)


def equal_nodes(gold: Node, other: Node, rules: Rules) -> bool:
    """Whether two parsed expressions have the same value."""
    if gold == other:
        return True
    if INFINITY in (gold, other, gold[1], other[1]):
        return False
    verdict, names = same(gold, other, rules.work), symbols(gold) | symbols(other)
    if verdict is not False or not names:
        return bool(verdict) or (not names and _near(gold, other, rules))
    if ANY_WHOLE in walk(other) and not symbols(gold):  # 3 modulo 5, where that is asked for
        return bool(same(gold, substituted(other, {"_": ("n", Fraction(0))}), rules.work))
    if (PI in walk(gold) and names <= {"k", "m", "n"}) or ANY_WHOLE in walk(gold):
        turned = parameter_turned(gold, other, rules.work)
    else:
        turned = _with_constant(gold, other, rules.work)
    return turned is not None and bool(same(gold, turned, rules.work))


def _near(gold: Node, other: Node, rules: Rules) -> bool:
    """Within the row's tolerance; rounding to the reference at the digits that the row says are right; 30.52 for the
    exact 1587/52 or 0.0833333333333333 for 1/12, but not 3.14 for pi, nor 0.25 for the decimal 249/1000."""
    if not (rules.tolerances or rules.last_place or rules.their_last_place):
        return False
    stated, value = approximate(gold, None, rules.work), approximate(other, None, rules.work)
    if stated is None or value is None:
        return False
    apart = abs(value - stated)
    if rules.tolerances:
        return apart <= rules.tolerances[0]
    if apart * 2 <= rules.last_place and (_is_endless(value) or not rules.is_exact):
        return True
    return _is_endless(stated) and apart <= rules.their_last_place


def _is_endless(value: Fraction) -> bool:
    """Whether no decimal equals it. Doubles, which stand for irrational numbers, have a power of two below the line."""
    rest = value.denominator
    while rest % 5 == 0:
        rest //= 5
    return rest & (rest - 1) != 0 or rest >= 2**30


def parameter_turned(gold: Node, other: Node, work: WorkLimit) -> Node | None:
    """`other` with its one parameter replaced so that it may be `gold`, both linear in theirs: by another name, a whole
    number further, or backwards, since n pi, k pi and (1 - k) pi are the same numbers for whole k.

    None for the same name, if it need not be a parameter's: where (n - 2) pi is the sum of a polygon's angles,
    (n - 1) pi is another number.
    """
    ours, theirs = symbols(gold), symbols(other)
    if not len(ours) == len(theirs) == 1 or (ours == theirs and ours != {"k"}):
        return None
    (mine,), (name,) = ours, theirs
    pairs = ((node, letter, at) for node, letter in ((gold, mine), (other, name)) for at in (0, 1))
    ends: list[Any] = [approximate(node, {letter: Fraction(at)}, work) for node, letter, at in pairs]
    start, end, other_start, other_end = (math.nan if value is None else value for value in ends)
    step = end - start
    if math.isnan(step + other_end - other_start):
        return None
    back = -1 if step * (other_end - other_start) < 0 else 1
    shift = back * round((start - other_start) / step) if step else 0
    if shift and mine != "k" and abs(start) >= abs(step):
        return None
    return substituted(other, {name: ("+", ("*", ("n", Fraction(back)), ("s", mine)), ("n", Fraction(shift)))})


def _with_constant(gold: Node, other: Node, work: WorkLimit) -> Node | None:
    """x^2 + k as the reference x^2 + C has it, 2cx as 2Cx, and c_1, c_2 as C_1, C_2; None where no constant of
    integration, which is added to a function of a variable, has another letter."""
    ours, theirs = symbols(gold), symbols(other)
    missing, added = ours - theirs, theirs - ours
    if not missing or not ours & _VARIABLES:
        return None
    is_swapped = missing == {name.swapcase() for name in added} and all(map(_CONSTANT.fullmatch, added))
    if is_swapped and (missing != {"c"} or len(ours) == 2):  # ax^2 + bx + c has no constant of integration
        return substituted(other, {name: ("s", name.swapcase()) for name in added})
    one, constant = ("n", Fraction(1)), ("s", "C")
    if missing != {"C"} or len(added) != 1 or not added <= _CONSTANTS:
        return None
    is_added = same(("+", gold, one), substituted(gold, {"C": ("+", constant, one)}), work)
    return substituted(other, dict.fromkeys(added, constant)) if is_added else None
