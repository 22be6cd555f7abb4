"""Families of answers in which one thing is written in several ways: parts, signs, primes, points, asked units."""

from __future__ import annotations

import itertools

import pytest
from support.math_cases import case, check

from dppo_megatron.rewards.math.grader import grade_math

LABELS = [("(a)", "(b)", "(c)"), ("(1)", "(2)", "(3)"), ("(i)", "(ii)", "(iii)")]
BETWEEN = [" ", ", ", "; ", r" \text{ and } ", r"\quad "]
VALUES = ["3", r"\frac{1}{2}", "-7", "(1,2)", r"\sqrt{2}"]


def reward(answer: str, gold: str, problem: str = "") -> float:
    """The grade of an answer in a box."""
    return grade_math(f"\\boxed{{{answer}}}", gold, {"problem": problem}).reward


@pytest.mark.parametrize("labels", LABELS)
def test_parts_keep_their_labels(labels: tuple[str, ...]) -> None:
    """In any order of the parts, with any separator; another part's value is wrong."""
    for values in itertools.permutations(VALUES, 2):
        gold = " ".join(f"{label} {value}" for label, value in zip(labels, values, strict=False))
        for between in BETWEEN:
            parts = [f"{label} {value}" for label, value in zip(labels, values, strict=False)]
            swapped = [f"{label} {value}" for label, value in zip(labels, values[::-1], strict=False)]
            texts = [rf"\text{{{label} }}{value}" for label, value in zip(labels, values, strict=False)]
            right = [between.join(parts), between.join(parts[::-1]), between.join(texts), ", ".join(values)]
            wrong = [between.join(swapped), parts[0], between.join([*parts, f"{labels[2]} 3"]), ", ".join(values[::-1])]
            wrong.append(between.join([parts[0], f"{labels[1]} 12"]))
            assert [(answer, gold) for answer in right if reward(answer, gold) != 1.0] == []
            assert [(answer, gold) for answer in wrong if reward(answer, gold) != 0.0] == []


def test_letters_in_brackets_are_factors_too() -> None:
    """Without values between them."""
    check(case("(a)(b)", right=["ab", "(b)(a)"], wrong=["a+b"]))
    check(case("(a)^2-(b)^2", right=["(a+b)(a-b)"], wrong=["(a-b)^2"]))


SIGNED = [
    ("{}(2,-1)", "(2,-1)", "(-2,1)"),
    ("({}2,3)", "(2,3)", "(-2,3)"),
    ("y={}3x+1", "y=3x+1", "y=-3x+1"),
    ("3x{}4y=0", "3x+4y=0", "3x-4y=0"),
    (r"2{}\sqrt{{5}}", r"2+\sqrt{5}", r"2-\sqrt{5}"),
    (r"x={}\sqrt{{7}}", r"x=\sqrt{7}", r"x=-\sqrt{7}"),
    (r"{}5\text{{ cm}}", r"5\text{ cm}", r"-5\text{ cm}"),
    (r"f(x)={}x", "f(x)=x", "f(x)=-x"),
]


@pytest.mark.parametrize("written, plus, minus", SIGNED)
def test_a_plus_minus_sign_stands_for_both(written: str, plus: str, minus: str) -> None:
    """Of whatever it is part, and for neither of the two alone."""
    for sign in (r"\pm ", "±", r"\mp "):
        both = written.format(sign)
        for spelled in (f"{plus}, {minus}", rf"{minus} \text{{ or }} {plus}"):
            assert reward(both, spelled) == reward(spelled, both) == 1.0, (both, spelled)
        for one in (plus, minus):
            assert reward(both, one) == reward(one, both) == 0.0, (both, one)


def test_opposite_signs_are_tied() -> None:
    """Of (1, -2) and (-1, 2) there are two, of two plus-minus signs four."""
    tied, free = r"(\pm 1, \mp 2)", r"(\pm 1, \pm 2)"
    check(case("(1,-2),(-1,2)", right=[tied, r"\pm(1,-2)", "-(1,-2), (1,-2)"], wrong=[free, r"(1,-2)", r"\pm(1,2)"]))
    check(case("(1,2),(1,-2),(-1,2),(-1,-2)", right=[free], wrong=[tied, r"\pm(1,2)"]))
    check(case(r"\{1,-1,2,-2\}", right=[r"\{\pm 1, \pm 2\}", r"\pm 1, \pm 2"], wrong=[r"\{\pm 1, 2\}"]))


PRIMES = ["{}'", r"{}^{{\prime}}", r"{}^\prime", "{}^{{'}}", "{}\u2032"]


@pytest.mark.parametrize("one, two", [*itertools.product(PRIMES, PRIMES)])
def test_a_prime_has_one_meaning(one: str, two: str) -> None:
    """After a letter, a function and minutes of an arc."""
    check(case(f"{one.format('x')} = 2", right=[f"{two.format('x')} = 2", "2"], wrong=["x = 2", "3"]))
    check(case(f"{one.format('f')}(x)=2x", right=[f"{two.format('f')}(x)=2x"], wrong=["f(x)=2x"]))
    arc = rf"67^\circ {one.format('30')}"
    check(case(arc, right=[rf"67^{{\circ}}{two.format('30')}", r"67.5^\circ"], wrong=[r"67.3^\circ", r"67^\circ"]))


def test_points_have_names() -> None:
    """Which they share with nothing else."""
    for name, at in itertools.product(["A", "P'", "F_1", "F_{2}"], ["(1,-2)", r"(0,\frac12)", "(1,2,3)"]):
        check(case(f"{name}{at}", right=[at, f"{name}={at}"], wrong=["(7,7)", "1", f"Q{at}", f"{name}(7,7)"]))
    check(case("A(1,2), B(3,4)", right=["(1,2),(3,4)", "B(3,4), A(1,2)"], wrong=["A(3,4), B(1,2)", "A(1,2)"]))
    check(case("(-2,0),(2,0)", right=["F_1(-2,0), F_2(2,0)", r"(\pm 2,0)"], wrong=["F_1(0,-2), F_2(0,2)"]))
    check(case("(-2,4)", right=["-(2,-4)"], wrong=["-(2,4)", "-(-2,4)"]))


ASKED = {
    "How many square feet are painted?": (r"16 \text{ ft}^2", [r"16 \text{ in}^2", r"16 \text{ square yards}"]),
    "How many minutes did it take?": (r"16 \text{ min}", [r"16 \text{ hours}", r"16 \text{ seconds}"]),
    "Give the length in meters.": (r"1600 \text{ cm}", [r"16 \text{ cm}", r"16 \text{ km}"]),
    "How many miles per hour is that?": (r"16 \text{ mph}", [r"16 \text{ km/h}", r"16 \text{ m/s}"]),
    "What is the price, in cents?": (r"\$0.16", [r"\$16"]),
}


@pytest.mark.parametrize("problem", ASKED)
def test_the_unit_is_the_one_that_is_asked_for(problem: str) -> None:
    """Other units of its kind are converted; without a question, or with two, a unit beside a bare 16 says nothing."""
    right, wrong = ASKED[problem]
    assert [reward(answer, "16", problem) for answer in ("16", right)] == [1.0, 1.0]
    for answer in wrong:
        assert reward(answer, "16", problem) == 0.0
        assert reward(answer, "16") == 1.0
        assert reward(answer, "16", f"{problem} In how many {answer.split('{')[-1].strip('}')}?") in (0.0, 1.0)


def test_a_measure_has_parts() -> None:
    """Each smaller than the unit before it, in any spelling; without one of them it is another measure."""
    for hours, minutes in itertools.product((1, 2, 11), (5, 30, 59)):
        spelled = [f"{hours} h {minutes} min", rf"{hours}\text{{ hours and }}{minutes}\text{{ minutes}}"]
        spelled += [f"{hours}h{minutes}min", rf"{hours} \text{{ hr. }} {minutes} \text{{ min.}}"]
        spelled += [rf"{hours * 60 + minutes} \text{{ minutes}}"]
        wrong = [f"{hours} h", rf"{minutes}\text{{ minutes}}", f"{hours}.{minutes:02} h", f"{minutes} h {hours} min"]
        wrong += [f"{hours}x h {minutes} min", f"{hours} min {minutes} h", f"{hours} h {minutes} h"]
        for gold in spelled:
            check(case(gold, right=spelled, wrong=wrong))


def test_the_letter_of_a_sum_says_nothing() -> None:
    """Nor those of sums in sums; the other letters do."""
    for one, two in itertools.permutations("ijkl", 2):
        gold = rf"\sum_{{{one}=1}}^{{n}} {one}^2 a"
        assert reward(gold.replace(one, two), gold) == 1.0
        assert reward(gold.replace(one, two).replace("a", "b"), gold) == 0.0
        nested = rf"\sum_{{{one}=1}}^{{n}} \sum_{{{two}=1}}^{{{one}}} \frac{{{one}}}{{{two}+a}}"
        swapped = nested.replace(one, "?").replace(two, one).replace("?", two)
        assert reward(swapped, nested) == 1.0
        assert reward(rf"\sum_{{{one}=1}}^{{n}} \sum_{{{two}=1}}^{{{one}}} \frac{{{two}}}{{{one}+a}}", nested) == 0.0


CASES = [
    *case(r"\textbf{(E)}\ 26", right=["26", "E", "(E) 26"], wrong=["25", "D", "(D) 26", "D: 26"]),
    *case("2^n-1, n \\geq 1", right=["2^n-1", "2^n-1, n \\ge 1"], wrong=["2^n+1", "2^n-1, n \\ge 2"]),
    *case("x=3, y \\ge 2", right=["x=3, y \\ge 2"], wrong=["x=3", "3"]),
    *case("f(x)=x^2, x>0", right=["f(x) = x^2, x>0"], wrong=["f(x)=x^2", "f(x)=x^2, x<0"]),
    *case("2^n-1", right=["2^n - 1"], wrong=["2^n-1, n > 5"]),
    *case(r"\{0,1\}", right=[r"A \cap B = \{0,1\}", r"A\cup B=\{1,0\}"], wrong=[r"A \cap B = \{0\}"]),
    *case(r"A \cap B = \{0,1\}", right=[r"\{0,1\}"], wrong=[r"A \cup B = \{0,1\}"]),
    *case(r"\frac{dy}{dx}=2x", right=["y'=2x", "2x", r"\frac{d y}{d x} = x+x"], wrong=["y=2x", "y'=x", "x'=2x"]),
    *case(
        r"\frac12",
        right=[r"\frac12 \text{ or } 50\%", r"0.5 \text{ or } \frac{1}{2}"],
        wrong=[r"\frac12 \text{ or } 2"],
    ),
    *case("5", right=[r"2^{100} \equiv 5 \pmod 7", r"\equiv 5 \pmod{7}"], wrong=[r"2^{100} \equiv 2 \pmod 7"]),
    *case(
        r"n \equiv 1 \pmod 4", right=[r"n \equiv 1 \pmod{4}"], wrong=[r"n^2 \equiv 1 \pmod 4", r"5 \equiv 1 \pmod 4"]
    ),
    *case(r"\frac{2\sqrt3}{3}", right=[r"\mathbf{\frac{2\sqrt{3}}{3}}", r"\text{$\frac{2\sqrt{3}}{3}$}"], wrong=[]),
    *case("1", right=[r"\text{maximum value } 1", r"\text{remainder } 1"], wrong=[r"\text{at most } 1"]),
    *case("x=3+7t, y=1-2t", right=["x=3+7k, y=1-2k", "(3+7s,1-2s)"], wrong=["x=3+7k, y=1-2t", "x=3-7k, y=1-2k"]),
    *case("3:30", right=["3{:}30"], wrong=["3{:}31"]),
]


def test_one_of_each_kind() -> None:
    """By hand, where a family has few members."""
    check(CASES)
