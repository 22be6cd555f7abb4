"""Whether two trees are equal, by proof where possible, else by their values; and whether two values are: with units,
percent, tolerance and rounding, parameters by other names.

- Rational functions (also in pi, e and i) and trees with steps are proved equal modulo a secret prime (`field.py`).
- Others are compared at secret points, to which no answer can be made to fit, exactly or to 40 digits or more.

None means undecided, which is not treated as equal.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from dppo_megatron.rewards.math import evaluate, regex
from dppo_megatron.rewards.math.answers import INFINITY, PI, Node, Value, substituted, symbols, walk
from dppo_megatron.rewards.math.evaluate import Evaluation, Point, WorkLimit, approximate, rational
from dppo_megatron.rewards.math.field import drawn, proved_equal, steps
from dppo_megatron.rewards.math.parse import DEGREE
from dppo_megatron.rewards.math.units import Unit, compatible, read_unit

_WHOLE = frozenset("nmkljNMK")
_MAX_NAMES = 12
_MAX_PERIOD = 60
_PERIODIC = frozenset(["gcd", "lcm", "mod", "floor"])
_SIZES = (1, 1, 4, 1, 1, 1, 30, 3, 300, 10**6, 10**5, 10**7, 10**7)
_NEGATIVE = {1: "one", 4: "all", 7: "one", 10: "one", 12: "all"}  # index of a size -> variables that are negative there
_ENOUGH = 3  # points at which two functions have to be equal; four times as many for whole numbers
_DIGITS = (60, 120, 250, 500, 1000, 2000)  # few, as each has constants of its own, which take milliseconds once
_NO_UNIT = Unit("")
_CONSTANT = regex(r"[Cc](?:_\d)?")
_ASKED = regex(r"\b(?:[Hh]ow many|[Ii]n(?! how)) ((?:(?:square|cubic) )?[a-z]+(?: (?:per|an?) [a-z]+|/[a-z]+)?)")
_WANTED = regex(  # of the answer; a pound may be money, a degree a temperature
    r"\b(?i:how many(?=[^.!]{0,300}\?)|what(?= percent)|(?:what|how|find|compute|calculate|determine|express|give)\b"
    r"[^.?!]{0,300}?\bin(?= [a-z /]{0,40}(?:[.?]|,? (?:to|round)))) (?!pound|degree|unit|in\b)"
    r"((?:(?:square|cubic) )?[a-z]+(?: per [a-z]+|/[a-z]+)?)"
)
_OF_SOLUTIONS = regex(r"(?i:molar|concentration|solubility)|\bM\b|\bmol")
_FREE = regex(r"[ABCDKkc]|[Cc]_\d")
_GIVEN = frozenset("abcdgkmnC")
_VARIABLES = frozenset("xyztuvw")


def same(gold: Node, other: Node, work: WorkLimit | None = None) -> bool | None:
    """Whether the trees are equal; None if that is undecided, which also sets `work.has_doubt`."""
    work = work or WorkLimit()
    try:
        verdict = gold == other or _same(gold, other, work)
    except (evaluate.TooBig, evaluate.Undefined, ArithmeticError, RecursionError, ValueError):
        verdict = None
    work.has_doubt |= verdict is None
    return verdict


def _same(gold: Node, other: Node, work: WorkLimit) -> bool | None:
    names = sorted(symbols(gold) | symbols(other))
    if gold[0] == other[0] == "n" or INFINITY in (gold, other, gold[1], other[1]):
        return False
    found = steps(("+", gold, other))
    verdict = proved_equal(gold, other, bool(found), work)
    if verdict is not None:
        return verdict
    if not names:
        return {"equal": True, "different": False}.get(_at(gold, other, {}, work))
    if found:
        is_discrete = found <= {"floor", "mod"} and _WHOLE.issuperset(names)
        return _same_wholes(gold, other, names, work) if is_discrete else None
    return _same_functions(gold, other, names, work) if len(names) <= _MAX_NAMES else None


def _same_functions(gold: Node, other: Node, names: list[str], work: WorkLimit) -> bool | None:
    """Compare by values, but not where two or more variables are negative, as roots of products and products of roots
    differ there, nor where the reference takes the root or logarithm of a negative number, if enough are left."""
    has_roots = any(map(_is_branched, walk(("+", gold, other))))
    inside = [part[2] for part in walk(gold) if part[:2] == ("f", "ln")]
    powers = [part for part in walk(gold) if part[0] == "^" and part[2][0] == "n"]
    inside += [part[1] for part in powers if part[2][1].denominator % 2 == 0]
    # others are not rational; first, as it ends at the next root: of 200 nested ones each has all further ones inside
    inside = [part for part in inside if not any(map(_is_branched, walk(part))) and symbols(part)]
    points = [point for point in _points(names) if not has_roots or sum(value < 0 for value in point.values()) < 2]
    near = _points(names, range(2, 30)) if inside else ()  # between 1 and 3 for (x - 3)\sqrt{x - 1}
    within = [point for point in (*points, *near) if all((rational(part, point, work) or 1) > 0 for part in inside)]
    outcomes = _outcomes(gold, other, within, work)
    if inside and "different" not in outcomes and outcomes.count("equal") < _ENOUGH:
        outcomes = _outcomes(gold, other, points, work)
    if "different" in outcomes:
        return _WHOLE.issuperset(names) and _same_wholes(gold, other, names, work)
    if outcomes.count("equal") >= _ENOUGH:
        return True
    return _same_wholes(gold, other, names, work) if "whole" in outcomes else None


def _is_branched(node: Node) -> bool:
    if node[0] != "^":
        return node[0] == "f" and node[1] in ("ln", "arcsin", "arccos")
    kind, power = node[2][:2]
    return bool(kind != "n" or power.denominator != 1)


def _points(names: Sequence[str], sizes: Sequence[int] = _SIZES) -> Iterator[dict[str, Fraction]]:
    """Secret points of these sizes: positive ones, and in `_SIZES` some with one or all coordinates negative."""
    numbers = drawn(f"{names} {len(sizes)}")
    for turn, size in enumerate(sizes):
        signs = _NEGATIVE.get(turn, "") if sizes is _SIZES else ""
        below: list[Sequence[str]] = [names if signs == "all" else ()]
        if signs == "one":  # each in turn: else the secret decides whether \sqrt{s(s - a)} is \sqrt s\sqrt{s - a}
            below = [[name] for name in names]
        for negative in below:
            point = {name: Fraction(numbers.randrange(1, 997), 997) * size for name in names}
            yield {name: -value if name in negative else value for name, value in point.items()}


def _same_wholes(gold: Node, other: Node, names: Sequence[str], work: WorkLimit) -> bool | None:
    """Whether they are equal for whole numbers: small ones in a row, large ones, and a period of periodic functions."""
    sums = [part for node in walk(("+", gold, other)) if node[0] == "big" for part in walk(node)]
    if len(names) > 3 or ("c", "i") in sums or ("c", "pi") in sums:  # a sum of 17 cosines is 0 but at every 17th n
        return None
    numbers = drawn(f"whole {names}")
    points: list[Point] = [dict.fromkeys(names, Fraction(both)) for both in range(1, 13)]
    orders = [*enumerate([*itertools.permutations(names)] * 4)]
    most = 40 if sums else 500  # a sum of n binomials can be carried out at n = 300, and not at 450
    start = sorted(numbers.sample(range(max(13, most // 4), most - len(orders)), len(names)))
    points += [{name: Fraction(at + turn) for name, at in zip(order, start, strict=True)} for turn, order in orders]
    num_near = len(points)
    bounds = (*(12,) * 12 * (len(names) - 1), 30, 90, 300, 1000, 10**6, 10**13, 10**20)
    points += [{name: Fraction(numbers.randrange(1, bound)) for name in names} for bound in bounds]
    points += [{name: Fraction(-numbers.randrange(5, bound)) for name in names} for bound in (30, 10**4, 10**9)]
    periodic = {node for node in walk(("+", gold, other)) if node[0] == "f" and node[1] in _PERIODIC and symbols(node)}
    if periodic:  # gcd(n, 1009) - 1 is 0 at nearly every point
        parts = [part for node in periodic for part in walk(node)]
        period = math.prod(abs(part[1].numerator) * part[1].denominator for part in parts if part[0] == "n" and part[1])
        if len(names) > 1 or period > _MAX_PERIOD or not all(map(_has_period, parts)):
            return None
        far = numbers.randrange(10**12)
        points += [{names[0]: Fraction(start + whole)} for start in (12, far) for whole in range(1, period + 1)]
    outcomes = _outcomes(gold, other, points, work)
    if outcomes[-1] == "different":
        return False
    # the first 12 points are not secret: trees with values at those alone are not accepted
    if "equal" not in outcomes[12:num_near] or "too big" in outcomes[12:num_near]:
        return None
    return outcomes.count("equal") >= 4 * _ENOUGH or None


def _has_period(node: Node) -> bool:
    """Whether the period follows from the numbers in the node, if so in its parts: not for floor(1 / (1 + n^2)), which
    is 0 but at one point."""
    others = [part for part in node[2:] if part[0] != "n"]
    if node[0] == "^":  # not (n/2)^5, whose period is 32
        return not others and all(part[0] in "s+-*^" or (part[0] == "n" and part[1] % 1 == 0) for part in walk(node))
    return node[0] in "ns+-*" or node[:2] == ("f", "floor") or (node[0] == "/" and not others)


def _outcomes(gold: Node, other: Node, points: Iterable[Point], work: WorkLimit) -> list[str]:
    """The outcome at each of the points, up to the first `different`."""
    outcomes = []
    for point in points:
        outcomes.append(_at(gold, other, point, work))
        if outcomes[-1] == "different":
            break
    return outcomes


def _at(gold: Node, other: Node, values: Point, work: WorkLimit) -> str:
    """`equal`, `different`, `whole` (defined for whole numbers only), `too big` or `unknown`. `equal` is checked again
    with 40 digits more than the longest fraction has that was rounded."""
    bits = 0
    for digits in _DIGITS:
        if digits < 40 + bits // 3:
            continue
        # at most half: e^{5t} at t = 290 takes 2000 digits, and the other points need operations too
        allowed = work.left // 2 if values else work.left
        part = WorkLimit(allowed)
        try:
            found, bits = _compared(gold, other, values, digits, part)
        except evaluate.Discrete:
            return "whole"
        except (evaluate.TooBig, OverflowError):
            return "too big"
        finally:
            work.left -= allowed - part.left
        if found != "equal" or digits >= 40 + bits // 3:
            return found
    return "too big"


def _compared(gold: Node, other: Node, values: Point, digits: int, work: WorkLimit) -> tuple[str, int]:
    """The outcome at `digits` digits, and the bits of the longest fraction that was rounded."""
    ours, theirs = (Evaluation(values, work, digits) for _ in range(2))
    left, right = _value(ours, gold), _value(theirs, other)
    if left is None or right is None:
        # n!/(n-2)! is n(n-1) but at n = 1. With letters other than n, k, ... only the reference may be undefined.
        is_outside = ours.is_outside or (theirs.is_outside and _WHOLE.issuperset(values))
        return "unknown" if left is right or not values or is_outside else "different", 0
    if isinstance(left, Fraction) and isinstance(right, Fraction):  # with bits, since a floor may be of a rounded value
        return "equal" if left == right else "different", max(ours.bits, theirs.bits)
    left, right = ours.lift(left), theirs.lift(right)
    bits, tiny = max(ours.bits, theirs.bits), ours.tiny * max(abs(left), abs(right), ours.largest, theirs.largest)
    if abs(left - right) <= tiny:
        return "equal", bits
    is_branch = (ours.has_branch or theirs.has_branch) and min(abs(left.imag), abs(right.imag)) > tiny
    return "unknown" if is_branch else "different", bits


def _value(at: Evaluation, node: Node) -> Any:
    """The value; None if there is none."""
    try:
        return at.of(node)
    except (evaluate.Undefined, ZeroDivisionError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Rules:
    """How a reference is compared, by its row or by the digits of both sides."""

    tolerances: tuple[Fraction, ...] = ()  # largest absolute errors: one for each item, or one for all
    unit: Unit | None = None  # the reference's, if it does not state one itself
    # 1 in the last digit of a rounded reference; if `is_exact`, for answers only that no decimal equals
    last_place: Fraction = Fraction(0)
    is_exact: bool = True
    their_last_place: Fraction = Fraction(0)  # of a decimal of twelve digits or more, at most in the fifteenth digit
    wholes: frozenset[str] = frozenset()  # letters of the reference that stand for any whole number
    free: frozenset[str] = frozenset()  # those that a clause of the reference says to be any number
    problem: str = ""  # its letters have a meaning: none of them is a parameter
    work: WorkLimit = field(default_factory=WorkLimit, compare=False)  # left for all comparisons of the grading

    def item(self, index: int) -> Rules:
        """The rules for one item of a list."""
        return self if len(self.tolerances) < 2 else replace(self, tolerances=self.tolerances[index : index + 1])

    def exact(self) -> Rules:
        """The rules for parts that have to be exactly equal: ends of intervals, cells of matrices."""
        return Rules(wholes=self.wholes, free=self.free, problem=self.problem, work=self.work)


def equal_values(gold: Value, other: Value, rules: Rules) -> bool:
    """Whether two values with their units are equal; an answer without a unit is taken in the reference's."""
    other_unit = other.unit or _NO_UNIT
    gold_unit = gold.unit or rules.unit or _asked(rules.problem, other_unit) or _NO_UNIT
    if gold_unit.dimension == "percent" or other_unit.dimension == "percent":
        return _percents(gold, gold_unit, other, other_unit, rules)
    for angle, plain in ((gold, other), (other, gold)):  # 90 degrees and pi/2
        in_radians = plain.unit.dimension == "radian" if plain.unit else PI in walk(plain.node)
        if angle.unit is not None and angle.unit.dimension == "angle" and in_radians:
            return bool(same(("*", angle.node, DEGREE), plain.node, rules.work))
    if gold_unit.dimension and other.unit is None and (measure := _with_unit(other.node, gold_unit)):
        return equal_values(gold, measure, rules)
    stated = gold.unit.words if gold.unit else gold_unit.dimension
    is_molar = other_unit.words == "m" and "mole" in other_unit.dimension
    if is_molar and not (stated or _OF_SOLUTIONS.search(rules.problem)):
        return False  # 5 M may be five million
    if stated and other_unit.words:
        if not compatible(gold_unit, other_unit):
            return False
        if gold_unit.dimension == other_unit.dimension and gold_unit.factor != other_unit.factor:
            in_gold_unit = ("*", other.node, ("n", other_unit.factor / gold_unit.factor))
            return equal_nodes([(gold.node, in_gold_unit)], rules)
    return equal_nodes([(gold.node, other.node)], rules)


def _asked(problem: str, unit: Unit) -> Unit | None:
    """The one unit in which the problem asks for what `unit` measures (`how many square feet`, `in cents`), if it is
    another; or what it asks for, if that is something else: years, not months."""
    if not problem or not (unit.dimension or unit.words.endswith("s")):
        return None
    asked, wanted = _asked_in(problem)
    if not unit.dimension:  # leagues, not miles; but full hours are hours
        words = unit.words.replace("-", " ").split()
        named = [one for one in wanted if one and one.dimension not in ("", "percent", "money")]
        is_asked = any(one.words in words for one in named) or re.search(rf"ow many [^.?!]*{words[-1]}", problem)
        return None if is_asked else next(iter(named), None)
    alike = {named.factor: named for named in asked if named is not None and named.dimension == unit.dimension}
    if alike:
        return alike.popitem()[1] if len(alike) == 1 and unit.factor not in alike else None
    others = {named.dimension: named for named in wanted if named is not None and named.dimension}
    return None if others.keys() & {*unit.dimension.split()} else next(iter(others.values()), None)


@functools.lru_cache(maxsize=64)  # a problem is searched once, and not for each pair of two lists' items
def _asked_in(problem: str) -> list[list[Unit | None]]:
    return [[*map(read_unit, names.findall(problem))] for names in (_ASKED, _WANTED)]


def _with_unit(node: Node, gold: Unit) -> Value | None:
    """5m or 5mL without \\text, which were read as products, with their unit if it has the reference's dimension."""
    letters = ""
    while node[0] == "*" and node[2][0] == "s":
        node, letters = node[1], node[2][1] + letters
    unit = read_unit(letters) if letters else None
    return Value(node, unit) if unit is not None and unit.dimension == gold.dimension else None


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
    differing = (pair for pair in pairs if not same(*pair, rules.work))
    unequal = [(one, two) for one, two in differing if symbols(one) | symbols(two) or not _near(one, two, rules)]
    if not unequal or any(INFINITY in walk(side) for pair in unequal for side in pair):
        return not unequal
    renamings = _renamings(*unequal[0], rules) if all(symbols(one) | symbols(two) for one, two in unequal) else ()
    return any(all(same(one, substituted(two, by), rules.work) for one, two in pairs) for by in renamings)


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
        for order in itertools.permutations(missing):
            yield {name: ("s", by) for name, by in zip(added, order, strict=True)}
    elif "C" in ours and missing <= {"C"} and not {"A", "B"} & ours:
        (name,) = added or {"C"}
        none, constant = ("n", Fraction(0)), ("s", "C")
        start, other_start = substituted(gold, {"C": none}), substituted(other, {name: none})
        difference: Node = ("+", start, ("-", other_start))
        # between two places, so that only the reference's logarithms decide where
        elsewhere: dict[str, Node] = {name: ("s", f"{name}'") for name in symbols(difference) - _GIVEN}
        ours_grows, theirs_grows = (("+", side, ("-", substituted(side, elsewhere))) for side in (start, other_start))
        if same(gold, ("+", start, constant), work) and same(ours_grows, theirs_grows, work):
            yield {name: ("+", constant, difference)}
        elif any(part[0] == "^" and symbols(part[2]) for part in walk(gold)):  # in C x and k x, C and k may be given
            yield {name: constant}
