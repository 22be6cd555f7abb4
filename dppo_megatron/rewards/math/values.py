"""Whether two numbers or expressions are the same: units, percent, tolerance and rounding.

Every comparison says True, False, or None where it cannot know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from dppo_megatron.rewards.math.answers import INFINITY, Node, Value, substituted, symbols
from dppo_megatron.rewards.math.equality import same
from dppo_megatron.rewards.math.evaluate import WorkLimit, approximate, rational
from dppo_megatron.rewards.math.units import Unit, compatible, read_unit

Verdict = bool | None


@dataclass(frozen=True, slots=True)
class Rules:
    """What the row says about how its reference is to be compared."""

    tolerances: tuple[Fraction, ...] = ()
    """Largest absolute errors, of each item or of all."""
    digits: int = 0
    """Significant digits to which the reference is rounded; 0 where it is exact."""
    unit: Unit | None = None
    """Of a reference that does not state it."""
    decimals: int = 0
    """Places to which a decimal reference may be rounded, if the answer is an exact form that no decimal equals."""
    their_digits: int = 0
    """Significant digits of an answer that is a decimal."""
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


_NO_UNIT = Unit("")


def equal_values(gold: Value, other: Value, rules: Rules) -> Verdict:
    """Whether two values with their units are equal; the reference's unit counts where the answer states none."""
    gold_unit = gold.unit or rules.unit or _NO_UNIT
    other_unit = other.unit or _NO_UNIT
    if not other_unit.is_noun and not _may_count(other, rules.context):
        return None
    if gold_unit.dimension == "percent" or other_unit.dimension == "percent":
        return _percents(gold, gold_unit, other, other_unit, rules)
    if {gold_unit.dimension, other_unit.dimension} == {"angle", "radians"}:
        degrees, radians = (gold, other) if gold_unit.dimension == "angle" else (other, gold)
        return same(("deg", degrees.node), radians.node, rules.work)
    if gold_unit.dimension and other.unit is None and (written := _with_unit(other.node, gold_unit)):
        return equal_values(gold, written, rules)
    stated = gold.unit.words if gold.unit else gold_unit.dimension
    if stated and other_unit.words:
        if not compatible(gold_unit, other_unit):
            return False
        if gold_unit.dimension == other_unit.dimension and gold_unit.factor != other_unit.factor:
            return equal_nodes(_times(gold.node, gold_unit), _times(other.node, other_unit), rules)
    verdict = equal_nodes(gold.node, other.node, rules)
    if verdict:
        return True
    for angle, plain in ((gold, other), (other, gold)):  # 90 degrees and pi/2
        if angle.unit is not None and angle.unit.words == "degrees" and plain.unit is None and _has_pi(plain.node):
            return same(("deg", angle.node), plain.node, rules.work)
    return verdict


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


def _percents(gold: Value, gold_unit: Unit, other: Value, other_unit: Unit, rules: Rules) -> Verdict:
    """50 % is 50 % and 0.5. A reference that should say % and does not (MATH drops it) is the number of percent, but
    0.5 is not 0.5 %."""
    percent = ("n", Fraction(100))
    if gold_unit.dimension == other_unit.dimension:
        return equal_nodes(gold.node, other.node, rules)
    if gold_unit.words and other_unit.words:
        return False
    if gold_unit.dimension == "percent":
        return any_of(
            [equal_nodes(gold.node, other.node, rules), equal_nodes(gold.node, ("*", other.node, percent), rules)]
        )
    as_fraction = equal_nodes(gold.node, ("/", other.node, percent), rules)
    value = rational(gold.node) if not symbols(gold.node) else None
    if value is not None and (value.denominator == 1 or abs(value) > 1):
        return any_of([as_fraction, equal_nodes(gold.node, other.node, rules)])
    return as_fraction


def equal_nodes(gold: Node, other: Node, rules: Rules) -> Verdict:
    """Whether two parsed expressions have the same value."""
    if gold == other:
        return True
    if _infinite_sign(gold) or _infinite_sign(other):
        return _infinite_sign(gold) == _infinite_sign(other)
    verdict = same(gold, other, rules.work)
    if verdict is not True and not symbols(gold) | symbols(other):
        return True if _near(gold, other, rules) else verdict
    if verdict is False and _has_pi(gold) and symbols(gold) | symbols(other) <= {"k", "m", "n"}:
        turn = parameter_turn(gold, other, rules.work)
        verdict = same(gold, substituted(other, *turn), rules.work) if turn else False
    if verdict is False and (constant := _with_constant(gold, other, rules.work)) is not None:
        verdict = same(gold, constant, rules.work)
    return verdict


def _near(gold: Node, other: Node, rules: Rules) -> bool:
    """Within the row's tolerance; rounding to the reference at the digits that the row says are right; 30.52 for the
    exact 1587/52 or 0.0833333333333333 for 1/12, but not 3.14 for pi, nor 0.25 for the decimal 249/1000."""
    if not (rules.tolerances or rules.digits or rules.decimals or rules.their_digits >= _FULL_PRECISION):
        return False
    stated, value = approximate(gold, None, rules.work), approximate(other, None, rules.work)
    if stated is None or value is None:
        return False
    apart = abs(value - stated)
    if rules.tolerances:
        return apart <= rules.tolerances[0]
    if rules.digits:
        return apart * 2 <= _last_place(stated, rules.digits)
    if rules.decimals:
        return _is_endless(value) and apart * 2 * 10**rules.decimals < 1
    return _is_endless(stated) and apart <= _last_place(value, min(rules.their_digits, 15))


_FULL_PRECISION = 12


def _last_place(value: Fraction, digits: int) -> Fraction:
    """What one more is worth in the last of so many significant digits."""
    return Fraction(10) ** (math.floor(math.log10(abs(value))) + 1 - digits) if value else Fraction(0)


def _is_endless(value: Fraction) -> bool:
    """Whether no decimal equals it. Doubles, which stand for irrational numbers, have a power of two below the line."""
    rest = value.denominator
    while rest % 5 == 0:
        rest //= 5
    return rest & (rest - 1) != 0 or rest >= 2**30


def parameter_turn(gold: Node, other: Node, work: WorkLimit) -> tuple[str, Node] | None:
    """How the one parameter of `other` has to be replaced for `other` to be `gold`, both linear in theirs: by another
    name, a whole number further, or backwards, since n pi, k pi and (1 - k) pi are the same numbers for whole k.

    None for the same name, if it need not be a parameter's: where (n - 2) pi is the sum of a polygon's angles,
    (n - 1) pi is another number.
    """
    ours, theirs = symbols(gold), symbols(other)
    if not len(ours) == len(theirs) == 1 or (ours == theirs and ours != {"k"}):
        return None
    (mine,), (name,) = ours, theirs
    ends = [
        approximate(node, {letter: Fraction(at)}, work)
        for node, letter in ((gold, mine), (other, name))
        for at in (0, 1)
    ]
    if None in ends:
        return None
    start, step = ends[0], ends[1] - ends[0]  # type: ignore[operator]
    back = -1 if step * (ends[3] - ends[2]) < 0 else 1  # type: ignore[operator]
    shift = back * round((start - ends[2]) / step) if step else 0  # type: ignore[operator]
    if shift and mine != "k" and abs(start) >= abs(step):  # type: ignore[arg-type, operator]
        return None
    moved = ("+", ("*", ("n", Fraction(back)), ("s", mine)), ("n", Fraction(shift)))
    return name, ("s", mine) if (back, shift) == (1, 0) else moved


_CONSTANTS = frozenset(["c", "K", "k", "C_1", "c_1", "C_0"])
_VARIABLES = frozenset("xyztuvw")


def _with_constant(gold: Node, other: Node, work: WorkLimit) -> Node | None:
    """x^2 + k as the reference x^2 + C has it, and 2cx as 2Cx; None where no constant of integration, which is added to
    a function of a variable, has another letter."""
    ours, theirs = symbols(gold), symbols(other)
    added = theirs - ours
    if ours - theirs != {"C"} or len(added) != 1 or not added <= _CONSTANTS or not ours & _VARIABLES:
        return None
    one, constant = ("n", Fraction(1)), ("s", "C")
    if added == {"c"} or same(("+", gold, one), substituted(gold, "C", ("+", constant, one)), work):
        return substituted(other, next(iter(added)), constant)
    return None


def _infinite_sign(node: Node) -> int:
    return 1 if node == INFINITY else -1 if node == ("-", INFINITY) else 0


def _has_pi(node: Node) -> bool:
    return node == ("c", "pi") or any(isinstance(part, tuple) and _has_pi(part) for part in node[1:])


def _times(node: Node, unit: Unit) -> Node:
    return ("*", node, ("n", unit.factor))


def all_of(verdicts: Sequence[Verdict]) -> Verdict:
    return False if False in verdicts else None if None in verdicts else True


def any_of(verdicts: Sequence[Verdict]) -> Verdict:
    return True if True in verdicts else None if None in verdicts else False
